"""Decode loops of two kinds of engines: one that speculates, one whose kernels update a single slot in place."""

from collections.abc import Sequence
from dataclasses import replace

import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support.planes import POISON, History, Loop, Planes

WINDOW = 6


class Speculator(Loop):
    """A decode loop that drafts windows: the accepted tokens are real, the rest of each window is wrong."""

    def __init__(self, backend: Backend, tracking: ms.Tracking, **settings: object) -> None:
        super().__init__(backend, tracking, overlap=False, speculation=True, **settings)  # type: ignore[arg-type]

    def window(
        self, rows: Sequence[ms.Row | None], accepted: Sequence[int], finished: Sequence[bool] | None = None,
        width: int = WINDOW, **settings: int,
    ) -> ms.Step:  # fmt: skip
        """Plans, runs and accepts a window; every plane's forward reads `read` and fills the windows only."""
        step = self.mem.plan(rows, width, window=True)
        before = [block.clone() for block in self.mem.planes.plane_map.blocks]
        windows = {}
        drafts = [[self._next + 100 * i + t for t in range(width)] for i in range(len(rows))]
        self._next += 100 * len(rows)
        tokens = torch.tensor(drafts, dtype=torch.int64, device=step.read.device)
        read = step.read.long()
        for name, plane in self.mem.planes.items():
            shape = (plane.shape[0], len(rows), width, *plane.shape[2:])
            window = torch.empty(shape, dtype=plane.dtype, device=plane.device)
            window.view(torch.uint8).fill_(POISON)
            state = plane[:, read].long() * (read > 0)[:, None]
            for t in range(width):
                state = state * 0x5851F42D4C957F2D + (tokens[:, t, None] + 1) * self.planes.weights[name][:, None]
                window[:, step.rows > 0, t] = state[:, step.rows > 0].to(plane.dtype)
            windows[name] = window
        for block, old in zip(self.mem.planes.plane_map.blocks, before, strict=True):
            assert torch.equal(block, old)
        for row, draft, n in zip(rows, drafts, accepted, strict=True):
            if row:
                self.fed[row] += draft[:n]
        self.mem.accept(step, accepted, windows, finished, **settings)
        return step


class InPlacePlanes(Planes):
    """A forward that knows `write` only, and leaves rubbish in slot 0 for every padded row."""

    def forward(self, step: ms.Step, fed: Sequence[History]) -> None:
        none = torch.zeros_like(step.snapshot)
        super().forward(replace(step, record=step.record._replace(read=step.write, snapshot=none)), fed)


class InPlace(Loop):
    """A decode loop over an in-place engine."""

    def __init__(self, backend: Backend, tracking: ms.Tracking, **settings: object) -> None:
        super().__init__(backend, tracking, in_place=True, **settings)  # type: ignore[arg-type]
        self.planes = InPlacePlanes(self.mem)

    @property
    def copied(self) -> float:
        """Whole states copied so far."""
        return self.mem.stats().copied_bytes / self.mem.layout.bytes_per_slot
