"""The selective state update against the papers' recurrence, bit by bit where bits are promised, in poisoned memory."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from memstate.kernels.dispatch import Backend
from tests.support.decode_case import (
    COINCIDING,
    MIXED,
    Case,
    Memory,
    Row,
    check_chunks,
    check_misfit,
    check_rows_alone,
    far_apart,
    rubbish,
    same_bits,
)  # fmt: skip
from tests.support.recurrences import Array, selective, selective_bound

DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)]
KINDS = {"mamba2": (2, 1, 16, 16), "mamba1": (1, 1, 24, 16)}  # small: heads, groups, dim, state
MODELS = {"mamba2": (32, 8, 64, 128), "mamba1": (1, 1, 8192, 16)}

each_kind = pytest.mark.parametrize("kind", KINDS)


def build(
    backend: Backend,
    generator: torch.Generator,
    kind: str = "mamba2",
    rows: list[Row] = MIXED,
    tokens: int = 3,
    state: torch.dtype = torch.float32,
    inputs: torch.dtype = torch.float32,
    dims: tuple[int, int, int, int] | None = None,
    softplus: bool = True,
    without: tuple[str, ...] = (),
    steps: tuple[float, float] = (-3, 1),
) -> Case:
    """Random states in the slots that real rows read, random inputs for their real tokens, rubbish everywhere else.

    dims: heads, groups, dim, state; unless given a model's on a GPU, small ones where every program is interpreted.
    without: those of d, z and dt_bias that are None. steps: where dt lies, before its softplus if it has one.
    """
    device = backend.device
    heads, groups, dim, states = dims or (MODELS if device.type == "cuda" else KINDS)[kind]
    memory = Memory((heads, dim, states), state, device, generator)
    own = (heads,) if kind == "mamba2" else (heads, dim)
    shapes = {"x": (heads, dim), "dt": own, "b": (groups, states), "c": (groups, states), "z": (heads, dim)}

    def random(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator)

    made: dict[str, Tensor] = {}
    for name in shapes:
        if name in without:
            continue
        whole = torch.empty((len(rows), tokens, *shapes[name]), dtype=inputs)
        whole = rubbish(whole.nbytes, device, generator).view(inputs).view(whole.shape)
        for i, row in enumerate(rows):
            if row.write > 0:
                values = random((row.tokens, *shapes[name]))
                if name == "dt":
                    values = values.uniform_(*steps, generator=generator)
                    values = values if softplus else values.abs()
                whole[i, : row.tokens] = values.to(whole)
        made[name] = whole
    for slot in {row.read for row in rows if row.write > 0 and row.read > 0}:
        memory.fill(slot, random((heads, dim, states)))
    a = -random(own if kind == "mamba2" else (heads, dim, states)).exp()
    weights = {"a": a, "d": random(own), "dt_bias": random(own).abs()}
    shared: dict[str, Any] = dict.fromkeys(without)
    shared |= {name: weight.to(device) for name, weight in weights.items() if name not in without}
    return Case("selective_step", rows, made, shared | {"softplus": softplus}, memory, like="x")


def float64(tensor: Tensor) -> Array:
    return tensor.double().cpu().numpy()


def heads_of(case: Case, row: int, tokens: int, before: Tensor) -> list[dict[str, Any]]:
    """What the recurrence takes, head by head: everything a head has in common repeated for each of its channels."""
    arguments = case.arguments()
    heads, dim, states = before.shape[1:]
    given = {
        name: float64(arguments[name] if name in ("a", "d", "dt_bias") else arguments[name][row, :tokens])
        for name in ("x", "dt", "a", "b", "c", "d", "z", "dt_bias")
        if arguments[name] is not None
    }
    group = heads // given["b"].shape[1]
    slot = case.rows[row].read
    old = float64(before[slot]) if slot > 0 else np.zeros((heads, dim, states))
    found = []
    for h in range(heads):
        weights = {
            name: np.broadcast_to(given[name][h], (dim,)) if name in given else np.zeros(dim)
            for name in ("d", "dt_bias")
        }
        dt = given["dt"][:, h]
        found.append(
            {
                "x": given["x"][:, h],
                "dt": np.broadcast_to(dt[:, None] if dt.ndim == 1 else dt, (tokens, dim)),
                "a": np.broadcast_to(given["a"][h], (dim, states)),
                "b": given["b"][:, h // group],
                "c": given["c"][:, h // group],
                "z": given["z"][:, h] if "z" in given else None,
                "state": old[h],
                "softplus": case.shared["softplus"],
            }
            | weights
        )
    return found


def exact(head: dict[str, Any]) -> tuple[Array, Array]:
    """Outputs `token dim` and states `token+1 dim state`; the statement knows of no bias."""
    rest = {name: value for name, value in head.items() if name != "dt_bias"}
    return selective(**rest | {"dt": head["dt"] + head["dt_bias"]})


def run(case: Case, backend: Backend) -> Tensor:
    """A step with every output and state within the bound of the recurrence, zeros and unchanged bytes elsewhere."""
    state, before = case.memory.state, case.memory.state.clone()
    out = case.step(backend)
    changed: set[int] = set()
    for i, row in enumerate(case.rows):
        real = row.tokens if row.write > 0 else 0
        assert not out[i, real:].any()
        if row.write <= 0:
            continue
        changed |= {slot for slot in (row.write, row.snapshot) if slot > 0}
        for h, head in enumerate(heads_of(case, i, real, before)):
            (y, states), (y_bounds, state_bounds) = exact(head), bounds(head)
            pairs = [(out[i, t, h], y[t], y_bounds[t]) for t in range(real)]
            for got, truth, bound in [*pairs, (state[row.write, h], states[-1], state_bounds[-1])]:
                assert (np.abs(float64(got) - truth) <= bound.stored(got.dtype, backend.name).error).all()
        if row.snapshot > 0:
            assert same_bits(state[row.snapshot], state[row.write])
    case.memory.check_changed_only(changed)
    return out


def bounds(head: dict[str, Any]) -> Any:
    """Bounds of what `exact` returns, one by one."""
    return selective_bound(**{"bias" if name == "dt_bias" else name: value for name, value in head.items()})


@each_kind
@pytest.mark.parametrize(("state", "inputs"), DTYPES)
def test_G2_mixed_batch_agrees_with_the_recurrence(
    backend: Backend, generator: torch.Generator, kind: str, state: torch.dtype, inputs: torch.dtype
) -> None:
    run(build(backend, generator, kind, state=state, inputs=inputs), backend)


@pytest.mark.parametrize(
    ("kind", "dims"),
    [
        ("mamba2", (3, 3, 12, 20)),
        ("mamba2", (4, 2, 5, 7)),
        ("mamba2", (1, 1, 20, 100)),  # three blocks
        ("mamba1", (1, 1, 12, 20)),
        ("mamba1", (1, 1, 70, 16)),  # three blocks
        ("mamba1", (4, 2, 3, 5)),
    ],
)
def test_G2_odd_sizes_and_groups(
    backend: Backend, generator: torch.Generator, kind: str, dims: tuple[int, int, int, int]
) -> None:
    run(build(backend, generator, kind, [Row(1, 2), Row(0, 3)], dims=dims), backend)


@each_kind
@pytest.mark.parametrize("softplus", [True, False])
@pytest.mark.parametrize("without", [("d",), ("z",), ("dt_bias",), ("d", "z", "dt_bias")])
def test_G2_with_and_without_what_may_be_left_out(
    backend: Backend, generator: torch.Generator, kind: str, softplus: bool, without: tuple[str, ...]
) -> None:
    run(build(backend, generator, kind, [Row(1, 2)], softplus=softplus, without=without), backend)


@each_kind
@pytest.mark.parametrize("steps", [(-60, -9), (-9, 9), (19, 21), (20, 300)])
def test_G2_softplus_of_steps_of_every_size(
    backend: Backend, generator: torch.Generator, kind: str, steps: tuple[float, float]
) -> None:
    """Relative precision where exp(dt) is lost beside 1, both branches, and no overflow. From nothing, so that the
    state is as small as its step."""
    run(build(backend, generator, kind, [Row(0, 1), Row(2, 3)], steps=steps, without=("dt_bias",)), backend)


@each_kind
def test_G2_reference_and_kernel_agree(backend: Backend, generator: torch.Generator, kind: str) -> None:
    """On the same inputs each is within the bound of the exact answer, so within twice the bound of the other."""
    case = build(backend, generator, kind)
    run(case.twin(), Backend("reference", backend.device))
    run(case, backend)


def some_head(generator: torch.Generator, dt: float) -> dict[str, Any]:
    """Three tokens of 8 channels with 16 states each, a gate, and softplus steps about `dt`."""
    x, z, jitter = (torch.randn(3, 8, generator=generator).double().numpy() for _ in range(3))
    b, c = (torch.randn(3, 16, generator=generator).double().numpy() for _ in range(2))
    a, state = (torch.randn(8, 16, generator=generator).double().numpy() for _ in range(2))
    step = {"dt": dt + 0.1 * jitter, "dt_bias": np.zeros(8), "softplus": True}
    return {"x": x, "z": z, "b": b, "c": c, "a": -np.exp(a), "d": np.ones(8), "state": state} | step


def test_G2_bounds_tell_fp32_from_less(generator: torch.Generator) -> None:
    """The bound follows the recurrence, is one of fp32, and rounding the state to bf16 between tokens breaks it."""
    head = some_head(generator, -1)
    y, states = exact(head)
    y_bounds, state_bounds = bounds(head)
    values = [bound.value for bound in y_bounds], [bound.value for bound in state_bounds]
    assert np.allclose(values[0], y, rtol=0, atol=1e-12) and np.allclose(values[1], states, rtol=0, atol=1e-12)
    assert max(bound.error.max() for bound in y_bounds) < 2e-4
    outputs = []
    for t in range(3):
        token = {name: head[name][t : t + 1] for name in ("x", "z", "b", "c", "dt")}
        (o,), (_, state) = exact(head | token)
        head["state"] = torch.from_numpy(state).bfloat16().double().numpy()
        outputs.append(np.abs(o - y[t]) > y_bounds[t].error)
    assert np.any(outputs)


def test_G2_bounds_tell_a_careless_softplus(generator: torch.Generator) -> None:
    """log(1 + exp(dt)) as it stands, in fp32, is outside: a small step would have half its digits."""
    head = some_head(generator, -7) | {"state": np.zeros((8, 16))}
    _, states = exact(head)
    _, state_bounds = bounds(head)
    careless = np.log(np.float32(1) + np.exp(head["dt"].astype(np.float32))).astype(np.float64)
    _, spoilt = exact(head | {"dt": careless, "softplus": False})
    assert (np.abs(spoilt[1] - states[1]) > state_bounds[1].error).mean() > 0.5


@each_kind
def test_G2_state_is_rounded_only_when_stored(backend: Backend, generator: torch.Generator, kind: str) -> None:
    """A bf16 state and fp32 outputs: within the fp32 bound, which rounding between tokens would exceed."""
    run(build(backend, generator, kind, [Row(1, 1), Row(2, 3)], state=torch.bfloat16), backend)


@each_kind
def test_G2_repeats_bit_for_bit(backend: Backend, generator: torch.Generator, kind: str) -> None:
    first = build(backend, generator, kind)
    second = first.twin()
    assert same_bits(first.step(backend), second.step(backend))
    assert same_bits(first.memory.whole, second.memory.whole)


@pytest.mark.parametrize(("kind", "state"), [("mamba2", torch.float32), ("mamba1", torch.bfloat16)])
def test_G2_a_row_does_not_depend_on_the_batch(
    backend: Backend, generator: torch.Generator, kind: str, state: torch.dtype
) -> None:
    check_rows_alone(build(backend, generator, kind, state=state), backend)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [[0, 1, 2, 3], [0, 1, 3], [0, 2, 3]])
def test_G2_chunking_does_not_change_bits(
    backend: Backend, generator: torch.Generator, kind: str, cuts: list[int]
) -> None:
    check_chunks(build(backend, generator, kind), backend, cuts)


@each_kind
def test_G2_bits_do_not_depend_on_where_inputs_lie(backend: Backend, generator: torch.Generator, kind: str) -> None:
    case = build(backend, generator, kind, [Row(1, 2)])
    moved = case.twin()

    def shifted(tensor: Tensor) -> Tensor:
        return torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape)

    moved.inputs = {name: shifted(tensor) for name, tensor in case.inputs.items()}
    fixed = ("softplus",) if kind == "mamba2" else ("softplus", "a")
    moved.shared = {name: value if name in fixed else shifted(value) for name, value in case.shared.items()}
    assert moved.inputs["b"].data_ptr() % 16 and moved.shared["d"].data_ptr() % 16
    assert same_bits(moved.step(backend), case.step(backend))
    assert same_bits(moved.memory.whole, case.memory.whole)


@pytest.mark.parametrize(("tokens", "meant"), [(9, 2), (-3, 0)])
def test_token_counts_beyond_the_step(backend: Backend, generator: torch.Generator, tokens: int, meant: int) -> None:
    case = build(backend, generator, rows=[Row(1, 2, tokens=2)], tokens=2)
    strange, plain = case.twin(), case.twin()
    strange.rows, plain.rows = [Row(1, 2, tokens=tokens)], [Row(1, 2, tokens=meant)]
    assert same_bits(strange.step(backend), plain.step(backend))
    assert same_bits(strange.memory.whole, plain.memory.whole)


@each_kind
@pytest.mark.parametrize("null", [0, -7])
def test_B14_padded_rows_change_nothing(backend: Backend, generator: torch.Generator, kind: str, null: int) -> None:
    """A batch that is all padding, whatever its other columns say: zeros out, and every byte as it was."""
    case = build(backend, generator, kind, [Row(null, null, null), Row(1, null, 2), Row(3, null, 3, 1)])
    assert not run(case, backend).any()
    case.memory.check_changed_only(set())


@each_kind
def test_B15_one_token_from_nothing_is_no_padding(backend: Backend, generator: torch.Generator, kind: str) -> None:
    case = build(backend, generator, kind, [Row(0, 1, tokens=1), Row(0, 0, tokens=1)], tokens=1)
    assert bool(run(case, backend)[0].any()) and bool(case.memory.state[1].any())


@each_kind
@pytest.mark.parametrize("null", [0, -1])
def test_B16_null_reads_as_zeros(backend: Backend, generator: torch.Generator, kind: str, null: int) -> None:
    """Slot 0 and what lies before it are NaN here: a single byte of either would show."""
    case = build(backend, generator, kind, [Row(null, 1), Row(null, 0), Row(null, 2, 3, 0)])
    out = run(case, backend)
    assert bool(out[0].isfinite().all()) and not out[1:].any()
    assert not case.memory.state[2:4].any()  # no token and nothing read: a state of zeros


@pytest.mark.parametrize("row", COINCIDING)
@pytest.mark.parametrize("tokens", [0, 2])
def test_B40_slots_of_one_row_may_coincide(backend: Backend, generator: torch.Generator, row: Row, tokens: int) -> None:
    run(build(backend, generator, "mamba1", [row._replace(tokens=tokens)], tokens=2), backend)


@each_kind
def test_B40_rows_may_read_one_slot(backend: Backend, generator: torch.Generator, kind: str) -> None:
    """Several requests start from one cached state: it stays, and each writes its own."""
    run(build(backend, generator, kind, [Row(1, 2), Row(1, 3), Row(1, 4, 5)]), backend)


@each_kind
def test_B38_slots_beyond_2_31_elements(backend: Backend, generator: torch.Generator, kind: str) -> None:
    near = build(backend, generator, kind, [Row(2, 2)], state=torch.float16)
    far = near.twin()
    far.memory.state = far_apart(3, near.memory.state[2], 2**30 + 8)
    far.memory.state[2] = near.memory.state[2]
    assert same_bits(far.step(backend), near.step(backend))
    assert same_bits(far.memory.state[2], near.memory.state[2])


def test_output_is_made_where_none_is_given(backend: Backend, generator: torch.Generator) -> None:
    case = build(backend, generator, rows=[Row(1, 1), Row(0, 0)])
    other = case.twin()
    assert same_bits(backend.selective_step(**case.arguments()), other.step(backend))


@each_kind
def test_nothing_is_allocated_where_output_is_given(
    backend: Backend, generator: torch.Generator, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend.name == "reference":
        return  # works on one row at a time in fp32
    case = build(backend, generator, kind, [Row(1, 1)])
    case.step(backend)  # compiles
    arguments, out = case.arguments(), torch.full_like(case.inputs["x"], torch.nan)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("allocated although `out` was given")

    for name in ("empty", "empty_like", "zeros", "zeros_like"):
        monkeypatch.setattr(torch, name, refuse)
    backend.selective_step(**arguments, out=out)
    assert bool(out.isfinite().all())


def test_empty_batch(backend: Backend, generator: torch.Generator) -> None:
    assert build(backend, generator, rows=[]).step(backend).shape[0] == 0


@each_kind
@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("x", lambda t: t.double()),
        ("x", lambda t: t[0]),
        ("dt", lambda t: t[:, :2].contiguous()),
        ("dt", lambda t: t[0, 0]),
        ("a", lambda t: t[..., None]),
        ("a", lambda t: t.int()),
        ("b", lambda t: t.transpose(1, 3)),
        ("c", lambda t: t[:, :, :, :1]),
        ("d", lambda t: t[:0]),
        ("z", lambda t: t[:1]),
        ("dt_bias", lambda t: t[..., None]),
        ("state", lambda t: t[:, :, :1]),
        ("state", lambda t: t.transpose(2, 3)),
        ("read", lambda t: t[:1]),
        ("tokens", lambda t: t.float()),
        ("out", lambda t: torch.empty(1)),
    ],
)
def test_G1_misfits_are_named_and_change_nothing(
    backend: Backend, generator: torch.Generator, kind: str, name: str, spoil: Callable[[Any], Tensor]
) -> None:
    case = build(backend, generator, kind, [Row(1, 1), Row(2, 2)])
    check_misfit(case, backend, name, spoil(case.arguments().get(name)))


def test_G1_decays_of_channels_that_lanes_cannot_move_whole(backend: Backend, generator: torch.Generator) -> None:
    case = build(backend, generator, "mamba1", [Row(1, 1)])
    a = case.shared["a"]
    check_misfit(case, backend, "a", torch.cat([a.flatten()[:1], a.flatten()])[1:].view(a.shape))


def test_G1_steps_of_one_kind_with_weights_of_the_other(backend: Backend, generator: torch.Generator) -> None:
    case = build(backend, generator, "mamba1", [Row(1, 1)])
    check_misfit(case, backend, "a", torch.zeros(1, device=backend.device))
