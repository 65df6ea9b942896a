"""Computes who holds which slot: at one moment, from an inspection; over time, from the journal.

A journal lists changes of registers. `holdings_over` makes spans of them:

    journal   #1 claim 3   #2 move 12 <- 3   #3 claim 3   #4 release 12
    spans     register 3   |--------|                     |------------->
              register 12           |-----------------------------|

A journal keeps only the newest changes, so a span can begin before the oldest of them. And an owner can change without
a change of registers: a state at a mark becomes a cached state.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from memstate.errors import InvalidArgument
from memstate.slots.inspect import Inspection
from memstate.slots.journal import Change

Changes = Inspection | Iterable[Change | Mapping[str, Any]]
FIELDS: Final = ("serial", "submit", "what", "register", "kind", "owner", "label", "source", "source_owner")
# Patterns of owners' names. The source of a move has a name, but no kind.
_REQUEST = re.compile(r"(row \d+ \(request .*\)) (live|lane [01])", re.DOTALL)
_MARK = re.compile(r"(row \d+) \((?!request )", re.DOTALL)
_ROW = re.compile(r"row \d+")
_SESSION = re.compile(r"(session .*) \(\d+ tokens\)", re.DOTALL)


@dataclass(frozen=True)
class OwnerSpan:
    """The time in which one owner held one register, from the packet that filled it to the packet that emptied it.

    Attributes:
        register: Number of the register.
        kind: Last known kind of the owner.
        owner: Last known name of the owner.
        group: What the owner belongs to: its request, its session, `prefix cache` or `snapshots`.
        label: Last known label of the register, in tokens; 0: not known.
        begin: Packet that filled the register. None: it was filled before the oldest change in the journal.
        end: Packet that emptied the register. None: it still holds its slot.
        filled: Change that filled the register: claim, move, plan or accept; "" if no change says so.
        emptied: Change that emptied the register: release, move, plan or accept. "": it still holds its slot or, if
            `end` is given, it was emptied without a change, for example by `reset`.
        source: Register from which the state was moved, 0 for none.
        target: Register to which the state was moved, 0 for none.
        serials: Serials of the first and the last change of the span; (0, 0): no change names its register.
    """

    register: int
    kind: str
    owner: str
    group: str
    label: int
    begin: int | None
    end: int | None = None
    filled: str = ""
    emptied: str = ""
    source: int = 0
    target: int = 0
    serials: tuple[int, int] = (0, 0)


def holdings(inspection: Inspection) -> list[tuple[str, str]]:
    """Returns a pair (kind, name) for the owner of each slot 1..capacity.

    Kinds are those of the inspection, and also `free`, `by id` (claimed by id), `leaked` (neither free nor owned) and
    `contested` (several owners, or an owner of a free slot). The name is "" unless there is exactly one owner. For a
    slot claimed by id, it is the tag.

    Args:
        inspection: A result of `StateManager.inspect`.

    Syncs: no.
    """
    return inspection.by_slot()


def holdings_over(changes: Changes) -> list[OwnerSpan]:
    """Returns the spans in which owners held registers, in the order in which they begin.

    From span to span, the number of the first packet never becomes smaller. A launch between two packets is given the
    number of the later one if the journal has recorded this packet already.

    Args:
        changes: `mem.journal.changes`, or the `changes` of an inspection, oldest first; or the inspection itself. The
            inspection gives more: registers that no change names, lengths, and the present names of owners.

    Raises:
        InvalidArgument: `changes` is not a list of changes.

    Example:
        >>> changes = [Change(1, 1, "claim", 3, "live", "row 1 (request 'a') live", 0),
        ...            Change(2, 4, "release", 3, "live", "row 1 (request 'a') live", 8)]
        >>> [(span.group, span.begin, span.end, span.label) for span in holdings_over(changes)]
        [("row 1 (request 'a')", 1, 4, 8)]

    Syncs: no.
    """
    track = _Track()
    inspected = changes if isinstance(changes, Inspection) else None
    for change in _read(changes.changes if isinstance(changes, Inspection) else changes):
        track.note(change)
    if inspected is not None:
        track.close_with(inspected)
    return sorted(track.spans, key=lambda span: -1 if span.begin is None else span.begin)


def group_of(kind: str, owner: str, rows: Mapping[str, str] | None = None) -> str:
    """Returns the group of an owner: its request, its session, `prefix cache`, `snapshots` or `unknown`.

    Args:
        kind: Kind of the owner.
        owner: Name of the owner, as in an inspection.
        rows: For the name of each row, such as `row 1`, the group of its request. The states at the row's marks belong
            to this group.
    """
    if match := _REQUEST.fullmatch(owner):
        return match[1]
    if kind == "session" and (match := _SESSION.fullmatch(owner)):
        return match[1]
    if kind == "mark" and (match := _MARK.match(owner)):
        return (rows or {}).get(match[1], match[1])
    return {"cached": "prefix cache", "snapshot": "snapshots", "unknown": "unknown"}.get(kind, owner)


class _Track:
    """Follows registers through a journal, change by change, and collects their spans."""

    def __init__(self) -> None:
        self.spans: list[OwnerSpan] = []
        self._open: dict[int, int] = {}  # register -> index of its open span
        self._rows: dict[str, str] = {}  # row -> group of its request
        self._now = 0  # packet of the latest change

    def note(self, change: Change) -> None:
        self._now = max(self._now, change.submit)
        serial = (change.serial, change.serial)
        if change.what == "move":
            self._empty(change.source, _kind_of(change.source_owner), change.source_owner, change, change.register)
        if change.what == "release" or (change.what in ("plan", "accept") and not change.label):
            self._empty(change.register, change.kind, change.owner, change)
            return
        self._lose(change.register)
        self._begin(
            change.register, change.kind, change.owner, change.label, self._now, filled=change.what,
            source=change.source, serials=serial,
        )  # fmt: skip

    def close_with(self, inspected: Inspection) -> None:
        """Adds to the spans what an inspection says of registers: those without a span, and newer names and lengths."""
        for register in [each for each in self._open if each not in inspected.names]:
            self._lose(register)
        for register, owner in inspected.names.items():
            kind, label = inspected.kinds[register], inspected.labels[register]
            if register not in self._open:
                self._begin(register, kind, owner, label)
            else:
                self._rename(register, kind, owner, label)

    def _group(self, kind: str, owner: str) -> str:
        group = group_of(kind, owner, self._rows)
        if _REQUEST.fullmatch(owner) and (row := _ROW.match(owner)):
            self._rows[row[0]] = group
        return group

    def _begin(self, register: int, kind: str, owner: str, label: int, begin: int | None = None, **more: Any) -> None:
        self._open[register] = len(self.spans)
        self.spans.append(OwnerSpan(register, kind, owner, self._group(kind, owner), label, begin, **more))

    def _rename(self, register: int, kind: str, owner: str, label: int) -> None:
        """Gives an open span a newer name and length. A name that says only the register is ignored."""
        at = self._open[register]
        span = self.spans[at]
        if not owner or owner.startswith(("holder ", "register ")):
            kind, owner, group = span.kind, span.owner, span.group
        elif (kind, owner) == (span.kind, span.owner) and not _ROW.fullmatch(span.group):
            group = span.group  # not a new one: the row may have another request now
        else:
            group = self._group(kind, owner)
        self.spans[at] = replace(span, kind=kind, owner=owner, group=group, label=label or span.label)

    def _empty(self, register: int, kind: str, owner: str, change: Change, target: int = 0) -> None:
        """Ends the span of a register. Adds the span first if it began before the oldest change."""
        if register not in self._open:
            self._begin(register, kind, owner, change.label, serials=(change.serial,) * 2)
        self._rename(register, kind, owner, change.label)
        at = self._open.pop(register)
        serials = (self.spans[at].serials[0], change.serial)
        self.spans[at] = replace(self.spans[at], end=self._now, emptied=change.what, target=target, serials=serials)

    def _lose(self, register: int) -> None:
        """Ends the span of a register that was emptied without a change."""
        if register in self._open:
            at = self._open.pop(register)
            self.spans[at] = replace(self.spans[at], end=self._now)


def _kind_of(owner: str) -> str:
    """Returns the kind of an owner, derived from its name."""
    if match := _REQUEST.fullmatch(owner):
        return match[2].split()[0]
    starts = {"session ": "session", "cached prefix": "cached", "snapshot ": "snapshot", "holder ": "snapshot"}
    if _MARK.match(owner):
        return "mark"
    return next((kind for start, kind in starts.items() if owner.startswith(start)), "unknown")


def _read(changes: Iterable[Change | Mapping[str, Any]]) -> Sequence[Change]:
    """Returns the changes sorted by serial. Raises InvalidArgument if the values are not changes."""
    expected = "expected `mem.journal.changes`, the `changes` of an inspection, or an inspection"
    if not isinstance(changes, Iterable) or isinstance(changes, str | Mapping):
        raise InvalidArgument(f"{changes!r}: {expected}")
    read = []
    for change in changes:
        if isinstance(change, Mapping):
            if missing := [name for name in FIELDS if name not in change]:
                raise InvalidArgument(f"{change!r} has no {missing[0]}: {expected}")
            change = Change(**{name: change[name] for name in FIELDS})
        elif not isinstance(change, Change):
            raise InvalidArgument(f"{change!r}: {expected}")
        read.append(change)
    return sorted(read, key=lambda change: change.serial)
