"""Compiles a configuration for a target, and ranks it among others if nothing can be timed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import gcd, prod
from typing import Any, NamedTuple

from memstate.errors import CompileFailed
from memstate.kernels import tuned
from memstate.kernels.catalog import CompileCase
from memstate.kernels.tuned import CONFIGS, KERNEL_OF, Config
from memstate_tools.compile import TARGETS
from memstate_tools.compile.accesses import WIDE_BITS
from memstate_tools.compile.build import build
from memstate_tools.tune.grid import FREE_AXIS

WORD_BYTES = 4  # bytes of a word; sizes of moves and of blocks of a state are counted in words
FEW = 4  # number of compile cases of a kernel that are compiled
UNIT = "register bytes per byte in flight"


@dataclass(frozen=True)
class Cost:
    """The worst figures of a kernel's operations under a configuration. Each is None if the kernel does not compile.

    Attributes:
        registers: Registers of a thread.
        spill_bytes: Spilled bytes of a thread.
        shared_bytes: Shared memory of a program.
        narrowest_bulk_access_bits: Fewest bits of a lane's access to plane bytes.
        why: Reason why the configuration is excluded; empty if it is not.
        weight: Register bytes of a program for each byte that it has in flight: less is better. A multiprocessor has a
            fixed number of registers, so this is the reciprocal of the bytes that it can keep in flight. It does not
            say how long a call takes.
    """

    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    narrowest_bulk_access_bits: int | None = None
    why: str = ""
    weight: float | None = None


class Shaped(NamedTuple):
    """A compile case under a configuration, and the bytes of state that one of its programs has in flight."""

    case: CompileCase
    in_flight: int


def shaped(case: CompileCase, config: Config) -> Shaped:
    """Returns a compile case with the shape that the launcher chooses under a configuration."""
    from memstate.kernels.warps import roomy

    shape = SHAPES[KERNEL_OF[type(config)]]
    constexprs, warps, nbytes = shape(case, config, 32)
    wide, _, _ = shape(case, config, 64)
    of_64 = {name: wide[name] for name in case.of_64}
    options = dict(case.options)
    if "maxnreg" in options:
        options |= roomy(warps, most=options["maxnreg"])
    constexprs = case.constexprs | constexprs
    return Shaped(case._replace(constexprs=constexprs, num_warps=warps, options=options, of_64=of_64), nbytes)


def _moves(case: CompileCase, config: Any, threads: int) -> tuple[dict[str, Any], int, int]:
    known = {"ENTRIES": "entries", "LANES": "lanes"}
    changed = {name: getattr(config, field) for name, field in known.items() if hasattr(config, field)}
    return changed, config.warps, config.lanes * WORD_BYTES


def _int8(case: CompileCase, config: Any, threads: int) -> tuple[dict[str, Any], int, int]:
    given = case.constexprs
    block_c, block_r = config.blocks(given["COLUMNS"], given["REDUCED"], given["INNER"])
    return {"BLOCK_C": block_c, "BLOCK_R": block_r}, config.warps, block_c * block_r * WORD_BYTES


def _delta(case: CompileCase, config: Any, threads: int) -> tuple[dict[str, Any], int, int]:
    given = case.constexprs
    itemsize = 4 if case.signature["state_ptr"] == "*fp32" else 2
    block_k, block_v, warps = config.blocks(given["KEY"], given["VALUE"], itemsize)
    lanes, run = tuned.shares(given["KEY_FASTEST"], itemsize, block_k, block_v, warps, threads)
    changed = {"BLOCK_K": block_k, "BLOCK_V": block_v, "LANES": lanes, "RUN": run}
    return changed, warps, block_k * block_v * WORD_BYTES


def _selective(case: CompileCase, config: Any, threads: int) -> tuple[dict[str, Any], int, int]:
    given = case.constexprs
    itemsize = 4 if case.signature["state_ptr"] == "*fp32" else 2
    dim_fastest = not given["STATE_FASTEST"]
    least = tuned.SECTOR_BYTES // itemsize if dim_fastest else 1
    block_d, block_n, warps = config.blocks(given["DIM"], given["STATE"], given["TIED"], least)
    wide = gcd(given["UNIT"], given["STATE"])
    lanes, run = tuned.state_shares(dim_fastest, itemsize, wide, block_d, block_n, warps, threads)
    changed = {"BLOCK_D": block_d, "BLOCK_N": block_n, "LANES": lanes, "RUN": run}
    return changed, warps, block_d * block_n * WORD_BYTES


def _conv(case: CompileCase, config: Any, threads: int) -> tuple[dict[str, Any], int, int]:
    given = case.constexprs
    itemsize = 4 if case.signature["state_ptr"] == "*fp32" else 2
    block, lane = config.blocks(given["CHANNELS"], given["TAPS"], itemsize, threads)
    return {"BLOCK": block, "LANE": lane}, config.warps, prod((block, given["TAPS"] - 1, itemsize))


Shape = Callable[[CompileCase, Any, int], tuple[dict[str, Any], int, int]]
SHAPES: dict[str, Shape] = {
    **dict.fromkeys(("copy", "gather", "scatter", "pack"), _moves),
    "pack_int8": _int8, "gated_delta": _delta, "selective": _selective, "conv": _conv,
}  # fmt: skip


def compile_cases(config: Config) -> list[Shaped]:
    """Returns the first few launches of a kernel under a configuration, to be compiled. Needs Triton."""
    cases = [case for case in tuned.compile_cases(KERNEL_OF[type(config)]) if not case.rare]
    return [shaped(case, config) for case in cases[:FEW]]


def cost(config: Config, target: str) -> Cost:
    """Compiles a kernel under a configuration in this process, which must not interpret. Returns the figures."""
    if hasattr(config, FREE_AXIS):
        config = replace(config, **{FREE_AXIS: getattr(CONFIGS[KERNEL_OF[type(config)]](), FREE_AXIS)})
    return _cost(config, target)


@cache
def _cost(config: Config, target: str) -> Cost:
    try:
        reports = [(build(case, target), case.num_warps, nbytes) for case, nbytes in compile_cases(config)]
    except CompileFailed as failure:
        return Cost(why=f"does not compile: {failure}")
    made = [report for report, _, _ in reports]
    spilled = max(report.spill_bytes for report in made)
    narrowest = min(report.narrowest_bulk_access_bits or 0 for report in made)
    why = f"spills {spilled} bytes a thread for {target}" if spilled else ""
    if narrowest < WIDE_BITS:
        why = why or f"moves {narrowest} bits a lane for {target}, expected {WIDE_BITS}"
    lanes = TARGETS[target][2]
    weight = max(report.registers * 4 * warps * lanes / nbytes for report, warps, nbytes in reports)
    return Cost(
        max(report.registers for report in made), spilled, max(report.shared_bytes for report in made), narrowest,
        why, weight,
    )  # fmt: skip
