"""Kernels of other libraries as the engine: the states that they compute live in memstate's slots.

flash-linear-attention comes as `fla-core` and runs in Triton's interpreter; mamba_ssm can only be built for a GPU.
"""

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support.build import build
from tests.support.chunked import first_of, starts_of
from tests.support.decode_case import same_bits
from tests.support.recurrences import Array, Rounded, gated_delta_bound, kda_bound

KEY_HEADS, HEADS, KEY, VALUE = 1, 2, 16, 8  # 16 keys: the scale is 1/4, so scaling queries or outputs rounds alike
GROUPS, DIM, STATE = 1, 8, 16  # of Mamba2
BOUNDS = {"gated_delta_rule": gated_delta_bound, "kda": kda_bound}  # one decay a head, or one a key channel
TRACKING = pytest.mark.parametrize("tracking", [ms.Redirect(2), ms.PingPong(2)], ids=["redirect", "ping-pong"])

pytestmark = pytest.mark.filterwarnings("ignore:Triton is not supported")  # as fla says where it sees no GPU

Inputs = dict[str, Tensor]  # `batch token ...`, named as the peer names them
Advance = Callable[[Inputs, Tensor], tuple[Tensor, Tensor]]  # states `batch ...` -> outputs, new states
Forward = Callable[[ms.StateManager, ms.Step, Inputs], Tensor]


@pytest.fixture(scope="module")
def fla() -> ModuleType:
    """Imported when the first test asks, because it takes seconds."""
    return pytest.importorskip("fla.ops", reason="fla-core is not installed: pip install fla-core packaging")


@pytest.fixture(scope="module")
def mamba() -> Callable[..., Tensor]:
    """The update of one token, at slots given by index."""
    name, reason = "mamba_ssm.ops.triton.selective_state_update", "mamba_ssm is not installed, or built without CUDA"
    return pytest.importorskip(name, reason=reason, exc_type=ImportError).selective_state_update


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


def delta_inputs(generator: torch.Generator, gate: str, *shape: int) -> Inputs:
    """Of a layer of fla; shape: batch, tokens. g is the natural log of the gate."""
    q, k = normalize(normal(generator, 2, *shape, KEY_HEADS, KEY), dim=-1)
    channels = [KEY] if gate == "kda" else []
    g, beta = -normal(generator, *shape, HEADS, *channels).abs(), normal(generator, *shape, HEADS).sigmoid()
    return {"q": q, "k": k, "v": normal(generator, *shape, HEADS, VALUE), "g": g, "beta": beta}


def distance(a: Tensor, b: Tensor) -> Array:
    return (a.double() - b.double()).abs().cpu().numpy()


def slots(device: torch.device, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def manager(backend: Backend, tracking: ms.Tracking, *shape: int, in_place: bool = False) -> ms.StateManager:
    layout = ms.StateLayout((ms.Plane("ssm", shape, torch.float32),), layers=1)
    where = {"device": backend.device, "backend": backend.name}
    return build(layout, slots=8, max_requests=3, tracking=tracking, in_place=in_place, **where)


class Talk:
    """Requests in a manager whose slots were NaN, each token compared with the request run by itself.

    said: what the requests a, b and c are fed, each `1 token ...`. c goes on from a snapshot of a, so it begins as a.
    """

    def __init__(self, mem: ms.StateManager, forward: Forward, alone: Advance, said: list[Inputs]) -> None:
        self.mem, self.forward, device = mem, forward, mem.backend.device
        self.said = {who: {name: t.to(device) for name, t in x.items()} for who, x in zip("abc", said, strict=True)}
        for name, tensor in self.said["c"].items():
            tensor[:, :4] = self.said["a"][name][:, :4]
        self.plane: Tensor = mem.planes["ssm"]
        self.expected = {who: self._run(alone, x) for who, x in self.said.items()}
        self.plane.fill_(torch.nan)
        mem.scrub_null()

    def _run(self, alone: Advance, x: Inputs) -> list[tuple[Tensor, Tensor]]:
        state, answers = self.plane.new_zeros(1, *self.plane.shape[2:]), []
        for t in range(6):
            out, state = alone({name: tensor[:, t : t + 1].contiguous() for name, tensor in x.items()}, state.clone())
            answers.append((out, state))
        return answers

    def step(self, batch: list[tuple[str, ms.Row] | None]) -> None:
        """One token for everybody; padding is fed NaN."""
        step = self.mem.plan([entry and entry[1] for entry in batch])
        fed = {name: t.new_full((len(batch), 1, *t.shape[2:]), torch.nan) for name, t in self.said["a"].items()}
        real = [(i, entry[0], step.before[i]) for i, entry in enumerate(batch) if entry]
        for i, who, t in real:
            for name, tensor in self.said[who].items():
                fed[name][i] = tensor[0, t]
        out = self.forward(self.mem, step, fed)
        for i, who, t in real:
            answer, state = self.expected[who][t]
            assert same_bits(out[i], answer[0])
            assert same_bits(self.plane[0, step.write[i]], state[0])
        self.mem.settle(step)

    def run(self) -> None:
        """Five tokens for a and b; c takes over what a was after four, and says two more, the first beside b."""
        a, b = self.mem.admit([ms.Request("a"), ms.Request("b")])
        for _ in range(5):
            self.step([("a", a), None, ("b", b)])
        (snapshot,) = self.mem.release([a], publish=[4])
        assert snapshot is not None and snapshot.length == 4
        (c,) = self.mem.admit([ms.Request("c", resume=snapshot)])
        self.step([("b", b), ("c", c)])
        self.step([None, ("c", c)])
        self.mem.release([b, c])
        self.mem.drop([snapshot])
        self.mem.audit().raise_if_leaking()
        self.mem.check()


@pytest.mark.parametrize("gate", BOUNDS)
def test_memstate_and_fla_agree(backend: Backend, generator: torch.Generator, fla: ModuleType, gate: str) -> None:
    """Both are within the bound of the exact recurrence, so within twice the bound of each other."""
    device, read, write = backend.device, [1, 0, 3], [2, 4, 3]
    x = {name: tensor.to(device) for name, tensor in delta_inputs(generator, gate, 3, 3).items()}
    states = normal(generator, 5, HEADS, KEY, VALUE).to(device)
    old = states[read].contiguous()
    old[1] = 0  # the null slot
    theirs = getattr(fla, f"fused_recurrent_{gate}")(**x, initial_state=old, output_final_state=True)
    vectors = slots(device, *read), slots(device, *write), slots(device, 0, 0, 0), slots(device, 3, 3, 3)
    ours = backend.gated_delta_step(*x.values(), states, *vectors)
    q, k, v, decay, beta, start = (tensor.double().cpu().numpy() for tensor in (*x.values(), old))
    for i, h in np.ndindex(3, HEADS):
        bounds = BOUNDS[gate](q[i, :, 0], k[i, :, 0], v[i, :, h], decay[i, :, h], beta[i, :, h], start[i, h], 0.25)
        pairs = (ours[i, :, h], theirs[0][i, :, h]), (states[write[i], h], theirs[1][i, h])
        assert all((distance(*pair) <= 2 * bound.error).all() for pair, bound in zip(pairs, bounds, strict=True))


@pytest.mark.sample
@pytest.mark.parametrize("gate", BOUNDS)
@TRACKING
def test_fla_engine_on_gathered_states(
    backend: Backend, generator: torch.Generator, fla: ModuleType, gate: str, tracking: ms.Tracking
) -> None:
    """fla's public functions take a batch of states and return a new one: gathered before, scattered after."""

    def advance(x: Inputs, states: Tensor) -> tuple[Tensor, Tensor]:
        return getattr(fla, f"fused_recurrent_{gate}")(**x, initial_state=states, output_final_state=True)

    def forward(mem: ms.StateManager, step: ms.Step, x: Inputs) -> Tensor:
        plane = mem.planes["ssm"]
        states = plane.new_empty(1, len(step.read), *plane.shape[2:])
        mem.backend.gather_slots(plane, step.read, states)
        out, states[0] = advance(x, states[0])
        for target in (step.write, step.snapshot):
            mem.backend.scatter_slots(plane, target, states)
        return out

    mem = manager(backend, tracking, HEADS, KEY, VALUE)
    Talk(mem, forward, advance, [delta_inputs(generator, gate, 1, 6) for _ in "abc"]).run()


@pytest.mark.parametrize(
    ("tracking", "in_place"), [(ms.Redirect(2), False), (ms.Redirect(2), True), (ms.PingPong(2), True)]
)
def test_fla_engine_on_slots(
    backend: Backend, generator: torch.Generator, fla: ModuleType, tracking: ms.Tracking, in_place: bool
) -> None:
    """fla's kernel reads indices[i, accepted - 1] and writes indices[i, 0]: what a step of Redirect asks for."""
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    def update(x: Inputs, states: Tensor, read: Tensor, write: Tensor) -> Tensor:
        indices = {"ssm_state_indices": torch.stack([write, read], 1), "num_accepted_tokens": torch.full_like(read, 2)}
        return fused_recurrent_kda_fwd(**x, initial_state=states, **indices)[0]

    def alone(x: Inputs, states: Tensor) -> tuple[Tensor, Tensor]:
        return update(x, states, slots(backend.device, 0), slots(backend.device, 0)), states

    def forward(mem: ms.StateManager, step: ms.Step, x: Inputs) -> Tensor:
        return update(x, mem.planes["ssm"][0], step.write if in_place else step.read, step.write)

    mem = manager(backend, tracking, HEADS, KEY, VALUE, in_place=in_place)
    Talk(mem, forward, alone, [delta_inputs(generator, "kda", 1, 6) for _ in "abc"]).run()
    assert bool(mem.stats().copied_bytes) is in_place
    assert mem.planes["ssm"][:, 0].isnan().any()  # where that kernel stored what it made of padding
    mem.scrub_null()
    assert not mem.planes["ssm"][:, 0].any()


def mamba_inputs(generator: torch.Generator, *shape: int) -> Inputs:
    """Of a layer of Mamba2; shape: batch, tokens."""
    x, (b, c) = normal(generator, *shape, HEADS, DIM), normal(generator, 2, *shape, GROUPS, STATE)
    return {"x": x, "dt": normal(generator, *shape, HEADS).abs(), "b": b, "c": c}


def mamba_weights(generator: torch.Generator, device: torch.device) -> Inputs:
    a, d, dt_bias = normal(generator, 3, HEADS).abs().to(device)
    return {"a": -a, "d": d, "dt_bias": dt_bias}


def update_in_place(mamba: Callable[..., Tensor], weights: Inputs, x: Inputs, states: Tensor, at: Tensor) -> Tensor:
    """One token of every row; strides of 0 tell mamba_ssm that a head has one step size, gate, skip and bias."""
    dt, d, bias = (t[..., None].expand(*t.shape, DIM) for t in (x["dt"][:, 0], weights["d"], weights["dt_bias"]))
    out = mamba(
        states, x["x"][:, 0], dt, weights["a"][:, None, None].expand(HEADS, DIM, STATE), x["b"][:, 0], x["c"][:, 0],
        D=d, dt_bias=bias, state_batch_indices=at.long(),  # it multiplies them by a stride as they are
    )  # fmt: skip
    return out[:, None]


def test_memstate_and_mamba_agree(backend: Backend, generator: torch.Generator, mamba: Callable[..., Tensor]) -> None:
    """Both are within the bound of the exact recurrence, so within twice the bound of each other."""
    device, at = backend.device, [3, 1]
    x = {name: tensor.to(device) for name, tensor in mamba_inputs(generator, 2, 1).items()}
    weights = mamba_weights(generator, device)
    states = normal(generator, 4, HEADS, DIM, STATE).to(device)
    start, updated, vector = states[at].double().cpu().numpy(), states.clone(), slots(device, *at)
    theirs = update_in_place(mamba, weights, x, updated, vector)
    vectors = {"read": vector, "write": vector, "snapshot": 0 * vector, "tokens": 0 * vector + 1}
    ours = backend.selective_step(**x, **weights, **vectors, state=states)
    value = {name: Rounded(tensor.double().cpu().numpy()) for name, tensor in (x | weights).items()}
    dt = value["dt"][:, 0, :, None, None] + value["dt_bias"][:, None, None]
    state = Rounded(start) * (dt * value["a"][:, None, None]).exp()
    state = state + dt * value["x"][:, 0, :, :, None] * value["b"][:, 0, :, None]
    out = (state * value["c"][:, 0, :, None]).sum(3) + value["d"][:, None] * value["x"][:, 0]
    assert (distance(ours[:, 0], theirs[:, 0]) <= 2 * out.error).all()
    assert (distance(states[at], updated[at]) <= 2 * state.error).all()


@TRACKING
def test_mamba_engine_in_place(
    backend: Backend, generator: torch.Generator, mamba: Callable[..., Tensor], tracking: ms.Tracking
) -> None:
    """mamba_ssm updates one slot a row: memstate copies what snapshots need, before and after."""
    weights = mamba_weights(generator, backend.device)

    def alone(x: Inputs, states: Tensor) -> tuple[Tensor, Tensor]:
        return update_in_place(mamba, weights, x, states, slots(backend.device, 0)), states

    def forward(mem: ms.StateManager, step: ms.Step, x: Inputs) -> Tensor:
        return update_in_place(mamba, weights, x, mem.planes["ssm"][0], step.write)

    mem = manager(backend, tracking, HEADS, DIM, STATE, in_place=True)
    Talk(mem, forward, alone, [mamba_inputs(generator, 1, 6) for _ in "abc"]).run()


def test_pieces_of_packed_rows_are_counted_as_fla_counts_them(fla: ModuleType) -> None:
    """What `scatter_states` takes as `first`: where the pieces of each row begin in the `h` of its chunked kernels."""
    from fla.ops.utils import prepare_chunk_offsets

    for lengths in ([300], [63, 64, 65], [1, 1, 200, 1, 128], [100, 600]):
        starts = torch.tensor(starts_of(lengths))
        assert prepare_chunk_offsets(starts, 64).tolist() == first_of(lengths, 64)
