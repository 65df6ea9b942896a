"""What is particular to the gated delta rule, with one gate a head or one a key channel (KDA).

What all decode steps have in common: test_decode_steps.py.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from memstate.kernels.dispatch import Backend
from tests.support.decode_case import MIXED, Case, Memory, Pairs, Row, check_step, fill_rows, same_bits
from tests.support.recurrences import Array, float64, gated_delta, gated_delta_bound, kda, kda_bound

per_key = pytest.mark.parametrize("per_key", [False, True], ids=["gdn", "kda"])


def build(
    backend: Backend, generator: torch.Generator, rows: list[Row] = MIXED, tokens: int = 3,
    state: torch.dtype = torch.float32, inputs: torch.dtype = torch.float32,
    dims: tuple[int, int, int, int] | None = None, scale: float | None = None, per_key: bool = False,
) -> Case:  # fmt: skip
    """Random states in the slots that real rows read, random inputs for their real tokens, rubbish everywhere else.

    dims: heads, key heads, key, value; unless given a model's on a GPU, small ones where every program is interpreted.
    per_key: one decay for each key channel of a head instead of one for the head.
    """
    device = backend.device
    heads, key_heads, key, value = dims or ((32, 16, 128, 128) if device.type == "cuda" else (2, 1, 16, 16))
    memory = Memory((heads, key, value), state, device, generator)
    shapes = {"q": ((key_heads, key), inputs), "k": ((key_heads, key), inputs), "v": ((heads, value), inputs)}
    shapes |= {"decay": ((heads, key) if per_key else (heads,), torch.float32), "beta": ((heads,), torch.float32)}

    def in_range(name: str, x: Tensor) -> Tensor:
        x = torch.nn.functional.normalize(x, dim=-1) if name in ("q", "k") else x
        return -2 * x.abs() if name == "decay" else x.sigmoid() if name == "beta" else x

    made = fill_rows(memory, rows, tokens, shapes, generator, in_range)
    return Case("gated_delta_step", rows, made, {"scale": scale}, memory, like="v")


def stated(case: Case, i: int, real: int, old: Array, out: Tensor) -> Pairs:
    """Outputs and the new state, head by head."""
    exactly, bounds = (kda, kda_bound) if case.inputs["decay"].dim() == 4 else (gated_delta, gated_delta_bound)
    q, k, v, decay, beta = (float64(tensor[i, :real]) for tensor in case.inputs.values())
    scale = q.shape[-1] ** -0.5 if case.shared["scale"] is None else case.shared["scale"]
    for h in range(v.shape[1]):
        kh = h // (v.shape[1] // q.shape[1])
        arguments = (q[:, kh], k[:, kh], v[:, h], decay[:, h], beta[:, h], old[h], scale)
        computed = (out[i, :real, h], case.memory.state[case.rows[i].write, h])
        yield from zip(computed, exactly(*arguments), bounds(*arguments), strict=True)


def run(case: Case, backend: Backend) -> Tensor:
    return check_step(case, backend, stated)


@per_key
@pytest.mark.parametrize("dims", [(3, 3, 12, 20), (4, 2, 5, 7), (1, 1, 20, 33)])
def test_G2_odd_sizes_and_grouped_heads(
    backend: Backend, generator: torch.Generator, dims: tuple[int, int, int, int], per_key: bool
) -> None:
    run(build(backend, generator, [Row(1, 2), Row(0, 3)], dims=dims, scale=0.3, per_key=per_key), backend)


@per_key
def test_G2_bounds_tell_fp32_from_less(generator: torch.Generator, per_key: bool) -> None:
    """The bound follows the recurrence and is one of fp32; a state in bf16 or the gate in the wrong place breaks it."""
    exactly, bounds = (kda, kda_bound) if per_key else (gated_delta, gated_delta_bound)
    q, k, v = (torch.randn(3, 16, generator=generator).double().numpy() / 4 for _ in range(3))
    decay = -torch.rand(3, 16, generator=generator).double().numpy() if per_key else np.full(3, -0.5)
    beta, state = np.full(3, 0.5), torch.randn(16, 16, generator=generator).double().numpy()
    exact, new = exactly(q, k, v, decay, beta, state, 1.0)
    out, final = bounds(q, k, v, decay, beta, state, 1.0)
    assert np.allclose(out.value, exact, rtol=0, atol=1e-13) and np.allclose(final.value, new, rtol=0, atol=1e-13)
    assert out.error.max() < 1e-4
    rounded, swapped, outputs = state, state, []
    for t in range(3):
        o, rounded = exactly(*(x[t : t + 1] for x in (q, k, v, decay, beta)), rounded, 1.0)
        rounded = torch.from_numpy(rounded.copy()).bfloat16().double().numpy()
        outputs.append(o[0])
        swapped = swapped - beta[t] * np.outer(k[t], k[t] @ swapped - v[t])  # gated behind the delta
        swapped = np.exp(np.broadcast_to(decay[t], 16))[:, None] * swapped
    assert (np.abs(np.array(outputs) - exact) > out.error).any()
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
def test_G2_equal_channels_are_one_gate(backend: Backend, generator: torch.Generator, state: torch.dtype) -> None:
    """Element by element the two gates multiply the same numbers."""
    one_gate = build(backend, generator, state=state)
    per_channel = one_gate.twin()
    key = one_gate.inputs["q"].shape[-1]
    per_channel.inputs = one_gate.inputs | {"decay": one_gate.inputs["decay"][..., None].repeat(1, 1, 1, key)}
    assert same_bits(per_channel.step(backend), one_gate.step(backend))
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
