"""Tests speculation in `serve`: right and wrong guesses change neither tokens nor states."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import memstate as ms
from tests.support.tiny_models import COPIES, FAMILIES, small, tiny
from tests.support.tiny_served import TEXT, managed

pytest.importorskip("transformers")
from transformers import GenerationConfig

import memstate.integrations.transformers as mst
from memstate.integrations.transformers import reading, steps
from memstate.integrations.transformers.drafts import Assistant
from memstate.integrations.transformers.speculation import Speculation
from tests.integrations.servers import SPECULATING, Judged, Raises, answer, guessing, hooked, raising

NEW = 14
PROMPTS = (TEXT[:19], TEXT[:9], [11, 12])
GUESSING = {**SPECULATING, "tracking": ms.Redirect(every=8)}
# families whose scans start from zeros
SINGLE = [family for family in FAMILIES if family in ("zamba", "mamba", "falcon_mamba", "jamba")]
FORMS = [(family, "gathered") for family in FAMILIES if family not in SINGLE]
FORMS += [(family, "slots") for family, _ in FORMS if family not in COPIES]
# A model whose states do not depend on attention. Its sizes fill whole vectors, as torch rounds remainders differently
LAST = (("layer_types", (*["linear_attention"] * 3, "full_attention")), ("intermediate_size", 64))


def guessed(
    model: Any, wrong: int, texts: Sequence[Sequence[int]] = PROMPTS, most: int = NEW, **settings: Any
) -> Judged:
    """Returns a server that was asked for answers to texts. Token `wrong` of each guess is wrong, counted from 0."""
    at = Judged(model=model, **{**GUESSING, "prefix": ms.Prefix(), "assistant": guessing(model, wrong), **settings})
    for number, text in enumerate(texts):
        at.ask(number, text=text, most=most)
    return at


@pytest.mark.sample(1)
@pytest.mark.parametrize("wrong", [0, 1, 2, 4, 13])
@pytest.mark.parametrize(("family", "kernels"), FORMS)
def test_guesses_change_no_token_and_no_state_that_others_start_from(family: str, kernels: Any, wrong: int) -> None:
    at = guessed(tiny(family), wrong, kernels=kernels)
    results = at.results().values()
    made, right = sum(one.guessed for one in results), sum(one.right for one in results)
    assert right == made > 20 if wrong == 13 else right < made
    assert right > 0 or wrong == 0
    later = Judged(mem=at.mem, model=at.model, kernels=kernels)  # these prompts start from states of answers
    for one in results:
        later.ask(one.id, text=[*PROMPTS[one.id], *one.tokens, 7, 8], most=4)
    served = later.ends()
    assert all(served[n].cached >= 8 * (len(text) // 8) for n, text in enumerate(PROMPTS)) and served[0].cached > 24


@pytest.mark.sample(1)
@pytest.mark.parametrize("kernels", ["gathered", "slots"])
@pytest.mark.parametrize("wrong", [0, 2, 13])
@pytest.mark.parametrize("settings", [
    {"tracking": ms.PingPong(every=4)}, {"tracking": ms.LazyPingPong(every=8)}, {"tracking": ms.NoTracking(every=8)},
    {"forward": ms.Forward(tail=16, in_place=True)}, {"prefix": None}, {"slots": 5, "max_requests": 2},
], ids=str)  # fmt: skip
def test_every_strategy_speculates(settings: dict[str, Any], wrong: int, kernels: Any) -> None:
    model = tiny("lfm3" if kernels == "gathered" else "qwen3_next")  # lfm3 has a sliding window
    assert sum(one.guessed for one in guessed(model, wrong, kernels=kernels, debug=True, **settings).ends().values())


@pytest.mark.parametrize(("kernels", "made", "folds"), [("gathered", 11, 0), ("slots", 12, 1)])
def test_right_guesses_save_forwards_and_copy_no_state(kernels: Any, made: int, folds: int) -> None:
    at, forwards = guessed(tiny("lfm2"), 13, [TEXT[:9]], kernels=kernels), list[int]()
    answer(at.model, TEXT[:9], NEW)  # the assistant knows it then, and runs no forward
    with hooked(at.model, lambda *_: forwards.append(1)):
        at.rest()
    assert at.mem.stats().copied_bytes == 0
    one = at.ends()[0]
    assert (one.guessed, one.right) == (made, made)
    # forwards: two chunks of the prompt, one per group of guesses, and those that fold pending tokens up to a boundary
    assert len(forwards) == 2 + NEW - 1 - made + folds


@pytest.mark.sample(1)
@pytest.mark.parametrize("pads", [256, 0])
@pytest.mark.parametrize("family", ["qwen3_next", "glm5_next", "mamba2"])
def test_rows_of_one_forward_differ_in_how_many_guesses_are_made_and_right(
    family: str, pads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, moved, verify = tiny(family), list[list[int]](), Speculation.verify
    texts = [TEXT[:9], TEXT[9:18], TEXT[18:27], TEXT[3:12]]
    guesses = {text[0]: guessing(model, wrong) for text, wrong in zip(texts, (0, 2, 13), strict=False)}

    def guess(tokens: Sequence[int], most: int) -> list[int]:
        return guesses[tokens[0]](tokens, most) if tokens[0] in guesses else []

    def counted(*args: Any) -> list[int]:
        moved.append(verify(*args))
        return moved[-1]

    monkeypatch.setattr(Speculation, "verify", counted)
    monkeypatch.setattr(steps, "PADS", pads)
    guessed(model, 0, texts, max_requests=4, assistant=guess, kernels="slots").ends()
    assert moved[: 1 if pads else 2] == ([[1, 3, 13, 1]] if pads else [[1, 3, 13], [1]])


@pytest.mark.sample(1)
@pytest.mark.parametrize("wrong", [0, 3, 13])
@pytest.mark.parametrize(("family", "changes"), [
    ("qwen3_5_text", (*LAST, ("linear_num_value_heads", 32))),
    ("kimi_linear", (*LAST, ("linear_num_heads", 32), ("mlp_layer_types", ("dense",) * 4))),
    ("mamba2", ()),
])  # fmt: skip
def test_kept_states_have_the_bits_of_decode_without_guesses(
    family: str, changes: Any, wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, linear = tiny(family, changes=changes), torch.nn.functional.linear

    def exact(x: Tensor, *weights: Tensor | None) -> Tensor:  # fp32 products of several rows round differently
        return linear(x.double(), *(one if one is None else one.double() for one in weights)).to(x.dtype)

    monkeypatch.setattr(torch.nn.functional, "linear", exact)
    kept = []
    for settings in ({"assistant": None}, {}):
        at = guessed(model, wrong, kernels="slots", **settings)
        answers = [one.tokens for _, one in sorted(at.results().items())]
        kept.append(_states(at.mem, PROMPTS, answers))
    plain, others = kept
    assert plain.keys() == others.keys() and len(plain) > 5
    for key, states in plain.items():
        assert all(torch.equal(states[name], others[key][name]) for name in states)


def _states(mem: ms.StateManager, texts: Any, answers: Any) -> dict[Any, dict[str, Tensor]]:
    """Returns (number of the text, length) -> plane -> cached state."""
    states = dict[Any, dict[str, Tensor]]()
    for number, parts in enumerate(zip(texts, answers, strict=True)):
        whole = [token for part in parts for token in part]
        for length in range(2, len(whole) + 1):
            rows = mem.admit([ms.Request("state", tokens=whole[:length])])
            at = mem.info(rows[0]).length
            if at:
                step = mem.plan(rows, 1)
                states[number, at] = mem.planes.save(step.read)
                mem.cancel(step)
            else:
                mem.end(rows)
    return states


@pytest.mark.sample
@pytest.mark.parametrize("most", [NEW, 5, 7])
@pytest.mark.parametrize("cache", [False, True])
def test_a_turn_of_a_session_starts_where_it_starts_without_guesses(cache: bool, most: int) -> None:
    model, starts, texts = tiny("qwen3_next"), list[list[int]](), [TEXT[:9]]
    for more in (TEXT[9:12], TEXT[12:15]):
        texts.append([*texts[-1], *answer(model, texts[-1], most), *more])
    for assistant in (None, guessing(model, 3)):
        settings = {"prefix": ms.Prefix() if cache else None, "assistant": assistant, "kernels": "slots"}
        at = Judged(model=model, max_requests=1, **GUESSING, **settings)
        session = at.mem.sessions.open("chat")
        for number, text in enumerate(texts):
            at.ask(number, text=text, most=most, session=session)
        starts.append([one.cached for one in at.ends().values()])
    plain, others = starts
    assert plain == others and others[-1] > 9 + 2 * most


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
def test_a_request_that_is_aborted_between_guesses_leaves_nothing(family: str) -> None:
    at = guessed(tiny(family), 2, kernels="slots")
    while not at.asked[0].events:
        at.step()
    at.step()
    at.abort(0)
    at.rest()
    assert at.asked[0].results[0].guessed > 0
    at.ends(others={"length", "aborted"})


@pytest.mark.parametrize("kernels", ["gathered", "slots"])
def test_samples_are_those_without_guesses(kernels: Any) -> None:
    config = GenerationConfig(
        do_sample=True, temperature=0.3, repetition_penalty=1.2, num_return_sequences=3, prompt_lookup_num_tokens=3,
        max_matching_ngram_size=1,
    )  # fmt: skip
    at = Judged("lfm3", kernels=kernels, max_requests=4, **GUESSING)
    asked = at.ask("three", text=[*TEXT[:9], *TEXT[:9]], config=config, most=NEW, seed=3)
    at.ends()
    assert len({tuple(one.tokens) for one in asked.results}) > 1
    assert sum(one.guessed for one in asked.results) > 0


@pytest.mark.parametrize("family", ["qwen3_next", "bamba"])
def test_guesses_change_no_token_under_autocast(family: str) -> None:
    runs = list[mst.Served]()
    for assistant in (None, guessing(tiny(family), 3)):
        with torch.autocast("cpu", torch.bfloat16):  # layers compute in bf16, tails are fp32
            given = managed(tiny(family), **GUESSING), [mst.Prompt(TEXT[:9], most=NEW)]
            runs += mst.serve(tiny(family), *given, kernels="slots", assistant=assistant)
    plain, other = runs
    assert (plain.tokens, other.right > 0) == (other.tokens, True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "mamba2"])
def test_the_kernels_themselves_check_guesses(family: str) -> None:
    at = guessed(tiny(family), 2, [TEXT[:5]], 8, backend="interpreter", kernels="slots")
    assert at.ends()[0].right > 0


def test_a_model_may_decode_on_slots_and_check_guesses_on_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("qwen3_next")
    without = {(model.dtype, model.device): replace(mst.layout(model), tails=())}
    monkeypatch.setitem(reading.KNOWN, model, without)
    at = guessed(model, 2, kernels="slots", debug=True)
    assert at.mem.layout.rows is None
    assert sum(one.right for one in at.ends().values()) > 0


def test_text_that_repeats_is_looked_up() -> None:
    at = Judged("lfm2", **GUESSING)
    at.ask("a", most=40, config=GenerationConfig(prompt_lookup_num_tokens=4))
    assert at.ends()["a"].right > 0


def test_a_smaller_model_guesses_its_own_greedy_answer_whatever_was_rejected() -> None:
    model = small()
    assistant = Assistant(model)
    for text in (TEXT[:9], [*TEXT[:9], 3, 4], [*TEXT[:9], 3, 5, 6], TEXT[:4], TEXT[:4], [*TEXT[:4], 9]):
        ids = torch.tensor([text])
        expected = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)[0, len(text) :].tolist()
        assert assistant(text, 4) == expected


def test_a_smaller_model_changes_no_token() -> None:
    assert all(one.guessed for one in guessed(tiny("lfm2"), 0, assistant=small()).ends().values())


@pytest.mark.sample(1)
@pytest.mark.parametrize("kernels", ["gathered", "slots"])
@pytest.mark.parametrize("at", [2, 3, 4])
def test_a_token_that_ends_text_may_be_guessed(at: int, kernels: Any) -> None:
    server = guessed(tiny("lfm2"), 13, [TEXT[:9]], kernels=kernels)
    end = server.results()[0].tokens[at]
    server.ask("ends", config=GenerationConfig(eos_token_id=end), most=NEW)
    server.ends(ends="end")


@pytest.mark.sample(2)
@pytest.mark.parametrize("kernels", ["gathered", "slots"])
@pytest.mark.parametrize("who", ["a processor", "the assistant", "no token", "the model", "the plan"])
def test_what_raises_ends_its_own_rows_only(who: str, kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"raises": TEXT[:9], "other": [11, 12]}
    guess = guessing(tiny("lfm2"), 2)

    def assistant(tokens: Sequence[int], most: int) -> list[int]:
        if tokens[0] == TEXT[0] and who == "no token":
            return [97]
        if tokens[0] == TEXT[0] and who == "the assistant":
            raise ArithmeticError("mine")
        return guess(tokens, most)

    at = Judged("lfm2", assistant=assistant, kernels=kernels, max_requests=4, **GUESSING)
    for id, text in texts.items():
        fails = [Raises(11, ArithmeticError("mine"))] if (id, who) == ("raises", "a processor") else []
        at.ask(id, text=text, most=NEW, processors=fails)
    if together := who in ("the model", "the plan"):  # one forward or plan for the guesses of both
        at.step(2)
        with monkeypatch.context() as patch:
            owner: Any = (at.model, "forward") if who == "the model" else (at.mem, "plan")
            patch.setattr(*owner, raising(ArithmeticError("mine")))
            at.step(raises=ArithmeticError)
    else:
        wrong = ms.InvalidArgument if who == "no token" else ArithmeticError
        assert [type(error) for error in at.rest()] == [wrong]
    at.ends(raises="failed", other={"length", "failed"} if together else "length")
