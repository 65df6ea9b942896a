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
from tests.support import inside
from tests.support.build import on
from tests.support.scan import scan

PLANES = (ms.Plane("ssm", (2, 4), torch.float32), ms.Plane("ring", (4,), torch.float32, rewritten_each_step=False))
TAIL = ms.Plane("tail", (3,), torch.int16, fill=7)
LAYOUT = ms.StateLayout(PLANES, layers=2, rows=ms.StateLayout((TAIL,), layers=2))
STRATEGIES = [ms.NoTracking(4), ms.PingPong(4), ms.LazyPingPong(4), ms.Redirect(4)]


class Graph:
    """The launches of one step, recorded in the first replay and repeated in later ones."""

    def __init__(self, mem: ms.StateManager, batch: int) -> None:
        self.mem, self.batch, self.forwards = mem, batch, 0
        self.calls: list[Callable[[], object]] = []

    def replay(self) -> None:
        if not self.calls:
            self._record()
            return
        for call in self.calls:
            call()

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
            vectors = self.mem.launch(self.batch)
        finally:
            for name, call in counted.items():
                setattr(backend, name, call)
        self.calls.append(lambda: self.forward(vectors))
        self.forward(vectors)

    def forward(self, step: Any) -> None:
        forward(self.mem, step)
        self.forwards += 1


def forward(mem: ms.StateManager, step: Any) -> None:
    """Computes each state from the one before; the plane `ring` is written only in part, in place."""
    read, write, snapshot = (column.long() for column in (step.read, step.write, step.snapshot))
    plane = mem.planes["ssm"]
    new = (plane[:, read] * 1.5 + read[None, :, None, None].sign()) % 7
    plane[:, write] = new
    plane[:, snapshot] = new
    plane[:, 0] = 0
    for state in mem.planes["ring"]:
        state[write, step.tokens.long() % 4] += 1
        state[0] = 0
    for tail in mem.planes.rows["tail"]:
        tail[step.rows.long()] += 1
        tail[0] = TAIL.fill


class Twins:
    """A manager whose steps are replayed, and one whose steps are launched one by one, under the same calls."""

    def __init__(self, backend: Backend, tracking: ms.Tracking, overlap: bool, seed: int) -> None:
        settings: dict[str, Any] = {"slots": 14, "max_requests": 5, "tracking": tracking, "overlap": overlap}
        self.pair = [on(backend, LAYOUT, **settings) for _ in range(2)]
        for mem in self.pair:
            mem.planes.rows["tail"].fill_(-1)
        self.graphs: dict[int, Graph] = {}
        self.rng, self.rows, self.flying = random.Random(seed), [[], []], [[], []]  # type: ignore[var-annotated]
        self.kept: list[list[ms.Snapshot]] = [[], []]
        self.overlap = overlap

    def both(self, call: Callable[[int, ms.StateManager], Any]) -> None:
        for which, mem in enumerate(self.pair):
            call(which, mem)

    def turn(self, name: int) -> None:
        """Starts, ends or resumes a request, the same one in both managers."""
        pick, at = self.rng.random(), self.rng.randrange(5)
        resume = self.rng.random() < 0.5

        def change(which: int, mem: ms.StateManager) -> None:
            rows, kept = self.rows[which], self.kept[which]
            if len(rows) < 4:
                given = kept[-1] if kept and resume and mem.free_slots > 6 else None
                if mem.free_slots > 6:
                    rows.extend(mem.admit([ms.Request(name, resume=given)]))
            elif pick < 0.5:
                kept += [snap for snap in mem.publish(rows[at % 4 : at % 4 + 1]) if snap]
                mem.end([rows.pop(at % 4)])
            if len(kept) > 2:
                mem.drop([kept.pop(0)])

        self.both(change)

    def step(self) -> None:
        size = self.rng.choice((3, 5))
        order = self.rng.sample(range(size), size)
        steps = []
        for which, mem in enumerate(self.pair):
            rows = [self.rows[which][i] if i < len(self.rows[which]) else None for i in order]
            if which:
                steps.append(mem.plan(rows))
                forward(mem, steps[-1])
                mem.submit(steps[-1])
            else:
                graph = self.graphs.setdefault(size, Graph(mem, size))
                steps.append(mem.plan(rows, replay=graph.replay))
            self.flying[which].append(steps[-1])
            if len(self.flying[which]) > self.overlap:
                mem.settle(self.flying[which].pop(0))
        replayed, eager = steps
        assert all(torch.equal(a, b) for a, b in zip(replayed.record, eager.record, strict=True))

    def check(self) -> None:
        one, other = self.pair
        assert torch.equal(inside.registers(one).cells, inside.registers(other).cells)
        assert torch.equal(one.pool.allocator.bitmap, other.pool.allocator.bitmap)
        memory = [(*mem.planes.plane_map.blocks, *mem.planes.rows.plane_map.blocks) for mem in self.pair]
        for a, b in zip(*memory, strict=True):
            assert torch.equal(a, b)
        assert one.stats().copied_bytes == other.stats().copied_bytes
        assert one.free_slots == other.free_slots


@pytest.mark.sample
@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
@pytest.mark.parametrize("tracking", STRATEGIES, ids=repr)
def test_a_graph_of_one_step_serves_all_steps(backend: Backend, tracking: ms.Tracking, overlap: bool) -> None:
    twins = Twins(backend, tracking, overlap, seed=7)
    for t in range(60 if backend.name == "reference" else 9):
        twins.turn(t)
        twins.step()
        twins.check()
    assert sum(graph.forwards for graph in twins.graphs.values()) > 8
    for mem in twins.pair:
        scan(mem)
        mem.audit().raise_if_leaking()
        mem.device.check()


@pytest.mark.parametrize("tracking", STRATEGIES, ids=repr)
def test_a_step_takes_at_most_one_upload_and_the_graph(backend: Backend, tracking: ms.Tracking) -> None:
    layout = ms.StateLayout(PLANES[:1], layers=2)
    mem = on(backend, layout, slots=20, max_requests=4, tracking=tracking)
    counts = mem.backend.counts
    graph = Graph(mem, 3)
    graph.forward = lambda step: None  # type: ignore[method-assign]
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
    for replay in (small.replay, lambda: None):
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
