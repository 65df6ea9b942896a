"""Compares `gated_delta_step` with flash-linear-attention's torch code of DeltaProduct and Gated DeltaNet-2."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import StepMarks
from tests.support.decode_case import same_bits
from tests.support.peers import module, normal
from tests.support.recurrences import Rounded, float64, gated_delta_bound, low_rank_bound

HEADS, KEY, VALUE, TOKENS = 2, 16, 8, 3
SCALE = KEY**-0.5
READ, WRITE = [1, 0, 3], [2, 4, 3]

pytestmark = pytest.mark.filterwarnings("ignore:Triton is not supported")  # fla warns without a GPU


def start(backend: Backend, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns random slots, and the states that the rows read; the null slot reads as zeros."""
    states = normal(generator, 6, HEADS, KEY, VALUE).to(backend.device)
    old = states[READ].clone()
    old[1] = 0  # slot 0 reads as zeros
    return states, old


def column(values: list[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=like.device)


def vectors(tokens: int, like: Tensor) -> list[Tensor]:
    return [column(values, like) for values in (READ, WRITE, [0] * 3, [tokens] * 3)]


def close(mine: Tensor, other: Tensor, bound: Rounded, times: int) -> bool:
    return bool((np.abs(float64(mine) - float64(other)) <= times * bound.error).all())


@pytest.mark.parametrize("steps", [2, 3])
def test_a_token_of_deltaproduct_is_several_of_the_kernel(
    backend: Backend, generator: torch.Generator, steps: int
) -> None:
    """The kernel computes a token of the model as `steps` tokens: the first of these has the decay, the last gives the
    output.

    Marks count the kernel's tokens, not the model's.
    """
    recurrence = module("fla.ops.gated_delta_product.naive").naive_recurrent_gated_delta_product
    states, old = start(backend, generator)
    shape = 3, TOKENS * steps, HEADS
    q, k = (normalize(normal(generator, 3, n, HEADS, KEY), dim=-1).to(states) for n in (TOKENS, shape[1]))
    v, g = normal(generator, *shape, VALUE).to(states), -normal(generator, 3, TOKENS, HEADS).abs().to(states)
    beta = 2 * normal(generator, *shape).sigmoid().to(states)
    outputs, final = recurrence(q, k, v, g, beta, SCALE, initial_state=old, num_householder=steps)

    decay = torch.zeros(3, TOKENS, steps, HEADS).to(states)
    decay[:, :, 0] = g
    decay, asked = decay.flatten(1, 2), q.repeat_interleave(steps, 1)
    # one mark, after two tokens of the last row
    marks = StepMarks(*(column([value], states) for value in (1, 2, 2 * steps, 5)))
    ours = backend.gated_delta_step(asked, k, v, decay, beta, states, *vectors(shape[1], states), marks=marks)
    for i in range(3):
        for h in range(HEADS):
            given = [float64(x[i, :, h]) for x in (asked, k, v, decay, beta)]
            of_tokens, of_state = gated_delta_bound(*given, float64(old[i, h]), SCALE)
            assert close(ours[i, steps - 1 :: steps, h], outputs[i, :, h], of_tokens[steps - 1 :: steps], 2)
            assert close(states[WRITE[i], h], final[i, h], of_state, 2)
    states[1] = old[2]  # the last row runs again, with its first two tokens only
    short = [column(values, states) for values in ([1], [2], [0], [2 * steps])]
    backend.gated_delta_step(*(x[2:, : 2 * steps].contiguous() for x in (asked, k, v, decay, beta)), states, *short)
    assert same_bits(states[2], states[5])


def test_gated_deltanet_2_is_a_generalized_delta_rule(backend: Backend, generator: torch.Generator) -> None:
    """Gated DeltaNet-2 reads the decayed state along erase * k and subtracts the result along k.

    So in `gated_delta_step`, `a` is erase * k * decay, and `b` is -k.
    """
    recurrence = module("fla.ops.gdn2.naive").naive_recurrent_gdn2
    states, old = start(backend, generator)
    q, k = normalize(normal(generator, 2, 3, TOKENS, HEADS, KEY), dim=-1).to(states)
    erase, keep = normal(generator, 2, 3, TOKENS, HEADS, KEY).sigmoid().to(states)
    v, write = normal(generator, 2, 3, TOKENS, HEADS, VALUE).to(states)
    decay, write = keep.log(), write.sigmoid()
    outputs, final = recurrence(q, k, v, decay, erase, write, initial_state=old, output_final_state=True)
    value, a, b = write * v, erase * k * decay.exp(), -k
    ours = backend.gated_delta_step(q, k, value, decay, None, states, *vectors(TOKENS, states), a=a, b=b)
    for i in range(3):
        for h in range(HEADS):
            given = [float64(x[i, :, h]) for x in (q, k, value, decay, a, b)]
            of_tokens, of_state = low_rank_bound(*given, float64(old[i, h]), SCALE)
            assert close(ours[i, :, h], outputs[i, :, h], of_tokens, 4)  # `a` has two more roundings than fla
            assert close(states[WRITE[i], h], final[i, h], of_state, 4)
