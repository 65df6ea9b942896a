"""The convolution step that stores no slot: its window has every input once, exactly, and the rest is untouched."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from memstate.kernels.dispatch import Backend
from tests.kernels.test_conv import DTYPES, both_orders, build, float64
from tests.support.decode_case import GUARD, Case, Row, check_misfit, far_apart, rubbish, same_bits
from tests.support.recurrences import causal_conv, causal_conv_bound


def windowed(case: Case, generator: torch.Generator) -> tuple[Case, Tensor]:
    """The same step with a window in rubbish, and all the bytes around that: a guard before it and one behind."""
    state, (batch, tokens, channels) = case.memory.state, case.inputs["x"].shape
    shape = (batch, state.shape[1] + tokens, channels)
    nbytes = torch.empty(shape, dtype=state.dtype, device="meta").nbytes
    around = rubbish(GUARD + nbytes + GUARD, state.device, generator)
    window = around[GUARD : GUARD + nbytes].view(state.dtype).view(shape)
    return replace(case.twin(), shared=case.shared | {"window": window}), around


def check(case: Case, backend: Backend, generator: torch.Generator) -> None:
    """Inputs in the window, what a step that stores slots returns, and no other byte changed."""
    step, around = windowed(case, generator)
    window, x, state = step.shared["window"], case.inputs["x"], case.memory.state
    old, expected, before = state.shape[1], window.clone(), around.clone()
    out = step.step(backend)
    for i, row in enumerate(case.rows):
        if row.write <= 0:
            assert not out[i].any()
            continue
        real = min(max(row.tokens, 0), x.shape[1])
        expected[i, :old] = state[row.read] if row.read > 0 else 0
        expected[i, old : old + real] = x[i, :real].to(state.dtype)
        alone = case.twin().cut([i], 0, x.shape[1])
        alone.rows = [Row(row.read, 1, 0, real)]
        assert same_bits(alone.step(backend)[0], out[i])
    assert same_bits(window, expected)
    assert same_bits(around[:GUARD], before[:GUARD]) and same_bits(around[-GUARD:], before[-GUARD:])
    step.memory.check_changed_only(set())


@both_orders
@pytest.mark.parametrize(("state", "inputs"), DTYPES)
def test_window_has_every_input_once(
    backend: Backend, generator: torch.Generator, state: torch.dtype, inputs: torch.dtype, channel_major: bool
) -> None:
    """Read in place, with a snapshot, from nothing, padding, without a token: and slots keep all their bytes."""
    check(build(backend, generator, state=state, inputs=inputs, channel_major=channel_major), backend, generator)


@pytest.mark.parametrize(("taps", "channel_major"), [(2, False), (3, True), (6, False), (6, True)])
@pytest.mark.parametrize("tokens", [1, 7])
def test_windows_longer_and_shorter_than_the_step(
    backend: Backend, generator: torch.Generator, taps: int, tokens: int, channel_major: bool
) -> None:
    rows = [Row(1, 1, tokens=tokens), Row(0, 2, tokens=1)]
    case = build(backend, generator, rows, tokens, taps=taps, channels=12, channel_major=channel_major)
    check(case, backend, generator)


@both_orders
@pytest.mark.parametrize("channels", [262, 3])
def test_channels_that_fill_no_block(
    backend: Backend, generator: torch.Generator, channels: int, channel_major: bool
) -> None:
    rows = [Row(1, 2, tokens=1), Row(2, 3, tokens=2)]
    case = build(backend, generator, rows, 2, channels=channels, bias=False, channel_major=channel_major)
    check(case, backend, generator)


@both_orders
def test_G2_output_agrees_with_the_convolution(
    backend: Backend, generator: torch.Generator, channel_major: bool
) -> None:
    """Of inputs before they are rounded for the window, which is coarser here."""
    case = build(backend, generator, [Row(1, 1)], state=torch.float16, channel_major=channel_major)
    out = windowed(case, generator)[0].step(backend)
    model = (float64(case.shared["weight"]), float64(case.shared["bias"]), float64(case.memory.state[1]))
    x = float64(case.inputs["x"][0])
    bound = causal_conv_bound(x, *model, silu=True).stored(out.dtype, backend.name)
    assert (np.abs(float64(out[0]) - causal_conv(x, *model, silu=True)[0]) <= bound.error).all()


@both_orders
@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_an_accepted_prefix_is_what_a_step_of_it_stores(
    backend: Backend, generator: torch.Generator, accepted: int, channel_major: bool
) -> None:
    """Window a : a + tap-1, for fewer tokens than old inputs too; going on from there changes no bit."""
    case = build(backend, generator, [Row(1, 2), Row(0, 3)], channel_major=channel_major)
    step = windowed(case, generator)[0]
    out = step.step(backend)
    short = case.twin().cut([0, 1], 0, accepted)
    short.step(backend)
    old = case.memory.state.shape[1]
    for i, row in enumerate(case.rows):
        assert same_bits(step.shared["window"][i, accepted : accepted + old], short.memory.state[row.write])
    rest = replace(case, memory=short.memory).cut([0, 1], accepted, 3)
    rest.rows = [row._replace(read=row.write) for row in rest.rows]
    assert same_bits(rest.step(backend), out[:, accepted:])


@pytest.mark.parametrize("tokens", [9, 0, -3])
def test_token_counts_beyond_the_step(backend: Backend, generator: torch.Generator, tokens: int) -> None:
    case = build(backend, generator, [Row(1, 2, tokens=2), Row(3, 4, tokens=2)], tokens=2)
    case.rows = [Row(1, 2, tokens=tokens), Row(3, 4, tokens=1)]
    check(case, backend, generator)


@both_orders
@pytest.mark.parametrize("null", [0, -1])
def test_B14_padded_rows_leave_the_window_alone(
    backend: Backend, generator: torch.Generator, null: int, channel_major: bool
) -> None:
    rows = [Row(1, null, 2), Row(null, null), Row(3, null, 3, 1)]
    step, around = windowed(build(backend, generator, rows, channel_major=channel_major), generator)
    before = around.clone()
    assert not step.step(backend).any()
    assert same_bits(around, before)
    step.memory.check_changed_only(set())


@both_orders
def test_write_says_only_that_a_row_is_real(backend: Backend, generator: torch.Generator, channel_major: bool) -> None:
    """Rows that share `write`, read what another one names there, or name a slot that does not exist."""
    rows = [Row(1, 1), Row(1, 1, 1, 2), Row(0, 1, -1, 1), Row(-2, 2**31 - 1, 2**31 - 1)]
    check(build(backend, generator, rows, channel_major=channel_major), backend, generator)


@both_orders
def test_B38_slots_beyond_2_31_elements(backend: Backend, generator: torch.Generator, channel_major: bool) -> None:
    near, around = windowed(build(backend, generator, [Row(2, 2)], channel_major=channel_major), generator)
    out, window = near.step(backend), near.shared["window"].clone()
    far = near.twin()
    far.memory.state = far_apart(3, near.memory.state[2], 2**30 + 8)
    far.memory.state[2] = near.memory.state[2]
    around.fill_(0xFF)
    assert same_bits(far.step(backend), out) and same_bits(near.shared["window"], window)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda w: w.bfloat16(),
        lambda w: w[:1],
        lambda w: w[:, 1:].contiguous(),
        lambda w: w[:, 0],
        lambda w: w.transpose(1, 2).contiguous().transpose(1, 2),
        lambda w: w.transpose(0, 1).contiguous().transpose(0, 1),
    ],
)
def test_G1_misfits_are_named_and_change_nothing(
    backend: Backend, generator: torch.Generator, spoil: Callable[[Tensor], Tensor]
) -> None:
    step, around = windowed(build(backend, generator, [Row(1, 1), Row(2, 2)]), generator)
    before = around.clone()
    check_misfit(step, backend, "window", spoil(step.shared["window"]))
    assert same_bits(around, before)


def test_empty_batch(backend: Backend, generator: torch.Generator) -> None:
    step, around = windowed(build(backend, generator, []), generator)
    assert step.step(backend).shape[0] == 0 and around.numel() == 2 * GUARD
