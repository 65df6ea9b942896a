"""Notes who touched which bytes of a launch, and finds two threads that no barrier orders, one of which stores.

A thread's moment is one number: its index, the barriers that its program has passed, and the barriers of its warp since
then. Two accesses are in order if the threads are of one program and a barrier stands between, or of one warp and a
barrier of the warp stands between. Shuffles order nothing ("These intrinsics do not imply a memory barrier", CUDA C++
Programming Guide, "Warp Shuffle Functions").
"""

import mmap
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

Array = Any
THREAD, BARRIER = 36, 18  # bits of a moment below the index of the thread, and below the number of barriers
NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux: memory is taken page by page, so a large allocation costs nothing
LEVELS, KINDS = ("programs", "warps", "lanes"), ("store", "atomic", "load")
_ONE_STORES = "all threads load the counter, and the one that stores uses what it has loaded itself"
_IN_STEP = "lanes that hold the same element load it in one instruction, before the instruction in which one stores it"
KNOWN = (  # file, beginning of a line of source, levels of races that are harmless there, and why
    ("bitmap.py", "tl.store(counters_ptr + cell, tl.load(counters_ptr + cell)", LEVELS[1:], _ONE_STORES),
    ("bitmap.py", "first = (count > 0) & (tl.load(counters_ptr + OFFENDER_KIND)", LEVELS[1:], _ONE_STORES),
    ("bitmap.py", "tl.store(counters_ptr + OFFENDER_KIND, kind", LEVELS[1:], _ONE_STORES),
    ("conv.py", "tl.store(ptr + at, parts[part]", LEVELS[2:], _IN_STEP),
    ("pieces.py", "tl.store(ptr + slot * apart + piece * (PIECE_STEP * STRIDE), block", LEVELS[2:], _IN_STEP),
    ("pieces.py", "tl.store(scales_ptr + slot * scales_apart, scale", LEVELS[2:], _IN_STEP),
)


class Shadow:
    """For each cell of some bytes: moments of its last store, atomic and load, and of one more of each by others.

    Two are enough: whoever comes next is another than one of them. A moment of 0 means never.

    cell: bytes of a cell: no access is narrower. threads: threads of a program.
    """

    def __init__(self, size: int, cell: int, threads: int) -> None:
        cells = size // cell + 1
        pages = mmap.mmap(-1, 48 * cells, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
        self._seen = dict(zip(KINDS, np.frombuffer(pages, "i8").reshape(3, 2, cells), strict=True))
        self._cell, self._threads = cell, threads

    def note(self, kind: str, at: Array, width: int, now: Array, silent: Array) -> Counter[str]:
        """Notes an access of some threads, and returns how many cells race, by kind and level.

        Args:
            kind: "load", "store" or "atomic".
            at: first byte of each thread's access.
            width: bytes of an access.
            now: moment of each thread.
            silent: for each thread whether it stores what is there already. This changes nothing for a reader.
        """
        raced = Counter[str]()
        for cell in at // self._cell + np.arange(-(-width // self._cell))[:, None]:
            for other, pair in self._seen.items():
                before = pair[:, cell]
                if before.any() and (kind != other or kind == "store"):
                    apart = self._apart(before, now).max(0) * ~silent
                    word = f"{'read' if kind == 'load' else 'write'} after {'read' if other == 'load' else 'write'}"
                    for level in np.unique(apart[apart > 0]):
                        raced[f"{word}, {LEVELS[-level]}"] += int((apart == level).sum())
            self._remember(*self._seen[kind], cell, now)
        return raced

    def _remember(self, last: Array, others: Array, cell: Array, now: Array) -> None:
        """Notes an access as the last one, and beside it that of the farthest thread that is not in order with it."""
        before = last[cell]
        last[cell] = now
        kept = last[cell]  # of threads that come to one cell at once
        for each in (before, now):
            if (each > 0).any() and (each != kept).any():
                apart, old = self._apart(each, kept), self._apart(others[cell], kept)
                for level in range(1, 4):
                    chosen = (apart == level) & (old <= level)
                    others[cell[chosen]] = each[chosen]

    def _apart(self, before: Array, now: Array) -> Array:
        """Returns the level at which two accesses are in no order: 1 lanes, 2 warps, 3 programs, 0 if they are."""
        mine, theirs, phase = now >> THREAD, before >> THREAD, (1 << THREAD) - 1
        late = (before & phase) >> BARRIER >= (now & phase) >> BARRIER
        level = np.where(theirs // 32 != mine // 32, 2 * late, before & phase >= now & phase)
        level = np.where(theirs // self._threads != mine // self._threads, 3, level)
        return np.where((before > 0) & (theirs != mine), level, 0)


def harmless(what: str, file: str, line: str) -> bool:
    """Returns whether a race at a line of source is listed in KNOWN."""
    level = what.split(", ")[1]
    return any(file == of and line.startswith(text) and level in levels for of, text, levels, _ in KNOWN)


def told(raced: Mapping[tuple[str, str], int]) -> str:
    """Returns a text of races, which are (what, place) -> number of cells."""
    return "; ".join(f"{place}: {what}, {cells} cells" for (what, place), cells in sorted(raced.items()))
