"""One upload and one graph for each step: a recorded sequence of launches serves every step of its batch size.

`Graph` records the launches of one step with their arguments, and repeats them. So whatever changes from step to
step must come through the packet or the columns on the device.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import OPS, Backend
from tests.proof.stateful.script import ALL, Play, script
from tests.support import inside
from tests.support.build import on
from tests.support.scan import scan

PLANES = (ms.Plane("ssm", (2, 4), torch.float32), ms.Plane("ring", (4,), torch.float32, rewritten_each_step=False))
TAIL = ms.Plane("tail", (3,), torch.int16, fill=7)
LAYOUT = ms.StateLayout(PLANES, layers=2, rows=ms.StateLayout((TAIL,), layers=2))
STRATEGIES = [ms.NoTracking(4), ms.PingPong(4), ms.LazyPingPong(4), ms.Redirect(4)]


def forward(mem: ms.StateManager, step: Any) -> None:
    """Computes each state from the one before; the plane `ring` is written only in part, in place."""
    read, write, snapshot = (column.long() for column in (step.read, step.write, step.snapshot))
    plane = mem.planes["ssm"]
    new = (plane[:, read] * 1.5 + read[None, :, None, None].sign()) % 7
    plane[:, write] = new
    plane[:, snapshot] = new
    plane[:, 0] = 0


class Graph:
    """The launches of one step, recorded in the first replay and repeated in later ones."""

    def __init__(self, mem: ms.StateManager, batch: int) -> None:
        self.mem, self.batch = mem, batch
        self.calls: list[Callable[[], object]] = []

    def replay(self) -> Any:
        """Launches a step, and returns its vectors."""
        if not self.calls:
            self._record()
        else:
            for call in self.calls:
                call()
        return self.vectors

    def _record(self) -> None:
        backend = self.mem.backend
        uncounted = Backend(backend.name, backend.device)
        counted = {name: getattr(backend, name) for name in OPS}

        def recording(name: str) -> Callable[..., Any]:
            raw = getattr(uncounted, name)

            def launch(*args: Any, **settings: Any) -> None:
                self.calls.append(lambda: raw(*args, **settings))
                counted[name](*args, **settings)

            return launch

        for name in OPS:
            setattr(backend, name, recording(name))
        try:
            self.vectors = type(self.mem).launch(self.mem, self.batch)
        finally:
            for name, call in counted.items():
                setattr(backend, name, call)


BARE = {"pages": 0, "page_size": 1, "pages_per_row": 0, "parts": ("fold", "ring")}  # the engine keeps the KV


@script(strategy=ALL, overlap=(False, True), tails=True, slots=14, rows=5, case=BARE)
def test_a_graph_of_one_step_serves_all_steps(play: Play) -> None:
    """Requests start, end and resume in between, and their places in the batch change."""
    rng, graphs, rows, kept = random.Random(7), dict[int, Graph](), list[Any](), list[Any]()
    counts = play.mem.backend.counts

    def launch(batch: int) -> Any:
        replayed = batch in graphs
        vectors = graphs.setdefault(batch, Graph(play.mem, batch)).replay()
        counts.launches.update({"plan": 1, "ownership": 1, "run_data": 1, "run_rows": 1} if replayed else {})
        return vectors

    play.mem.launch = launch  # type: ignore[method-assign]
    for _ in range(20):
        if len(rows) < 4:
            rows += play.admit(None, resume=kept[-1] if kept and rng.random() < 0.5 else None)
        elif rng.random() < 0.5:
            kept += play.end(rows.pop(rng.randrange(4)), how="publish")
        if len(kept) > 2:
            play.drop(kept.pop(0))
        size = rng.choice((3, 5))
        play.step(rng.sample([*rows, *[None] * 5][:size], size), replays=True)
    assert len(graphs) == 2


@pytest.mark.parametrize("tracking", STRATEGIES, ids=repr)
def test_a_step_takes_at_most_one_upload_and_the_graph(backend: Backend, tracking: ms.Tracking) -> None:
    layout = ms.StateLayout(PLANES[:1], layers=2)
    mem = on(backend, layout, slots=20, max_requests=4, tracking=tracking)
    counts = mem.backend.counts
    graph = Graph(mem, 3)
    rows = mem.admit([ms.Request(i) for i in range(3)])
    mem.settle(mem.plan(rows, replay=graph.replay))
    uploads = []
    for t in range(12):
        if t == 5:  # claims, moves, releases, zeros and cells, all in the same upload
            mem.end(rows[:1], keep="handle")
            rows = rows[1:] + mem.admit([ms.Request("new")])
        counts.reset()
        mem.settle(mem.plan(rows, replay=graph.replay))
        assert (counts.total_launches, counts.syncs) == (0, 0)
        uploads.append(counts.uploads)
    assert max(uploads) == uploads[5] == 1 and uploads[1] == 0
    scan(mem)


Pair = tuple[ms.StateManager, ms.Rows]


@pytest.fixture
def pair(backend: Backend) -> Pair:
    """A manager and its two rows."""
    mem = on(backend, LAYOUT, slots=8, max_requests=3)
    return mem, mem.admit([ms.Request("a"), ms.Request("b")])


def test_vectors_lie_at_one_address_and_a_caller_cannot_change_those_of_the_host(pair: Pair) -> None:
    mem, rows = pair[0], list(pair[1])
    steps = [mem.plan(rows)]
    rows.reverse()
    steps.append(mem.plan(rows))
    assert steps[0].write.data_ptr() == steps[1].write.data_ptr() and steps[1].numbers.tolist() == [2, 1]
    for column in (steps[1].numbers, steps[1].tokens_of):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 2
    mem.submit(steps[1])
    mem.settle(steps[0])


def test_launch_is_refused_where_it_would_run_a_step_again(pair: Pair) -> None:
    mem, rows = pair
    for batch in (-1, 99, "2", 1.5):
        with pytest.raises(ms.InvalidArgument):
            mem.launch(batch)  # type: ignore[arg-type]
    with pytest.raises(ms.InvalidArgument, match="outside of a graph capture"):
        mem.launch(2)
    with pytest.raises(ms.InvalidArgument, match="expected a function"):
        mem.plan(rows, replay=3)  # type: ignore[arg-type]
    mem.device.sleep()
    with pytest.raises(ms.Asleep):
        mem.launch(2)
    mem.device.wake()
    step = mem.plan(rows, replay=lambda: mem.launch(2))
    with pytest.raises(ms.InvalidArgument, match="its forward was launched"):
        mem.cancel(step)
    mem.settle(step)
    assert mem.info(rows[0]).length == 1
    scan(mem)


def fails() -> None:
    raise RuntimeError("CUDA error")


@pytest.mark.parametrize(
    ("replay", "said"),
    [
        (lambda mem: fails(), "CUDA error"), (lambda mem: mem.launch(3), "replay of a step with batch=2"),
        (lambda mem: None, r"did not launch it: .* launch\(2\)"),  # like a graph of the forward alone
    ],
)  # fmt: skip
def test_an_error_in_the_replay_breaks_the_manager_until_it_recovers(pair: Pair, replay: Any, said: str) -> None:
    mem, rows = pair
    with pytest.raises((RuntimeError, ms.InvalidArgument), match=said):
        mem.plan(rows, replay=lambda: replay(mem))
    with pytest.raises(ms.Broken, match="plan"):
        mem.plan(rows)
    mem.recover()
    with pytest.raises(ms.InvalidArgument, match="outside of a graph capture"):
        mem.launch(2)
    rows = mem.admit([ms.Request("c")])
    mem.settle(mem.plan(rows, replay=lambda: mem.launch(1)))
    scan(mem)


@pytest.mark.sample(interpreter=1)
def test_the_graph_of_another_batch_changes_no_state(pair: Pair) -> None:
    """A batch of three replays a graph of two entries, or nothing: no state changes, and an audit finds the mistake."""
    mem, rows = pair
    small = Graph(mem, 2)
    mem.settle(mem.plan(rows, replay=small.replay))
    mem.settle(mem.plan([*rows, None], replay=lambda: mem.launch(3)))
    cells, states = inside.registers(mem).cells.clone(), mem.planes["ssm"].clone()
    for replay in (lambda: forward(mem, small.replay()), lambda: None):
        mem.settle(mem.plan([*rows, None], replay=replay))
        assert torch.equal(cells, inside.registers(mem).cells)
        assert torch.equal(states.view(torch.int32), mem.planes["ssm"].view(torch.int32))
        assert mem.audit().miscounts


@pytest.mark.parametrize("call", ["launch", "length", "admit", "poll", "plan", "recover", "close"])
def test_calls_in_a_replay_are_refused_by_name(pair: Pair, call: str) -> None:
    mem, rows = pair
    calls = {
        "launch": lambda: mem.launch(2), "length": lambda: mem.info(rows[0]).length, "poll": mem.poll,
        "admit": lambda: mem.admit([ms.Request("c")]), "plan": lambda: mem.plan(rows), "recover": mem.recover,
        "close": mem.close,
    }  # fmt: skip

    def replay() -> None:
        mem.device.scrub_null()
        mem.launch(2)
        with pytest.raises(
            ms.InvalidArgument, match=r"twice in the replay|inside the replay of a plan|inside plan\(\), which still"
        ):
            calls[call]()

    mem.settle(mem.plan(rows, replay=replay))
    assert mem.info(rows[0]).length == 1
    scan(mem)


def test_a_step_with_drafts_is_replayed(backend: Backend) -> None:
    mem = on(backend, LAYOUT, slots=8, max_requests=2, overlap=False, forward=ms.Forward(tail=3))
    (row,) = mem.admit([ms.Request("a")])
    mem.accept(mem.plan([row], 3, drafts=3, replay=lambda: mem.launch(1)), [2])
    step = mem.plan([row], 3, drafts=2, replay=lambda: mem.launch(1))
    assert (step.cursor.pending.tolist(), step.cursor.store.tolist(), step.lengths.tolist()) == ([2], [2], [2])
    mem.accept(step, [1])
    assert (mem.info(row).length, mem.info(row).pending) == (3, 1)
    scan(mem)
