"""Whole steps (ownership, plan, forward) in CUDA graphs, one for each batch size, compared with eager steps."""

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
WIDTH = 2  # most tokens that an entry of the batch has in one step
LAYERS, HEADS, DIM, STATE, TAPS = 2, 2, 32, 16, 4
LAYOUT = ms.StateLayout(
    planes=(
        ms.Plane("conv", (TAPS - 1, HEADS * DIM), torch.bfloat16),
        ms.Plane("delta", (HEADS, STATE, DIM), torch.float32),
        ms.Plane("ssm", (HEADS, DIM, STATE), torch.float32),
    ),
    layers=LAYERS,
)


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Poisons fresh memory only: slots that a graph frees would be poisoned later, while a test compares bytes."""
    with fresh_memory():
        yield


@pytest.fixture
def backend() -> Backend:
    """Returns the backend of compiled kernels, the only one that can be captured."""
    return Backend("cuda", torch.device("cuda"))


class Inputs:
    """Weights of a forward, and its inputs except states, with axes `batch token ...`; all at fixed addresses."""

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
        """Draws new values in place. Norms of keys, decays and gates are such that states stay bounded."""
        for name, tensor in self.named.items():
            values = torch.rand(tensor.shape, generator=self._generator)
            values = values - 0.5 if name in ("x", "v", "u", "c", "q") else -values if name == "decay" else values
            tensor.copy_(values * STATE**-0.5 if name in ("k", "q") else values)


class Forward:
    """A forward with three kinds of recurrent layer on the planes of one manager; it runs eagerly or as a graph."""

    def __init__(self, mem: ms.StateManager, backend: Backend, inputs: Inputs) -> None:
        self.mem, self.backend, self.inputs = mem, backend, inputs
        named = inputs.named
        self.out = {name: torch.stack([named[name]] * LAYERS).fill_(torch.nan) for name in ("x", "v", "u")}
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def eager(self, step: ms.Step | StepRecord) -> None:
        """Launches the kernels of all layers. Allocates nothing, so that a graph owns no memory."""
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
        """Plans a step that replays the graph of its batch size; captures this graph if it does not exist yet."""
        batch = len(rows)
        if batch not in self.graphs:
            self.graphs[batch] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graphs[batch]):  # a capture runs nothing, and refuses what waits for the device
                self.eager(self.mem.launch(batch))
        return self.mem.plan(rows, tokens, replay=self.graphs[batch].replay)


def build(tracking: ms.Tracking, batch: int, backend: Backend, inputs: Inputs) -> Forward:
    """Returns the forward of a warmed-up manager whose slots hold rubbish."""
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


def check_changed_only(before: list[Tensor], mem: ms.StateManager, step: ms.Step) -> None:
    """Requires that only slots that the step writes have changed, and that these are finite."""
    written = torch.cat([step.write, step.snapshot]).unique().long()
    written = written[written > 0]
    for was, now in zip(before, mem.planes.plane_map.blocks, strict=True):
        now = now.clone()
        now[:, written] = was[:, written]
        assert torch.equal(was, now)
    assert all(plane[:, written].isfinite().all() for plane in mem.planes.values())


def test_one_manager_replays_graphs_of_every_batch_size(backend: Backend, generator: torch.Generator) -> None:
    """Five graphs share the step's vectors and run in any order: they give the bits of eager steps, without launches.

    In the larger batches, all entries but the last are padding. `tests/proof/gpu/graphs.py` goes on for hundreds of
    steps whose slots change hands, under every strategy.
    """
    inputs, order = Inputs(max(BATCHES), backend.device, generator), (*BATCHES, *reversed(BATCHES), *BATCHES)
    replayed, eager = (build(ms.Redirect(4), max(BATCHES), backend, inputs) for _ in range(2))
    rows = [forward.mem.admit([ms.Request(i) for i in range(2)]) for forward in (replayed, eager)]
    for forward in (replayed, eager):
        forward.mem.submit()  # zeroes the slots of both rows now, before their first step
    launched, planned = backend.counts.total_launches, replayed.mem.backend.counts.launches["plan"]
    for batch in order:
        inputs.draw()
        before = [block.clone() for block in replayed.mem.planes.plane_map.blocks]
        given = [[*[None] * (batch - 2), *mine[: min(batch, 2)]] for mine in rows]
        steps = replayed.plan(given[0]), eager.mem.plan(given[1])
        eager.eager(steps[1])
        check_changed_only(before, replayed.mem, steps[0])
        for a, b in zip(replayed.mem.planes.plane_map.blocks, eager.mem.planes.plane_map.blocks, strict=True):
            assert torch.equal(a, b)
        assert all(same_bits(replayed.out[name][:, :batch], eager.out[name][:, :batch]) for name in eager.out)
        assert not any(out[:, :batch][:, steps[0].write == 0].any() for out in replayed.out.values())
        replayed.mem.settle(steps[0])
        eager.mem.settle(steps[1])
    assert set(replayed.graphs) == set(BATCHES)
    # launches of eager steps and of captures
    assert backend.counts.total_launches - launched == (len(order) + len(BATCHES)) * 3 * LAYERS
    assert replayed.mem.backend.counts.launches["plan"] - planned == len(BATCHES)


def test_captures_and_other_streams_are_refused(backend: Backend, generator: torch.Generator) -> None:
    """Checks on a GPU what `tests/engine/test_streams.py` checks on fake devices."""
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
