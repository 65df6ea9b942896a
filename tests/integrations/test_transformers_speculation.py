"""Tests speculation in `serve`: right and wrong guesses change neither tokens nor states."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import memstate as ms
from tests.support.tiny_models import FAMILIES, small, tiny
from tests.support.tiny_served import TEXT, alone, managed

pytest.importorskip("transformers")
from transformers import GenerationConfig

import memstate.integrations.transformers as mst
from memstate.integrations.transformers import reading, steps
from memstate.integrations.transformers.drafts import Assistant
from memstate.integrations.transformers.speculation import Speculation
from tests.integrations.servers import SPECULATING, Raises, hooked, raising

NEW = 14
PROMPTS = (TEXT[:19], TEXT[:9], [11, 12])
GUESSING = {**SPECULATING, "tracking": ms.Redirect(every=8)}
# families whose scans start from zeros
SINGLE = [family for family in FAMILIES if family in ("zamba", "mamba", "falcon_mamba", "jamba")]
COPIES = ("qwen4_exp_text", "zaya", "inkling2_text")  # families whose layers compute on states without a kernel
FORMS = [(family, "gathered") for family in FAMILIES if family not in SINGLE]
FORMS += [(family, "slots") for family, _ in FORMS if family not in COPIES]
# A model whose states do not depend on attention. Its sizes fill whole vectors, as torch rounds remainders differently
LAST = (("layer_types", (*["linear_attention"] * 3, "full_attention")), ("intermediate_size", 64))

Answers = Sequence[Sequence[int]]


def guessing(texts: Answers, answers: Answers, wrong: int) -> Callable[[Sequence[int], int], list[int]]:
    """Returns an assistant that guesses from known answers. Token `wrong` of a guess is wrong, counted from 0."""
    known = [[*text, *answer] for text, answer in zip(texts, answers, strict=True)]

    def guess(tokens: Sequence[int], most: int) -> list[int]:
        guessed = next((one[len(tokens) :] for one in known if one[: len(tokens)] == list(tokens)), [])[:most]
        if wrong < len(guessed):
            guessed[wrong] = (guessed[wrong] + 1) % 97
        return guessed

    return guess


def served(model: Any, mem: ms.StateManager, texts: Answers, most: int = NEW, **settings: Any) -> list[mst.Served]:
    prompts = [mst.Prompt(text, number, most=most) for number, text in enumerate(texts)]
    results = {one.id: one for one in mst.serve(model, mem, prompts, **settings)}
    return [results[number] for number in range(len(texts))]


@pytest.mark.sample(1)
@pytest.mark.parametrize("wrong", [0, 1, 2, 4, 13])
@pytest.mark.parametrize(("family", "kernels"), FORMS)
def test_guesses_change_no_token_and_no_state_that_others_start_from(family: str, kernels: Any, wrong: int) -> None:
    model = tiny(family)
    expected = [alone(model, text, {}, NEW) for text in PROMPTS]
    mem = managed(model, **GUESSING)
    results = served(model, mem, PROMPTS, assistant=guessing(PROMPTS, expected, wrong), kernels=kernels)
    assert [one.tokens for one in results] == expected
    guessed, right = sum(one.guessed for one in results), sum(one.right for one in results)
    assert right == guessed > 20 if wrong == 13 else right < guessed
    assert right > 0 or wrong == 0
    mem.audit().raise_if_leaking()
    # these prompts start from states of answers
    later = [[*text, *answer, 7, 8] for text, answer in zip(PROMPTS, expected, strict=True)]
    results = served(model, mem, later, 4, kernels=kernels)
    assert [one.tokens for one in results] == [alone(model, text, {}, 4) for text in later]
    assert all(one.cached >= 8 * (len(text) // 8) for one, text in zip(results, PROMPTS, strict=True))
    assert results[0].cached > 24


@pytest.mark.sample(1)
@pytest.mark.parametrize("kernels", ["gathered", "slots"])
@pytest.mark.parametrize("wrong", [0, 2, 13])
@pytest.mark.parametrize("settings", [
    {"tracking": ms.PingPong(every=4)}, {"tracking": ms.LazyPingPong(every=8)}, {"tracking": ms.NoTracking(every=8)},
    {"forward": ms.Forward(tail=16, in_place=True)}, {"prefix": None}, {"slots": 5, "max_requests": 2},
], ids=str)  # fmt: skip
def test_every_strategy_speculates(settings: dict[str, Any], wrong: int, kernels: Any) -> None:
    model = tiny("lfm3" if kernels == "gathered" else "qwen3_next")  # lfm3 has a sliding window
    expected = [alone(model, text, {}, NEW) for text in PROMPTS]
    mem = managed(model, **{**GUESSING, **settings}, debug=True)
    results = served(model, mem, PROMPTS, assistant=guessing(PROMPTS, expected, wrong), kernels=kernels)
    assert [one.tokens for one in results] == expected
    assert sum(one.guessed for one in results) > 0
    mem.audit().raise_if_leaking()
    mem.close()


@pytest.mark.parametrize(("kernels", "guessed", "folds"), [("gathered", 11, 0), ("slots", 12, 1)])
def test_right_guesses_save_forwards_and_copy_no_state(kernels: Any, guessed: int, folds: int) -> None:
    model, forwards = tiny("lfm2"), []
    expected = [alone(model, TEXT[:9], {}, NEW)]
    mem = managed(model, **GUESSING)
    with hooked(model, lambda *_: forwards.append(1)):
        (one,) = served(model, mem, [TEXT[:9]], assistant=guessing([TEXT[:9]], expected, 13), kernels=kernels)
    assert (one.tokens, one.guessed, one.right) == (expected[0], guessed, guessed)
    # forwards: two chunks of the prompt, one per group of guesses, and those that fold pending tokens up to a boundary
    assert len(forwards) == 2 + NEW - 1 - guessed + folds
    assert mem.stats().copied_bytes == 0


@pytest.mark.parametrize("pads", [256, 0])
@pytest.mark.parametrize("family", ["qwen3_next", "glm5_next", "mamba2"])
def test_rows_of_one_forward_differ_in_how_many_guesses_are_made_and_right(
    family: str, pads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, moved, verify = tiny(family), list[list[int]](), Speculation.verify
    texts = [TEXT[:9], TEXT[9:18], TEXT[18:27], TEXT[3:12]]
    expected = [alone(model, text, {}, NEW) for text in texts]
    given = zip(texts, expected, (0, 2, 13), strict=False)
    guesses = {text[0]: guessing([text], [answer], wrong) for text, answer, wrong in given}

    def guess(tokens: Sequence[int], most: int) -> list[int]:
        return guesses[tokens[0]](tokens, most) if tokens[0] in guesses else []

    def counted(*args: Any) -> list[int]:
        moved.append(verify(*args))
        return moved[-1]

    monkeypatch.setattr(Speculation, "verify", counted)
    monkeypatch.setattr(steps, "PADS", pads)
    mem = managed(model, **GUESSING, max_requests=4)
    results = served(model, mem, texts, assistant=guess, kernels="slots")
    assert [one.tokens for one in results] == expected
    assert moved[: 1 if pads else 2] == ([[1, 3, 13, 1]] if pads else [[1, 3, 13], [1]])
    mem.audit().raise_if_leaking()


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
    expected = [alone(model, text, {}, NEW) for text in PROMPTS]
    kept = []
    for settings in ({}, {"assistant": guessing(PROMPTS, expected, wrong)}):
        mem = managed(model, **GUESSING)
        results = served(model, mem, PROMPTS, kernels="slots", **settings)
        assert [one.tokens for one in results] == expected
        kept.append(_states(mem, PROMPTS, expected))
    plain, guessed = kept
    assert plain.keys() == guessed.keys() and len(plain) > 5
    for at, states in plain.items():
        assert all(torch.equal(states[name], guessed[at][name]) for name in states)


def _states(mem: ms.StateManager, texts: Answers, answers: Answers) -> dict[Any, dict[str, Tensor]]:
    """Returns (number of the text, length) -> plane -> cached state."""
    states = dict[Any, dict[str, Tensor]]()
    for number, (text, answer) in enumerate(zip(texts, answers, strict=True)):
        whole = [*text, *answer]
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


@pytest.mark.parametrize("most", [NEW, 5, 7])
@pytest.mark.parametrize("settings", [{}, {"prefix": None}], ids=str)
def test_a_turn_of_a_session_starts_where_it_starts_without_guesses(settings: dict[str, Any], most: int) -> None:
    model, starts, whole = tiny("qwen3_next"), list[list[int]](), TEXT[:9]
    texts, answers = list[list[int]](), list[list[int]]()
    for more in ([], TEXT[9:12], TEXT[12:15]):
        texts.append([*whole, *more])
        answers.append(alone(model, texts[-1], {}, most))
        whole = [*texts[-1], *answers[-1]]
    for guesses in ({}, {"assistant": guessing(texts, answers, 3)}):
        mem = managed(model, **{**GUESSING, "max_requests": 1, **settings})
        session = mem.sessions.open("chat")
        results = list[mst.Served]()
        for text in texts:
            results += mst.serve(model, mem, [mst.Prompt(text, most=most, session=session)], kernels="slots", **guesses)
        assert [one.tokens for one in results] == answers
        starts.append([one.cached for one in results])
    plain, guessed = starts
    assert plain == guessed and guessed[-1] > 9 + 2 * most


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
def test_a_request_that_is_aborted_between_guesses_leaves_nothing(family: str) -> None:
    model = tiny(family)
    expected = [alone(model, text, {}, NEW) for text in PROMPTS]
    mem = managed(model, **GUESSING)
    running = mst.Server(model, mem, assistant=guessing(PROMPTS, expected, 2), kernels="slots")
    for number, text in enumerate(PROMPTS):
        running.submit(mst.Prompt(text, number, most=NEW))
    events = list[Any]()
    while not any(isinstance(one, mst.Token) and one.id == 0 for one in events):
        events += running.step()
    events += running.step()
    running.abort(0)
    while running.busy:
        events += running.step()
    results = {one.id: one for one in events if isinstance(one, mst.Served)}
    gone = results.pop(0)
    assert (gone.reason, gone.guessed > 0, gone.tokens) == ("aborted", True, expected[0][: len(gone.tokens)])
    assert {id: one.tokens for id, one in results.items()} == {1: expected[1], 2: expected[2]}
    mem.audit().raise_if_leaking()
    assert mem.stats().rows_used == 0


@pytest.mark.parametrize("kernels", ["gathered", "slots"])
def test_samples_are_those_without_guesses(kernels: Any) -> None:
    model = tiny("lfm3")
    config = {"do_sample": True, "temperature": 0.3, "repetition_penalty": 1.2, "max_new_tokens": NEW}
    prompt = [*TEXT[:9], *TEXT[:9]]
    runs = []
    for more in ({}, {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1}):
        mem = managed(model, **GUESSING, max_requests=4)
        settings = GenerationConfig(num_return_sequences=3, **config, **more)
        runs.append(list(mst.serve(model, mem, [mst.Prompt(prompt, config=settings, seed=3)], kernels=kernels)))
    plain, guessed = ({one.sample: one.tokens for one in run} for run in runs)
    assert plain == guessed
    assert len(set(map(tuple, plain.values()))) > 1
    assert sum(one.guessed for one in runs[1]) > 0 == sum(one.guessed for one in runs[0])


@pytest.mark.parametrize("family", ["qwen3_next", "bamba"])
def test_guesses_change_no_token_under_autocast(family: str) -> None:
    model, text, runs = tiny(family), TEXT[:9], list[mst.Served]()
    for _ in range(2):
        guess = {"assistant": guessing([text], [runs[0].tokens], 3)} if runs else {}
        with torch.autocast("cpu", torch.bfloat16):  # layers compute in bf16, tails are fp32
            runs += served(model, managed(model, **GUESSING), [text], kernels="slots", **guess)
    plain, guessed = runs
    assert (plain.tokens, guessed.right > 0) == (guessed.tokens, True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "mamba2"])
def test_the_kernels_themselves_check_guesses(family: str) -> None:
    model, text = tiny(family), TEXT[:5]
    expected = [alone(model, text, {}, 8)]
    mem = managed(model, **GUESSING, backend="interpreter")
    (one,) = served(model, mem, [text], 8, assistant=guessing([text], expected, 2), kernels="slots")
    assert (one.tokens, one.right > 0) == (expected[0], True)


def test_a_model_may_decode_on_slots_and_check_guesses_on_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("qwen3_next")
    without = {(model.dtype, model.device): replace(mst.layout(model), tails=())}
    monkeypatch.setitem(reading.KNOWN, model, without)
    expected = [alone(model, text, {}, NEW) for text in PROMPTS]
    mem = managed(model, **GUESSING, debug=True)
    results = served(model, mem, PROMPTS, assistant=guessing(PROMPTS, expected, 2), kernels="slots")
    assert ([one.tokens for one in results], mem.layout.rows) == (expected, None)
    assert sum(one.right for one in results) > 0
    mem.close()


def test_text_that_repeats_is_looked_up() -> None:
    model, config = tiny("lfm2"), GenerationConfig(prompt_lookup_num_tokens=4, max_new_tokens=40)
    (one,) = mst.serve(model, managed(model, **GUESSING), [mst.Prompt(TEXT[:9], config=config)])
    assert one.tokens == alone(model, TEXT[:9], {}, 40)
    assert one.right > 0


def test_a_smaller_model_guesses_its_own_greedy_answer_whatever_was_rejected() -> None:
    model = small()
    assistant = Assistant(model)
    for text in (TEXT[:9], [*TEXT[:9], 3, 4], [*TEXT[:9], 3, 5, 6], TEXT[:4], TEXT[:4], [*TEXT[:4], 9]):
        ids = torch.tensor([text])
        expected = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)[0, len(text) :].tolist()
        assert assistant(text, 4) == expected


def test_a_smaller_model_changes_no_token() -> None:
    model = tiny("lfm2")
    results = served(model, managed(model, **GUESSING), PROMPTS, assistant=small())
    assert [one.tokens for one in results] == [alone(model, text, {}, NEW) for text in PROMPTS]
    assert all(one.guessed for one in results)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kernels", ["gathered", "slots"])
@pytest.mark.parametrize("at", [2, 3, 4])
def test_a_token_that_ends_text_may_be_guessed(at: int, kernels: Any) -> None:
    model = tiny("lfm2")
    answer = alone(model, TEXT[:9], {}, NEW)
    end = answer[at]
    mem = managed(model, **GUESSING)
    config = GenerationConfig(eos_token_id=end, max_new_tokens=NEW)
    (one,) = mst.serve(
        model, mem, [mst.Prompt(TEXT[:9], config=config)], assistant=guessing([TEXT[:9]], [answer], 13),
        kernels=kernels,
    )  # fmt: skip
    assert (one.tokens, one.reason) == (answer[: answer.index(end) + 1], "end")
    mem.audit().raise_if_leaking()


@pytest.mark.sample(2)
@pytest.mark.parametrize("kernels", ["gathered", "slots"])
@pytest.mark.parametrize("who", ["a processor", "the assistant", "no token", "the model", "the plan"])
def test_what_raises_ends_its_own_rows_only(who: str, kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("lfm2")
    mem = managed(model, **GUESSING, max_requests=4)
    texts = [TEXT[:9], TEXT[:9], [11, 12]]
    expected = [alone(model, text, {}, NEW) for text in texts]
    guess, verify = guessing(texts, expected, 2), Speculation.verify

    def assistant(tokens: Sequence[int], most: int) -> list[int]:
        guessed = guess(tokens, most)
        if tokens[0] == TEXT[0] and who in ("the assistant", "no token"):
            if who == "no token":
                return [97]
            raise ArithmeticError("mine")
        return guessed

    def broken(self: Any, rows: Any, tokens: Any, *rest: Any) -> Any:
        if who in ("the model", "the plan") and list(tokens[0]) != [11, 12] and len(tokens[0]) > 3:
            call = (mem, "plan") if who == "the plan" else (model, "forward")
            with monkeypatch.context() as patch:
                patch.setattr(*call, raising(ArithmeticError("mine")))
                return verify(self, rows, tokens, *rest)
        return verify(self, rows, tokens, *rest)

    monkeypatch.setattr(Speculation, "verify", broken)
    running = mst.Server(model, mem, assistant=assistant, kernels=kernels)
    processors = [Raises(11, ArithmeticError("mine"))] if who == "a processor" else []
    running.submit(mst.Prompt(texts[0], "raises", most=NEW, processors=processors))
    running.submit(mst.Prompt(texts[2], "other", most=NEW))
    events, errors = list[Any](), list[Exception]()
    while running.busy:
        try:
            events += running.step()
        except Exception as error:
            errors.append(error)
    assert [type(error) for error in errors][:1] == [ms.InvalidArgument if who == "no token" else ArithmeticError]
    ended = {one.id: one for one in events if isinstance(one, mst.Served)}
    if who not in ("the model", "the plan"):
        assert ended["other"].tokens == expected[2]
    assert ended["raises"].reason == "failed" and len(ended) == 2
    mem.audit().raise_if_leaking()
    assert mem.stats().rows_used == 0
