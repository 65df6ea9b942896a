"""How long a decode step would take on paper, beside the time that its bytes take: no GPU, only the compiled code.

A launch cannot be faster than its bytes at the bandwidth of the memory, nor than its instructions at one a cycle and
scheduler. Before either, a first program waits for its chain of loads. The estimate is that chain and the longer of the
two; what a GPU measures is above it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from memstate.cli.compile.build import KernelReport
from memstate.cli.compile.work import Work, work_of
from memstate.kernels.catalog import all_cases

BATCHES = (1, 16, 64, 256)
TRAFFIC = 8192  # bytes of state read and written for which instructions are counted
SCHEDULERS = 4  # of a multiprocessor; each issues one instruction a cycle
MOST_WARPS = 64  # of a multiprocessor
REGISTERS = 65536  # of a multiprocessor, given to warps in portions of 256
# Cycles from a load to its value: 479 were measured on an H100, Luo et al. 2024, arXiv:2402.13499. None are published
# for a B200.
LATENCY = 480


class Device(NamedTuple):
    """A GPU as its data sheet has it: compile target, multiprocessors, cycles and bytes a second.

    Copies do not reach that bandwidth: on an H200 they move about 4.3e12 bytes a second, read and written.
    """

    target: str
    multiprocessors: int
    clock: float
    bandwidth: float


DEVICES = {"H200": Device("sm_90", 132, 1.98e9, 4.8e12), "B200": Device("sm_100", 148, 1.965e9, 8e12)}


@dataclass(frozen=True)
class Estimate:
    """One kernel on one device, for one token of every row.

    Attributes:
        kernel: Name of the kernel.
        device: Name of the device.
        registers: Per thread.
        warps_per_sm: Warps that fit a multiprocessor.
        instructions: Of one warp.
        instructions_per_8_kb: For 8 192 bytes of state read and written, all warps together.
        bytes_in_flight: Bytes that the warps of a multiprocessor wait for at a time, at most.
        dependent_loads: Loads of global memory in the longest chain in which each waits for the one before.
        batch: Rows.
        floor_us: Time of the bytes alone, at the bandwidth of the data sheet.
        issue_us: Time of the instructions alone.
        estimate_us: The longer of the two, behind the chain of loads.
    """

    kernel: str
    device: str
    registers: int
    warps_per_sm: int
    instructions: int
    instructions_per_8_kb: int
    bytes_in_flight: int
    dependent_loads: int
    batch: int
    floor_us: float
    issue_us: float
    estimate_us: float


def bandwidths() -> str:
    """Returns the bandwidth that stands for each device, for a heading."""
    return ", ".join(f"{name} {device.bandwidth / 1e12:g} TB/s" for name, device in DEVICES.items())


def estimates(reports: Sequence[KernelReport]) -> list[Estimate]:
    """Estimates the decode kernels among the reports, one token a row: on each device of their targets, each batch."""
    cases = {case.name: case for case in all_cases()}
    found: list[Estimate] = []
    for report in reports:
        work = work_of(cases[report.kernel]) if report.kernel in cases else None
        for name, device in DEVICES.items():
            if work is not None and device.target == report.target:
                warps = work.programs * cases[report.kernel].num_warps
                found += [_estimate(report, name, work, warps, batch) for batch in BATCHES]
    return found


def _estimate(report: KernelReport, name: str, work: Work, warps: int, batch: int) -> Estimate:
    """Estimates one kernel on one device for one batch; warps: of a row."""
    device, instructions, loads = DEVICES[name], report.instructions or 0, report.dependent_loads or 0
    resident = min(MOST_WARPS, REGISTERS // (256 * ceil(report.registers * 32 / 256)))
    floor = batch * (work.state + work.tokens) / device.bandwidth
    issue = ceil(batch * warps / (SCHEDULERS * device.multiprocessors)) * instructions / device.clock
    return Estimate(
        kernel=report.kernel,
        device=name,
        registers=report.registers,
        warps_per_sm=resident,
        instructions=instructions,
        instructions_per_8_kb=round(instructions * warps * TRAFFIC / work.state),
        bytes_in_flight=resident * (report.bytes_in_flight or 0),
        dependent_loads=loads,
        batch=batch,
        floor_us=1e6 * floor,
        issue_us=1e6 * issue,
        estimate_us=1e6 * (loads * LATENCY / device.clock + max(floor, issue)),
    )
