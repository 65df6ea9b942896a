"""Runs a decode loop of an engine whose kernels update a slot in place."""

from collections.abc import Sequence
from dataclasses import replace

import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support.planes import History, Loop, Planes


class InPlacePlanes(Planes):
    """Planes whose forward reads and writes the slot in `write`. For padding it writes rubbish to slot 0."""

    def forward(self, step: ms.Step, fed: Sequence[History]) -> None:
        none = torch.zeros_like(step.snapshot)
        super().forward(replace(step, record=step.record._replace(read=step.write, snapshot=none)), fed)


class InPlace(Loop):
    """A decode loop with `InPlacePlanes`."""

    def __init__(self, backend: Backend, tracking: ms.Tracking, **settings: object) -> None:
        super().__init__(backend, tracking, in_place=True, **settings)  # type: ignore[arg-type]
        self.planes = InPlacePlanes(self.mem)

    @property
    def copied(self) -> float:
        """The number of whole states copied so far."""
        return self.mem.stats().copied_bytes / self.mem.layout.bytes_per_slot
