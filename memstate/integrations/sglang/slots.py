"""Hands out the slot ids of SGLang's recurrent states, by means of a `SlotAllocator`. Does not import SGLang."""

import torch
from torch import Tensor

from memstate.checks import is_count
from memstate.errors import InvalidArgument
from memstate.integrations.sglang.track import TrackBuffer
from memstate.kernels.dispatch import Backend
from memstate.slots.allocator import SlotAllocator

STOCK = 32  # slots that one claim takes in advance, for calls that want one slot


def is_ids(kind: torch.dtype) -> bool:
    """Returns whether a dtype is one of whole numbers, which can be ids."""
    return not (kind.is_floating_point or kind.is_complex or kind == torch.bool)


class MambaSlotAllocator:
    """Hands out slot ids with the methods of SGLang's `MambaSlotAllocator`.

    Two things save launches. Slots for calls that want one slot are claimed in advance: the *stock*. Freed slots are
    collected until the next claim or count, and then released together.

    Wrong frees do no harm: 0, negative ids and ids beyond the pool are ignored. An id that is already free is not freed
    again: the device counts a fault, for which `check` raises an error. The first call of `available_size`
    after a wrong free returns an exact number again; on a GPU, the second call.

    Args:
        size: number of slots; their ids are 1..size.
        device: device of the tensors with ids.
        copy: whether to copy each freed tensor, as SGLang's own pool does, in case its owner writes to it later.

    Raises:
        InvalidArgument: `size` is not a valid number of slots.

    Example:
        >>> slots = MambaSlotAllocator(4, "cpu")
        >>> ids = slots.alloc(3)
        >>> ids.tolist(), slots.available_size(), slots.alloc(2)
        ([1, 2, 3], 1, None)
        >>> slots.free(ids)
        >>> slots.available_size()
        4
    """

    def __init__(self, size: int, device: str | torch.device, *, copy: bool = True) -> None:
        self.size, self.device = size, device
        self.slots = SlotAllocator(size, Backend("auto", device), dtype=torch.int64, verify=False)
        self._copy = copy
        self._none = torch.empty(0, dtype=torch.int64, device=device)
        self._device = self._none.device
        self._stock = self._group = self._none  # ids of the claimed slots of the stock, and of the open group
        self._left = 0  # number of last slots of the stock that are not handed out yet
        self._freed: list[Tensor] = []
        # while freed slots wait for release: (slots handed out, number of tensors that were freed before)
        self._handed: list[tuple[Tensor, int]] = []

    def __repr__(self) -> str:
        return f"MambaSlotAllocator({self.slots.free + self._left} of {self.size} slots free)"

    def available_size(self) -> int:
        """Returns the number of free slots, without the slots of an open group.

        Syncs: no.
        """
        if self._freed:
            self._release()
        self.slots.follow()
        return self.slots.free + self._left

    def schedulable_available_size(self) -> int:
        """Returns the number of slots that a scheduler can plan with, including the slots of an open group.

        Syncs: no.
        """
        return self.available_size() + self._group.numel()

    @property
    def free_slots(self) -> Tensor:
        """The free slots: an int64 tensor on the device, without the slots of an open group.

        Syncs: yes.
        """
        self._release()
        return torch.tensor(self.slots.free_ids(), dtype=torch.int64, device=self.device)

    def alloc(self, need_size: int) -> Tensor | None:
        """Claims slots.

        Args:
            need_size: number of slots. A single slot is taken from the open group, if it has one left. If too few slots
                are free outside the group, the group is ended.

        Returns:
            The ids, an int64 tensor, axis `need_size`; None if fewer slots are free. The caller must not write to it.

        Raises:
            InvalidArgument: `need_size` is not a whole number of 0 or more.

        Syncs: no.
        """
        if need_size == 1 and self._group.numel():
            ids, self._group = self._group[:1], self._group[1:]
        elif not is_count(need_size):
            raise InvalidArgument(f"alloc({need_size!r}): expected a number of slots, 0 or more")
        else:
            if need_size > self._left:
                self._stock = self._claim(need_size, STOCK)
                self._left = self._stock.numel()
                if need_size > self._left:
                    if need_size > self.slots.free + self._group.numel():
                        return None
                    self.alloc_group_end()  # now the claim can take the group's slots
                    return self.alloc(need_size)
            first = self._stock.numel() - self._left
            ids = self._stock[first : first + need_size]
            self._left -= int(need_size)
        if self._freed:
            self._handed.append((ids, len(self._freed)))
        return ids

    def free(self, free_index: Tensor | TrackBuffer) -> None:
        """Frees slots. The device releases them at the next claim or count.

        Args:
            free_index: integers in any shape, or a track buffer, which SGLang 0.5.21 passes when a session ends.

        Raises:
            InvalidArgument: the ids are not integers.

        Syncs: no.
        """
        if isinstance(free_index, TrackBuffer):
            free_index = free_index.ids()
        strided = isinstance(free_index, Tensor) and free_index.layout is torch.strided
        if strided and free_index.dtype is torch.int64 and free_index.device == self._device:
            mine = free_index.clone() if self._copy else free_index
        elif strided and not free_index.is_meta and is_ids(free_index.dtype):
            mine = free_index.to(self._device, torch.int64)
        else:
            raise InvalidArgument(f"free({free_index!r}): expected slot ids, such as alloc() returned")
        self._freed.append(mine if mine.dim() == 1 else mine.reshape(-1))

    def alloc_group_begin(self, num_reqs: int) -> None:
        """Opens a group: claims a slot for each request, in one launch. Later calls for one slot get one of these.

        Unused slots of an earlier group become free. If too few slots are free, no group is opened.

        Args:
            num_reqs: number of requests.

        Raises:
            InvalidArgument: `num_reqs` is not a whole number of 0 or more; nothing changed.

        Syncs: no.
        """
        if not is_count(num_reqs):
            raise InvalidArgument(f"alloc_group_begin({num_reqs!r}): expected a number of requests, 0 or more")
        self.alloc_group_end()
        if num_reqs:
            self._group = self._claim(num_reqs)

    def alloc_group_end(self) -> None:
        """Frees the unused slots of the group.

        Syncs: no.
        """
        if self._group.numel():
            if self._freed:
                self._release()  # first, because `_owned` compares freed slots with the group's
            self._freed.append(self._group)
            self._group = self._none

    def clear(self) -> None:
        """Makes every slot free, including the slots of an open group.

        Syncs: yes.
        """
        self._stock = self._group = self._none
        self._left, self._freed, self._handed = 0, [], []
        self.slots.reset()

    def check(self) -> None:
        """Raises an error for the first wrong free since the last call.

        Raises:
            DoubleRelease: a slot was freed twice.
            DeviceFault: another fault was counted.

        Syncs: yes.
        """
        self._release()
        self.slots.check()

    def _claim(self, n: int, stock: int = 0) -> Tensor:
        """Claims n slots, or up to `stock` if this is more. Returns no slots if fewer than n are free."""
        if self._freed or self._left:
            self._release()
        self.slots.follow()
        n = max(int(n), min(stock, self.slots.free))
        if n > self.slots.free:
            return self._none
        with self.slots.guard.changing("claim"):
            return self.slots.take(n)

    def _release(self) -> None:
        """Releases freed slots together with the stock, so that the device notices if a slot of the stock was freed."""
        given = [self._owned()] if self._freed and (self._handed or self._group.numel()) else self._freed
        given = [self._stock[self._stock.numel() - self._left :], *given] if self._left else given
        self._left, self._freed, self._handed = 0, [], []
        ids = torch.cat(given) if len(given) > 1 else given[0].contiguous() if given else self._none
        if ids.numel():
            with self.slots.guard.changing("release"):
                self.slots.give(ids)

    def _owned(self) -> Tensor:
        """Returns freed slots. If a slot had no owner when it was freed, its id is moved out of range: a fault."""
        later = [*self._handed, (self._group, len(self._freed))]
        times = [at for at, each in enumerate(self._freed) for _ in range(each.numel())]
        times += [by for each, by in later for _ in range(each.numel())]
        ids, others = torch.cat(self._freed), torch.cat([each for each, _ in later])
        since = torch.tensor(times, device="cpu", pin_memory=ids.is_cuda).to(ids.device, non_blocking=True)
        self.slots.backend.counts.uploads += 1
        free = (ids[:, None] == others) & (since[: len(ids), None] < since[len(ids) :])
        return torch.where(free.any(1), ids + self.size, ids)
