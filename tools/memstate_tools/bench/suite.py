"""Runs benchmarks by name. A figure is reported only if its check passed in the same run."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from memstate.errors import InvalidArgument
from memstate_tools.bench import (
    alloc,
    copy,
    decode,
    host,
    parking,
    prefix,
    state,
    tiers_stores,
    tiers_transfers,
    track,
    transformers_serve,
)
from memstate_tools.bench.launches import launches
from memstate_tools.bench.task import BenchResult, Progress, Setting, Task, carry_out

COURSES: dict[str, tuple[Callable[[Setting], Iterator[Task]], ...]] = {
    "host": (host.tasks, parking.tasks),
    "alloc": (alloc.tasks,),
    "track": (track.tasks, decode.tasks),
    "copy": (copy.tasks,),
    "state": (state.tasks,),
    "prefix": (prefix.tasks,),
    "tiers": (tiers_stores.tasks, tiers_transfers.tasks),
    "transformers": (transformers_serve.tasks,),
}
NEED_DEVICE = ("alloc", "track", "copy", "state")  # benchmarks of device time; on a CPU they run at toy sizes only
NAMES = ("launches", *COURSES)


def run(
    names: Sequence[str],
    backend: str = "auto",
    device: str = "cpu",
    toy: bool = False,
    peer: str | None = None,
    progress: Progress | None = None,
    report: Callable[[BenchResult], None] | None = None,
    end: float | None = None,
    measure: bool = True,
    case: str = "",
) -> BenchResult:
    """Runs benchmarks one after the other. Each measurement comes after a check of the measured operation.

    Args:
        names: Names in `NAMES`.
        backend: Name of the backend.
        device: Where tensors live.
        toy: Whether sizes are so small that an interpreter can run them. Times then come from the host clock, and cases
            are named "toy".
        peer: The only peer to compare with. None: all.
        progress: Called with (done, total); total is None if unknown.
        report: Called with the outcome so far, after each measurement.
        end: Time, by `time.monotonic`, after which no measurement begins. None: no limit.
        measure: Whether tasks are measured after their checks.
        case: Text that the name of a measurement must contain. If it equals the name of a case, only that case runs.

    Returns:
        The outcome.

    Raises:
        InvalidArgument: A name, the peer or the case is unknown, or device time is asked for without a GPU.

    Syncs: yes.
    """
    unknown = [name for name in names if name not in NAMES]
    if unknown or not names:
        raise InvalidArgument(f"bench {', '.join(unknown) or 'nothing'}: expected {', '.join(NAMES)}")
    on_gpu = torch.device(device).type == "cuda"
    timed = [name for name in names if name in NEED_DEVICE]
    if timed and not (toy or on_gpu):
        raise InvalidArgument(f"bench {', '.join(timed)}: device time needs a GPU; --toy goes through it at toy sizes")
    setting = Setting(backend, torch.device(device), toy, peer)
    outcome = BenchResult()
    for name in names:
        if name == "launches":
            outcome.entries += [one for one in launches(backend, device, progress) if case in f"{one.op}, {one.case}"]
        for course in COURSES.get(name, ()):
            with setting.held:
                tasks = _chosen(course(setting), case) if case else course(setting)
                carry_out(tasks, outcome, progress, report, end, measure)
            if on_gpu:
                torch.cuda.empty_cache()  # the next benchmark asks the driver for free memory
        if report:
            report(outcome)
        if not outcome.complete:
            break
    if case and measure and outcome.complete and not (outcome.entries or outcome.wrong):
        raise InvalidArgument(f"case {case!r}: no measurement of {', '.join(names)} has it in its name")
    return outcome


def _chosen(tasks: Iterable[Task], case: str) -> list[Task]:
    """Returns the tasks that `case` chooses, see `run`."""
    chosen = [task for task in tasks if case in task.name]
    # the name of a task is "operation, case"
    return [task for task in chosen if task.name.partition(", ")[2] == case] or chosen
