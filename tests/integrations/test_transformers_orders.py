"""Tests layers in any order: the size of an attention mask comes from a layer of the same kind of attention.

The window has 6 tokens; prompts and chunks are shorter and longer than the window.
"""

from itertools import permutations
from typing import Any

import pytest
import torch

from tests.support.tiny_models import tiny
from tests.support.tiny_served import NEW, TEXT, alone, managed

pytest.importorskip("transformers")
import memstate.integrations.transformers as mst
from tests.support.own_model import FULL, SLIDING, STATES, own_model

PROMPTS = tuple([*TEXT, *TEXT][:length] for length in (20, 33, 5))
CHUNKS = (256, 13, 3)


def check(model: Any) -> None:
    """Checks that a server, and `generate` from cached states, give the answers of the model with its own cache."""
    expected = [alone(model, tokens, {}) for tokens in PROMPTS]
    for chunk in CHUNKS:
        prompts = [mst.Prompt(tokens, number, most=NEW) for number, tokens in enumerate(PROMPTS)]
        answers = {one.id: one.tokens for one in mst.serve(model, managed(model), prompts, chunk=chunk)}
        assert [answers[number] for number in range(len(PROMPTS))] == expected, chunk
    mem, ids = managed(model), torch.tensor([PROMPTS[1]])
    for cached in (0, 32):
        with mst.StateCache(model, mem, prompt=ids) as cache:
            assert cache.cached == [cached]
            out = model.generate(ids, **{cache.argument: cache}, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
            assert out[0, ids.shape[1] :].tolist() == expected[1]


def test_a_mask_of_full_attention_is_not_sized_by_a_layer_with_a_window_and_states() -> None:
    check(tiny("zaya", changes=(("layer_types", ("hybrid_sliding", "hybrid") * 2),)))


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "kinds",
    [" ".join(kinds) for kinds in permutations(dict.fromkeys((*STATES, *FULL, *SLIDING, "moe")), 3)
     if {*kinds} & {*STATES} and {*kinds} & {*FULL, *SLIDING}],
)  # fmt: skip
def test_every_mixture_of_layers_answers_as_with_its_own_cache(kinds: str) -> None:
    check(own_model(kinds.split()))
