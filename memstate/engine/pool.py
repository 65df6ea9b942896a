"""Claims slots and moves their bytes, for callers that hold slot ids. One allocator can serve several `Planes`.

This module does not know requests.
"""

from collections.abc import Sequence

from torch import Tensor

from memstate.checks import NotCopied
from memstate.errors import ConfigurationError
from memstate.slots.allocator import SlotAllocator
from memstate.state.planes import Planes


class StatePool(NotCopied):
    """Claims slots by id and moves their bytes.

    Args:
        allocator: the allocator of the slots.
        of: planes with one entry for every slot of the allocator.
        debug: whether to refuse overlapping copies. Each copy then waits for the device.

    Raises:
        ConfigurationError: planes and allocator have different numbers of slots.

    Example:
        >>> import torch, memstate as ms
        >>> layout = ms.StateLayout([ms.Plane("ssm", (4,), torch.float32)], layers=1)
        >>> mem = ms.StateManager(layout, slots=8, max_requests=2)
        >>> ids = mem.pool.claim(2)
        >>> ids.tolist(), mem.free_slots
        ([1, 2], 6)
        >>> mem.pool.release(ids)
        >>> mem.free_slots
        8
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
        """Claims the n lowest free slots.

        Args:
            n: number of slots.
            zero: whether to zero the bytes of the slots. Pass False only if you will overwrite every byte.

        Returns:
            The ids: int32 tensor, axis `n`.

        Raises:
            OutOfSlots: fewer than n slots are free; nothing changed.
            InvalidArgument: n is not a whole number of 0 or more, or the call comes on another stream or inside a graph
                capture; nothing changed.
            Asleep: `zero` is True and the states sleep; nothing changed.

        Syncs: only if the call needs slots that were released by id and that the device has not confirmed yet.
        """
        self.allocator.stream.require()
        for planes in self.planes if zero else ():
            planes.require_awake("claim")
        n = self.allocator.valid_count(n)
        with self.allocator.guard.changing("claim"):
            ids = self.allocator.take(n)
            if zero:
                self.zero(ids)
            return ids

    def release(self, ids: Tensor | Sequence[int]) -> None:
        """Frees slots that `claim` returned; see `SlotAllocator.release`.

        Do not release a slot that a register owns. The device cannot detect this; only an audit does.

        Args:
            ids: the slots, integers in any shape.

        Raises:
            InvalidArgument: the ids are not integers, or the call comes on another stream or inside a graph capture.

        Syncs: no.
        """
        self.allocator.stream.require()
        self.allocator.release(ids)

    def zero(self, ids: Tensor) -> None:
        """Zeroes slots.

        Args:
            ids: the slots: integer tensor, axis `n`; 0 is skipped.

        Syncs: no.
        """
        for planes in self.planes:
            planes.zero(ids)

    def copy(self, dst: Tensor, src: Tensor, *, due: int | None = None) -> None:
        """Copies slot src[i] to slot dst[i] in all planes and layers, in one launch for each `Planes`.

        Pairs with a 0 and pairs of equal slots are skipped.

        Args:
            dst: target slot of each pair: integer tensor, axis `n`.
            src: source slot of each pair: integer tensor, axis `n`.
            due: number of pairs that are not skipped, if the caller knows it, to count bytes.

        Raises:
            InvalidArgument: the ids are not integers on this device, or dst and src differ in length. In debug mode
                also: an id names no slot, a target is named twice, or a slot is target and source.

        Syncs: in debug mode only.
        """
        for planes in self.planes:
            planes.copy(dst, src, checked=self.debug, due=due)

    def run_data(self, slots: Tensor, packet: Tensor, *, copied: int, zeroed: int, replayed: bool = False) -> None:
        """Copies and zeroes the states that a command packet names, in one launch for each `Planes`.

        Args:
            slots: slot of each register: int32 tensor, axis `register`.
            packet: the packet on the device.
            copied: number of slots that the packet copies.
            zeroed: number of slots that the packet zeroes.
            replayed: whether a captured graph copies and zeroes. If so, the slots are only counted.

        Syncs: no.
        """
        for planes in self.planes:
            if replayed:
                planes.count(copied=copied, zeroed=zeroed)
            else:
                planes.run_data(slots, packet, copied=copied, zeroed=zeroed)

    def check(self) -> None:
        """Raises an error for the first fault that the device counted; see `SlotAllocator.check`.

        Syncs: yes.
        """
        self.allocator.stream.require()
        self.allocator.check()
