"""Runs a test server whose forward stores states inside chunks, at the lengths that its grid allows."""

from collections.abc import Sequence

import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support.planes import History, Planes, folds
from tests.support.serving import Server

# name -> settings that say where a forward can store states: only at the end of a chunk, or on a grid. The grid counts
# from the start of the row's chunk, or of the packed batch.
GIVES: dict[str, dict[str, object]] = {
    "ends": {}, "1": {"grid": 1}, "4": {"grid": 4}, "8": {"grid": 8}, "4 packed": {"grid": 4, "packed": True},
    "8 packed": {"grid": 8, "packed": True}, "1 packed": {"grid": 1, "packed": True}, "in place": {"in_place": True},
}  # fmt: skip


class MarkingPlanes(Planes):
    """Planes whose forward computes a whole chunk at once, and also stores the states at `step.marks`."""

    def forward(self, step: ms.Step, fed: Sequence[History]) -> None:
        """Runs a step. Checks that each mark is on the grid, and that its slot is used for nothing else in the step."""
        can, read, write = self.mem.forward, step.read.tolist(), step.write.tolist()
        assert step.tokens.tolist() == [len(row) for row in fed]
        values, starts, at = list[list[int]](), list[int](), 0
        for i, row in enumerate(fed):
            origin = write[i] if can.in_place else read[i]
            values.append(folds(int(self.mem.planes["long"][0, origin].flatten()[0]) if origin else 0, row))
            starts.append(at)
            at += len(row)
        stored = {slot: values[i][-1] if slot else 0x77 for i, slot in enumerate(write)}
        if not can.in_place:
            stored |= {slot: values[i][-1] for i, slot in enumerate(step.snapshot.tolist()) if slot}
        count = int(step.marks.count[0])
        assert count == step.marked
        for i, offset, slot in zip(*(column.tolist()[:count] for column in step.marks[1:]), strict=True):
            assert can.grid and (offset == len(fed[i]) or (offset + starts[i] * can.packed) % can.grid == 0)
            assert 1 <= offset < len(fed[i]) or (offset == len(fed[i]) > 1 and not can.direct_hits)
            assert slot and slot not in stored and slot not in read
            stored[slot] = values[i][offset]
        slots, held = list(stored), torch.tensor(list(stored.values()), device=step.read.device)
        for name, plane in self.mem.planes.items():
            shape = (-1, *[1] * (plane.dim() - 2))
            plane[:, slots] = (held.view(shape) * self.weights[name][:, None]).to(plane.dtype)


class Prefill(Server):
    """A server with marks. Its steps may compute any number of tokens per row."""

    def __init__(self, backend: Backend, name: str = "redirect", gives: str = "1", **settings: object) -> None:
        super().__init__(backend, name, **({"ends": True} | GIVES[gives] | settings))  # type: ignore[arg-type]
        self.planes = MarkingPlanes(self.mem)
        self.forwards = 0
        self.flying: list[ms.Step] = []

    def _forward(self, step: ms.Step, fed: Sequence[Sequence[int]]) -> None:
        self.forwards += 1
        super()._forward(step, fed)

    def go(self, rows: Sequence[ms.Row | None], most: int, obey: bool = True) -> None:
        """Runs a step of at most `most` tokens per row. Then settles and publishes it, or with overlap the step before.

        obey: whether chunks end at `next_boundary`, which a forward without a grid needs.
        """
        ends = [0 if row is None else min(len(self.text[row]), self.mem.info(row).length + most) for row in rows]
        if obey:
            ends = [
                min(end, self.mem.info(row).next_boundary) if row else 0 for row, end in zip(rows, ends, strict=True)
            ]
        self.flying.append(self.step_to(rows, ends))
        if len(self.flying) > self.mem.overlap:
            self.land(1)

    def land(self, n: int = 99) -> None:
        """Settles the `n` oldest steps in flight, and publishes their rows."""
        for step in self.flying[:n]:
            self.mem.settle(step)
            numbers = set(step.numbers.tolist())
            self.publish([row for row in self.text if row in self.mem.rows and row.index in numbers])
        del self.flying[:n]
