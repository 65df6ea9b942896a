"""The gated delta rule step against the paper's recurrence, bit by bit where bits are promised, in poisoned memory."""

from collections.abc import Callable

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
from tests.support.recurrences import Array, gated_delta, gated_delta_bound, kda, kda_bound

DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)]


def build(
    backend: Backend,
    generator: torch.Generator,
    rows: list[Row] = MIXED,
    tokens: int = 3,
    state: torch.dtype = torch.float32,
    inputs: torch.dtype = torch.float32,
    dims: tuple[int, int, int, int] | None = None,
    scale: float | None = None,
    per_key: bool = False,
) -> Case:
    """Random states in the slots that real rows read, random inputs for their real tokens, rubbish everywhere else.

    dims: heads, key heads, key, value; unless given a model's on a GPU, small ones where every program is interpreted.
    per_key: one decay for each key channel of a head instead of one for the head.
    """
    device = backend.device
    heads, key_heads, key, value = dims or ((32, 16, 128, 128) if device.type == "cuda" else (2, 1, 16, 16))
    memory = Memory((heads, key, value), state, device, generator)
    shapes = {"q": (key_heads, key), "k": (key_heads, key), "v": (heads, value)}
    shapes |= {"decay": (heads, key) if per_key else (heads,), "beta": (heads,)}
    made = {}
    for name, shape in shapes.items():
        dtype = torch.float32 if name in ("decay", "beta") else inputs
        whole = torch.empty((len(rows), tokens, *shape), dtype=dtype)
        whole = rubbish(whole.nbytes, device, generator).view(dtype).view(whole.shape)
        for i, row in enumerate(rows):
            if row.write > 0:
                values = torch.randn((row.tokens, *shape), generator=generator)
                values = torch.nn.functional.normalize(values, dim=-1) if name in ("q", "k") else values
                values = -2 * values.abs() if name == "decay" else values.sigmoid() if name == "beta" else values
                whole[i, : row.tokens] = values.to(whole)
        made[name] = whole
    for slot in {row.read for row in rows if row.write > 0 and row.read > 0}:
        memory.fill(slot, torch.randn((heads, key, value), generator=generator))
    return Case("gated_delta_step", rows, made, {"scale": scale}, memory, like="v")


def float64(tensor: Tensor) -> Array:
    return tensor.double().cpu().numpy()


def run(case: Case, backend: Backend) -> Tensor:
    """A step with every output and state within the bound of the recurrence, zeros and unchanged bytes elsewhere."""
    state, before = case.memory.state, case.memory.state.clone()
    exactly, bounds = (kda, kda_bound) if case.inputs["decay"].dim() == 4 else (gated_delta, gated_delta_bound)
    out = case.step(backend)
    changed: set[int] = set()
    for i, row in enumerate(case.rows):
        real = row.tokens if row.write > 0 else 0
        assert not out[i, real:].any()
        if row.write <= 0:
            continue
        changed |= {slot for slot in (row.write, row.snapshot) if slot > 0}
        q, k, v, decay, beta = (float64(tensor[i, :real]) for tensor in case.inputs.values())
        old = float64(before[row.read]) if row.read > 0 else np.zeros(state.shape[1:])
        scale = q.shape[-1] ** -0.5 if case.shared["scale"] is None else case.shared["scale"]
        for h in range(v.shape[1]):
            kh = h // (v.shape[1] // q.shape[1])
            arguments = (q[:, kh], k[:, kh], v[:, h], decay[:, h], beta[:, h], old[h], scale)
            computed = (out[i, :real, h], state[row.write, h])
            for got, exact, bound in zip(computed, exactly(*arguments), bounds(*arguments), strict=True):
                assert (np.abs(float64(got) - exact) <= bound.stored(got.dtype, backend.name).error).all()
        if row.snapshot > 0:
            assert same_bits(state[row.snapshot], state[row.write])
    case.memory.check_changed_only(changed)
    return out


@pytest.mark.parametrize(("state", "inputs"), DTYPES)
def test_G2_mixed_batch_agrees_with_the_recurrence(
    backend: Backend, generator: torch.Generator, state: torch.dtype, inputs: torch.dtype
) -> None:
    run(build(backend, generator, state=state, inputs=inputs), backend)


@pytest.mark.parametrize("dims", [(3, 3, 12, 20), (4, 2, 8, 8)])
def test_G2_odd_sizes_and_grouped_heads(
    backend: Backend, generator: torch.Generator, dims: tuple[int, int, int, int]
) -> None:
    run(build(backend, generator, [Row(1, 2), Row(0, 3)], dims=dims, scale=0.3), backend)


def test_G2_reference_and_kernel_agree(backend: Backend, generator: torch.Generator) -> None:
    """On the same inputs each is within the bound of the exact answer, so within twice the bound of the other."""
    case = build(backend, generator)
    run(case.twin(), Backend("reference", backend.device))
    run(case, backend)


def test_G2_bounds_tell_fp32_from_less(generator: torch.Generator) -> None:
    """The bound follows the recurrence, is one of fp32, and rounding the state to bf16 between tokens breaks it."""
    q, k, v = (torch.randn(3, 16, generator=generator).double().numpy() / 4 for _ in range(3))
    decay, beta, state = np.full(3, -0.5), np.full(3, 0.5), torch.randn(16, 16, generator=generator).double().numpy()
    exact, new = gated_delta(q, k, v, decay, beta, state, 1.0)
    out, final = gated_delta_bound(q, k, v, decay, beta, state, 1.0)
    assert np.allclose(out.value, exact, rtol=0, atol=1e-13) and np.allclose(final.value, new, rtol=0, atol=1e-13)
    assert out.error.max() < 1e-4
    outputs = []
    for t in range(3):
        o, state = gated_delta(*(x[t : t + 1] for x in (q, k, v, decay, beta)), state, 1.0)
        state = torch.from_numpy(state.copy()).bfloat16().double().numpy()
        outputs.append(o[0])
    assert (np.abs(np.array(outputs) - exact) > out.error).any()


def test_G2_state_is_rounded_only_when_stored(backend: Backend, generator: torch.Generator) -> None:
    """A bf16 state and fp32 outputs: within the fp32 bound, which rounding between tokens would exceed."""
    run(build(backend, generator, [Row(1, 1), Row(2, 3)], state=torch.bfloat16), backend)


def test_G2_repeats_bit_for_bit(backend: Backend, generator: torch.Generator) -> None:
    first = build(backend, generator)
    second = first.twin()
    assert same_bits(first.step(backend), second.step(backend))
    assert same_bits(first.memory.whole, second.memory.whole)


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_G2_a_row_does_not_depend_on_the_batch(
    backend: Backend, generator: torch.Generator, state: torch.dtype
) -> None:
    check_rows_alone(build(backend, generator, state=state), backend)


@pytest.mark.parametrize("cuts", [[0, 1, 2, 3], [0, 1, 3], [0, 2, 3]])
def test_G2_chunking_does_not_change_bits(backend: Backend, generator: torch.Generator, cuts: list[int]) -> None:
    check_chunks(build(backend, generator), backend, cuts)


@pytest.mark.parametrize(("tokens", "meant"), [(9, 2), (-3, 0)])
def test_token_counts_beyond_the_step(backend: Backend, generator: torch.Generator, tokens: int, meant: int) -> None:
    case = build(backend, generator, [Row(1, 2, tokens=2)], tokens=2)
    strange, plain = case.twin(), case.twin()
    strange.rows, plain.rows = [Row(1, 2, tokens=tokens)], [Row(1, 2, tokens=meant)]
    assert same_bits(strange.step(backend), plain.step(backend))
    assert same_bits(strange.memory.whole, plain.memory.whole)


@pytest.mark.parametrize("null", [0, -1, -7])
def test_B14_padded_rows_change_nothing(backend: Backend, generator: torch.Generator, null: int) -> None:
    """A batch that is all padding, whatever its other columns say: zeros out, and every byte as it was."""
    case = build(backend, generator, [Row(null, null, null), Row(1, null, 2), Row(3, null, 3, 1)])
    assert not run(case, backend).any()
    case.memory.check_changed_only(set())


def test_B15_one_token_from_nothing_is_no_padding(backend: Backend, generator: torch.Generator) -> None:
    case = build(backend, generator, [Row(0, 1, tokens=1), Row(0, 0, tokens=1)], tokens=1)
    assert bool(run(case, backend)[0].any()) and bool(case.memory.state[1].any())


@pytest.mark.parametrize("null", [0, -1])
def test_B16_null_reads_as_zeros(backend: Backend, generator: torch.Generator, null: int) -> None:
    """Slot 0 and what lies before it are NaN here: a single byte of either would show."""
    case = build(backend, generator, [Row(null, 1), Row(null, 0), Row(null, 2, 3, 0)])
    out = run(case, backend)
    assert bool(out[0].isfinite().all()) and not out[1:].any()
    assert not case.memory.state[2:4].any()  # no token and nothing read: a state of zeros


@pytest.mark.parametrize("row", COINCIDING)
@pytest.mark.parametrize("tokens", [0, 2])
def test_B40_slots_of_one_row_may_coincide(backend: Backend, generator: torch.Generator, row: Row, tokens: int) -> None:
    run(build(backend, generator, [row._replace(tokens=tokens)], tokens=2), backend)


def test_B40_rows_may_read_one_slot(backend: Backend, generator: torch.Generator) -> None:
    """Several requests start from one cached state: it stays, and each writes its own."""
    run(build(backend, generator, [Row(1, 2), Row(1, 3), Row(1, 4, 5)]), backend)


def test_B38_slots_beyond_2_31_elements(backend: Backend, generator: torch.Generator) -> None:
    near = build(backend, generator, [Row(2, 2)], state=torch.float16)
    far = near.twin()
    far.memory.state = far_apart(3, near.memory.state[2], 2**30 + 8)
    far.memory.state[2] = near.memory.state[2]
    assert same_bits(far.step(backend), near.step(backend))
    assert same_bits(far.memory.state[2], near.memory.state[2])


def test_output_is_made_where_none_is_given(backend: Backend, generator: torch.Generator) -> None:
    case = build(backend, generator, [Row(1, 1), Row(0, 0)])
    other = case.twin()
    assert same_bits(backend.gated_delta_step(**case.arguments()), other.step(backend))


def test_nothing_is_allocated_where_output_is_given(
    backend: Backend, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend.name == "reference":
        return  # works on one row at a time in fp32
    case = build(backend, generator, [Row(1, 1)])
    case.step(backend)  # compiles
    arguments, out = case.arguments(), torch.full_like(case.inputs["v"], torch.nan)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("allocated although `out` was given")

    for name in ("empty", "empty_like", "zeros", "zeros_like"):
        monkeypatch.setattr(torch, name, refuse)
    backend.gated_delta_step(**arguments, out=out)
    assert bool(out.isfinite().all())


def test_empty_batch(backend: Backend, generator: torch.Generator) -> None:
    assert build(backend, generator, []).step(backend).shape[0] == 0


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("q", lambda t: t.double()),
        ("k", lambda t: t[:, :2].contiguous()),
        ("v", lambda t: t.transpose(2, 3)),
        ("v", lambda t: t[0]),
        ("decay", lambda t: t.int()),
        ("beta", lambda t: t[:1]),
        ("state", lambda t: t[:, :1]),
        ("state", lambda t: t.transpose(2, 3)),
        ("read", lambda t: t[:1]),
        ("tokens", lambda t: t.float()),
    ],
)
def test_G1_misfits_are_named_and_change_nothing(
    backend: Backend, generator: torch.Generator, name: str, spoil: Callable[[Tensor], Tensor]
) -> None:
    case = build(backend, generator, [Row(1, 1), Row(2, 2)])
    check_misfit(case, backend, name, spoil(case.arguments()[name]))
