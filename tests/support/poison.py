"""Fills uninitialised tensors, and slots as soon as a launch has freed them, with wrong values (poison).

Torch fills uninitialised tensors: with NaN in floats, and the largest number in integers. The memory of scripts,
`tests.proof.stateful.memory`, also has rubbish in slot 0, which memstate's kernels may not read.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
import torch

from memstate.engine.pool import StatePool
from memstate.slots.allocator import SlotAllocator
from memstate.slots.registers import RegisterFile

FLOAT, INTEGER = (0xFF, 0x5A)  # 0xFF: NaN in each float format


@contextmanager
def fresh_memory() -> Iterator[None]:
    """Makes torch fill uninitialised tensors with poison during the block."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")  # `use_deterministic_algorithms` would load torch's compiler
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


class Freed:
    """Watches the pools of a test, and poisons slots that have become free since the last look."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._pools: WeakSet[StatePool] = WeakSet()
        self._free: dict[int, Any] = {}
        self.filled = 0
        made = StatePool.__init__

        def remember(pool: StatePool, *args: Any, **settings: Any) -> None:
            made(pool, *args, **settings)
            self._pools.add(pool)
            self._free[id(pool)] = _free_slots(pool)

        patch.setattr(StatePool, "__init__", remember)
        for owner, name in ((RegisterFile, "ownership"), (SlotAllocator, "release")):
            patch.setattr(owner, name, self._then_look(getattr(owner, name)))

    def _then_look(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def looked(*args: Any, **settings: Any) -> Any:
            result = call(*args, **settings)
            if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
                self.look()
            return result

        return looked

    def look(self) -> None:
        """Poisons the slots that have become free."""
        for pool in list(self._pools):
            free = _free_slots(pool)
            slots = np.flatnonzero(free & ~self._free[id(pool)]).tolist()
            self._free[id(pool)] = free
            for storage in pool.planes if slots else ():
                if storage.asleep:
                    continue
                for region in storage.regions:
                    is_float = region.plane.dtype.is_floating_point or region.plane.dtype.is_complex
                    region.blocks[:, slots] = FLOAT if is_float else INTEGER
                self.filled += len(slots)


def _free_slots(pool: StatePool) -> Any:
    """Returns for each slot whether it is free, bool `capacity+1`, from the raw words of the bitmap."""
    words = pool.allocator.bitmap.cpu().numpy().view(np.uint8)
    return np.unpackbits(words, bitorder="little")[: pool.allocator.capacity + 1].astype(bool)
