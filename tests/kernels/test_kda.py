"""Kimi Delta Attention, the delta rule with one gate per key channel: the paper's recurrence in poisoned memory."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from memstate.kernels.dispatch import Backend
from tests.kernels.test_gated_delta import DTYPES, build, run
from tests.support.decode_case import (
    COINCIDING,
    Row,
    check_chunks,
    check_misfit,
    check_rows_alone,
    far_apart,
    same_bits,
)  # fmt: skip
from tests.support.recurrences import gated_delta, kda, kda_bound


@pytest.mark.parametrize(("state", "inputs"), DTYPES)
def test_G2_mixed_batch_agrees_with_the_recurrence(
    backend: Backend, generator: torch.Generator, state: torch.dtype, inputs: torch.dtype
) -> None:
    run(build(backend, generator, state=state, inputs=inputs, per_key=True), backend)


@pytest.mark.parametrize("dims", [(3, 3, 12, 20), (4, 2, 8, 8), (2, 1, 5, 7), (1, 1, 20, 33)])
def test_G2_odd_sizes_and_grouped_heads(
    backend: Backend, generator: torch.Generator, dims: tuple[int, int, int, int]
) -> None:
    run(build(backend, generator, [Row(1, 2), Row(0, 3)], dims=dims, scale=0.3, per_key=True), backend)


def test_G2_reference_and_kernel_agree(backend: Backend, generator: torch.Generator) -> None:
    """On the same inputs each is within the bound of the exact answer, so within twice the bound of the other."""
    case = build(backend, generator, per_key=True)
    run(case.twin(), Backend("reference", backend.device))
    run(case, backend)


def test_G2_bounds_tell_fp32_from_less(generator: torch.Generator) -> None:
    """The bound follows the recurrence and is one of fp32; a state in bf16 or the gate in the wrong place breaks it."""
    q, k, v = (torch.randn(3, 16, generator=generator).double().numpy() / 4 for _ in range(3))
    decay, beta = -torch.rand(3, 16, generator=generator).double().numpy(), np.full(3, 0.5)
    state = torch.randn(16, 16, generator=generator).double().numpy()
    exact, new = kda(q, k, v, decay, beta, state, 1.0)
    out, final = kda_bound(q, k, v, decay, beta, state, 1.0)
    assert np.allclose(out.value, exact, rtol=0, atol=1e-13) and np.allclose(final.value, new, rtol=0, atol=1e-13)
    assert out.error.max() < 1e-4

    rounded = torch.from_numpy(state.copy()).bfloat16().double().numpy()
    assert (np.abs(kda(q, k, v, decay, beta, rounded, 1.0)[0] - exact) > out.error).any()
    swapped = state  # gated behind the delta instead of before it
    for t in range(3):
        swapped = swapped - beta[t] * np.outer(k[t], k[t] @ swapped - v[t])
        swapped = np.exp(decay[t])[:, None] * swapped
    assert (np.abs(swapped - new) > final.error).any()


def test_the_statements_agree_where_channels_do(generator: torch.Generator) -> None:
    """Two statements, written down apart, of what is one recurrence when every channel has the same gate."""
    q, k, v = (torch.randn(4, 8, generator=generator).double().numpy() for _ in range(3))
    decay, beta = -torch.rand(4, generator=generator).double().numpy(), np.full(4, 0.7)
    state = torch.randn(8, 8, generator=generator).double().numpy()
    one_gate = gated_delta(q, k, v, decay, beta, state, 0.5)
    per_channel = kda(q, k, v, np.repeat(decay[:, None], 8, axis=1), beta, state, 0.5)
    assert all(np.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(one_gate, per_channel, strict=True))


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_G2_equal_channels_have_the_bits_of_one_gate(
    backend: Backend, generator: torch.Generator, state: torch.dtype
) -> None:
    """Element by element the two gates multiply the same numbers."""
    one_gate = build(backend, generator, state=state)
    per_channel = one_gate.twin()
    key = one_gate.inputs["q"].shape[-1]
    per_channel.inputs = one_gate.inputs | {"decay": one_gate.inputs["decay"][..., None].repeat(1, 1, 1, key)}
    assert same_bits(run(per_channel, backend), one_gate.step(backend))
    assert same_bits(per_channel.memory.whole, one_gate.memory.whole)


def test_each_channel_has_its_own_gate(backend: Backend, generator: torch.Generator) -> None:
    """Without a delta, a channel with gate 1 keeps its bits and one with gate 0 is gone, in every head."""
    case = build(backend, generator, [Row(1, 2)], per_key=True)
    case.inputs["beta"].zero_()
    decay = case.inputs["decay"]
    closed = torch.rand(decay.shape[2:], generator=generator).to(decay.device) < 0.5  # head key
    decay.copy_(torch.where(closed, -torch.inf, 0.0))
    old = case.memory.state[1].clone()
    case.step(backend)
    assert torch.equal(case.memory.state[2], torch.where(closed[:, :, None], 0.0, old))


def test_G2_state_is_rounded_only_when_stored(backend: Backend, generator: torch.Generator) -> None:
    """A bf16 state and fp32 outputs: within the fp32 bound, which rounding between tokens would exceed."""
    run(build(backend, generator, [Row(1, 1), Row(2, 3)], state=torch.bfloat16, per_key=True), backend)


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_G2_a_row_does_not_depend_on_the_batch(
    backend: Backend, generator: torch.Generator, state: torch.dtype
) -> None:
    check_rows_alone(build(backend, generator, state=state, per_key=True), backend)


@pytest.mark.parametrize("cuts", [[0, 1, 2, 3], [0, 1, 3], [0, 2, 3]])
def test_G2_chunking_does_not_change_bits(backend: Backend, generator: torch.Generator, cuts: list[int]) -> None:
    check_chunks(build(backend, generator, per_key=True), backend, cuts)


@pytest.mark.parametrize("null", [0, -1, -7])
def test_B14_padded_rows_change_nothing(backend: Backend, generator: torch.Generator, null: int) -> None:
    """A batch that is all padding, whatever its other columns say: zeros out, and every byte as it was."""
    case = build(backend, generator, [Row(null, null, null), Row(1, null, 2), Row(3, null, 3, 1)], per_key=True)
    assert not run(case, backend).any()
    case.memory.check_changed_only(set())


@pytest.mark.parametrize("null", [0, -1])
def test_B16_null_reads_as_zeros(backend: Backend, generator: torch.Generator, null: int) -> None:
    """Slot 0 and what lies before it are NaN here: a single byte of either would show."""
    case = build(backend, generator, [Row(null, 1), Row(null, 0), Row(null, 2, 3, 0)], per_key=True)
    out = run(case, backend)
    assert bool(out[0].isfinite().all()) and not out[1:].any()
    assert not case.memory.state[2:4].any()  # no token and nothing read: a state of zeros


@pytest.mark.parametrize("row", COINCIDING)
@pytest.mark.parametrize("tokens", [0, 2])
def test_B40_slots_of_one_row_may_coincide(backend: Backend, generator: torch.Generator, row: Row, tokens: int) -> None:
    run(build(backend, generator, [row._replace(tokens=tokens)], tokens=2, per_key=True), backend)


def test_B38_slots_beyond_2_31_elements(backend: Backend, generator: torch.Generator) -> None:
    near = build(backend, generator, [Row(2, 2)], state=torch.float16, per_key=True)
    far = near.twin()
    far.memory.state = far_apart(3, near.memory.state[2], 2**30 + 8)
    far.memory.state[2] = near.memory.state[2]
    assert same_bits(far.step(backend), near.step(backend))
    assert same_bits(far.memory.state[2], near.memory.state[2])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda t: t[..., :-1].contiguous(),
        lambda t: torch.cat([t, t[..., :1]], dim=-1),
        lambda t: t[..., :1].contiguous(),
        lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
        lambda t: t[..., None],
        lambda t: t[:, :2].contiguous(),
        lambda t: t.double(),
    ],
)
def test_G1_misfits_are_named_and_change_nothing(
    backend: Backend, generator: torch.Generator, spoil: Callable[[Tensor], Tensor]
) -> None:
    case = build(backend, generator, [Row(1, 1), Row(2, 2)], per_key=True)
    check_misfit(case, backend, "decay", spoil(case.inputs["decay"]))
