"""Keeps free slots: a bitmap on the device with its summary, and a count on the host.

The host's count is exact, unless invalid ids were released. The host waits for the device's count in two cases only: in
`check`, and if a claim needs slots that were released by id. `follow` corrects the host's count without waiting.

There are two ways to own a slot: by id (`claim` returns ids, `release` takes them back) or in a register
(`memstate.slots.registers`). Both change the same bitmap and the same count. An audit does not know the ids
that a caller holds: it reports these slots as leaked. It knows the ids that an open group has not handed out.

This module does not know planes or requests.
"""

from collections.abc import Sequence
from typing import Literal, Protocol, Self, overload
from weakref import ReferenceType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memstate import lasting
from memstate.checks import NotCopied, is_count
from memstate.errors import DeviceFault, DoubleRelease, InvalidArgument, OutOfSlots
from memstate.guard import Guard
from memstate.kernels.dispatch import Backend
from memstate.kernels.levels import bitmap_ints, bitmap_words, with_summary, wrong_summary
from memstate.kernels.tables import COUNTERS, Count
from memstate.sizes import MOST_SLOTS
from memstate.slots.readback import Readback
from memstate.streams import WorkStream

FAULTS = (Count.DOUBLE_RELEASE, Count.OUT_OF_RANGE, Count.CLAIM_FULL, Count.CLAIM_SHORT, Count.MOVE_FULL)


class Recorder(Protocol):
    """Records changes of owners and sends them later; a command buffer does this."""

    def submit(self) -> None:
        """Sends the recorded changes that do not wait for a forward."""

    @property
    def withheld(self) -> tuple[int, int]:
        """The number of slots that the waiting changes will free, and the number that they will claim."""
        ...


class SlotAllocator(NotCopied):
    """Hands out slot ids 1..capacity, lowest first. Slot 0 is the null slot, and is never handed out.

    Args:
        capacity: number of slots, at most 2**31 - 32.
        backend: runs the launches.
        reserve: number of slots that claims for snapshots at boundaries leave free.
        dtype: dtype of the ids that claims return: torch.int32 or torch.int64.
        verify: whether a claim that needs slots released by id waits until the device has confirmed them. If not, and
            the released ids were wrong, the device has too few slots: it hands out 0, the null slot, instead, and
            counts a fault for `check`. No slot gets a second owner in either case.

    Attributes:
        unconfirmed: number of slots that were released by id and that the device has not confirmed.
        held_back: number of slots that `free` leaves out, because the device may have claimed them, and the host does
            not know yet how many it has claimed. 0 once the host has read the device's count: then `free` is exact.
        open_groups: groups that perhaps still hold slots; an audit counts these slots as owned.
        recorder: weak reference to the command buffer, whose `submit` is called before the bitmap or the device's count
            is read. It is weak so that the planes of a manager are freed without a garbage collection.
        guard: notices calls that were interrupted; all parts of a manager share it.

    Raises:
        InvalidArgument: `capacity` or `reserve` is out of range, or `dtype` is not one of the two; nothing was
            allocated.

    Example:
        >>> from memstate import Backend, SlotAllocator
        >>> allocator = SlotAllocator(8, Backend("reference"))
        >>> ids = allocator.claim(3)
        >>> ids.tolist(), allocator.free
        ([1, 2, 3], 5)
        >>> allocator.release(ids)
        >>> allocator
        SlotAllocator(8 of 8 slots free)
    """

    def __init__(
        self, capacity: int, backend: Backend, reserve: int = 0, *, dtype: torch.dtype = torch.int32,
        verify: bool = True,
    ) -> None:  # fmt: skip
        if not is_count(capacity) or not 1 <= capacity <= MOST_SLOTS:
            raise InvalidArgument(f"slots={capacity!r}: expected a whole number from 1 to {MOST_SLOTS}")
        if not is_count(reserve) or reserve > capacity:
            raise InvalidArgument(f"reserve {reserve}: expected 0..{capacity} slots")
        if dtype not in (torch.int32, torch.int64):
            raise InvalidArgument(f"dtype={dtype!r}: expected torch.int32 or torch.int64")
        self.capacity, self.reserve, self.backend = int(capacity), int(reserve), backend
        self.dtype, self.verify = dtype, verify
        self.guard = Guard()
        self.stream = WorkStream(backend.device)
        self.bitmap = lasting.empty(bitmap_ints(capacity), torch.int32, backend.device)
        self.counters = lasting.empty(COUNTERS, torch.int32, backend.device)
        self.claimed = 0
        self.open_groups: list[ClaimGroup] = []
        self.recorder: ReferenceType[Recorder] | None = None
        self._readback: Readback | None = None
        self.reset()

    def __repr__(self) -> str:
        return f"SlotAllocator({self.free} of {self.capacity} slots free)"

    def reset(self, taken: Sequence[int] = ()) -> None:
        """Makes every slot free, and empties open groups. Works after an interrupted call, too.

        Args:
            taken: slots that stay in use, no slot twice.

        Syncs: yes.
        """
        free = np.zeros(32 * bitmap_words(self.capacity), bool)
        free[1 : self.capacity + 1] = True
        free[list(taken)] = False
        words = np.packbits(free, bitorder="little").view("<i4").astype(np.int32)
        counters = np.zeros(COUNTERS, np.int32)
        counters[Count.FREE], counters[Count.RESERVE] = self.capacity - len(taken), self.reserve
        self.bitmap.copy_(torch.from_numpy(with_summary(words)))
        self.counters.copy_(torch.from_numpy(counters))
        self.free = self.capacity - len(taken)
        self.unconfirmed = self.held_back = 0
        self._reading: tuple[int, int] | None = None  # (`free`, `unconfirmed`) when the device was asked for its count
        for group in self.open_groups:
            group.held = group.held[:0]
        self.open_groups = []
        if self.recorder is None and self.guard.call:  # with a recorder, the manager mends the guard, after all parts
            with self.guard.mending("reset"):
                pass

    def confirm(self, n: int) -> None:
        """Makes sure that n free slots are confirmed: reads the device's count if the claim needs slots released by id.

        Syncs: only if it reads the count.
        """
        if self.verify and self.unconfirmed and n > self.free - self.unconfirmed:
            self._reconcile()

    def follow(self) -> None:
        """Corrects the host's count of free slots by the device's count, if that has arrived.

        On a CPU the count is there at once. On a GPU, a call uses the count that an earlier call has asked for. So
        the host's count is right one step after a wrong release.

        Syncs: no.
        """
        self._arrive()
        if self.unconfirmed and self._reading is None and not self.held_back:
            self._submit_recorded()
            released, claimed = self._withheld()
            self._reading = self.free - released + claimed, self.unconfirmed
            if self.backend.device.type != "cpu":
                self._readback = self._readback or Readback(COUNTERS, self.backend)
                self._readback.begin(self.counters)
            self._arrive()

    def _arrive(self) -> None:
        """Corrects `free` by the count that an earlier call has asked the device for, if this count has arrived."""
        if self._reading is not None and (self._readback is None or self._readback.ready):
            (free, unverified), self._reading = self._reading, None
            counters = self.counters.numpy() if self._readback is None else self._readback.wait()
            self.free += int(counters[Count.FREE]) - free
            self.unconfirmed -= unverified

    @overload
    def claim(self, n: int, *, or_none: Literal[False] = False) -> Tensor: ...

    @overload
    def claim(self, n: int, *, or_none: bool) -> Tensor | None: ...

    def claim(self, n: int, *, or_none: bool = False) -> Tensor | None:
        """Claims the n lowest free slots.

        If too few slots are free, `claim` takes the remaining slots of open groups (see `group`). Slots whose release
        waits for a forward are not free yet.

        Args:
            n: number of slots.
            or_none: whether to return None instead of raising OutOfSlots.

        Returns:
            The ids, ascending: a new tensor of the allocator's `dtype`, axis `n`.

        Raises:
            OutOfSlots: fewer than n slots are free; nothing changed.
            InvalidArgument: n is not a whole number of 0 or more.
            Broken: an earlier call was interrupted.

        Syncs: only if the claim needs slots released by id that the device has not confirmed.
        """
        n = self.valid_count(n)
        try:
            with self.guard.changing("claim"):
                return self.take(n)
        except OutOfSlots:
            if or_none:
                return None
            raise

    def take(self, n: int) -> Tensor:
        """Claims slots as `claim` does, for a caller that is inside the guard.

        Args:
            n: number of slots; see `valid_count`.

        Raises:
            OutOfSlots: fewer than n slots are free; nothing changed.
        """
        held = sum(group.left for group in self.open_groups) if self.open_groups else 0
        self.confirm(n)
        coming = self._withheld()[0]
        there = max(0, self.free - coming)
        if n > there + held:
            raise self.guard.orderly(OutOfSlots(n, there + held, waiting=coming))
        for group in self.open_groups:
            if n > there:
                there += group.shrink(n - there)
        if n == 0:
            return torch.empty(0, dtype=self.dtype, device=self.backend.device)
        self._submit_recorded()
        self.free -= n
        self.claimed += n
        return self.backend.claim(self.bitmap, n, self.counters).to(self.dtype)

    def _submit_recorded(self) -> None:
        """Sends the changes recorded so far, so that device and host count in the same order."""
        if self.recorder is not None and (recorder := self.recorder()):
            recorder.submit()

    def _withheld(self) -> tuple[int, int]:
        """Returns the number of slots that the waiting changes will free, and the number that they will claim."""
        recorder = None if self.recorder is None else self.recorder()
        return recorder.withheld if recorder else (0, 0)

    def release(self, ids: Tensor | Sequence[int]) -> None:
        """Frees slots by id.

        0 and negative ids are ignored. The device counts an id that is free already or out of range as a fault, and
        `check()` raises an error for the first fault. Such ids, and ignored ids, make the host's count too high until
        the host reads the device's count again, for example in `check()`.

        Args:
            ids: integers in any shape, on any device.

        Raises:
            InvalidArgument: the ids are not integers.

        Syncs: no, for ids on this device.
        """
        try:
            ids = ids if isinstance(ids, Tensor) else torch.as_tensor(ids, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidArgument(f"slot ids {ids!r}: expected integers") from error
        if ids.numel() == 0:
            return
        if ids.dtype not in (torch.int32, torch.int64):
            if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype is torch.bool:
                raise InvalidArgument(
                    f"slot ids of dtype {ids.dtype}: expected integers, such as the tensor that claim() returned"
                )
            ids = ids.to(torch.int64)
        ids = ids.reshape(-1).contiguous()
        # The bitmap's device always has an index, such as cuda:0. `backend.device` can lack one.
        if ids.device != self.bitmap.device:
            self.backend.counts.uploads += 1
            ids = ids.to(self.bitmap.device)
        with self.guard.changing("release"):
            self.give(ids)

    def give(self, ids: Tensor) -> None:
        """Frees slots by id as `release` does, for a caller that is inside the guard.

        Args:
            ids: int32 or int64, contiguous, on this device, axis `n`.
        """
        self.free += ids.numel()
        self.unconfirmed += ids.numel()
        self.backend.release(self.bitmap, ids, self.capacity, self.counters)

    def _reconcile(self) -> list[int]:
        """Reads the device's counters, and makes the host's count exact."""
        self._submit_recorded()
        self.backend.counts.syncs += 1
        counters: list[int] = self.counters.tolist()
        released, claimed = self._withheld()
        self.free = counters[Count.FREE] + released - claimed
        self.unconfirmed, self.held_back, self._reading = 0, 0, None
        return counters

    def group(self, n: int) -> "ClaimGroup":
        """Claims n slots in one launch, for a group that hands them out.

        A `with` statement closes the group at its end, also on an error. Otherwise call `close`.

        Args:
            n: number of slots.

        Raises:
            OutOfSlots: fewer than n slots are free.
            InvalidArgument: n is not a whole number of 0 or more.

        Syncs: as `claim`.
        """
        n = self.valid_count(n)
        with self.guard.changing("group"):
            group = ClaimGroup(self, self.take(n))
            self.open_groups.append(group)
        return group

    def free_ids(self) -> list[int]:
        """Returns the slots that are free on the device, ascending.

        Syncs: yes.
        """
        slots: list[int] = np.flatnonzero(self.free_slots()).tolist()
        return slots

    def free_slots(self) -> NDArray[np.bool_]:
        """Returns whether each slot is free on the device: axis `slot`, from slot 0 on.

        Syncs: yes.
        """
        words = self.bitmap.cpu().numpy().view(np.uint8)
        return np.unpackbits(words, bitorder="little")[: self.capacity + 1].astype(bool)

    def wrong_summary(self) -> list[int]:
        """Returns the indices of the words of the bitmap's summary that disagree with the level below.

        Syncs: only if the bitmap has a summary.
        """
        if self.bitmap.numel() == bitmap_words(self.capacity):
            return []
        return wrong_summary(self.bitmap.cpu().numpy())

    def check(self) -> None:
        """Raises an error for the first fault that the device counted.

        The call also sets the host's count from the device's counters, and clears the faults. So a second call raises
        no error for the same faults.

        Raises:
            DoubleRelease: a slot was released twice.
            DeviceFault: another fault was counted.

        Syncs: yes.
        """
        with self.guard.changing("check"):
            counters = self._reconcile()
            kind, offender = counters[Count.OFFENDER_KIND], counters[Count.OFFENDER]
            kind = kind or next((fault for fault in FAULTS if counters[fault]), 0)
            if kind:
                self.counters[list(FAULTS)] = 0
                self.counters[Count.OFFENDER : Count.OFFENDER_KIND + 1] = 0
        if kind:
            error = DoubleRelease if kind == Count.DOUBLE_RELEASE else DeviceFault
            names = {Count(f).name.lower(): counters[f] for f in FAULTS if counters[f]}
            raise error(Count(kind).name.lower().replace("_", " "), counters[kind], offender, names)

    @staticmethod
    def valid_count(n: int) -> int:
        """Returns a number of slots as a plain integer.

        Raises:
            InvalidArgument: n is not a whole number of 0 or more.
        """
        if not is_count(n):
            raise InvalidArgument(f"claim({n!r}): expected a number of slots, 0 or more")
        return int(n)


class ClaimGroup:
    """Hands out slots that `SlotAllocator.group` has claimed in advance.

    Args:
        allocator: the allocator that claimed the slots.
        ids: the slots: a tensor, axis `n`.

    Attributes:
        held: the ids that are not handed out yet: a tensor, axis `left`.

    Example:
        >>> from memstate import Backend, SlotAllocator
        >>> allocator = SlotAllocator(8, Backend("reference"))
        >>> with allocator.group(3) as group:
        ...     group.claim(2).tolist(), group.left
        ([1, 2], 1)
        >>> allocator.free  # the third has gone back
        6
        >>> group = allocator.group(2)
        >>> group.close()
        >>> allocator.free
        6
    """

    def __init__(self, allocator: SlotAllocator, ids: Tensor) -> None:
        self._allocator, self.held = allocator, ids

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the slots that were not handed out. A second call does nothing.

        Syncs: no.
        """
        allocator = self._allocator
        if not allocator.guard.call:  # after an interrupted call, recover() or reset() ends the group
            with allocator.guard.changing("group"):
                self.shrink(self.left)
                allocator.open_groups = [group for group in allocator.open_groups if group is not self]

    @property
    def left(self) -> int:
        """Number of slots that are not handed out yet."""
        return self.held.numel()

    def claim(self, n: int) -> Tensor:
        """Returns the next n slots of the group: a tensor of the allocator's `dtype`, axis `n`.

        Args:
            n: number of slots.

        Raises:
            OutOfSlots: the group has fewer than n slots left.
            InvalidArgument: n is not a whole number of 0 or more.

        Syncs: no.
        """
        n = SlotAllocator.valid_count(n)
        if n > self.left:
            raise OutOfSlots(n, self.left)
        with self._allocator.guard.changing("claim"):
            taken, self.held = self.held[:n], self.held[n:]
            return taken

    def give_back(self, most: int | None = None) -> int:
        """Frees slots that were not handed out, beginning with the last one.

        Args:
            most: largest number of slots to free. None: all.

        Returns:
            Number of freed slots.

        Syncs: no.
        """
        n = self.left if most is None else min(most, self.left)
        with self._allocator.guard.changing("give_back"):
            return self.shrink(n)

    def shrink(self, n: int) -> int:
        """Frees the last n slots that were not handed out, for a caller that is inside the guard.

        Args:
            n: number of slots; fewer if fewer are left.

        Returns:
            Number of freed slots.
        """
        n = min(n, self.left)
        if n:
            self._allocator.give(self.held[-n:])
            self.held = self.held[:-n]
        return n
