"""Tests `serve` with models of the caller's own, layers in any order, prompts of all kinds, and no settings.

The size of an attention mask must come from a layer of the same kind of attention.
"""

from collections.abc import Sequence
from copy import deepcopy
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import memstate as ms
from tests.support.tiny_models import tiny
from tests.support.tiny_served import NEW, TEXT, managed

pytest.importorskip("transformers")
from transformers import Cache, GenerationConfig

import memstate.integrations.transformers as mst
from memstate.integrations.transformers.prompts import checked
from tests.integrations.servers import Judged, answer
from tests.support.own_model import ARGUMENT, FULL, SLIDING, STATES, OwnModel, own_model


def own_answer(model: Any, tokens: Sequence[int], **settings: Any) -> list[int]:
    ids = torch.tensor([tokens])
    answer: list[int] = model.generate(ids, do_sample=False, **settings)[0, len(tokens) :].tolist()
    return answer


def test_a_model_that_nobody_knows_is_served_and_generates_as_with_its_own_cache() -> None:
    model = own_model()
    layout = mst.layout(model)
    assert [(place.layer, place.kind) for place in layout.places] == [
        (0, "conv"), (0, "recurrent"), (3, "conv"), (3, "recurrent")
    ]  # fmt: skip
    assert len(layout.state.planes) == 4 and not layout.on_slots and layout.continues
    at = Judged(model=model, max_requests=6, prefix=ms.Prefix())
    for turn in range(2):
        for n in (19, 2, 27):
            at.ask((turn, n), text=TEXT[:n], most=4)
    mem, done = at.mem, at.results()
    assert done[1, 19].cached and done[1, 27].cached
    ids = torch.tensor([TEXT[:9], [0, 0, *TEXT[:7]]])
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    for beams in (1, 3):
        settings = {"attention_mask": mask, "max_new_tokens": 4, "num_beams": beams, "do_sample": False}
        with mst.StateCache(model, mem) as cache:
            assert model.generate(ids, **{cache.argument: cache}, **settings).tolist() == (
                model.generate(ids, **settings).tolist()
            )


def test_a_forward_without_positions_would_give_all_rows_those_of_one_and_is_refused() -> None:
    class Unplaced(OwnModel):
        def forward(
            self, input_ids: Any, attention_mask: Any = None, cache: Any = None, past_key_values: Any = None, **_: Any
        ) -> Any:
            return super().forward(input_ids, attention_mask, None, cache or past_key_values)

    class Unnamed(OwnModel):
        def forward(self, input_ids: Any, **rest: Any) -> Any:
            return super().forward(input_ids, **rest)

    model = Unplaced(own_model().config).eval()
    mem = mst.manager(model, slots=8, max_requests=2, tokens=64)
    with pytest.raises(ms.ConfigurationError, match=r"Unplaced\.forward names no argument position_ids"):
        mst.Server(model, mem)
    with mst.StateCache(model, mem) as cache:  # in generate, all rows have one position
        ids = torch.tensor([TEXT[:9]])
        said = model.generate(ids, **{ARGUMENT: cache}, max_new_tokens=4, do_sample=False)[0, 9:].tolist()
        assert said == own_answer(model, TEXT[:9], max_new_tokens=4)
        assert cache.lengths == [12]
    with pytest.raises(ms.ConfigurationError, match=r"Unnamed.forward fills no cache .* \*\*kwargs pass a cache on"):
        mst.layout(Unnamed(own_model().config).eval())


def test_a_model_may_call_its_cache_by_any_name() -> None:
    class Named(OwnModel):
        def forward(
            self, input_ids: Any, hint: Any = None, memories: Any = None, attention_mask: Any = None,
            position_ids: Any = None, **_: Any,
        ) -> Any:  # fmt: skip
            return super().forward(input_ids, attention_mask, position_ids, memories)

    plain = own_model()
    model, own = Named(plain.config).eval(), answer(plain, TEXT[:9], 4)
    model.load_state_dict(plain.state_dict())
    assert mst.layout(model).argument == "memories"
    at = Judged(model=model)
    at.ask("a", most=4)
    assert at.results()["a"].tokens == own
    with mst.StateCache(model, at.mem) as cache:
        logits = [
            model(input_ids=torch.tensor([part]), **{cache.argument: cache}).logits[0, -1]
            for part in (TEXT[:9], own[:1], own[1:2])
        ]
        assert [int(one.argmax()) for one in logits] == own[:3] and cache.lengths == [11]


def test_a_model_that_runs_its_layers_again_adds_to_its_cache_and_is_served() -> None:
    class Looped(OwnModel):
        def forward(
            self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, memories: Any = None, **_: Any
        ) -> Any:
            number = self.config.num_hidden_layers
            if len(memories.layers) == number:
                memories.layers += deepcopy(memories.layers)
            first, second = Cache(layers=memories.layers[:number]), Cache(layers=memories.layers[number:])
            out = super().forward(input_ids, attention_mask, position_ids, first)
            out.logits = out.logits + super().forward(96 - input_ids, attention_mask, position_ids, second).logits
            return out

    model = Looped(own_model().config).eval()
    layout = mst.layout(model)
    assert (layout.layers, layout.copies, len(layout.places), len(layout.attended)) == (8, (0, 1, 2, 0), 8, 2)
    at = Judged(model=model, prefix=ms.Prefix())
    for cached in (0, 24):
        at.ask(cached, text=TEXT)
        assert at.results()[cached].cached == cached
    with mst.StateCache(model, managed(model)) as cache:
        logits = model(input_ids=torch.tensor([TEXT]), **{cache.argument: cache}).logits[0, -1]
        assert [int(logits.argmax())] == at.ends()[0].tokens[:1]


@pytest.mark.parametrize("tokens, why", [
    ("Hello", "is a str of shape ()"),
    (5, "is a int of shape ()"),
    (torch.tensor([[5, 6]]), r"is a Tensor of shape \(1, 2\)"),
    ([[5, 6], [7]], r"is a list of shape \(2, 0\)"),
    ([0.5], "is a list of shape"),
    ([], "no tokens"),
    ([5, 97], "token 97: the vocabulary of the model has 97"),
    ([5, -1], "token -1"),
    ([5, 1000], "token 1000, the image_token_id of the model, and only text is read here"),
])  # fmt: skip
def test_what_is_no_prompt_is_refused_before_it_can_end_others(tokens: Any, why: str) -> None:
    text = SimpleNamespace(vocab_size=97)
    model = SimpleNamespace(config=SimpleNamespace(image_token_id=1000, get_text_config=lambda decoder: text))
    with pytest.raises(ms.InvalidArgument, match=f"prompt 'a' .*{why}"):
        checked(model, tokens, "prompt 'a'")


def test_prompts_of_any_kind_are_numbered_and_find_the_states_of_each_other() -> None:
    model = tiny("lfm2")
    mem, given = managed(model), [TEXT, torch.tensor(TEXT), np.array(TEXT), tuple(TEXT)]
    done = [next(mst.serve(model, mem, [mst.Prompt(one, most=2)])) for one in given]
    assert len({tuple(one.tokens) for one in done}) == 1
    assert done[0].cached == 0 and all(one.cached for one in done[1:])
    named = mst.serve(model, mem, [mst.Prompt(TEXT, most=1), torch.tensor(TEXT[:3]), mst.Prompt(TEXT, "mine", most=1)])
    assert {one.id for one in named} == {0, 1, "mine"}
    with pytest.raises(ms.InvalidArgument, match="entry 1 of prompt= has token 97"):
        mst.StateCache(model, mem, prompt=torch.tensor([[5, 6], [5, 97]]))


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_without_settings_an_answer_is_as_long_as_that_of_generate() -> None:
    model = tiny("lfm2")
    mem = managed(model)
    (done,) = mst.serve(model, mem, [TEXT])
    assert done.tokens == own_answer(model, TEXT) and len(done.tokens) == 20
    for settings in ({"max_length": len(TEXT) + 3}, {"max_new_tokens": 4, "forced_eos_token_id": 9}):
        (one,) = mst.serve(model, mem, [mst.Prompt(TEXT, config=GenerationConfig(**settings))])
        assert one.tokens == own_answer(model, TEXT, **settings), settings


def test_states_that_decay_at_once_are_still_seen_to_continue() -> None:
    model = tiny("qwen3_5_text", seed=1, dtype=torch.bfloat16)
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            torch.nn.init.constant_(weight, 8.0)
    assert mst.layout(model).continues


def test_a_layout_is_read_whatever_a_model_has_kept_of_another_batch_and_changes_nothing_on_it() -> None:
    class Keeping(OwnModel):
        kept: Any = None

        def forward(
            self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, memories: Any = None, **_: Any
        ) -> Any:
            if position_ids is None and self.kept is not None and memories.get_seq_length():
                position_ids = memories.get_seq_length() + torch.cat([self.kept, input_ids], 1)[:, 1:]
            self.kept = self.memories.seen = torch.zeros(len(input_ids), 1, dtype=torch.long)
            return super().forward(input_ids, attention_mask, position_ids, memories)

    model = Keeping(own_model().config).eval()
    model.kept = kept = torch.zeros(2, 1, dtype=torch.long)
    model.memories.train()
    assert mst.layout(model).state == mst.layout(own_model()).state
    assert model.kept is kept and not hasattr(model.memories, "seen")
    assert model.memories.training and not model.training


def check(model: Any) -> None:
    """Checks that a server, and `generate` from cached states, give the answers of the model with its own cache."""
    for chunk in (256, 13, 3):  # the window has 6 tokens
        at = Judged(model=model, prefix=ms.Prefix(), chunk=chunk)
        for length in (20, 33, 5):
            at.ask(length, text=[*TEXT, *TEXT][:length])
        at.ends()
    mem, ids = managed(model), torch.tensor([[*TEXT, *TEXT][:33]])
    for cached in (0, 32):
        with mst.StateCache(model, mem, prompt=ids) as cache:
            assert cache.cached == [cached]
            out = model.generate(ids, **{cache.argument: cache}, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
            assert out[0, 33:].tolist() == answer(model, ids[0].tolist())


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
