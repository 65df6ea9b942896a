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
LEVELS = ("programs", "warps", "lanes")
_ONE_STORES = "all threads load the counter, and the one that stores uses what it has loaded itself"
_IN_STEP = "lanes that hold the same element load it in one instruction, before the instruction in which one stores it"
KNOWN = (  # file, beginning of a line of source, levels of races that are harmless there, and why
    ("bitmap.py", "tl.store(counters_ptr + cell, tl.load(counters_ptr + cell)", LEVELS[1:], _ONE_STORES),
    ("bitmap.py", "first = (count > 0) & (tl.load(counters_ptr + OFFENDER_KIND)", LEVELS[1:], _ONE_STORES),
    ("bitmap.py", "tl.store(counters_ptr + OFFENDER_KIND, kind", LEVELS[1:], _ONE_STORES),
    ("conv.py", "tl.store(ptr + at, parts[part]", LEVELS[2:], _IN_STEP),
    ("gated_delta.py", "tl.store(ptr + piece * (PIECE_STEP * KEY_STRIDE), block", LEVELS[2:], _IN_STEP),
    ("selective.py", "tl.store(ptr + piece * (PIECE_STEP * STATE_STRIDE), tiles[piece]", LEVELS[2:], _IN_STEP),
)


class Shadow:
    """For each cell of some bytes: moments of its last store, its last atomic, its last load, and a load by others.

    A moment of 0 means never.

    cell: bytes of a cell: no access is narrower. threads: threads of a program.
    """

    def __init__(self, size: int, cell: int, threads: int) -> None:
        cells = size // cell + 1
        pages = mmap.mmap(-1, 32 * cells, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
        self._stored, self._changed, self._loaded, self._others = np.frombuffer(pages, "i8").reshape(4, cells)
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
            checks = [("write after write" if kind != "load" else "read after write", self._stored[cell])]
            if kind != "atomic":
                checks.append((checks[0][0], self._changed[cell]))
            if kind != "load":
                checks += [("write after read", self._loaded[cell]), ("write after read", self._others[cell])]
            for word, before in checks:
                if before.any():
                    self._compare(word, before, now, silent, raced)
            if kind == "load":
                self._remember(cell, now)
            else:
                (self._stored if kind == "store" else self._changed)[cell] = now
        return raced

    def _remember(self, cell: Array, now: Array) -> None:
        """Notes a load, and keeps the one before if it is of another program, else if it is of another warp."""
        last, other = self._loaded[cell], self._others[cell]
        if last.any():
            mine, theirs = now >> THREAD, last >> THREAD
            foreign = (last > 0) & (theirs // self._threads != mine // self._threads)
            free = (other == 0) | ((other >> THREAD) // self._threads == mine // self._threads)
            moves = foreign | ((last > 0) & free & (theirs // 32 != mine // 32))
            self._others[cell] = np.where(moves, last, other)
        self._loaded[cell] = now

    def _compare(self, word: str, before: Array, now: Array, silent: Array, raced: Counter[str]) -> None:
        mine, theirs = now >> THREAD, before >> THREAD
        program = theirs // self._threads != mine // self._threads
        warp = ~program & (theirs // 32 != mine // 32)
        phase = (1 << THREAD) - 1
        late = np.where(warp, (before & phase) >> BARRIER >= (now & phase) >> BARRIER, before & phase >= now & phase)
        bad = (before > 0) & (theirs != mine) & (program | late) & ~silent
        if bad.any():
            for level, chosen in zip(LEVELS, (program, warp, ~program & ~warp), strict=True):
                if count := int((bad & chosen).sum()):
                    raced[f"{word}, {level}"] += count


def harmless(what: str, file: str, line: str) -> bool:
    """Returns whether a race at a line of source is listed in KNOWN."""
    level = what.split(", ")[1]
    return any(file == of and line.startswith(text) and level in levels for of, text, levels, _ in KNOWN)


def told(raced: Mapping[tuple[str, str], int]) -> str:
    """Returns a text of races, which are (what, place) -> number of cells."""
    return "; ".join(f"{place}: {what}, {cells} cells" for (what, place), cells in sorted(raced.items()))
