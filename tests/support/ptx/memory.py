"""Memory of a launch: torch's own, by address, and the shared memory of each program. Checks and notes each access."""

import ctypes
import gc
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.ptx.races import Shadow
from tests.support.ptx.reading import Instruction

Array = Any
BASE = 64  # numpy takes no array that begins at address 0
SPACE = (ctypes.c_uint8 * (2**47 - BASE)).from_address(BASE)  # every address of this process
VIEWS = {width: np.frombuffer(SPACE, f"u{width}") for width in (1, 2, 4, 8)}
COMBINE: dict[str, Any] = {"add": np.add, "and": np.bitwise_and, "or": np.bitwise_or}


class Allocations:
    """The live allocations of torch on the CPU, which kernels may touch.

    Those of the arguments of a launch are noted at the launch. If an address lies in none of them, all tensors of the
    process are looked at, because kernels also take addresses from memory.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, int, int]] = {}  # storage -> itself, first byte, bytes
        self.starts = self.ends = np.zeros(0, "i8")

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """Forgets allocations that are gone or have moved, and notes those of these tensors."""
        gone = [key for key, (weak, *place) in self._known.items() if _place_of(weak) != place]
        for key in gone:
            del self._known[key]
        before = len(self._known)
        for storage in (tensor.untyped_storage() for tensor in tensors):
            if storage.nbytes() and storage._cdata not in self._known:
                self._known[storage._cdata] = StorageWeakRef(storage), storage.data_ptr(), storage.nbytes()
        if gone or before != len(self._known):
            places = np.array(sorted((at, at + size) for _, at, size in self._known.values()), "i8").reshape(-1, 2)
            self.starts, self.ends = places[:, 0], np.maximum.accumulate(places[:, 1])  # one may lie in another

    def find(self, at: Array, size: int) -> Array:
        """Returns for each address the number of the allocation that has `size` bytes from there on, -1 if none has."""
        number = np.searchsorted(self.starts, at, "right") - 1
        return (
            np.where((number >= 0) & (at + size <= self.ends[number]), number, -1) if len(self.starts) else at * 0 - 1
        )

    def look(self) -> None:
        """Notes the allocations of all tensors of this process."""
        self.note(
            each for each in gc.get_objects()
            if type(each) in (torch.Tensor, torch.nn.Parameter)
            and each.device.type == "cpu" and each.layout == torch.strided
        )  # fmt: skip


def _place_of(weak: StorageWeakRef) -> list[int]:
    """Returns the first byte and the bytes of a storage, nothing if it is gone."""
    storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
    return [] if storage is None else [storage.data_ptr(), storage.nbytes()]


ALLOCATIONS = Allocations()


class Memory:
    """What the programs of one launch see.

    Args:
        cells: bytes of the narrowest access of the kernel, in global and in shared memory.
        threads: threads of a program.
        shared: bytes of shared memory of a program.
        order: of warps, see `Program.run`. Backwards, lanes carry out atomics backwards, too.

    Attributes:
        races: (what, place) -> number of cells.
    """

    def __init__(self, cells: tuple[int, int], threads: int, shared: int, order: str) -> None:
        self._cells, self._threads, self._room = cells, threads, max(16, -(-shared // 16) * 16)
        self._lanes = -1 if order == "backwards" else 1
        self._shadows: dict[int, Shadow] = {}  # first byte of an allocation -> shadow
        self.races: Counter[tuple[str, str]] = Counter()

    def begin(self, programs: int) -> None:
        """Gives some programs shared memory with rubbish in it."""
        self._shared = np.full(programs * self._room, 0xA5, "u1")
        self._shared_shadow = Shadow(programs * self._room, self._cells[1], self._threads)

    def load(self, one: Instruction, at: Array, width: int, count: int, now: Array, program: Array) -> list[Array]:
        """Returns the words that threads load, `count` for each thread.

        Args:
            one: the instruction.
            at: address of each thread, in shared memory from the start of its program's.
            width: bytes of a word.
            count: number of words.
            now: moment of each thread.
            program: number of each thread's program, among those that have begun.
        """
        view, first, owner = self._place(one, at, width * count, width, program)
        if one.used < 0:
            self._note(one, "load", at, width * count, now, program, owner)
        for number in range(count) if one.used >= 0 else ():
            if one.used >> number * width & (1 << width) - 1:
                self._note(one, "load", at + number * width, width, now, program, owner)
        return [view[first + number] for number in range(count)]

    def store(self, one: Instruction, at: Array, words: list[Array], now: Array, program: Array) -> None:
        """Stores words, one list element after the other from each address on. For the arguments see `load`."""
        width = words[0].itemsize
        view, first, owner = self._place(one, at, width * len(words), width, program)
        silent = np.logical_and.reduce([view[first + number] == word for number, word in enumerate(words)])
        self._note(one, "store", at, width * len(words), now, program, owner, silent)
        for number, word in enumerate(words):
            view[first + number] = word
            if (view[first + number] != word).any():
                raise one.fault("two threads store different values to one address at once")

    def change(self, one: Instruction, at: Array, operand: Array, now: Array, program: Array) -> Array:
        """Carries out an atomic, one thread after the other, and returns the old values. Arguments: see `load`."""
        kind = operand.dtype
        view, first, owner = self._place(one, at, kind.itemsize, kind.itemsize, program)
        self._note(one, "atomic", at, kind.itemsize, now, program, owner)
        combine = next(COMBINE[name] for name in one.words if name in COMBINE)
        words, old = view.view(kind), np.empty(len(at), kind)
        for number, place in list(enumerate(first))[:: self._lanes]:
            old[number] = words[place]
            words[place] = combine(old[number], operand[number])
        return old

    def _place(self, one: Instruction, at: Array, size: int, width: int, program: Array) -> tuple[Array, Array, Array]:
        """Checks an access of `size` bytes.

        Returns the words of its memory, the first word of each thread, and the number of its allocation.
        """
        if (at % size).any():
            raise one.fault(f"misaligned access of {size} bytes")
        if "shared" in one.words:
            if (at < 0).any() or (at + size > self._room).any():
                raise one.fault("outside of shared memory")
            return self._shared.view(f"u{width}"), (at + program * self._room) // width, program
        owner = ALLOCATIONS.find(at, size)
        if (owner < 0).any():
            ALLOCATIONS.look()
            owner = ALLOCATIONS.find(at, size)
            outside = at[owner < 0]
            if len(outside):
                raise one.fault(f"{len(outside)} threads outside of every allocation, {size} bytes at {outside[0]:#x}")
        return VIEWS[width], (at - BASE) // width, owner

    def _note(
        self, one: Instruction, kind: str, at: Array, size: int, now: Array, program: Array, owner: Array,
        silent: Any = np.False_,
    ) -> None:  # fmt: skip
        """Notes an access of `size` bytes that `_place` has checked."""
        if "shared" in one.words:
            raced = self._shared_shadow.note(kind, at + program * self._room, size, now, silent)
            self.races.update({(f"{what}, shared", one.place): cells for what, cells in raced.items()})
            return
        same = (owner == owner[0]).all()
        for number in [int(owner[0])] if same else np.unique(owner).tolist():
            start, end = int(ALLOCATIONS.starts[number]), int(ALLOCATIONS.ends[number])
            if start not in self._shadows:
                self._shadows[start] = Shadow(end - start, self._cells[0], self._threads)
            chosen = slice(None) if same else owner == number
            quiet = silent[chosen] if silent.ndim else silent
            raced = self._shadows[start].note(kind, at[chosen] - start, size, now[chosen], quiet)
            self.races.update({(what, one.place): cells for what, cells in raced.items()})
