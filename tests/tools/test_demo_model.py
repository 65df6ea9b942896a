"""Tests the demo's model: its sums are exact in any order, and its attention is softmax attention.

Each run of the demo checks that the numbers of a row do not depend on its batch.
"""

import torch

from memstate.kernels.dispatch import Backend
from memstate_tools.demo.arithmetic import (
    LIMIT,
    TERM_BITS,
    WEIGHT_BITS,
    attend,
    decaying_exp,
    fixed,
)
from memstate_tools.demo.corpus import ChatScript
from memstate_tools.demo.model import HybridModel
from memstate_tools.demo.sizes import ModelSize
from memstate_tools.demo.uncached import Uncached


def test_B52_the_chunk_size_changes_nothing(backend: Backend) -> None:
    conversation = ChatScript(0, b"About heapq: ", (b"heappush?", b"nlargest?"))
    tiny = ModelSize(recurrent_layers=1, heads=1)
    lengths = [9, 24]
    runs = [Uncached(HybridModel(tiny, 1, backend), chunk, 12, 8, 0).answer(conversation, lengths) for chunk in (7, 16)]
    assert runs[0].tokens == runs[1].tokens and runs[0].states == runs[1].states and set(lengths) <= set(runs[0].states)
    assert {at: x.tobytes() for at, x in runs[0].logits.items()} == {
        at: x.tobytes() for at, x in runs[1].logits.items()
    }


def test_sums_are_exact_whatever_their_order() -> None:
    """Adds the model's widest sum with the largest possible terms forwards, backwards and pairwise."""
    draw = torch.Generator().manual_seed(0)
    x = fixed(torch.randn(64, generator=draw) * LIMIT, TERM_BITS)
    weight = fixed(torch.randn(64, generator=draw) * 4, WEIGHT_BITS)
    terms = (x * weight).tolist()
    pairwise = (x * weight).view(2, 32).sum(1).sum().item()
    assert sum(terms) == sum(reversed(terms)) == sum(sorted(terms)) == pairwise == (x @ weight).item()


def test_attention_is_softmax_attention_with_a_close_exponential() -> None:
    draw = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, 2, n, 16, generator=draw) for n in (3, 9, 9))
    visible = torch.ones(2, 1, 3, 9, dtype=torch.bool).tril(4)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    assert torch.allclose(attend(q, k, v, visible), expected, atol=0.05)
    x = torch.linspace(-20, 0, 50)
    assert torch.allclose(decaying_exp(x), x.exp(), atol=0.003) and (decaying_exp(x).diff() > 0).all()
    assert decaying_exp(torch.tensor([0.0, -300.0])).tolist() == [1.0, 0.0]
    assert torch.equal(attend(q, k, v, torch.zeros_like(visible)), torch.zeros(2, 2, 3, 16))
