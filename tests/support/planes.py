"""Planes whose bytes show which tokens a slot stands for, and a forward that folds tokens into them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import pytest
import torch

import memstate as ms

History = tuple[int, ...]
LAYOUT = ms.StateLayout((ms.Plane("long", (3,), torch.int64), ms.Plane("short", (5,), torch.int32)), layers=2)
POISON = 0x5A
I = 4  # noqa: E741 - tokens between two boundaries
MAKERS: dict[str, Callable[[], ms.Tracking]] = {
    "none": lambda: ms.NoTracking(I),
    "ping-pong": lambda: ms.PingPong(I),
    "lazy": lambda: ms.LazyPingPong(I),
    "redirect": lambda: ms.Redirect(I),
}
FACTOR = 0x5851F42D4C957F2D

every_strategy = pytest.mark.parametrize("name", MAKERS)
both_orders = pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])


@lru_cache(maxsize=8192)
def fold(history: History) -> int:
    """Returns the signed 64-bit integer of a state after these tokens; each element is this integer times a weight."""
    return folds(0, history)[-1]


def folds(value: int, tokens: Sequence[int]) -> list[int]:
    """Returns `value`, and what `fold` makes of it after each of the tokens."""
    states = [value]
    for token in tokens:
        value = (value * FACTOR + token + 1 + 2**63) % 2**64 - 2**63
        states.append(value)
    return states


class Planes:
    """The bytes of a manager's slots, and a forward pass that folds tokens into the integers of each slot."""

    def __init__(self, mem: ms.StateManager) -> None:
        self.mem = mem
        self.weights = {
            name: torch.arange(1, 1 + plane[:, 0].numel(), device=plane.device).view(plane[:, 0].shape)
            for name, plane in mem.planes.items()
        }
        self.poison(range(1, mem.stats().capacity + 1))

    def poison(self, slots: Sequence[int]) -> None:
        for block in self.mem.planes.plane_map.blocks:
            block[:, list(slots)] = POISON

    def touched(self, slots: Sequence[int]) -> list[int]:
        """Returns which of these poisoned slots have changed."""
        changed = torch.zeros(len(slots), dtype=torch.bool, device="cpu")
        for block in self.mem.planes.plane_map.blocks:
            changed |= (block[:, list(slots)].cpu() != POISON).any(-1).any(0)
        return [slot for slot, is_changed in zip(slots, changed.tolist(), strict=True) if is_changed]

    def forward(self, step: ms.Step, fed: Sequence[History]) -> None:
        """Runs the forward of a step. Entries without a row read zeros, and write rubbish to slot 0."""
        width = max(map(len, fed), default=0)
        tokens = torch.tensor(
            [[*row, *[0] * (width - len(row))] for row in fed], dtype=torch.int64, device=step.read.device
        )
        read, write, snapshot, counts = (
            column.long() for column in (step.read, step.write, step.snapshot, step.tokens)
        )
        assert counts.tolist() == [len(row) for row in fed]
        for name, plane in self.mem.planes.items():
            state = plane[:, read].long() * (read > 0)[:, None]
            for t in range(width):
                folded = state * FACTOR + (tokens[:, t, None] + 1) * self.weights[name][:, None]
                state = torch.where((t < counts)[:, None], folded, state)
            state[:, write == 0] = 0x77
            plane[:, write] = state.to(plane.dtype)
            plane[:, snapshot[snapshot > 0]] = state[:, snapshot > 0].to(plane.dtype)

    def wrong(self, content: dict[int, History]) -> list[int]:
        """Returns the slots that do not hold the state of their tokens. content: slot -> all its tokens."""
        slots = list(content)
        values = torch.tensor([fold(history) for history in content.values()], dtype=torch.int64, device="cpu")
        bad = torch.zeros(len(slots), dtype=torch.bool, device="cpu")
        for name, plane in self.mem.planes.items():
            expected = values[:, None] * self.weights[name].cpu()[:, None]
            bad |= (plane[:, slots].cpu() != expected.to(plane.dtype)).any(-1).any(0)
        return [slot for slot, is_bad in zip(slots, bad.tolist(), strict=True) if is_bad]


class InPlacePlanes(Planes):
    """Planes whose forward reads and writes the slot in `write`. For padding it writes rubbish to slot 0."""

    def forward(self, step: ms.Step, fed: Sequence[History]) -> None:
        none = torch.zeros_like(step.snapshot)
        super().forward(replace(step, record=step.record._replace(read=step.write, snapshot=none)), fed)
