"""Finds leaked and doubly owned slots in an `Inspection`, and names their owners. It does not use the device."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from memstate.errors import LeakFound
from memstate.kernels.levels import summed_slots
from memstate.sheet import Sheet, Shown, bar, of_slots, sheet
from memstate.slots.inspect import Inspection


@dataclass(frozen=True, repr=False)
class AuditReport(Shown):
    """The result of an audit.

    A slot is right if exactly one of these is true: it is free, one register holds it, an open claim group holds it.
    The report lists all other slots.

    Args:
        capacity: number of slots, the highest slot id.
        free: number of slots that are free in the bitmap.
        owned_by_kind: kind of owner -> number of slots.
        leaked: slots that are not free, and that no register and no open claim group holds. They include slots that a
            caller holds by id.
        double_owned: slot -> its owners.
        owned_but_free: slot -> its first owner, for owned slots that are free in the bitmap.
        foreign: owners of registers whose slot id is out of range.
        lost: owners of registers that are empty, but held according to the host.
        unexpected: owners of registers that hold a slot, but are empty according to the host. The host would never
            release these slots.
        null_slot_free: whether slot 0 is free in the bitmap.
        summary: (level, first slot, last slot) of each word of the bitmap's summary that disagrees with the level
            below. A claim may miss free slots there.
        miscounts: a sentence for each count of the host that is wrong: rows, KV pages, pins, leases, snapshot
            registers, sessions, host records, lengths of states, tokens in tails, free slots.
        parked: number of parked requests. They have no slots.

    Example:
        >>> import torch
        >>> import memstate as ms
        >>> layout = ms.StateLayout((ms.Plane("ssm", (2,), torch.float32),), layers=1)
        >>> mem = ms.StateManager(layout, slots=4, max_requests=2, backend="reference")
        >>> report = mem.audit()
        >>> report.clean, report.free
        (True, 4)
    """

    capacity: int
    free: int
    owned_by_kind: dict[str, int]
    leaked: list[int] = field(default_factory=list)
    double_owned: dict[int, list[str]] = field(default_factory=dict)
    owned_but_free: dict[int, str] = field(default_factory=dict)
    foreign: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    null_slot_free: bool = False
    summary: list[tuple[int, int, int]] = field(default_factory=list)
    miscounts: list[str] = field(default_factory=list)
    parked: int = 0

    @property
    def clean(self) -> bool:
        """Whether the audit found nothing wrong."""
        slots = (self.leaked, self.double_owned, self.owned_but_free, self.null_slot_free, self.summary)
        return not any((*slots, self.foreign, self.lost, self.unexpected, self.miscounts))

    def raise_if_leaking(self) -> None:
        """Raises an error that lists all faults. Does nothing if the audit is clean.

        Raises:
            LeakFound: the audit found something wrong.
        """
        if not self.clean:
            raise LeakFound(str(self))

    @property
    def faults(self) -> list[str]:
        """A sentence for each thing that is wrong."""
        lines = [f"slot {slot} leaked: not free and not owned" for slot in self.leaked]
        lines += [
            f"slot {slot} has {len(owners)} owners: {', '.join(owners)}" for slot, owners in self.double_owned.items()
        ]
        lines += [f"slot {slot} is marked free and owned by {owner}" for slot, owner in self.owned_but_free.items()]
        lines += [f"{owner} holds a slot that this pool does not have" for owner in self.foreign]
        lines += [f"{owner} should hold a slot and reads empty" for owner in self.lost]
        lines += [f"{owner} holds a slot that the host knows nothing of" for owner in self.unexpected]
        lines += ["the null slot is marked free"] if self.null_slot_free else []
        lines += [
            f"level {level} of the bitmap's summary is wrong for slots {first}..{last}"
            for level, first, last in self.summary
        ]
        return lines + self.miscounts

    def __repr__(self) -> str:
        faults = len(self.faults)
        return f"AuditReport({self.free} of {self.capacity} slots free, {f'faults: {faults}' if faults else 'clean'})"

    def __str__(self) -> str:
        parked = f", {self.parked} requests parked" if self.parked else ""
        first = f"{self.capacity} slots: {self.free} free, owned: {self.owned_by_kind or 'none'}{parked}"
        return "\n".join([first, *self.faults])

    def sheet(self) -> Sheet:
        """See `Shown.sheet`."""
        owned = self.owned_by_kind
        other = max(0, self.capacity - self.free - sum(owned.values()) - len(self.leaked))
        counts = {**owned, "by id": owned.get("group", 0), "leaked": len(self.leaked), "free": self.free}
        counts["unknown"] = owned.get("unknown", 0) + other
        twice = len(self.double_owned.keys() | self.owned_but_free.keys())
        title = f"{self.capacity:,} slots" + (f", {twice:,} of them counted more than once" if twice else "")
        return sheet(repr(self), [bar(title, of_slots(counts))], faults=self.faults)


def audit(
    inspection: Inspection, expected: dict[int, tuple[str, str]] | None = None, miscounts: Sequence[str] = ()
) -> AuditReport:
    """Finds leaked, doubly owned and other wrong slots in an inspection.

    Args:
        inspection: owners, bitmap and names at one moment.
        expected: register -> (kind, owner), for the registers that are held according to the host. None: do not look
            for lost and unexpected registers.
        miscounts: counts of the host that are wrong, as sentences.
    """
    by_slot: dict[int, list[str]] = {}
    foreign = []
    for register, owner in inspection.names.items():
        slot = inspection.slots[register]
        if 0 < slot <= inspection.capacity:
            by_slot.setdefault(slot, []).append(owner)
        else:
            foreign.append(owner)
    for slot in inspection.by_id:
        by_slot.setdefault(slot, []).append("open claim group")
    kinds = Counter(inspection.kinds.values()) + Counter({"group": len(inspection.by_id)})
    slots = range(1, inspection.capacity + 1)
    by_id = set(inspection.by_id)
    return AuditReport(
        capacity=inspection.capacity,
        free=sum(inspection.free[1:]),
        owned_by_kind=dict(kinds),
        leaked=[s for s in slots if not inspection.free[s] and not inspection.owners[s] and s not in by_id],
        double_owned={s: owners for s, owners in sorted(by_slot.items()) if len(owners) > 1},
        owned_but_free={s: owners[0] for s, owners in sorted(by_slot.items()) if inspection.free[s]},
        foreign=foreign,
        lost=[owner for register, (_, owner) in (expected or {}).items() if not inspection.slots[register]],
        unexpected=[
            owner for register, owner in inspection.names.items() if expected is not None and register not in expected
        ],
        null_slot_free=inspection.free[0],
        summary=[summed_slots(word, inspection.capacity) for word in inspection.summary],
        miscounts=list(miscounts),
        parked=(inspection.stats.get("tiers") or {}).get("parked", 0),
    )
