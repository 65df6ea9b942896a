"""What a configuration compiles to for a target, and its rank among others where nothing can be timed."""

from dataclasses import dataclass, replace
from functools import cache

from memstate.cli.compile import TARGETS
from memstate.cli.compile.accesses import WIDE_BITS
from memstate.cli.compile.build import build
from memstate.errors import CompileFailed
from memstate.kernels.tuned import CopyConfig, compile_cases

WORD_BYTES = 4  # of a lane, where lanes move 16 bytes at a time
UNIT = "register bytes per byte in flight"


@dataclass(frozen=True)
class Cost:
    """The worst of the three operations of the copy kernel under a configuration; None where it does not compile.

    Attributes:
        registers: Per thread.
        spill_bytes: Per thread.
        shared_bytes: Per program.
        narrowest_bulk_access_bits: Of one lane.
        why: What excludes the configuration, empty if nothing does.
    """

    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    narrowest_bulk_access_bits: int | None = None
    why: str = ""


def cost(config: CopyConfig, target: str) -> Cost:
    """Compiles the copy kernel under a configuration, in this process, which must not interpret kernels."""
    return _cost(replace(config, programs_per_sm=CopyConfig().programs_per_sm), target)


@cache
def _cost(config: CopyConfig, target: str) -> Cost:
    try:
        reports = [build(case, target) for case in compile_cases(config)]
    except CompileFailed as failure:
        return Cost(why=f"does not compile: {failure}")
    spilled = max(report.spill_bytes for report in reports)
    narrowest = min(report.narrowest_bulk_access_bits or 0 for report in reports)
    why = f"spills {spilled} bytes a thread for {target}" if spilled else ""
    if narrowest < WIDE_BITS:
        why = why or f"moves {narrowest} bits a lane for {target}, expected {WIDE_BITS}"
    return Cost(
        max(report.registers for report in reports), spilled, max(report.shared_bytes for report in reports),
        narrowest, why,
    )  # fmt: skip


def weight(config: CopyConfig, found: Cost, target: str) -> float:
    """Returns the register bytes that a program takes for each byte that it has in flight: less is better.

    A multiprocessor holds a fixed number of registers, so this is the reciprocal of the bytes it can keep in flight.
    It does not tell how long a copy takes.
    """
    assert found.registers is not None, f"{config} does not compile"
    threads = config.warps * TARGETS[target][2]
    return found.registers * 4 * threads / (config.lanes * WORD_BYTES)
