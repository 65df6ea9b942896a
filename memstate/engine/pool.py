"""Slots and their bytes together, for callers who hold slot ids in hand. One allocator may serve several storages."""

from collections.abc import Sequence

from torch import Tensor

from memstate.errors import ConfigurationError
from memstate.slots.allocator import SlotAllocator
from memstate.state.planes import Planes


class StatePool:
    """Claims slots and moves their bytes.

    of: each holds planes for every slot of the allocator. debug: refuse overlapping copies (costs a
    synchronisation).
    Raises: ConfigurationError.
    """

    def __init__(self, allocator: SlotAllocator, *of: Planes, debug: bool = False) -> None:
        for planes in of:
            if planes.slots != allocator.capacity:
                raise ConfigurationError(
                    f"planes of {planes.slots} slots for an allocator of {allocator.capacity}: they must agree"
                )
        self.allocator, self.planes, self.debug = allocator, of, debug

    def __repr__(self) -> str:
        return f"StatePool({self.allocator!r}, {len(self.planes)} of planes)"

    def claim(self, n: int, *, zero: bool = True) -> Tensor:
        """Claims the n lowest free slots, zeroed unless they are about to be overwritten whole: int32 `n`. Syncs: as
        `SlotAllocator.claim`.

        Raises: OutOfSlots, InvalidArgument, Asleep; nothing changed then.
        """
        for planes in self.planes if zero else ():
            planes.memory.require_awake("claim")
        ids = self.allocator.claim(n)
        if zero:
            self.zero(ids)
        return ids

    def release(self, ids: Tensor | Sequence[int]) -> None:
        """Takes slots back that `claim` gave; see `SlotAllocator.release`. One that a register owns is not this
        caller's: the device cannot tell, and only an audit shows its two owners. Syncs: no. Raises: InvalidArgument.
        """
        self.allocator.release(ids)

    def zero(self, ids: Tensor) -> None:
        """Zeroes slots; 0 is skipped. ids: integers `n`. Syncs: no."""
        for planes in self.planes:
            planes.zero(ids)

    def copy(self, dst: Tensor, src: Tensor, *, due: int | None = None) -> None:
        """Copies slots src[i] to dst[i], over all planes and layers, in one launch a storage; pairs with a 0 and pairs
        of equals are skipped.

        dst, src: integers `n`. due: pairs that are not skipped, where the caller knows. Syncs: in debug mode only.
        Raises: InvalidArgument in debug mode for overlapping sets.
        """
        for planes in self.planes:
            planes.copy(dst, src, checked=self.debug, due=due)

    def run_data(self, slots: Tensor, packet: Tensor, *, copied: int, zeroed: int) -> None:
        """Carries out the data section of a command packet, register-indirect, in one launch a storage. Syncs: no."""
        for planes in self.planes:
            planes.run_data(slots, packet, copied=copied, zeroed=zeroed)

    def check(self) -> None:
        """Raises the first fault that the device counted; see `SlotAllocator.check`. Syncs: yes."""
        self.allocator.check()
