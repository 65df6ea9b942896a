"""Describes the owners of all slots at one moment, as plain data that another process can load without a device."""

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from memstate.atomic import write
from memstate.checks import shown
from memstate.errors import InvalidArgument
from memstate.kernels.tables import AUDIT_FREE
from memstate.sheet import MOST_ROWS, Sheet, Shown, bar, figures, of_slots, section, sheet
from memstate.slots.commands import Action
from memstate.slots.journal import Change
from memstate.slots.packet import Packet
from memstate.slots.registers import RegisterFile

FORMAT = "memstate inspection 2"
# Bytes of the largest file that `load` reads: about 200,000 slots, each with its owner and a node of the prefix cache.
LARGEST: Final = 64 << 20
# Errors that the drawing functions raise for a value that they cannot use.
UNDRAWN: Final = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True, repr=False)
class Inspection(Shown):
    """The owners of every slot at one moment, and what the manager knew at that moment.

    Args:
        capacity: number of slots, the highest slot id.
        owners: for each slot, the number of registers that hold it.
        free: for each slot, whether it is free in the bitmap.
        slots: for each register, the slot that it holds; 0 = none.
        labels: for each register, the length of its state in tokens.
        names: register -> name of its owner, for the registers that hold a slot.
        kinds: register -> kind of owner: live, lane, cached, session, mark, snapshot or unknown.
        by_id: slots held by open claim groups.
        tags: register -> a short name of its owner.
        rows: running requests with their lengths.
        prefix: nodes of the prefix cache, parents first. Each has the index of its parent in this list or -1, its pages
            from `start` to `end`, the register of its state or 0, and whether that state was evicted.
        sessions: open sessions.
        changes: the changes in the journal, oldest first, with the fields of `Change`.
        stats: figures by name.
        summary: words of the bitmap's summary that disagree with the level below.
        layout: layout of a slot: its order, layers, `bytes_per_slot`, and planes with the bytes of one layer; and the
            tokens of a KV page.
        faults: a sentence for each thing that the audit found wrong.
    """

    capacity: int
    owners: list[int]
    free: list[bool]
    slots: list[int]
    labels: list[int]
    names: dict[int, str]
    kinds: dict[int, str]
    by_id: list[int] = field(default_factory=list)
    tags: dict[int, str] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    prefix: list[dict[str, Any]] = field(default_factory=list)
    sessions: list[dict[str, Any]] = field(default_factory=list)
    changes: list[dict[str, Any]] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    summary: list[int] = field(default_factory=list)
    layout: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        slots = f"{sum(self.free[1:])} of {self.capacity} slots free"
        counts = f"requests: {len(self.rows)}, changes: {len(self.changes)}, faults: {len(self.faults)}"
        return f"Inspection({slots}, {counts})"

    def save(self, path: Path | str) -> None:
        """Writes the inspection as JSON, whole or not at all.

        An existing file is replaced when the new one is complete. `load` refuses a file of more than `LARGEST` bytes.

        Args:
            path: the file. If it is a link, the file behind it is replaced. A device or a pipe is written to directly.

        Raises:
            OSError: the file cannot be written.
        """
        write(Path(path), (json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n").encode())

    @classmethod
    def load(cls, path: Path | str) -> "Inspection":
        """Reads an inspection that `save` wrote.

        The file can come from a stranger. So `load` draws the inspection once, as `sheet`, checks what the pictures of
        `viz` read, and refuses one that cannot be drawn. No number in the file decides how much memory is allocated.
        Slots and labels can be any numbers, as on a faulty device.

        Args:
            path: path of the file.

        Raises:
            InvalidArgument: the file is not an inspection, or has more than `LARGEST` bytes. The message names the
                file.
            OSError: the file cannot be read.
        """
        with _naming(str(path)), Path(path).open("rb") as file:
            _require_small(os.fstat(file.fileno()).st_size)
            content = file.read(LARGEST + 1)
        return cls.parse(content, str(path))

    @classmethod
    def parse(cls, content: bytes, source: str) -> "Inspection":
        """Reads an inspection from the bytes of a file that `save` wrote. See `load`.

        Args:
            content: the bytes of the file.
            source: name of the file, for errors.

        Raises:
            InvalidArgument: the bytes are no inspection, or more than `LARGEST`.
        """
        with _naming(source):
            _require_small(len(content))
            read = json.loads(content.decode(), object_pairs_hook=_unique, parse_float=_finite, parse_constant=_finite)
            form = read.pop("format", None) if isinstance(read, dict) else read
            if form != FORMAT:
                raise InvalidArgument(f"its format is {shown(form)}, expected {FORMAT!r}")
            for name in read.keys() - {each.name for each in fields(cls)}:
                raise InvalidArgument(f"{shown(name)} is no field")
            for keyed in ("names", "kinds", "tags"):
                read[keyed] = {int(register): text for register, text in read[keyed].items()}
            seen = cls(**read)
            seen._require_sound()
            seen.sheet()
            return seen

    def _require_sound(self) -> None:
        """Refuses faults that `sheet` does not find: wrong lengths, a prefix cache that is no tree, and wrong types.

        The types are those that `viz.timeline`, `viz.holdings_over` and `viz.occupancy` need.
        """
        lengths = len(self.owners), len(self.free)
        if self.capacity < 1 or lengths != (self.capacity + 1,) * 2:
            raise InvalidArgument(
                f"capacity is {self.capacity}, and owners and free have {lengths} entries, expected one more"
            )
        if len(self.slots) != len(self.labels):
            raise InvalidArgument(f"slots and labels have {len(self.slots)} and {len(self.labels)} entries")
        for at, node in enumerate(self.prefix):
            if not -1 <= node["parent"] < at:
                raise InvalidArgument(f"prefix[{at}].parent is {node['parent']}, expected -1 or a node before it")
        for what, value, expected in chain(
            ((f"changes[{at}].{each.name}", change[each.name], each.type)
             for at, change in enumerate(self.changes) for each in fields(Change)),
            ((f"labels[{at}]", label, int) for at, label in enumerate(self.labels)),
            (("a name, kind or tag", text, str) for register, name in self.names.items()
             for text in (name, self.kinds[register], self.tags.get(register, ""))),
        ):  # fmt: skip
            if type(value) is not expected or (isinstance(value, int) and abs(value) >> 63):
                raise InvalidArgument(f"{what} is {shown(value)}, expected a {'text' * (expected is str) or 'number'}")

    def by_slot(self) -> list[tuple[str, str]]:
        """Returns (kind, tag or name) of the owner of each slot 1..capacity; see `memstate.viz.holdings`."""
        owners: list[list[tuple[str, str]]] = [[] for _ in range(self.capacity + 1)]
        for register, name in self.names.items():
            if 0 < self.slots[register] <= self.capacity:
                owners[self.slots[register]].append((self.kinds[register], self.tags.get(register, name)))
        for slot in self.by_id:
            owners[slot].append(("by id", ""))
        slots = []
        for free, mine in zip(self.free[1 : self.capacity + 1], owners[1:], strict=True):
            if len(mine) + free > 1:
                slots.append(("contested", ""))
            elif free:
                slots.append(("free", ""))
            else:
                slots.append(mine[0] if mine else ("leaked", ""))
        return slots

    def sheet(self) -> Sheet:
        """See `Shown.sheet`."""
        slots = of_slots(Counter(kind for kind, _ in self.by_slot()), int(self.layout.get("bytes_per_slot", 0)))
        requests = [
            (row["row"], row["id"], f"{row['length']:,}", f"{row['confirmed']:,}", "finished" * bool(row["finished"]))
            for row in self.rows[:MOST_ROWS]
        ]
        sessions = [
            (one["id"], f"{one['tokens']:,}", len(one["states"]), one["pages"]) for one in self.sessions[:MOST_ROWS]
        ]
        changes = [
            (one["serial"], one["submit"], one["what"], one["owner"], one["source_owner"], f"{one['label']:,}")
            for one in reversed(self.changes[-MOST_ROWS:])
        ]
        planes = [
            (plane["name"], f"{plane['shape']} {plane['dtype']}", f"{plane['payload']:,}", f"{plane['padding']:,}")
            for plane in self.layout.get("planes", [])[:MOST_ROWS]
        ]
        sections = [
            section("requests", ("row", "request", "tokens", "confirmed", ""), requests, len(self.rows)),
            section("sessions", ("session", "tokens", "states", "KV pages"), sessions, len(self.sessions)),
            section("changes of owners, newest first", ("change", "packet", "what", "owner", "from", "tokens"), changes,
                    len(self.changes)),
            section("planes", ("plane", "shape", "bytes of a layer of a slot", "padding"), planes,
                    len(self.layout.get("planes", []))),
            figures("figures", self.stats),
        ]  # fmt: skip
        return sheet(repr(self), [bar(f"{self.capacity:,} slots", slots)], sections, self.faults)


@contextmanager
def _naming(source: str) -> Iterator[None]:
    """Adds the name of the source to errors, and turns errors of the drawing functions into InvalidArgument."""
    try:
        yield
    except (InvalidArgument, json.JSONDecodeError, UnicodeError) as error:
        raise InvalidArgument(f"{source!r}: not an inspection: {error}") from error
    except UNDRAWN as error:
        raise InvalidArgument(f"{source!r}: not an inspection: it cannot be drawn: {shown(error)}") from error


def _require_small(size: int) -> None:
    if size > LARGEST:
        raise InvalidArgument(f"it has more than {LARGEST} bytes")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        name = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        raise InvalidArgument(f"{shown(name)} stands there twice")
    return entries


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise InvalidArgument(f"{shown(text)} is no number that a page can show")
    return number


def inspect(
    file: RegisterFile, name: dict[int, tuple[str, str]], tags: dict[int, str] | None = None,
    read: RegisterFile | None = None, **more: Any,
) -> Inspection:  # fmt: skip
    """Copies the registers, and the owners and free flag of each slot, to the host.

    The call takes one launch and three small copies, and one more copy if the bitmap has a summary. Open claim groups
    and waiting changes take more copies.

    Args:
        file: the register file.
        name: register -> (kind, owner), for the registers whose owner is known.
        tags: register -> a short name of its owner.
        read: the register file to read instead of `file`; see `behind`.
        more: the other fields of the inspection.

    Syncs: yes.
    """
    file.backend.counts.syncs += 1
    read = read or file
    owners = read.owners()
    status = owners.cpu().numpy()
    slots, labels = read.table.slots.tolist(), read.table.labels.tolist()
    by_id = [int(slot) for group in file.allocator.open_groups for slot in group.held.tolist()]
    filled = [register for register, slot in enumerate(slots) if slot]
    return Inspection(
        capacity=file.allocator.capacity,
        owners=(status & (AUDIT_FREE - 1)).tolist(),
        free=((status & AUDIT_FREE) != 0).tolist(),
        slots=slots,
        labels=labels,
        names={register: name.get(register, ("unknown", f"register {register}"))[1] for register in filled},
        kinds={register: name.get(register, ("unknown", ""))[0] for register in filled},
        by_id=np.unique(by_id).tolist() if by_id else [],
        tags={register: tag for register, tag in (tags or {}).items() if slots[register]},
        summary=read.allocator.wrong_summary(),
        **more,
    )


def behind(file: RegisterFile, waiting: Sequence[Packet | Action]) -> RegisterFile:
    """Returns the register file as it will be after the waiting changes, so that it agrees with the host.

    Args:
        file: the register file. If nothing waits, the result is this file, otherwise a copy in host memory.
        waiting: the changes that wait for a forward.

    Syncs: yes, if something waits.
    """
    if not waiting:
        return file
    copied = file.on_host()
    for entry in waiting:
        if isinstance(entry, Packet):
            copied.ownership(torch.from_numpy(entry.encode()))
        elif entry.owners:
            entry.owners(copied)
    return copied
