"""The causal convolution step against np.convolve, bit by bit where bits are promised, in poisoned memory."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from memstate.kernels.dispatch import Backend
from tests.decode_case import (
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
)
from tests.recurrences import Array, causal_conv, causal_conv_bound

DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.float32, torch.bfloat16),
]


def build(
    backend: Backend,
    generator: torch.Generator,
    rows: list[Row] = MIXED,
    tokens: int = 3,
    state: torch.dtype = torch.float32,
    inputs: torch.dtype = torch.float32,
    taps: int = 4,
    channels: int | None = None,
    bias: bool = True,
    activation: str | None = "silu",
) -> Case:
    """Random windows in the slots that real rows read, random inputs for their real tokens, rubbish everywhere else.

    channels: unless given a model's on a GPU, a few where every program is interpreted.
    """
    device = backend.device
    channels = channels or (8192 if device.type == "cuda" else 24)
    memory = Memory((taps - 1, channels), state, device, generator)
    x = torch.empty((len(rows), tokens, channels), dtype=inputs)
    x = rubbish(x.nbytes, device, generator).view(inputs).view(x.shape)
    for i, row in enumerate(rows):
        if row.write > 0:
            x[i, : row.tokens] = torch.randn((row.tokens, channels), generator=generator).to(x)
    for slot in {row.read for row in rows if row.write > 0 and row.read > 0}:
        memory.fill(slot, torch.randn((taps - 1, channels), generator=generator))
    shared: dict[str, Any] = {
        "weight": torch.randn((channels, taps), generator=generator).to(x),
        "bias": torch.randn((channels,), generator=generator).to(x) if bias else None,
        "activation": activation,
    }
    return Case("conv_step", rows, {"x": x}, shared, memory, like="x")


def float64(tensor: Tensor) -> Array:
    return tensor.double().cpu().numpy()


def run(case: Case, backend: Backend) -> Tensor:
    """Every output within the bound of the convolution, exact windows, and zeros or old bytes elsewhere."""
    state, before = case.memory.state, case.memory.state.clone()
    weight, bias, silu = case.shared["weight"], case.shared["bias"], case.shared["activation"] == "silu"
    offset = np.zeros(len(weight)) if bias is None else float64(bias)
    out = case.step(backend)
    changed: set[int] = set()
    for i, row in enumerate(case.rows):
        real = row.tokens if row.write > 0 else 0
        assert not out[i, real:].any()
        if row.write <= 0:
            continue
        changed |= {slot for slot in (row.write, row.snapshot) if slot > 0}
        window = float64(before[row.read]) if row.read > 0 else np.zeros(state.shape[1:])
        arguments = (float64(case.inputs["x"][i, :real]), float64(weight), offset, window, silu)
        exact, new = causal_conv(*arguments)
        bound = causal_conv_bound(*arguments).stored(out.dtype, backend.name)
        assert (np.abs(float64(out[i, :real]) - exact) <= bound.error).all()
        assert same_bits(state[row.write].cpu(), torch.from_numpy(new.copy()).to(state.dtype))
        if row.snapshot > 0:
            assert same_bits(state[row.snapshot], state[row.write])
    case.memory.check_changed_only(changed)
    return out


@pytest.mark.parametrize(("state", "inputs"), DTYPES)
def test_G2_mixed_batch_agrees_with_the_convolution(
    backend: Backend, generator: torch.Generator, state: torch.dtype, inputs: torch.dtype
) -> None:
    run(build(backend, generator, state=state, inputs=inputs), backend)


@pytest.mark.parametrize("taps", [2, 3, 4, 6])
@pytest.mark.parametrize("tokens", [1, 7])
def test_G2_windows_longer_and_shorter_than_the_step(
    backend: Backend, generator: torch.Generator, taps: int, tokens: int
) -> None:
    rows = [Row(1, 1, tokens=tokens), Row(0, 2, tokens=tokens)]
    run(build(backend, generator, rows, tokens, taps=taps), backend)


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("bias", [True, False])
def test_G2_with_and_without_bias_and_activation(
    backend: Backend, generator: torch.Generator, activation: str | None, bias: bool
) -> None:
    run(build(backend, generator, [Row(1, 2)], bias=bias, activation=activation), backend)


def test_G2_channels_that_fill_no_block(backend: Backend, generator: torch.Generator) -> None:
    run(build(backend, generator, [Row(1, 2), Row(0, 3)], channels=262), backend)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, under the interpreter
def test_G2_silu_of_large_values(backend: Backend, generator: torch.Generator) -> None:
    """No overflow on the way: where exp(-y) is infinite, y sigmoid(y) is zero."""
    case = build(backend, generator, [Row(1, 2)])
    case.inputs["x"] *= 100
    assert bool(run(case, backend).isfinite().all())


def test_G2_reference_and_kernel_agree(backend: Backend, generator: torch.Generator) -> None:
    """On the same inputs each is within the bound of the exact answer, so within twice the bound of the other."""
    case = build(backend, generator)
    run(case.twin(), Backend("reference", backend.device))
    run(case, backend)


def test_G2_bounds_tell_fp32_from_less(generator: torch.Generator) -> None:
    """The bound follows the convolution, is one of fp32, and products rounded to bf16 break it."""
    x, window = (torch.randn(n, 8, generator=generator).double().numpy() for n in (5, 3))
    weight, bias = torch.randn(8, 4, generator=generator).double().numpy(), np.ones(8)
    exact, _ = causal_conv(x, weight, bias, window, silu=True)
    bound = causal_conv_bound(x, weight, bias, window, silu=True)
    assert np.allclose(bound.value, exact, rtol=0, atol=1e-13) and bound.error.max() < 1e-4
    coarse = torch.from_numpy(weight).bfloat16().double().numpy()
    assert (np.abs(causal_conv(x, coarse, bias, window, silu=True)[0] - exact) > bound.error).any()


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_G2_chunking_does_not_change_bits(
    backend: Backend, generator: torch.Generator, cuts: list[int], dtype: torch.dtype
) -> None:
    """With any state that holds the inputs exactly."""
    check_chunks(build(backend, generator, state=dtype, inputs=dtype), backend, cuts)


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
    assert bool(run(case, backend)[0].any())
    assert bool(case.memory.state[1, -1].any()) and not case.memory.state[1, :-1].any()


@pytest.mark.parametrize("null", [0, -1])
def test_B16_null_reads_as_zeros(backend: Backend, generator: torch.Generator, null: int) -> None:
    """Slot 0 and what lies before it are NaN here: a single byte of either would show."""
    case = build(backend, generator, [Row(null, 1), Row(null, 0), Row(null, 2, 3, 0)])
    out = run(case, backend)
    assert bool(out[0].isfinite().all()) and not out[1:].any()
    assert not case.memory.state[2:4].any()  # no token and nothing read: a window of zeros


@pytest.mark.parametrize("row", COINCIDING)
@pytest.mark.parametrize("tokens", [0, 2])
def test_B40_slots_of_one_row_may_coincide(backend: Backend, generator: torch.Generator, row: Row, tokens: int) -> None:
    run(build(backend, generator, [row._replace(tokens=tokens)], tokens=2), backend)


def test_B40_rows_may_read_one_slot(backend: Backend, generator: torch.Generator) -> None:
    """Several requests start from one cached window: it stays, and each writes its own."""
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
    assert same_bits(backend.conv_step(**case.arguments()), other.step(backend))


def test_empty_batch(backend: Backend, generator: torch.Generator) -> None:
    assert build(backend, generator, []).step(backend).shape[0] == 0


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("x", lambda t: t.transpose(1, 2)),
        ("x", lambda t: t[0]),
        ("weight", lambda t: t[:, :1]),
        ("weight", lambda t: t.t().contiguous().t()),
        ("bias", lambda t: t[:1]),
        ("bias", lambda t: t.int()),
        ("state", lambda t: t[:, :1]),
        ("state", lambda t: t.transpose(1, 2)),
        ("write", lambda t: t[:1]),
        ("snapshot", lambda t: t.float()),
        ("activation", lambda t: "relu"),
    ],
)
def test_G1_misfits_are_named_and_change_nothing(
    backend: Backend, generator: torch.Generator, name: str, spoil: Callable[[Any], Any]
) -> None:
    case = build(backend, generator, [Row(1, 1), Row(2, 2)])
    check_misfit(case, backend, name, spoil(case.arguments()[name]))
