"""The causal convolution step against np.convolve, bit by bit where bits are promised, in poisoned memory."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from memstate.kernels.dispatch import Backend
from tests.support.decode_case import (
    COINCIDING,
    MIXED,
    SLOTS,
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
from tests.support.recurrences import Array, causal_conv, causal_conv_bound

DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.float32, torch.bfloat16),
]
both_orders = pytest.mark.parametrize("channel_major", [False, True], ids=["tap_channel", "channel_tap"])


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
    channel_major: bool = False,
) -> Case:
    """Random windows in the slots that real rows read, random inputs for their real tokens, rubbish everywhere else.

    channels: unless given a model's on a GPU, a few where every program is interpreted. channel_major: slots lie in
    memory as `channel tap-1`.
    """
    device = backend.device
    channels = channels or (8192 if device.type == "cuda" else 24)
    memory = Memory((channels, taps - 1) if channel_major else (taps - 1, channels), state, device, generator)
    memory.state = memory.state.transpose(1, 2) if channel_major else memory.state
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
        stored = state[row.write].flatten()
        assert same_bits(stored.cpu(), torch.from_numpy(new.copy()).to(state.dtype).flatten())
        if row.snapshot > 0:
            assert same_bits(state[row.snapshot].flatten(), stored)
    case.memory.check_changed_only(changed)
    return out


def reordered(case: Case, generator: torch.Generator) -> Case:
    """The same step on memory of its own, whose slots lie in the other order."""
    state = case.memory.state
    memory = Memory((state.shape[2], state.shape[1]), state.dtype, state.device, generator)
    memory.state = memory.state.transpose(1, 2)
    for slot in range(SLOTS):
        memory.fill(slot, state[slot])
    return replace(case, memory=memory)


@both_orders
@pytest.mark.parametrize(("state", "inputs"), DTYPES)
def test_G2_mixed_batch_agrees_with_the_convolution(
    backend: Backend, generator: torch.Generator, state: torch.dtype, inputs: torch.dtype, channel_major: bool
) -> None:
    run(build(backend, generator, state=state, inputs=inputs, channel_major=channel_major), backend)


@both_orders
@pytest.mark.parametrize("taps", [2, 3, 4, 6])
@pytest.mark.parametrize("tokens", [1, 7])
def test_G2_windows_longer_and_shorter_than_the_step(
    backend: Backend, generator: torch.Generator, taps: int, tokens: int, channel_major: bool
) -> None:
    rows = [Row(1, 1, tokens=tokens), Row(0, 2, tokens=1)]
    run(build(backend, generator, rows, tokens, taps=taps, channels=12, channel_major=channel_major), backend)


@pytest.mark.parametrize(("taps", "channels"), [(4, 24), (3, 11), (2, 5), (4, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_orders_have_the_same_bits(
    backend: Backend, generator: torch.Generator, taps: int, channels: int, dtype: torch.dtype
) -> None:
    """With one old tap, or one channel, the orders are one, whatever the strides say."""
    rows = [Row(1, 1), Row(2, 3, 4, 2), Row(6, 6, 7, 0)]
    case = build(backend, generator, rows, state=dtype, inputs=dtype, taps=taps, channels=channels)
    other = reordered(case, generator)
    assert same_bits(run(other, backend), run(case, backend))
    for slot in (1, 3, 4, 6, 7):
        assert same_bits(other.memory.state[slot].flatten(), case.memory.state[slot].flatten())


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("bias", [True, False])
def test_G2_with_and_without_bias_and_activation(
    backend: Backend, generator: torch.Generator, activation: str | None, bias: bool
) -> None:
    run(build(backend, generator, [Row(1, 2)], bias=bias, activation=activation), backend)


@both_orders
@pytest.mark.parametrize("channels", [262, 3])
def test_G2_channels_that_fill_no_block(
    backend: Backend, generator: torch.Generator, channels: int, channel_major: bool
) -> None:
    run(build(backend, generator, [Row(1, 2, 3, 1)], 1, channels=channels, channel_major=channel_major), backend)


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


@pytest.mark.parametrize(("state", "channel_major"), [(torch.float32, True), (torch.bfloat16, False)])
def test_G2_a_row_does_not_depend_on_the_batch(
    backend: Backend, generator: torch.Generator, state: torch.dtype, channel_major: bool
) -> None:
    check_rows_alone(build(backend, generator, state=state, channel_major=channel_major), backend)


@pytest.mark.parametrize("cuts", [[0, 1, 2, 3], [0, 1, 3], [0, 2, 3]])
@pytest.mark.parametrize(("dtype", "channel_major"), [(torch.float32, False), (torch.bfloat16, True)])
def test_G2_chunking_does_not_change_bits(
    backend: Backend, generator: torch.Generator, cuts: list[int], dtype: torch.dtype, channel_major: bool
) -> None:
    """With any state that holds the inputs exactly."""
    check_chunks(build(backend, generator, state=dtype, inputs=dtype, channel_major=channel_major), backend, cuts)


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
@both_orders
@pytest.mark.parametrize("tokens", [0, 2])
def test_B40_slots_of_one_row_may_coincide(
    backend: Backend, generator: torch.Generator, row: Row, tokens: int, channel_major: bool
) -> None:
    case = build(backend, generator, [row._replace(tokens=tokens)], tokens=2, channels=12, channel_major=channel_major)
    run(case, backend)


@both_orders
def test_B40_rows_may_read_one_slot(backend: Backend, generator: torch.Generator, channel_major: bool) -> None:
    """Several requests start from one cached window: it stays, and each writes its own."""
    run(build(backend, generator, [Row(1, 2), Row(1, 3), Row(1, 4, 5)], channel_major=channel_major), backend)


@both_orders
def test_B38_slots_beyond_2_31_elements(backend: Backend, generator: torch.Generator, channel_major: bool) -> None:
    near = build(backend, generator, [Row(2, 2)], state=torch.float16, channel_major=channel_major)
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
        ("state", lambda t: t.double()),
        ("state", lambda t: t[:, :1].expand_as(t)),
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


@both_orders
def test_G1_slots_with_gaps_are_refused(backend: Backend, generator: torch.Generator, channel_major: bool) -> None:
    """In either order: the strides are told."""
    case = build(backend, generator, [Row(1, 1)], channel_major=channel_major)
    state = case.memory.state
    for axis in (1, 2):
        strides = [stride * (2 if axis == at else 1) for at, stride in enumerate(state.stride())]
        spread = torch.zeros(2 * state[0].numel(), dtype=state.dtype, device=state.device)
        spoilt = spread.as_strided((1, *state.shape[1:]), strides)
        with pytest.raises(ValueError, match=rf"^state: .*{re.escape(str(spoilt.stride()))}"):
            backend.conv_step(**(case.arguments() | {"state": spoilt}))
