"""Chooses the warps and the hardware registers of programs that pass data through memory. Knows no kernel.

Triton spreads the lanes of a tensor over the threads of a program. If there are more threads than lanes, several warps
hold the same lane: each warp loads it, at a time of its own, and one stores it. A late warp would then read what
another warp has stored, decide differently, and enter a loop alone. So there are never more warps than lanes / 32, and
a barrier always separates loads on which a decision depends from the first store to the same words.
"""

from functools import cache
from typing import Any

import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver

LANES = 64  # fewest lanes of a warp: one per thread in warps of 64 threads, two in warps of 32
MOST = 16  # limit of the warps of a program
BLOCKS = (32, 64, 128, 256, 512, 1024)  # possible numbers of lanes: one per entry; a program loops over more entries
REGISTERS = 65536  # hardware registers of an NVIDIA multiprocessor
THREAD_REGISTERS = 255  # limit of the hardware registers of a thread


def warps_for(lanes: int) -> int:
    """Returns the warps of a program, so few that no two warps hold the same lane.

    Args:
        lanes: lanes of the program's smallest tensor.

    Raises:
        ValueError: fewer than 32 lanes: even the threads of one warp would hold copies.
    """
    warps = min(MOST, max(1, lanes // LANES))
    if warps * 32 > lanes:
        raise ValueError(f"{lanes} lanes: expected 32 or more, one for each thread of a warp")
    return warps


def block_for(entries: int) -> int:
    """Returns the lanes of a program for a number of entries, one of `BLOCKS`."""
    return min(BLOCKS[-1], max(BLOCKS[0], int(triton.next_power_of_2(entries))))


def roomy(warps: int, needed: bool = True, most: int = THREAD_REGISTERS) -> dict[str, int]:
    """Returns launch options that allow a thread as many hardware registers as a program of its size can have.

    Without these options, NVIDIA's assembler fits more programs on a multiprocessor, and spills in some shapes. With
    them, most shapes take a few more registers. So only kinds of launches in which a shape spills have these options.
    AMD's compiler has no such option.

    Args:
        warps: warps of a program.
        needed: whether a shape of this kind of launch would spill.
        most: limit of the registers of a thread.
    """
    return {"maxnreg": min(most, REGISTERS // (32 * warps))} if needed else {}


ALONE = roomy(MOST)  # launch options of a program that runs alone, for any number of warps


def alone() -> dict[str, int]:
    """Returns the launch options of a program that runs alone on the current device."""
    return limit(ALONE)


def limit(options: dict[str, int]) -> dict[str, int]:
    """Returns `options`, which limit the registers of a thread, or none if the current device's compiler lacks them."""
    return {} if knobs.runtime.interpret or _target(driver.active).backend != "cuda" else options


def warp_threads() -> int:
    """Returns the threads of a warp of the current device; 32 if kernels are interpreted."""
    return 32 if knobs.runtime.interpret else int(_target(driver.active).warp_size)


def overlaps() -> bool:
    """Returns whether the current device can begin a launch before the one in front of it ends: from sm_90 on."""
    return bool(alone()) and _target(driver.active).arch >= 90  # only NVIDIA's devices have launch options


@cache
def _target(active: Any) -> Any:
    return active.get_current_target()


@triton.jit
def all_loaded():
    """Waits until every warp has loaded the words on which a decision depends, before a warp stores to them."""
    tl.debug_barrier()
