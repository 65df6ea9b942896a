"""How many warps a program gets that speaks to itself through memory, and how many registers. Knows no kernel.

Triton deals the lanes of a tensor out over the threads of a program. Where there are more threads than lanes, several
warps hold the same lane: each loads it when it gets there, and one stores it. A warp that is late reads what another
has stored, decides otherwise and enters a loop alone. So there are never more warps than lanes / 32; and a barrier
stands between loads that decide something and the first store to the same words, however lanes are dealt out.
"""

from functools import cache
from typing import Any

import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver

LANES = 64  # of a warp at least: what the widest one has; 32 threads take two each
MOST = 16
BLOCKS = (32, 64, 128, 256, 512, 1024)  # lanes of a program that has a lane for each entry; of more it makes a loop
REGISTERS = 65536  # of a multiprocessor of NVIDIA
THREAD_REGISTERS = 255  # of a thread, at most


def warps_for(lanes: int) -> int:
    """Warps of a program, so that no lane is in two of them.

    Args:
        lanes: the fewest lanes of the program's tensors.

    Raises:
        ValueError: below 32 lanes, of which even one warp would hold copies.
    """
    warps = min(MOST, max(1, lanes // LANES))
    if warps * 32 > lanes:
        raise ValueError(f"{lanes} lanes: expected 32 or more, one for each thread of a warp")
    return warps


def block_for(entries: int) -> int:
    """Lanes of a program for a number of entries, one of `BLOCKS`."""
    return min(BLOCKS[-1], max(BLOCKS[0], int(triton.next_power_of_2(entries))))


def roomy(warps: int, needed: bool = True, most: int = THREAD_REGISTERS) -> dict[str, int]:
    """Returns the launch options that let a thread have the registers it needs, as far as a program can have them.

    Without these options NVIDIA's assembler aims at more programs of a multiprocessor, and spills some bytes in some
    shapes. With them most shapes take some more registers. So they are for the kinds of launches in which a shape
    spills, and not for others. AMD's compiler has no such option.

    Args:
        warps: of a program.
        needed: whether the launch is of such a kind.
        most: registers of a thread.
    """
    return {"maxnreg": min(most, REGISTERS // (32 * warps))} if needed else {}


ALONE = roomy(MOST)  # of a program that runs alone, whatever its warps


def alone() -> dict[str, int]:
    """Returns the launch options of a program that runs alone, on the device that is current."""
    return limit(ALONE)


def limit(options: dict[str, int]) -> dict[str, int]:
    """Returns options that limit the registers of a thread, where the compiler of the current device has them."""
    return {} if knobs.runtime.interpret or not _limits(driver.active) else options


def warp_threads() -> int:
    """Returns how many threads a warp of the current device has; 32 where kernels are interpreted."""
    return 32 if knobs.runtime.interpret else _threads(driver.active)


@cache
def _threads(active: Any) -> int:
    return int(active.get_current_target().warp_size)


@cache
def _limits(active: Any) -> bool:
    return bool(active.get_current_target().backend == "cuda")


@triton.jit
def all_loaded():
    """Stands behind the loads that decide something: every warp has them before one stores to the same words."""
    tl.debug_barrier()
