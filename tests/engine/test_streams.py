"""Devices and streams, on the fake devices of `tests/support/fake_cuda.py`."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import memstate as ms
from memstate import streams
from memstate.prefix.policies import Lru, LruPages
from memstate.streams import WorkStream
from tests.engine.calls import CALLS
from tests.support import inside, owners
from tests.support.fake_cuda import FakeCuda, Stream, Work, fake_cuda

LAYOUT = ms.StateLayout([ms.Plane("s", (4,), torch.float32)], layers=2)
KV = ms.StateLayout([ms.Plane("k", (4,), torch.int64)], layers=2)
PAGE, EVERY = 2, 4


@pytest.fixture
def poison() -> None:
    """Does nothing: poison reads the device, so that the host would wait."""


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with fake_cuda(monkeypatch) as fake:
        yield fake


def manager(device: str = "cuda:1", **settings: object) -> ms.StateManager:
    usual: dict[str, object] = {"slots": 12, "max_requests": 4, "tracking": ms.Redirect(EVERY)}
    return ms.StateManager(LAYOUT, device=device, backend="reference", **(usual | settings))  # type: ignore[arg-type]


def tiered(device: str = "cuda:1") -> ms.StateManager:
    """Returns a manager with a prefix cache, and host memory to which each state is saved as soon as it is cached."""
    kv = ms.Planes(KV, 24, ms.Backend("reference", device))
    tiers = ms.Tiers(model="toy", host_slots=8, host_pages=24, kv=kv, write="through")
    return manager(
        device, pages=ms.Pages(count=24, size=PAGE, per_row=8), prefix=ms.Prefix(Lru(), LruPages()), tiers=tiers
    )


def forward(mem: ms.StateManager, step: ms.Step) -> None:
    """Adds the tokens of the step to each state."""
    for state in mem.planes["s"]:
        state[step.write] = state[step.read] + step.tokens[:, None]


def serve(mem: ms.StateManager, tokens: Sequence[int], answer: int = 3) -> ms.Row:
    """Serves a request until its answer is complete, and returns its row."""
    (row,) = mem.admit([ms.Request(str(tokens), tokens=tokens, length=len(tokens) + answer)])
    while (length := mem.info(row).length) < len(tokens) + answer:
        step = mem.plan([row], min(mem.info(row).next_boundary, len(tokens) + answer) - length)
        forward(mem, step)
        mem.settle(step)
    return row


def end(mem: ms.StateManager, prompt: Sequence[int]) -> None:
    """Serves a request, and keeps only states of its prompt."""
    mem.end([serve(mem, prompt)], keep="cache", lengths=[len(prompt)], tokens=[[*prompt, 90, 91, 92]])


def devices(work: Sequence[Work]) -> set[int]:
    return {each.device for each in work}


# Devices


def test_every_launch_and_copy_is_on_the_device_of_the_states(cuda: FakeCuda) -> None:
    """Device 0 stays the current device, although the states are on device 1."""
    mem = manager(debug=True)
    ms.warm_up(mem)
    rows = mem.admit([ms.Request("a"), ms.Request("b")])
    for _ in range(2 * EVERY + 1):
        step = mem.plan(rows)
        forward(mem, step)
        mem.settle(step)
    ids = mem.pool.claim(2)
    mem.pool.copy(ids[:1], ids[1:])
    mem.pool.release(ids)
    slots = mem.device.read_slots(rows)
    assert not slots.ready
    assert len(set(slots.wait().tolist())) == 2 and slots.ready
    kept = mem.publish(rows)
    mem.end(rows)
    mem.drop(kept)
    mem.device.check()
    mem.device.sleep()
    mem.device.wake()
    mem.device.scrub_null()
    mem.audit().raise_if_leaking()
    mem.recover(keep=False)
    assert {work.what for work in cuda.work} >= {"plan", "ownership", "run_data", "claim", "resolve", "copy_slots"}
    assert devices(cuda.work) == {1}
    assert {event.device for event in inside.commands(mem).ring._sent if event} == {torch.device("cuda:1")}
    assert set(cuda.pinned_on) == {1}
    assert cuda.current == 0


def test_the_tiers_stay_on_the_device_of_the_states(cuda: FakeCuda) -> None:
    """States and KV are saved, evicted from the cache and loaded again; each reader waits for the load."""
    mem = tiered()
    prompt = list(range(2 * EVERY))
    end(mem, prompt)
    mem.submit()
    for _ in range(2):
        mem.poll()
        cuda.synchronize(1)
    mem.prefix.clear()  # type: ignore[union-attr]
    end(mem, [*prompt, 1, 2])
    assert mem.stats().tiers.states_in == 1
    assert {"pack_slots", "unpack_slots"} <= {work.what for work in cuda.work}
    assert devices(cuda.work) == {1}
    assert set(cuda.pinned_on) == {1}
    loaded = cuda.given("unpack_slots")[-1]
    reader = next(work for work in cuda.work[cuda.work.index(loaded) :] if work.what == "plan")
    assert loaded.stream is not reader.stream and reader.behind(loaded)
    mem.close()


def test_cuda_without_an_index_is_the_device_that_is_current_at_construction(cuda: FakeCuda) -> None:
    with torch.cuda.device(1):
        mem = manager("cuda")
    assert mem.backend.device == mem.planes.device == torch.device("cuda:1")
    mem.plan(mem.admit([ms.Request("a")]))
    assert devices(cuda.work) == {1}


def test_an_op_runs_on_the_device_of_its_tensors(cuda: FakeCuda) -> None:
    ops = ms.Backend("reference", "cuda:0")
    for device in (1, 0):
        plane = torch.zeros((1, 3, 2), device=f"cuda:{device}")
        ids, out = torch.zeros(1, dtype=torch.int32, device=plane.device), torch.zeros((1, 1, 2), device=plane.device)
        ops.gather_slots(plane, ids, out)
        ops.gather_slots(plane=plane, slots=ids, out=out)
    assert [work.device for work in cuda.given("gather_slots")] == [1, 1, 0, 0]


# Streams

ANYWHERE = ("match", "inspect", "info", "device.scrub_null", "prefix.clear")
on_its_stream = pytest.mark.parametrize("name", [name for name in CALLS if name not in ANYWHERE])


def open_step(mem: ms.StateManager) -> tuple[ms.Rows, ms.Step, Sequence[ms.Snapshot | None]]:
    """Caches a prompt; returns two rows, an open step of them whose forward was launched, and their snapshots."""
    prompt = list(range(EVERY))
    end(mem, prompt)
    rows = mem.admit([ms.Request("a", length=12), ms.Request("b", length=12)])
    for tokens in (EVERY, 1):
        step = mem.plan(rows, tokens)
        forward(mem, step)
        mem.settle(step)
    kept = mem.publish(rows)
    step = mem.plan(rows)
    forward(mem, step)
    return rows, step, kept


def figures(mem: ms.StateManager) -> object:
    """Returns the counts and tables of the host."""
    file, table = inside.registers(mem), owners.table(mem)
    host = (file.held, file.labels, file.tracked, table.confirmed, mem._parts.log.times(table), table.used)
    return mem.stats(), [array.tolist() for array in host], len(inside.commands(mem).queue), mem._parts.stepping.open


@pytest.mark.sample(12)
@on_its_stream
def test_a_call_on_another_stream_is_refused_and_changes_nothing(cuda: FakeCuda, name: str) -> None:
    mem = tiered()
    given = open_step(mem)
    other, before, work = cuda.new_stream(1), figures(mem), list(cuda.work)
    with torch.cuda.stream(other), pytest.raises(ms.InvalidArgument, match=r"call use_stream\(") as refused:
        CALLS[name](mem, *given)
    assert repr(other) in str(refused.value) and repr(cuda.current_stream(1)) in str(refused.value)
    assert (figures(mem), cuda.work) == (before, work)


@pytest.mark.sample(12)
@on_its_stream
def test_a_call_inside_a_capture_is_refused_and_changes_nothing(cuda: FakeCuda, name: str) -> None:
    """Device 1 captures a graph. The current device is device 0, which captures nothing."""
    mem = tiered()
    given = open_step(mem)
    before, work = figures(mem), list(cuda.work)
    refused = pytest.raises(ms.InvalidArgument, match="captures a CUDA graph")
    with cuda.capture(cuda.current_stream(1)), torch.cuda.device(0), refused:
        CALLS[name](mem, *given)
    assert (figures(mem), cuda.work) == (before, work)
    if name not in ("device.wake", "close"):
        mem.prefix.evict_states(0)  # type: ignore[union-attr]
        with cuda.capture(cuda.new_stream(0)):  # a capture on another device
            mem.submit()


def test_what_a_forward_calls_can_be_captured_and_comes_on_any_stream(cuda: FakeCuda) -> None:
    mem = tiered()
    rows, step, _ = open_step(mem)
    ops, out = ms.Backend("reference", "cuda:1"), torch.empty((2, 2, 4), device="cuda:1")
    with cuda.capture(side := cuda.new_stream(1)):
        forward(mem, step)
        mem.planes.gather("s", step.read, out)
        mem.planes.scatter("s", step.write, out)
        mem.planes.copy(step.write, step.read)
        mem.planes.zero(step.snapshot)
        mem.planes.scrub_null()
        mem.device.scrub_null()
        ops.gather_slots(mem.planes["s"], step.read, out)
        assert mem.info(rows[0]).length and mem.info(rows[0]).confirmed and mem.stats() and mem.free_slots
    assert cuda.work[-1].stream is side


def test_the_first_call_decides_the_stream_behind_the_construction(cuda: FakeCuda) -> None:
    mem = manager()
    built = cuda.work[-1]
    with torch.cuda.stream(loop := cuda.new_stream(1)):
        rows = mem.admit([ms.Request("a")])
        mem.plan(rows)
    assert {work.stream for work in cuda.work[cuda.work.index(built) + 1 :]} == {loop}
    assert cuda.given("ownership")[0].behind(built)
    with pytest.raises(ms.InvalidArgument, match="use_stream"):
        mem.submit()


def test_a_new_stream_comes_behind_the_old_one(cuda: FakeCuda) -> None:
    mem = manager()
    rows = mem.admit([ms.Request("a"), ms.Request("b")])
    step = mem.plan(rows)
    forward(mem, step)
    last, new = cuda.work[-1], cuda.new_stream(1)
    mem.device.use_stream(new)  # type: ignore[arg-type]
    with pytest.raises(ms.InvalidArgument, match="use_stream"):
        mem.settle(step)  # use_stream does not make the stream current
    with torch.cuda.stream(new):
        mem.settle(step)
        mem.plan(rows[:1])
    after = cuda.work[cuda.work.index(last) + 1 :]
    assert {work.stream for work in after} == {new} and all(work.behind(last) for work in after)
    mem.device.use_stream(cuda.current_stream(1))  # type: ignore[arg-type]
    mem.submit()


def test_a_stream_that_cannot_be_is_refused(cuda: FakeCuda) -> None:
    mem = manager()
    mem.submit()
    for wrong in (None, 0, cuda.new_stream(0)):
        with pytest.raises(ms.InvalidArgument, match=r"expected a torch.cuda.Stream of cuda:1"):
            mem.device.use_stream(wrong)  # type: ignore[arg-type]
    with pytest.raises(ms.InvalidArgument, match="on the CPU, which has no streams"):
        manager("cpu").device.use_stream(cuda.new_stream(1))  # type: ignore[arg-type]
    with cuda.capture(cuda.new_stream(1)), pytest.raises(ms.InvalidArgument, match="captures a CUDA graph"):
        mem.device.use_stream(cuda.new_stream(1))  # type: ignore[arg-type]
    mem.submit()


def test_a_cpu_has_no_streams_to_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*args: object) -> None:
        raise AssertionError("torch.cuda was asked")

    for name in ("current_stream", "current_device", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, asked)
    mem = manager("cpu")
    step = mem.plan(mem.admit([ms.Request("a")]))
    mem.settle(step)
    mem.pool.release(mem.pool.claim(1))
    assert repr(WorkStream(torch.device("cpu"))) == "WorkStream(None)"


def test_a_stream_whose_handle_is_known_is_not_asked_for_again(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch gives stream handles, a step asks for the handle alone, and still refuses another stream."""
    asked: list[torch.device] = []

    def ask(device: torch.device) -> Any:
        asked.append(device)
        return cuda.current_stream(device)

    monkeypatch.setattr(streams, "_STREAMS", {})
    monkeypatch.setattr(torch.cuda, "current_stream", ask)
    handle_of = "_cuda_getCurrentRawStream"
    monkeypatch.setattr(torch._C, handle_of, lambda index: id(cuda.current_stream(index)), raising=False)
    mem = manager()
    rows = mem.admit([ms.Request("a")])
    mem.settle(mem.plan(rows))
    assert asked == [torch.device("cuda:1")]
    with torch.cuda.stream(cuda.new_stream(1)), pytest.raises(ms.InvalidArgument, match=r"call use_stream\("):
        mem.plan(rows)
    mem.settle(mem.plan(rows))
    assert len(asked) == 2  # each of the two streams was asked for once


@pytest.mark.parametrize("beside", [False, True], ids=["one stream", "forward beside"])
@pytest.mark.parametrize("tracking", [ms.Redirect(EVERY), ms.LazyPingPong(EVERY)], ids=repr)
def test_an_id_reaches_the_host_after_every_earlier_forward(
    cuda: FakeCuda, tracking: ms.Tracking, beside: bool
) -> None:
    """Once the host knows an id, a network card may write to its slot, so no earlier forward may still be running."""
    mem, main = manager(tracking=tracking), cuda.current_stream(1)
    side = cuda.new_stream(1) if beside else main
    rows = mem.admit([ms.Request("a"), ms.Request("b")])
    forwards: list[Work] = []
    for t in range(2 * EVERY + 1):
        step = mem.plan(rows)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            forwards.append(cuda.launch("forward"))
        main.wait_stream(side)
        mem.submit(step)
        mem.settle(step)
        if t % EVERY == EVERY - 1:
            (new,) = mem.admit([ms.Request(t)])  # the new row may get slots that other rows had
            slots = mem.device.read_slots([new, rows[0]])
            assert not any(cuda.host.get(work.stream, 0) >= work.number for work in forwards[-1:])
            assert len(slots.wait()) == 2
            copied = cuda.given("copy_")[-1]
            assert all(cuda.host[work.stream] >= work.number for work in (*forwards, copied))
            assert all(copied.behind(work) for work in forwards)
            mem.end([new])


@pytest.mark.parametrize("waits", [True, False], ids=["by events", "without the second wait"])
def test_a_forward_beside_keeps_its_records_by_events(cuda: FakeCuda, waits: bool) -> None:
    """In the loop of the guide, plan and forward wait for each other, so no record is overwritten while it is read."""
    mem, main, side = manager(), cuda.current_stream(1), cuda.new_stream(1)
    rows = mem.admit([ms.Request("a")])
    forwards: list[Work] = []
    for _ in range(6):
        planned = mem.plan(rows)
        side.wait_event(recorded(main))
        with torch.cuda.stream(side):
            forwards.append(cuda.launch("forward"))
        assert forwards[-1].behind(cuda.given("plan")[-1])
        if waits:
            main.wait_event(recorded(side))
        mem.settle(planned)
    later = zip(cuda.given("plan")[1:], forwards, strict=False)
    assert {plan.behind(work) for plan, work in later} == {waits}


def test_what_sleep_keeps_is_what_the_last_forward_wrote(cuda: FakeCuda) -> None:
    """Sleep also waits for a forward on another stream, even if no event was recorded behind it."""
    mem, side = manager(), cuda.new_stream(1)
    mem.plan(mem.admit([ms.Request("a")]))
    with torch.cuda.stream(side):
        last = cuda.launch("forward")
    mem.device.sleep()
    assert cuda.given("to") and cuda.given("to")[-1].behind(last)
    mem.device.wake()


def recorded(stream: Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)  # type: ignore[arg-type]
    return event
