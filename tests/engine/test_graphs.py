"""Whole steps captured as CUDA graphs, one a batch size: the bits of eager steps, whatever slots the steps name.

Ownership, plan and forward are in the graph. A twin manager takes the same calls and runs everything eagerly.
"""

import random
from collections import deque
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import StepRecord
from tests.support.decode_case import same_bits
from tests.support.poison import fresh_memory

CUDA = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="CUDA graphs need a CUDA device")]

BATCHES = (1, 2, 3, 64, 256)
STEPS = 100
WIDTH = 2  # most tokens of an entry in one step
LAYERS, HEADS, DIM, STATE, TAPS = 2, 2, 32, 16, 4
LAYOUT = ms.StateLayout(
    planes=(
        ms.Plane("conv", (TAPS - 1, HEADS * DIM), torch.bfloat16),
        ms.Plane("delta", (HEADS, STATE, DIM), torch.float32),
        ms.Plane("ssm", (HEADS, DIM, STATE), torch.float32),
    ),
    layers=LAYERS,
)
TRACKING = [ms.LazyPingPong(4), ms.Redirect(4)]


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Of fresh memory alone: which bytes a step changes is compared, and slots that a graph frees would be filled late.

    They are noticed when the other manager sends a packet.
    """
    with fresh_memory():
        yield


@pytest.fixture
def backend() -> Backend:
    """The compiled kernels alone: nothing else can be captured."""
    return Backend("cuda", torch.device("cuda"))


class Inputs:
    """What a forward reads besides states, at fixed addresses: `batch token ...` each, and weights."""

    def __init__(self, batch: int, device: torch.device, generator: torch.Generator) -> None:
        self._generator = generator
        shapes = {
            "x": (HEADS * DIM,), "q": (1, STATE), "k": (1, STATE), "v": (HEADS, DIM), "decay": (HEADS,),
            "beta": (HEADS,), "u": (HEADS, DIM), "dt": (HEADS,), "b": (1, STATE), "c": (1, STATE),
        }  # fmt: skip
        wide = ("decay", "beta", "dt")
        self.named = {
            name: torch.zeros(
                batch, WIDTH, *shape, dtype=torch.float32 if name in wide else torch.bfloat16, device=device
            )
            for name, shape in shapes.items()
        }
        self.weight = torch.randn(HEADS * DIM, TAPS, generator=generator).to(device, torch.bfloat16)
        self.a = -torch.rand(HEADS, generator=generator).to(device)

    def draw(self) -> None:
        """New values in place. Keys have a norm below 1, decays are negative and gates in 0..1: states stay bounded."""
        for name, tensor in self.named.items():
            values = torch.rand(tensor.shape, generator=self._generator)
            values = values - 0.5 if name in ("x", "v", "u", "c", "q") else -values if name == "decay" else values
            tensor.copy_(values * STATE**-0.5 if name in ("k", "q") else values)


class Forward:
    """Three kinds of recurrent layer on the planes of one manager, eager or as graphs."""

    def __init__(self, mem: ms.StateManager, backend: Backend, inputs: Inputs) -> None:
        self.mem, self.backend, self.inputs = mem, backend, inputs
        named = inputs.named
        self.out = {name: torch.stack([named[name]] * LAYERS).fill_(torch.nan) for name in ("x", "v", "u")}
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def eager(self, step: ms.Step | StepRecord) -> None:
        """Allocates nothing, so that a graph owns no memory."""
        batch = step.rows.numel()
        i = {name: tensor[:batch] for name, tensor in self.inputs.named.items()}
        where = {"read": step.read, "write": step.write, "snapshot": step.snapshot, "tokens": step.tokens}
        for layer in range(LAYERS):
            conv, delta, ssm = (self.mem.planes[name][layer] for name in ("conv", "delta", "ssm"))
            out = {name: tensor[layer, :batch] for name, tensor in self.out.items()}
            self.backend.conv_step(i["x"], self.inputs.weight, None, conv, **where, out=out["x"])
            self.backend.gated_delta_step(i["q"], i["k"], i["v"], i["decay"], i["beta"], delta, **where, out=out["v"])
            self.backend.selective_step(
                i["u"], i["dt"], self.inputs.a, i["b"], i["c"], ssm, **where, softplus=True, out=out["u"]
            )

    def plan(self, rows: Sequence[ms.Row | None], tokens: int | Sequence[int] = 1) -> ms.Step:
        """A step with everything in the graph of its batch size, which is captured before its first replay."""
        batch = len(rows)
        if batch not in self.graphs:
            self.graphs[batch] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graphs[batch]):  # refuses whatever waits for the device, and runs nothing
                self.eager(self.mem.launch(batch))
        return self.mem.plan(rows, tokens, replay=self.graphs[batch].replay)


def build(tracking: ms.Tracking, batch: int, backend: Backend, inputs: Inputs) -> Forward:
    """A manager in rubbish, warmed up, and its forward."""
    mem = ms.StateManager(
        LAYOUT, slots=4 * batch + 8, max_requests=batch + 1, max_batch=batch, tracking=tracking,
        backend=backend.name, device=backend.device,
    )  # fmt: skip
    for block in mem.planes.plane_map.blocks:
        block[:, 1:].fill_(0xFF)
    ms.warm_up(mem)
    forward = Forward(mem, backend, inputs)
    step, side = mem.plan([None]), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles the forward, for every batch size at once
        forward.eager(step)
    torch.cuda.current_stream().wait_stream(side)
    mem.settle(step)
    return forward


class Twins:
    """A manager whose forwards are replayed, and one whose forwards are eager, under the same calls."""

    def __init__(self, tracking: ms.Tracking, batch: int, backend: Backend, generator: torch.Generator) -> None:
        self.inputs = Inputs(batch, backend.device, generator)
        self.replayed, self.eager = (build(tracking, batch, backend, self.inputs) for _ in range(2))
        self.batch = batch
        self.random = random.Random(int(torch.randint(2**31, (), generator=generator)))
        self.rows = [list(mem.admit([ms.Request(i) for i in range(batch)])) for mem in self.managers]
        for mem in self.managers:
            mem.submit()  # or the first step would fill slots with zeros, those of rows that are not in it as well
        self.flying: list[deque[ms.Step]] = [deque(), deque()]

    @property
    def managers(self) -> tuple[ms.StateManager, ms.StateManager]:
        return self.replayed.mem, self.eager.mem

    def turn_over(self, name: int) -> None:
        """Admits a request in the place of another, which ends while its step flies: slots change hands."""
        i = self.random.randrange(self.batch)
        for mem, rows in zip(self.managers, self.rows, strict=True):
            ended, (rows[i],) = rows[i], mem.admit([ms.Request(("new", name))])
            mem.submit()  # or the slot that is released would be the one that is claimed
            mem.end([ended])

    def plan(self, padding: bool) -> list[ms.Step]:
        """A step of the same batch for both, in a new order and with gaps; or of padding alone."""
        order = self.random.sample(range(self.batch), self.batch)
        chosen = [None if padding or self.random.random() < 0.2 else i for i in order]
        most = [self.random.randint(1, WIDTH) for _ in chosen]
        steps = []
        for mem, rows, flying in zip(self.managers, self.rows, self.flying, strict=True):
            batch = [None if i is None else rows[i] for i in chosen]
            room = [mem.info(row).next_boundary - mem.info(row).length if row else 0 for row in batch]
            tokens = [min(pair) for pair in zip(room, most, strict=True)]
            if mem is self.replayed.mem:
                steps.append(self.replayed.plan(batch, tokens))
            else:
                steps.append(mem.plan(batch, tokens))
                self.eager.eager(steps[-1])
            flying.append(steps[-1])
        return steps

    def settle(self) -> None:
        for mem, flying in zip(self.managers, self.flying, strict=True):
            if len(flying) > 1:
                mem.settle(flying.popleft())

    def same(self) -> bool:
        """Whether outputs and all bytes of all slots are the same."""
        blocks = zip(*(mem.planes.plane_map.blocks for mem in self.managers), strict=True)
        outs = zip(self.replayed.out.values(), self.eager.out.values(), strict=True)
        return all(same_bits(a, b) for a, b in (*blocks, *outs))


def check_changed_only(before: list[Tensor], mem: ms.StateManager, step: ms.Step) -> None:
    """No byte differs outside the slots that the step writes; what it writes is no rubbish."""
    written = torch.cat([step.write, step.snapshot]).unique().long()
    written = written[written > 0]
    for was, now in zip(before, mem.planes.plane_map.blocks, strict=True):
        now = now.clone()
        now[:, written] = was[:, written]
        assert torch.equal(was, now)
    assert all(plane[:, written].isfinite().all() for plane in mem.planes.values())


@pytest.mark.parametrize("tracking", TRACKING, ids=repr)
@pytest.mark.parametrize("batch", BATCHES)
def test_replays_have_the_bits_of_eager_forwards(
    backend: Backend, generator: torch.Generator, tracking: ms.Tracking, batch: int
) -> None:
    """100 steps of changing slots on one graph, every tenth of padding alone."""
    twins = Twins(tracking, batch, backend, generator)
    mem = twins.replayed.mem
    launched = backend.counts.total_launches
    controlled = dict(mem.backend.counts.launches)
    seen = set()
    for t in range(STEPS):
        if t % 3 == 2:
            twins.turn_over(t)
        twins.inputs.draw()
        before = [block.clone() for block in mem.planes.plane_map.blocks]
        replayed, eager = twins.plan(padding=t % 10 == 9)
        seen |= set(replayed.write.tolist())
        assert torch.equal(replayed.write, eager.write) and torch.equal(replayed.snapshot, eager.snapshot)
        assert twins.same(), f"step {t}"
        check_changed_only(before, mem, replayed)
        assert not any(out[:, :batch][:, replayed.write == 0].any() for out in twins.replayed.out.values())
        twins.settle()
    assert len(seen - {0}) > batch  # slots changed hands
    assert set(twins.replayed.graphs) == {batch}
    per_forward = 3 * LAYERS
    assert backend.counts.total_launches - launched == (STEPS + 1) * per_forward  # replays launch nothing one by one
    assert mem.backend.counts.launches["plan"] == controlled["plan"] + 1  # in the capture
    for manager in twins.managers:
        manager.audit().raise_if_leaking()
        manager.device.check()


def test_one_manager_replays_graphs_of_every_batch_size(backend: Backend, generator: torch.Generator) -> None:
    """Five graphs that share the vectors, in any order; all but the last rows are padding in the larger ones."""
    inputs = Inputs(max(BATCHES), backend.device, generator)
    replayed, eager = (build(ms.Redirect(4), max(BATCHES), backend, inputs) for _ in range(2))
    rows = [forward.mem.admit([ms.Request(i) for i in range(2)]) for forward in (replayed, eager)]
    for batch in (*BATCHES, *reversed(BATCHES), *BATCHES):
        inputs.draw()
        for forward, mine in ((replayed, rows[0]), (eager, rows[1])):
            real = list(mine[: min(batch, 2)])
            given = [*[None] * (batch - len(real)), *real]
            step = replayed.plan(given) if forward is replayed else eager.mem.plan(given)
            if forward is eager:
                eager.eager(step)
            forward.mem.settle(step)
        for a, b in zip(replayed.mem.planes.plane_map.blocks, eager.mem.planes.plane_map.blocks, strict=True):
            assert torch.equal(a, b)
        assert all(same_bits(replayed.out[name][:, :batch], eager.out[name][:, :batch]) for name in eager.out)
    assert set(replayed.graphs) == set(BATCHES)


def test_captures_and_other_streams_are_refused(backend: Backend, generator: torch.Generator) -> None:
    """What `tests/engine/test_streams.py` shows on fake devices."""
    forward = build(ms.Redirect(4), 1, backend, Inputs(1, backend.device, generator))
    mem = forward.mem
    step, side = mem.plan([None]), torch.cuda.Stream()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        forward.eager(step)
        with pytest.raises(ms.InvalidArgument, match="captures a CUDA graph"):
            mem.settle(step)
    with torch.cuda.stream(side):
        with pytest.raises(ms.InvalidArgument, match=r"call use_stream\("):
            mem.settle(step)
        mem.device.use_stream(side)
        mem.settle(step)
        mem.audit().raise_if_leaking()
