"""Poison wherever nothing has been written: fresh tensors, and slots from the launch on that frees them.

Fresh tensors are torch's to fill: NaN in floats, the largest number in integers. What a harness such as
`tests.support.planes` writes to slot 0 is its own rubbish; memstate's kernels may not read it.
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

FLOAT, INTEGER = (0xFF, 0x5A)  # NaN in every float format; what `tests.support.planes` expects in slots nobody wrote


@contextmanager
def fresh_memory() -> Iterator[None]:
    """Tensors made without contents are filled meanwhile."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")  # what `use_deterministic_algorithms` does, without torch's compiler
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


class Freed:
    """Watches the pools of a test, and fills slots whose bit says free since the last look."""

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
        """Fills what has become free."""
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
    """Bit by bit from the raw words: bool `capacity+1`."""
    words = pool.allocator.bitmap.cpu().numpy().view(np.uint8)
    return np.unpackbits(words, bitorder="little")[: pool.allocator.capacity + 1].astype(bool)
