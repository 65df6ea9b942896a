"""Tests parts of the demo: sources of conversations, ends of answers, and the model, whose sums are exact in any order.

Each run of the demo checks that the numbers of a row do not depend on its batch.
"""

import inspect
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from memstate.errors import InvalidArgument
from memstate.kernels.dispatch import Backend
from memstate_tools.demo.answers import longest_context, noise, rule_for
from memstate_tools.demo.arithmetic import (
    LIMIT,
    TERM_BITS,
    WEIGHT_BITS,
    attend,
    decaying_exp,
    fixed,
)
from memstate_tools.demo.corpus import LONGEST, ChatScript, first_requests, from_docstrings, from_file
from memstate_tools.demo.model import VOCABULARY, HybridModel
from memstate_tools.demo.sizes import ModelSize
from memstate_tools.demo.uncached import Uncached


@pytest.mark.parametrize("requests", [1, 2, 7, 40])
def test_docstring_conversations_have_as_many_turns_as_asked(requests: int) -> None:
    conversations = from_docstrings(requests, 0)
    assert sum(len(conversation.turns) for conversation in conversations) == requests
    assert [conversation.number for conversation in conversations] == list(range(len(conversations)))
    assert all(b"Python" in conversation.system and all(conversation.turns) for conversation in conversations)
    assert from_docstrings(requests, 0) == conversations


def test_system_prompts_are_shared_and_lengths_vary() -> None:
    conversations = from_docstrings(60, 0)
    systems = Counter(conversation.system for conversation in conversations)
    assert len(systems) == 3 and min(systems.values()) > 1
    assert len({conversation.prompt_bytes % 8 for conversation in conversations}) > 4
    assert max(len(conversation.turns) for conversation in conversations) > 2


def test_a_python_without_docstrings_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "getdoc", lambda thing: None)
    with pytest.raises(InvalidArgument, match="--input"):
        from_docstrings(3, 0)


def test_input_file_gives_its_conversations(tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    path.write_text('{"system": "Be brief.", "turns": ["Hé?", "More."]}\n\n{"turns": ["Alone"]}\n', encoding="utf-8")
    assert from_file(path) == [
        ChatScript(0, b"Be brief.", ("Hé?".encode(), b"More.")),
        ChatScript(1, b"", (b"Alone",)),
    ]


def test_a_line_that_is_too_long_is_named(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text('{"turns": ["' + "x" * (LONGEST + 1) + '"]}')
    with pytest.raises(InvalidArgument, match=f"{path}', line 1: {LONGEST + 1} bytes"):
        from_file(path)


def test_requests_cut_a_file_short() -> None:
    given = [
        ChatScript(0, b"", (b"a", b"b")),
        ChatScript(1, b"", (b"c", b"d", b"e")),
        ChatScript(2, b"", (b"f",)),
    ]
    assert first_requests(given, 3) == [given[0], ChatScript(1, b"", (b"c",))]
    assert first_requests(given, 2) == [given[0]]
    assert first_requests(given, 100) == given


@pytest.mark.parametrize("page_size", [1, 4, 8, 16])
def test_answers_fit_the_context_and_end_on_a_page(page_size: int) -> None:
    conversation = ChatScript(0, b"s" * 13, (b"t" * 5,) * 200)
    total, kinds = len(conversation.system), Counter[str]()
    for turn in range(200):
        total += 5
        rule = rule_for(0, 0, turn, total, page_size)
        assert rule == rule_for(0, 0, turn, total, page_size)
        assert (total + rule.limit - 1) % page_size == 0
        assert rule.abort_prompt < total and rule.abort_after < rule.limit
        kinds["prompt" if rule.abort_prompt else "answer" if rule.abort_after else "none"] += 1
        total += rule.limit
    assert total <= longest_context(conversation, page_size)
    assert kinds["prompt"] > 2 and kinds["answer"] > 5 and kinds["none"] > 140


def test_noise_depends_on_seed_conversation_and_position_only() -> None:
    first = noise(1, 2, 3)
    assert first.shape == (VOCABULARY,) and first.dtype == np.float32
    assert np.array_equal(first, noise(1, 2, 3))
    assert not any(np.array_equal(first, other) for other in (noise(0, 2, 3), noise(1, 3, 3), noise(1, 2, 4)))
    many = np.concatenate([noise(9, 0, at) for at in range(200)])
    assert abs(many.mean() - 0.5772) < 0.02  # Euler's constant, the mean of Gumbel noise


# -- the model ------------------------------------------------------------------------------------


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
