"""Tests the timed benchmarks at toy sizes: their entries, their checks, and the clock of a device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memstate.errors import InvalidArgument
from memstate.kernels import bitmap, conv_delta, gather, registers, tracking
from memstate.kernels import copy as copy_kernel
from memstate.kernels.configs import CONFIGS
from memstate.kernels.own import KERNELS
from memstate_tools.bench import (
    PEERS,
    BenchResult,
    Measured,
    alloc,
    clock,
    copy,
    decode,
    run,
    track,
)
from memstate_tools.bench.clock import IN_GRAPH, RUNS, WARM_UPS, DeviceClock, HostTimer, Times, TooSlow, nothing
from memstate_tools.bench.task import Setting, Task, carry_out
from memstate_tools.models import model_of, toy_of
from memstate_tools.workload import MAKERS

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted kernels, at toy sizes")
OPS = {
    "alloc": {"claim", "release", "claim and release", "ownership"},
    "track": {"plan", "step", "forward", "decode step"},
    "copy": {"copy", "gather", "scatter", "zero"},
    "state": {
        "copy", "zero", "gather", "scatter", "pack", "unpack", "pack int8", "unpack int8", "gated delta", "selective",
        "conv", "mamba3", "gated delta, drafts", "gated delta, trees", "selective, drafts", "selective, trees",
        "conv, drafts", "conv, trees",
    },
}  # fmt: skip


@lru_cache
def toy(name: str, peer: str | None = None) -> BenchResult:
    """Returns the result of a toy benchmark.

    The benchmark runs once for each name and peer, since the tests read only what is equal in all runs.
    """
    return run([name], "auto", toy=True, peer=peer)


def findings(course: Callable[[Setting], Iterator[Task]], names: set[str]) -> dict[str, str]:
    """Runs the checks of the named tasks without a measurement. Returns the text of each check, by name of the task."""
    return {task.name: task.check() for task in course(Setting("auto", CPU, True)) if task.name in names}


def test_every_kernel_with_configurations_has_a_workload() -> None:
    assert CONFIGS.keys() - KERNELS.keys() <= MAKERS.keys()


@pytest.mark.sample(2)
@on_cpu
@pytest.mark.parametrize("name", OPS)
def test_every_operation_is_checked_measured_and_marked_as_a_toy(name: str) -> None:
    outcome = toy(name)
    entries = outcome.entries
    assert outcome.wrong == [] and {entry.op for entry in entries} == OPS[name]
    assert len({(entry.op, entry.case, entry.unit) for entry in entries}) == len(entries)
    for entry in entries:
        assert entry.case.startswith("toy ") and entry.value > 0, entry
        assert entry.unit in ("us", "host us", "bytes/s")
        if entry.peer:
            assert entry.peer in PEERS and entry.ratio == pytest.approx(entry.value / (entry.peer_value or 0))


@on_cpu
def test_copies_say_bytes_rate_and_share_of_a_plain_copy() -> None:
    entries = {(entry.op, entry.case, entry.unit): entry for entry in toy("copy").entries}
    layout = toy_of(model_of(copy.MODEL), "copy").layout
    slot, plane = layout.payload_bytes_per_slot, layout.layers * max(each.nbytes for each in layout.planes)
    for op, nbytes, factor in (("copy", slot, 2), ("gather", plane, 2), ("scatter", plane, 2), ("zero", slot, 1)):
        for due in copy.TOY_DUE:
            case = f"toy {due} slots of qwen3_next"
            rate, time = entries[op, case, "bytes/s"], entries[op, case, "us"]
            assert rate.value == pytest.approx(factor * due * nbytes / time.value * 1e6)
            assert (rate.peer, time.peer) == ("device-copy", "torch-indexing")
    assert {"toy nothing due", "toy nothing due, in a graph"} <= {case for op, case, _ in entries if op == "copy"}


@pytest.mark.parametrize(("name", "says"), [("everything", "everything: expected launches, host, "), ("", "nothing")])
def test_what_is_no_benchmark_is_refused(name: str, says: str) -> None:
    with pytest.raises(InvalidArgument, match=f"bench {says}"):
        run(name.split(), toy=True)


# -- checks before a measurement -------------------------------------------------------------------


def _skip_last(true: Any, planes: Any, dst: Any, src: Any) -> None:
    true(planes, *(column.clone().index_fill_(0, column.nonzero()[-1:, 0], 0) for column in (dst, src)))


def _idle(true: Any, planes: Any, dst: Any, src: Any) -> None:
    planes.blocks[0][0, 1, 0] += 1


def _backwards(true: Any, words: Any, n: int, counters: Any) -> Any:
    return true(words, n, counters).flip(0)


def _forget(true: Any, table: Any, packet: Any) -> None:
    packet = packet.clone()
    packet[3] = max(0, int(packet[3]) - 1)  # drops the last cell write
    true(table, packet)


def _no_snapshot(true: Any, table: Any, packet: Any, record: Any, *rest: Any) -> None:
    true(table, packet, record, *rest)
    record.snapshot.zero_()


def _nudge(true: Any, *given: Any) -> Any:
    out = true(*given)
    given[1][5].mul_(1.001)  # changes the states
    return out


def _twice_the_first(true: Any, plane: Any, slots: Any, *rest: Any) -> None:
    true(plane, slots[:1].expand_as(slots).contiguous(), *rest)


@pytest.mark.sample(3)
@on_cpu
@pytest.mark.parametrize(
    ("course", "module", "op", "fault", "lost"),
    [
        (copy.tasks, copy_kernel, "copy_slots", _skip_last, {f"copy, {due} slots of qwen3_next" for due in (1, 2)}),
        (copy.tasks, copy_kernel, "copy_slots", _idle, {"copy, nothing due"}),
        (copy.tasks, gather, "gather_slots", _twice_the_first, {"gather, 2 slots of qwen3_next"}),
        (alloc.tasks, bitmap, "claim", _backwards, {"claim, R=3"}),
        (alloc.tasks, registers, "ownership", _forget, {"ownership, R=3"}),
        (track.tasks, tracking, "plan", _no_snapshot, {"plan, R=2 lazy", "plan, R=2 ping-pong"}),
        (decode.tasks, tracking, "plan", _no_snapshot, {"decode, R=2 lazy, all due"}),
        (decode.tasks, conv_delta, "conv_delta_step", _nudge, {"decode, R=2 none, nothing due"}),
    ],
)
def test_checks_find_a_wrong_operation(
    course: Any, module: Any, op: str, fault: Callable[..., Any], lost: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert findings(course, lost) == dict.fromkeys(lost, "")
    true = getattr(module, op)
    monkeypatch.setattr(module, op, lambda *given: fault(true, *given))
    faults = findings(course, lost)
    assert set(faults) == lost and all(faults.values()), faults


def test_a_failing_check_is_told_and_the_next_task_runs() -> None:
    good = Measured("a", "b", 1.0, "us")

    def raises(error: Exception | None = None) -> Any:
        raise error or RuntimeError("out of\nmemory")

    def tasks() -> Iterator[Task]:
        yield Task("bad", lambda: "broken", lambda: [good])
        yield Task("raises", raises, lambda: [good])
        yield Task("slow", lambda: "", lambda: raises(TooSlow()))
        yield Task("good", lambda: "", lambda: [good])
        raises()

    outcome, calls = BenchResult(), []
    carry_out(tasks(), outcome, lambda *at: calls.append(at))
    told = "raises RuntimeError: out of memory"
    assert outcome.wrong == ["bad: broken", f"raises: {told}", f"the task behind good: {told}"]
    assert outcome.too_slow == ["slow: the call waits for the device, or takes the host over 0.05 s to queue"]
    assert (outcome.entries, len(calls), outcome.complete) == ([good], 4, True)


class Slow(HostTimer):
    """A clock that raises TooSlow in measurement number `last`, after the call has run."""

    def __init__(self, last: int) -> None:
        self.left = last

    def alone(self, act: Callable[[], object], before: Callable[[], object] = nothing) -> Times:
        times = super().alone(act, before)
        self.left -= 1
        if self.left == 0:
            raise TooSlow
        return times


@on_cpu
@pytest.mark.parametrize("last", range(1, 7))
def test_a_case_that_is_too_slow_leaves_the_pool_to_the_next_one(last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever call is too slow, the slots of its case are free afterwards, and the next case runs as usual."""
    monkeypatch.setattr(alloc, "TOY_SIZES", (3, 4))
    monkeypatch.setattr(Setting, "clock", Slow(last))
    outcome = run(["alloc"], "reference", toy=True)
    assert outcome.wrong == [] and len(outcome.too_slow) == 1 and outcome.entries


# -- a device's clock ------------------------------------------------------------------------------


class Graph:
    """Stands in for a CUDA graph."""

    def replay(self) -> None:
        happened.append("replay")


@contextmanager
def capture(graph: Graph) -> Iterator[None]:
    """Stands in for torch.cuda.graph."""
    happened.append("capture")
    yield
    happened.append("captured")


happened: list[str] = []


@pytest.fixture
def device_clock(monkeypatch: pytest.MonkeyPatch) -> DeviceClock:
    """A clock of a false device: every run takes 20 microseconds on the device and 7 on the host."""
    happened.clear()

    class Timed(DeviceClock):
        def __init__(self) -> None:
            self._device = CPU

        def _run(self, act: Callable[[], object], before: Callable[[], object] = nothing, warm: bool = False) -> Times:
            before()
            happened.append("warm" if warm else "cold")
            act()
            return Times(20e-6, 7e-6)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: happened.append("wait"))
    return Timed()


class Events:
    """A false device that notes events, sleeps and reads in their order. A cycle of its clock takes a nanosecond."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, late: int) -> None:
        """Replaces torch's events and sleep.

        Args:
            late: number of runs whose sleep ends before the call is queued.
        """
        happened.clear()
        self.late, self.slept = late, 0.0
        seconds = count(0, 1e-4)

        class Event:
            def __init__(event, enable_timing: bool) -> None:
                assert enable_timing

            def record(event, stream: str) -> None:
                happened.append(f"event on {stream}")

            def query(event) -> bool:
                self.late -= 1
                return self.late >= 0

            def synchronize(event) -> None:
                happened.append("wait")

            def elapsed_time(event, end: object) -> float:
                return 2.5 if "act" in happened else 1.0  # milliseconds; a sleep of 10^6 cycles takes 1.0

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=100))
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep, raising=False)
        monkeypatch.setattr(clock, "FLUSH_BYTES", 16)
        monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
        self.watch = DeviceClock(CPU)
        monkeypatch.setattr(torch, "sum", lambda tensor, dim, out: happened.append(f"read {tensor.nbytes} bytes"))
        happened.clear()

    def sleep(self, cycles: int) -> None:
        self.slept = cycles / 1e9
        happened.append("sleep")

    def run(self, warm: bool = False) -> Times:
        return self.watch._run(lambda: happened.append("act"), lambda: happened.append("undo"), warm)


RUN = ["undo", "read 400 bytes", "sleep", "event on stream", "act", "event on stream", "wait"]


def test_a_run_reads_past_the_cache_and_sleeps_while_the_host_queues_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    events = Events(monkeypatch, late=0)
    device, host = events.run()
    assert device == 2.5e-3 and host == pytest.approx(1e-4) and happened == RUN
    assert events.slept == pytest.approx(clock.SLEEP)
    happened.clear()
    events.run(warm=True)
    assert happened == [*RUN[:2], "act", *RUN[2:]]


def test_a_run_whose_call_came_late_is_repeated_with_a_longer_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    events = Events(monkeypatch, late=2)
    assert events.run().device == 2.5e-3 and happened == RUN * 3
    assert 4 * clock.SLEEP <= events.slept < clock.LONGEST_SLEEP


def test_a_call_that_waits_for_the_device_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TooSlow, match=r"waits for the device, or takes the host over 0.05 s"):
        Events(monkeypatch, late=1000).run()


def test_a_call_alone_is_cold_and_what_undoes_it_is_not_timed(device_clock: DeviceClock) -> None:
    times = device_clock.alone(lambda: happened.append("act"), lambda: happened.append("undo"))
    assert times == (20e-6, 7e-6)
    assert happened == ["undo", "act", "wait"] + ["undo", "cold", "act"] * (WARM_UPS + RUNS)


def test_a_graph_holds_many_calls_and_gives_the_time_of_one(device_clock: DeviceClock) -> None:
    assert device_clock.in_graph(lambda: happened.append("act")) == pytest.approx(20e-6 / IN_GRAPH)
    captured = ["act", "warm", "act", "wait", "capture", *["act"] * IN_GRAPH, "captured"]
    assert happened == captured + ["warm", "replay"] * (WARM_UPS + RUNS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="times calls on a CUDA device")
def test_a_device_times_calls_alone_and_in_a_graph() -> None:
    device = torch.device("cuda")
    cell = torch.zeros(1, device=device)
    timer = DeviceClock(device)
    assert min(timer.alone(lambda: cell.add_(1))) > 0 and timer.in_graph(lambda: cell.add_(1)) > 0
    assert cell.item() >= WARM_UPS + RUNS + 1 + 2 * IN_GRAPH * (WARM_UPS + RUNS)  # a warm run makes the call twice


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="times launches on a CUDA device")
@pytest.mark.parametrize("name", ["alloc", "track"])
def test_small_benchmarks_run_on_a_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs toy sizes with the device's clock, which fails if a graph cannot capture a call."""
    device = torch.device("cuda")
    monkeypatch.setattr(Setting, "clock", DeviceClock(device))
    outcome = run([name], "cuda", "cuda", toy=True)
    measured = {entry.op for entry in outcome.entries}
    assert outcome.wrong == [] and (measured == OPS[name] or outcome.too_slow), "a busy host may be too slow"
