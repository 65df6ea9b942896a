"""Tests `serve` on models of Transformers: tokens and logits are compared with the model's own cache.

Chunks and batches change the order of sums, so logits may differ by 1e-4 of the largest logit. As a control, states in
slots are spoilt: then logits must differ by more.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import memstate as ms
from tests.support.tiny_models import FAMILIES, tiny
from tests.support.tiny_served import NEW, TEXT, Known, alone, managed

pytest.importorskip("transformers")
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, DynamicLayer

import memstate.integrations.transformers as mst
from memstate.integrations.transformers import steps
from tests.integrations.servers import hooked, raising, require_free, rest, results, server_of

BOUND = 1e-4
PROMPTS = (TEXT[:19], TEXT[:9], [11, 12], TEXT, [*TEXT[:19], 7, 8], TEXT[:19])


def prompts(tokens: Sequence[Sequence[int]] = PROMPTS, most: int = NEW) -> list[mst.Prompt]:
    return [mst.Prompt(one, number, most=most) for number, one in enumerate(tokens)]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], Tensor]]:
    """A list with (tokens before it, logits from which it was chosen) for each chosen token."""
    pairs: list[tuple[tuple[int, ...], Tensor]] = []
    choose = steps.choose

    def watched(samplers: Any, tokens: Any, logits: Tensor) -> list[int]:
        pairs.extend(zip(map(tuple, tokens), logits.clone(), strict=True))
        return choose(samplers, tokens, logits)

    monkeypatch.setattr(steps, "choose", watched)
    return pairs


def farthest(seen: list[tuple[tuple[int, ...], Tensor]], known: Known) -> float:
    """Compares logits with those of the model's own cache after the same tokens.

    Returns the largest difference, as a part of the largest logit of the own cache.
    """
    pairs = [(logits, known[key]) for key, logits in seen if key in known]
    return max(float((actual - own).abs().max() / own.abs().max()) for actual, own in pairs)


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_the_own_cache_and_spoiled_states_are_noticed(family: str, seen: Any) -> None:
    model, known = tiny(family), Known()
    expected = [alone(model, tokens, known) for tokens in PROMPTS]
    mem, kernels = managed(model), "slots" if mst.layout(model).on_slots else "auto"
    served = {one.id: one for one in mst.serve(model, mem, prompts(), chunk=8, kernels=kernels)}
    assert [served[number].tokens for number in range(len(PROMPTS))] == expected
    assert len(seen) == NEW * len(PROMPTS)
    assert farthest(seen, known) < BOUND
    assert served[5].cached == 16  # 16 tokens have a state and KV; the last token is computed
    seen.clear()
    for name in mem.planes:
        mem.planes[name].neg_()
    (spoiled,) = mst.serve(model, mem, [mst.Prompt(PROMPTS[5], most=NEW)])
    assert spoiled.cached == 16
    assert farthest(seen[:1], known) > 10 * BOUND
    mem.audit().raise_if_leaking()


def test_B29a_lengths_of_a_prompt_are_rounded_down_to_pages() -> None:
    model = tiny("qwen3_next")
    for lengths, start in (((), 0), ((11, 10**6), 8), ([12], 12)):
        mem = managed(model)
        for text, cached in ((TEXT, 0), ([*TEXT[:14], 1, 2], start)):
            (one,) = mst.serve(model, mem, [mst.Prompt(text, most=NEW, snapshot_at=lengths)])
            assert one.cached == cached and one.tokens == alone(model, text, {})
        mem.audit().raise_if_leaking()


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["qwen3_next", "jamba", "lfm3"])
@pytest.mark.parametrize("tracking", [ms.Redirect(every=4), ms.PingPong(every=4), ms.LazyPingPong(every=4)], ids=str)
def test_short_memory_evictions_and_faults_change_no_token(family: str, tracking: Any) -> None:
    model, random = tiny(family), Random(5)
    texts = [TEXT[: random.randint(3, 20)] + random.sample(range(3, 97), random.randint(0, 6)) for _ in range(14)]
    expected = [alone(model, text, {}) for text in texts]
    mem = managed(model, slots=8, tracking=tracking, pages=ms.Pages(size=4, count=28, per_row=10), debug=True)
    ms.testing.Faults(ms.testing.Chaos(seed=3, admissions=0.3, claims=0.3)).inject(mem)
    served = {one.id: one for one in mst.serve(model, mem, prompts(texts), chunk=7)}
    assert [served[number].tokens for number in range(len(texts))] == expected
    assert sum(one.cached for one in served.values()) > 0
    assert mem.stats().chaos.admissions > 0
    mem.close()  # with debug, close looks for leaks


def test_what_never_fits_is_refused_and_the_others_are_served() -> None:
    model, mem = tiny("qwen3_next"), managed(tiny("qwen3_next"))
    served = {one.id: one for one in mst.serve(model, mem, prompts([[5] * 70, TEXT[:9]]))}
    assert (served[0].reason, served[0].tokens, served[1].reason) == ("too_large", [], "length")
    assert "per_row" in served[0].error


@pytest.mark.sample
@pytest.mark.parametrize("call", [mst.serve, mst.stream])
@pytest.mark.parametrize("bad", [[5, 97], mst.Prompt(TEXT, "long name", config=GenerationConfig(num_beams=2)),
                                 mst.Prompt(TEXT, config=GenerationConfig(do_sample=True, temperature=0.0))],
                         ids=["token", "beams", "temperature"])  # fmt: skip
def test_a_wrong_request_in_a_list_is_named_before_anything_starts(call: Any, bad: Any) -> None:
    model = tiny("qwen3_next")
    mem = managed(model)
    requests = [*PROMPTS, None, bad, TEXT]
    with pytest.raises(ms.InvalidArgument, match=rf"^requests\[{len(PROMPTS) + 1}\]: prompt ('long name'|6)[ :]"):
        next(call(model, mem, requests))
    assert mem.stats().prefix.prompt_tokens == 0
    requests.pop(-2)
    served = [one for one in call(model, mem, requests) if isinstance(one, mst.Served)]
    assert sorted(one.id for one in served) == [*range(len(PROMPTS) + 1)]
    assert len(mem.rows) == 0


def test_a_wrong_request_of_an_iterator_is_named_and_what_ran_is_aborted() -> None:
    model, mem = tiny("qwen3_next"), managed(tiny("qwen3_next"), prefix=None)
    events = mst.stream(model, mem, iter([PROMPTS[0], PROMPTS[1], [97]]))
    told = []
    with pytest.raises(ms.InvalidArgument, match=r"^requests\[2\]: prompt 2 has token 97"):
        told += list(events)
    assert (mem.free_slots, len(mem.rows)) == (16, 0)


def test_a_stream_yields_each_token_before_its_request_ends() -> None:
    model = tiny("bamba")
    tokens: dict[Any, list[int]] = {}
    for event in mst.stream(model, managed(model), prompts(PROMPTS[:3])):
        if isinstance(event, mst.Token):
            tokens.setdefault(event.id, []).append(event.token)
        else:
            assert event.tokens == tokens.pop(event.id)
    assert tokens == {}


def test_requests_join_a_running_batch() -> None:
    model, mem, starts = tiny("qwen3_next"), managed(tiny("qwen3_next")), []

    def arrivals() -> Iterator[mst.Prompt | None]:
        yield mst.Prompt(TEXT[:9], "first", most=12)
        for _ in range(4):
            yield None
        starts.append(mem.stats().rows_used)
        yield mst.Prompt([11, 12], "second", most=3)

    events = list(mst.stream(model, mem, arrivals()))
    assert starts == [1]  # one request was running when the second came
    assert [event.id for event in events if isinstance(event, mst.Served)] == ["second", "first"]


def test_leaving_a_stream_ends_its_requests() -> None:
    model, mem = tiny("qwen3_next"), managed(tiny("qwen3_next"), prefix=None)
    events = mst.stream(model, mem, prompts())
    assert len(list(islice(events, 4))) == 4
    assert mem.free_slots < 16
    events.close()
    assert mem.free_slots == 16
    assert mem.free_pages == 60


def test_a_forward_that_fails_ends_its_rows_only() -> None:
    running = server_of(chunk=32)
    running.submit(prompts()[1])
    events = running.step()

    def broken(_: Any, args: Any, kwargs: Any) -> None:
        if kwargs["input_ids"].shape[1] > 1:
            raise ArithmeticError("in a prompt")

    running.submit(prompts()[0])
    with hooked(running.model, broken), pytest.raises(ArithmeticError):
        running.step()
    served = results(events + rest(running))
    assert served[1].tokens == alone(running.model, PROMPTS[1], {})
    assert (served[0].reason, served[0].tokens, served[0].error) == ("failed", [], "ArithmeticError: in a prompt")
    require_free(running)


def test_a_plan_that_fails_ends_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    running = server_of()
    running.submit(prompts()[0])
    monkeypatch.setattr(running.mem, "plan", raising(ms.InvalidArgument("a plan")))
    with pytest.raises(ms.InvalidArgument, match="a plan"):
        running.step()
    assert [one.reason for one in rest(running)] == ["failed"]
    require_free(running)


def test_a_session_continues_where_its_last_turn_ended() -> None:
    model, mem = tiny("qwen3_next"), managed(tiny("qwen3_next"))
    chat = mem.sessions.open("chat")
    (first,) = mst.serve(model, mem, [mst.Prompt(TEXT[:9], most=NEW, session=chat)])
    turn = [*TEXT[:9], *first.tokens, 77, 78]
    (second,) = mst.serve(model, mem, [mst.Prompt(turn, most=NEW, session=chat)])
    assert second.cached == 9 + NEW - 1  # the last chosen token was never computed
    assert second.tokens == alone(model, turn, {})


def test_states_and_kv_come_back_from_host_memory() -> None:
    model = tiny("lfm3")  # this model has a sliding window
    mem = managed(model, slots=4, max_requests=1, pages=ms.Pages(size=4, count=24, per_row=16),
                  tiers=ms.Tiers("tiny", host_slots=32))  # fmt: skip
    texts = [[*TEXT[shift:], *TEXT[:shift]] for shift in range(5)]
    expected = [alone(model, text, {}) for text in texts]
    for turn in range(2):
        served = {one.id: one for one in mst.serve(model, mem, prompts(texts))}
        assert [served[number].tokens for number in range(5)] == expected
        assert [served[number].cached > 0 for number in range(5)] == [turn == 1] * 5
    assert mem.stats().tiers.host_hit_tokens > 0
    mem.close()


def test_a_salt_that_is_none_is_refused_with_its_prompt() -> None:
    model = tiny("qwen3_next")
    server = mst.Server(model, managed(model))
    for salt in (1.0, True, ["a"]):
        with pytest.raises(ms.InvalidArgument, match="salt"):
            server.submit(mst.Prompt(TEXT, most=NEW, salt=salt))  # type: ignore[arg-type]
    with pytest.raises(ms.InvalidArgument, match=r"kind=''"):
        server.submit(mst.Prompt(TEXT, most=NEW, kind=""))
    assert not server.busy


def test_the_kind_of_a_prompt_comes_to_what_it_leaves() -> None:
    model = tiny("qwen3_next")
    mem = managed(model)
    list(mst.serve(model, mem, [mst.Prompt(TEXT, most=NEW, kind="chat")]))
    assert mem.prefix and {node.kind for node in mem.prefix.stated()} == {"chat"}


@pytest.mark.parametrize(("first", "salt", "cached"), [("a", "a", 24), ("a", None, 0), ("a", "b", 0), (None, None, 24)])
def test_storage_is_asked_before_a_request_starts_for_what_its_own_salt_has(
    first: str | None, salt: str | None, cached: int, tmp_path: Path
) -> None:
    assert stored_and_served(tmp_path, first, salt) == [0, cached]


@pytest.mark.parametrize("how", ["abort", "close", "refused"])
def test_what_storage_reads_for_a_request_that_never_starts_is_cancelled(how: str, tmp_path: Path) -> None:
    model = tiny("qwen3_next")
    assert stored_and_served(tmp_path, None) == [0]
    tiers = ms.Tiers("tiny", host_slots=16, store=ms.FileStore(str(tmp_path)), prefetch=ms.Prefetch(threshold=4))
    mem = managed(model, tiers=tiers)
    at = mst.Server(model, mem)
    at.submit(mst.Prompt(TEXT, "never", most=1000 if how == "refused" else NEW))
    at.admit()
    assert mem.stats().tiers.prefetch.in_flight == 1
    if how != "close":
        if how == "abort":
            at.abort("never")
        assert [one.reason for one in rest(at)] == ["aborted" if how == "abort" else "too_large"]
    at.close()
    assert mem.stats().tiers.prefetch.in_flight == 0 and mem.audit().clean
    mem.close()


def stored_and_served(tmp_path: Path, *salts: str | None) -> list[int]:
    """Serves a prompt under each salt, with a new manager over the same folder; returns the cached tokens."""
    model, starts = tiny("qwen3_next"), []
    for salt in salts:
        store = ms.FileStore(str(tmp_path))
        tiers = ms.Tiers("tiny", host_slots=16, store=store, prefetch=ms.Prefetch(threshold=4, stop="wait_complete"))
        mem = managed(model, tiers=tiers)
        (one,) = mst.serve(model, mem, [mst.Prompt(TEXT, most=NEW, salt=salt)])
        starts.append(one.cached)
        assert one.prefetch == ("complete" if one.cached else "missed")
        assert one.tokens == alone(model, TEXT, {})
        mem.close()
    return starts


def test_a_prefetch_that_was_stopped_is_told_with_the_result(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("qwen3_next")
    assert stored_and_served(tmp_path, None) == [0]
    caplog.set_level("WARNING", "memstate.tiers")
    late = ms.Prefetch(threshold=4, timeout=0.0, timeout_per_page=0.0)
    mem = managed(model, tiers=ms.Tiers("tiny", host_slots=16, store=ms.FileStore(str(tmp_path)), prefetch=late))
    (one,) = mst.serve(model, mem, [mst.Prompt(TEXT, most=NEW)])
    assert (one.cached, one.prefetch, one.tokens) == (0, "stopped", alone(model, TEXT, {}))
    assert "outcome='stopped'" in caplog.text and "stopped by timeout after" in caplog.text
    mem.close()


def test_sampling_is_that_of_generate() -> None:
    model, mem = tiny("qwen3_next"), managed(tiny("qwen3_next"))
    config = GenerationConfig(do_sample=True, temperature=0.8, top_k=20, repetition_penalty=1.3, max_new_tokens=NEW)
    torch.manual_seed(7)
    expected = model.generate(torch.tensor([TEXT]), generation_config=config, pad_token_id=0)[0, len(TEXT) :].tolist()
    (served,) = mst.serve(model, mem, [mst.Prompt(TEXT, config=config, seed=7)])
    assert served.tokens == expected


def test_a_token_or_a_string_ends_an_answer() -> None:
    model, mem = tiny("qwen3_next"), managed(tiny("qwen3_next"))
    answer = alone(model, TEXT, {})
    (served,) = mst.serve(model, mem, [mst.Prompt(TEXT, config=GenerationConfig(eos_token_id=answer[2]), most=NEW)])
    assert (served.tokens, served.reason) == (answer[: answer.index(answer[2]) + 1], "end")
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {**{f"w{n}.": n for n in range(97)}, "abcdef": 97}  # Transformers encodes its own test word
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0."))
    config = GenerationConfig(stop_strings=[f"w{answer[3]}."])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    (served,) = mst.serve(model, mem, [mst.Prompt(TEXT, config=config, most=NEW)], tokenizer=tokenizer)
    assert (served.tokens, served.reason) == (answer[: answer.index(answer[3]) + 1], "stop")


def test_layers_whose_kv_pages_cannot_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(DynamicLayer):
        pass

    model = tiny("qwen3_next")
    mem = managed(model)
    monkeypatch.setitem(DYNAMIC_LAYER_TYPE_MAPPING, "full_attention", Other)
    with pytest.raises(ms.ConfigurationError, match="layer 1 is a Other"):
        mst.Server(model, mem)
