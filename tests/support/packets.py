"""Makes command packets by hand, and models in plain Python what the ownership launch does with them."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import COUNTERS, HEADER_INTS, LIMIT_CELL, Count, Registers, Section

ORDER = (Section.BATCH, Section.MOVES, Section.RELEASES, Section.CLAIMS, Section.WRITES, Section.DATA, Section.MARKS)
SINGLE = (Section.RELEASES, Section.CLAIMS)


@dataclass
class Packet:
    """The entries of each section, and the limit of the plan.

    Moves and data are (target, source), moves behind the releases (-target, source), writes (cell, value), the batch
    (row, tokens), marks (entry, offset, register), all others registers.
    """

    moves: list[tuple[int, int]] = field(default_factory=list)
    releases: list[int] = field(default_factory=list)
    claims: list[int] = field(default_factory=list)
    writes: list[tuple[int, int]] = field(default_factory=list)
    data: list[tuple[int, int]] = field(default_factory=list)
    batch: list[tuple[int, int]] = field(default_factory=list)
    marks: list[tuple[int, int, int]] = field(default_factory=list)
    limit: int = 0

    def pack(self, device: torch.device) -> Tensor:
        """Returns header and sections. Gaps hold 77 777 777, so that a kernel that uses them fails."""
        header, body = [0] * HEADER_INTS, []
        header[LIMIT_CELL] = self.limit
        for section in ORDER:
            entries = getattr(self, section.name.lower())
            header[section], header[8 + section] = len(entries), HEADER_INTS + len(body)
            for column in zip(*entries, strict=True) if entries and section not in SINGLE else [entries]:
                body += [*column, *[77_777_777] * (-len(column) % 4)]
        return torch.tensor(header + body, dtype=torch.int32, device=device)


class Model:
    """Registers, free slots and counters in plain Python. A packet changes them entry by entry."""

    def __init__(self, capacity: int, count: int, rows: int) -> None:
        self.capacity, self.count, self.rows = capacity, count, rows
        self.slots, self.labels = [0] * count, [0] * count
        self.free = set(range(1, capacity + 1))
        self.columns = [0] * (2 * (rows + 1))
        self.counts = dict.fromkeys(Count, 0) | {Count.FREE: capacity}

    def populate(self, rng: random.Random, share: float) -> None:
        """Gives a share of the registers random slots and labels.

        A few empty registers get a wrong label. A packet that fills such a register must not keep this label.
        """
        for register in range(3, self.count):
            if self.free and rng.random() < share:
                self.slots[register] = rng.choice(tuple(self.free))
                self.labels[register] = rng.choice((0, 1, 256, 2**31 - 1))
                self.free.remove(self.slots[register])
            elif rng.random() < 0.1:
                self.labels[register] = 8
        self.counts[Count.FREE] = len(self.free)

    def run(self, packet: Packet) -> None:
        slots, labels = self.slots, self.labels
        self._move([(target, source) for target, source in packet.moves if target > 0])
        doubles, strays = [], []
        for register in packet.releases:
            slot, slots[register] = slots[register], 0
            if slot:
                labels[register] = 0
            if slot and not 0 < slot <= self.capacity:
                strays.append(slot)
            elif slot in self.free:
                doubles.append(slot)
            elif slot:
                self.free.add(slot)
                self.counts[Count.RELEASED] += 1
        self._fault(Count.DOUBLE_RELEASE, doubles)
        self._fault(Count.OUT_OF_RANGE, strays)
        self._move([(-target, source) for target, source in packet.moves if target < 0])
        full, short = [], []
        for register in packet.claims:
            if slots[register]:
                full.append(register)
            elif not self.free:
                short.append(register)
            else:
                slots[register], labels[register] = min(self.free), 0
                self.free.remove(slots[register])
                self.counts[Count.CLAIMED] += 1
        self._fault(Count.CLAIM_FULL, full)
        self._fault(Count.CLAIM_SHORT, short)
        for cell, value in packet.writes:
            self.columns[cell] = value
        for target, source in packet.data:
            if source >= 0 and slots[source] and slots[target]:
                labels[target] = labels[source]
        self.counts[Count.FREE] = len(self.free)

    def _move(self, pairs: list[tuple[int, int]]) -> None:
        slots, labels, refused = self.slots, self.labels, []
        for target, source in pairs:
            if slots[source] and slots[target]:
                refused.append(target)
            elif slots[source]:
                slots[target], labels[target] = slots[source], labels[source]
                slots[source] = labels[source] = 0
        self._fault(Count.MOVE_FULL, refused)

    def _fault(self, kind: Count, offenders: list[int]) -> None:
        self.counts[kind] += len(offenders)
        if offenders and not self.counts[Count.OFFENDER_KIND]:
            self.counts[Count.OFFENDER], self.counts[Count.OFFENDER_KIND] = min(offenders), kind


class Device:
    """A register file in raw tensors, filled like a model. Between the columns are numbers that must not change."""

    GAP = 5

    def __init__(self, model: Model, backend: Backend) -> None:
        self.backend = backend
        sizes = [model.count, model.count, *[model.rows + 1] * 2]
        cells = torch.full((sum(sizes) + self.GAP * (len(sizes) + 1),), -77, dtype=torch.int32, device=backend.device)
        self.starts, columns, at = [], [], self.GAP
        contents = [model.slots, model.labels, *[[0] * (model.rows + 1)] * 2]
        for size, content in zip(sizes, contents, strict=True):
            columns.append(cells[at : at + size])
            columns[-1].copy_(torch.tensor(content, dtype=torch.int32))
            self.starts.append(at)
            at += size + self.GAP
        bitmap = torch.tensor(bits(model.free, model.capacity), dtype=torch.int32, device=backend.device)
        counters = torch.tensor(counted(model), dtype=torch.int32, device=backend.device)
        self.table = Registers(*columns, cells, bitmap, counters, model.capacity)

    def run(self, packet: Packet) -> None:
        """Runs a packet. Its writes count cells as the model does: column after column, without gaps."""
        width = self.table.tracked.numel()
        moved = [(self.starts[2 + cell // width] + cell % width, value) for cell, value in packet.writes]
        sent = Packet(packet.moves, packet.releases, packet.claims, moved, packet.data).pack(self.backend.device)
        before = sent.tolist()
        self.backend.ownership(self.table, sent)
        assert sent.tolist() == before

    def check(self, model: Model) -> None:
        t = self.table
        assert t.slots.tolist() == model.slots
        assert t.labels.tolist() == model.labels
        assert [c for column in t[2:4] for c in column.tolist()] == model.columns
        assert t.bitmap.tolist() == bits(model.free, model.capacity)
        assert t.counters.tolist() == counted(model)
        ends = [start + column.numel() for start, column in zip(self.starts, t[:4], strict=True)]
        gaps = [t.cells[end : end + self.GAP].tolist() for end in (0, *ends)]
        assert gaps == [[-77] * self.GAP] * len(gaps)


def bits(free: Iterable[int], capacity: int) -> list[int]:
    """Returns the words of the bitmap for a set of free slots, then those of its summary in levels."""
    level, count, everything = list(free), capacity + 1, []
    while True:
        words = [0] * ((count + 31) // 32)
        for bit in level:
            words[bit // 32] |= 1 << (bit % 32)
        everything += words
        if len(words) <= 64:
            return [word - 2**32 if word >= 2**31 else word for word in everything]
        level, count = [at for at, word in enumerate(words) if word], len(words)


def counted(model: Model) -> list[int]:
    """Returns the counters of a model as the device stores them."""
    return [model.counts[Count(cell)] if cell < len(Count) else 0 for cell in range(COUNTERS)]
