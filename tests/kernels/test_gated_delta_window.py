"""The window of a speculative step: the state behind every token, bit by bit what slots would hold, and no slot stored.

One gate a head and one a key channel (KDA) throughout.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from memstate.kernels.dispatch import Backend
from tests.kernels.test_gated_delta import DTYPES, build, float64
from tests.support.decode_case import GUARD, MIXED, SLOTS, Case, Row, check_misfit, far_apart, rubbish, same_bits
from tests.support.recurrences import gated_delta, gated_delta_bound, kda, kda_bound

per_key = pytest.mark.parametrize("per_key", [False, True], ids=["gdn", "kda"])
LAST = SLOTS - 1  # no row of these tests reads it


def windowed(case: Case, generator: torch.Generator) -> tuple[Case, Tensor]:
    """The same step with a window in rubbish, and all the bytes around that: a guard before it and one behind."""
    state = case.memory.state
    shape = (len(case.rows), case.inputs["v"].shape[1], *state.shape[1:])
    nbytes = torch.empty(shape, dtype=state.dtype, device="meta").nbytes
    around = rubbish(GUARD + nbytes + GUARD, state.device, generator)
    window = around[GUARD : GUARD + nbytes].view(state.dtype).view(shape)
    return replace(case.twin(), shared=case.shared | {"window": window}), around


def check(case: Case, backend: Backend, generator: torch.Generator) -> None:
    """Output and window have the bits of steps that store a slot, one for every row and token; nothing else changes."""
    step, around = windowed(case, generator)
    window = step.shared["window"]
    expected, before = window.clone(), around.clone()
    out = step.step(backend)
    step.memory.check_changed_only(set())
    assert same_bits(around[:GUARD], before[:GUARD]) and same_bits(around[-GUARD:], before[-GUARD:])
    for i, row in enumerate(case.rows):
        real = min(max(row.tokens, 0), out.shape[1]) if row.write > 0 else 0
        assert not out[i, real:].any()
        for t in range(real):
            alone = case.twin().cut([i], 0, t + 1)
            alone.rows = [Row(row.read, LAST, 0, t + 1)]
            assert same_bits(alone.step(backend)[0], out[i, : t + 1])
            expected[i, t] = alone.memory.state[LAST]
    assert same_bits(window, expected)


@per_key
@pytest.mark.parametrize(("state", "inputs"), DTYPES)
def test_window_holds_the_state_behind_every_token(
    backend: Backend, generator: torch.Generator, state: torch.dtype, inputs: torch.dtype, per_key: bool
) -> None:
    """Stored at once, with a snapshot, from nothing, padding, without a token: and slots keep all their bytes."""
    check(build(backend, generator, MIXED, state=state, inputs=inputs, per_key=per_key), backend, generator)


@per_key
@pytest.mark.parametrize("dims", [(3, 3, 12, 20), (4, 2, 8, 8), (2, 1, 5, 7)])
def test_odd_sizes_and_grouped_heads(
    backend: Backend, generator: torch.Generator, dims: tuple[int, int, int, int], per_key: bool
) -> None:
    case = build(backend, generator, [Row(1, 2), Row(0, 3, tokens=2)], dims=dims, scale=0.3, per_key=per_key)
    check(case, backend, generator)


@per_key
def test_G2_every_state_of_the_window_agrees_with_the_recurrence(
    backend: Backend, generator: torch.Generator, per_key: bool
) -> None:
    """Rounded to bf16 where it is stored and nowhere else: the bound grows by one rounding, whatever the token."""
    case = build(backend, generator, [Row(1, 2), Row(0, 3)], state=torch.bfloat16, per_key=per_key)
    step, _ = windowed(case, generator)
    step.step(backend)
    exactly, bounds = (kda, kda_bound) if per_key else (gated_delta, gated_delta_bound)
    for i, row in enumerate(case.rows):
        q, k, v, decay, beta = (float64(tensor[i]) for tensor in case.inputs.values())
        old = float64(case.memory.state[row.read]) if row.read > 0 else np.zeros(case.memory.state.shape[1:])
        for h in range(v.shape[1]):
            kh = h // (v.shape[1] // q.shape[1])
            for t in range(1, len(v) + 1):
                arguments = (q[:t, kh], k[:t, kh], v[:t, h], decay[:t, h], beta[:t, h], old[h], q.shape[-1] ** -0.5)
                bound = bounds(*arguments)[1].stored(torch.bfloat16, backend.name)
                got = float64(step.shared["window"][i, t - 1, h])
                assert (np.abs(got - exactly(*arguments)[1]) <= bound.error).all()


@per_key
def test_output_has_the_bits_of_a_step_that_stores(backend: Backend, generator: torch.Generator, per_key: bool) -> None:
    """Also where slots lie so that no wide access fits: the window must not change how a sum is added up."""
    case = build(backend, generator, [Row(1, 1), Row(2, 3)], per_key=per_key)
    slots = case.memory.state.clone()
    for gap in (0, 1, 2):
        stored, step = case.twin(), windowed(case, generator)[0]
        for other in (stored, step):
            other.memory.state = far_apart(SLOTS, slots[0], slots[0].numel() + gap)
            other.memory.state.copy_(slots)
        assert same_bits(stored.step(backend), step.step(backend))
        assert same_bits(step.memory.state, slots)
        for i, row in enumerate(case.rows):
            assert same_bits(step.shared["window"][i, -1], stored.memory.state[row.write])


@per_key
@pytest.mark.parametrize("tokens", [9, 0, -3])
def test_token_counts_beyond_the_step(backend: Backend, generator: torch.Generator, tokens: int, per_key: bool) -> None:
    case = build(backend, generator, [Row(1, 2, tokens=2), Row(3, 4, tokens=2)], tokens=2, per_key=per_key)
    case.rows = [Row(1, 2, tokens=tokens), Row(3, 4, tokens=1)]
    check(case, backend, generator)


@per_key
@pytest.mark.parametrize("null", [0, -1])
def test_B14_padded_rows_leave_the_window_alone(
    backend: Backend, generator: torch.Generator, null: int, per_key: bool
) -> None:
    case = build(backend, generator, [Row(1, null, 2), Row(null, null), Row(3, null, 3, 1)], per_key=per_key)
    step, around = windowed(case, generator)
    before = around.clone()
    assert not step.step(backend).any()
    assert same_bits(around, before)
    step.memory.check_changed_only(set())


@per_key
def test_write_says_only_that_a_row_is_real(backend: Backend, generator: torch.Generator, per_key: bool) -> None:
    """Rows that share `write`, read what another one names there, or name a slot that does not exist."""
    rows = [Row(1, 1), Row(1, 1, 1, 2), Row(0, 1, -1, 1), Row(2, 2**31 - 1, 2**31 - 1)]
    check(build(backend, generator, rows, per_key=per_key), backend, generator)


@per_key
@pytest.mark.parametrize("accepted", [1, 2])
def test_an_accepted_state_goes_on(backend: Backend, generator: torch.Generator, accepted: int, per_key: bool) -> None:
    """Copied to a slot, the state behind an accepted token continues as if no token had been in doubt."""
    case = build(backend, generator, [Row(1, 2), Row(0, 3)], per_key=per_key)
    step = windowed(case, generator)[0]
    step.step(backend)
    rest = case.twin().cut([0, 1], accepted, 3)
    for i, row in enumerate(case.rows):
        rest.memory.fill(row.write, step.shared["window"][i, accepted - 1])
    rest.rows = [Row(row.write, row.write, 0, 3 - accepted) for row in case.rows]
    out = rest.step(backend)
    assert same_bits(out, case.step(backend)[:, accepted:].contiguous())
    for row in case.rows:
        assert same_bits(rest.memory.state[row.write], case.memory.state[row.write])


def test_B38_windows_beyond_2_31_elements(backend: Backend, generator: torch.Generator) -> None:
    """A row whose window begins behind 2^31 elements, in a batch of addresses of which it alone is computed."""
    dims = (32, 16, 128, 128) if backend.device.type == "cuda" else (1, 1, 2**16, 16)  # one program a row
    near = build(backend, generator, [Row(1, 1, tokens=1)], tokens=1, state=torch.float16, dims=dims)
    tokens = 2**31 // near.memory.state[1].numel() + 1

    def spread(like: Tensor) -> Tensor:
        return far_apart(2 * tokens, like, like.numel()).view(2, tokens, *like.shape)

    inputs = {name: spread(tensor[0, 0]) for name, tensor in near.inputs.items()}
    for name, tensor in near.inputs.items():
        inputs[name][1, 0] = tensor[0, 0]
    window = spread(near.memory.state[1])
    far = replace(near.twin(), rows=[Row(1, 0), Row(1, 1, tokens=1)], inputs=inputs, shared={"window": window})
    out = far.step(backend)
    assert same_bits(out[1, 0], near.step(backend)[0, 0]) and not out[0].any()
    assert same_bits(window[1, 0], near.memory.state[1])
    far.memory.check_changed_only(set())


def shifted(window: Tensor) -> Tensor:
    """The same values at an address that one lane's widest store does not fit."""
    bytes_ = torch.empty(window.nbytes + 8, dtype=torch.uint8, device=window.device)
    return bytes_[8:].view(window.dtype).view(window.shape).copy_(window)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda w: w.bfloat16(),
        lambda w: w[:1],
        lambda w: w[:, :2].contiguous(),
        lambda w: w[:, 0],
        lambda w: w.transpose(3, 4).contiguous().transpose(3, 4),
        lambda w: w.transpose(0, 1).contiguous().transpose(0, 1),
        shifted,
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
