"""Tests `serve` on models of Transformers: tokens and logits are compared with the model's own cache.

Chunks and batches change the order of sums, so logits may differ by 1e-4 of the largest logit. As a control, states in
slots are spoilt: then logits must differ by more.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import memstate as ms
from tests.support.tiny_models import FAMILIES, tiny
from tests.support.tiny_served import NEW, TEXT, Known, managed

pytest.importorskip("transformers")
from transformers import GenerationConfig
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, DynamicLayer

import memstate.integrations.transformers as mst
from memstate.integrations.transformers import steps
from memstate.integrations.transformers.own import cache_argument, own_cache, read
from tests.integrations.servers import KNOWN, Judged, hooked, ignore, stored

BOUND = 1e-4
PROMPTS = (TEXT[:19], TEXT[:9], [11, 12], TEXT, [*TEXT[:19], 7, 8], TEXT[:19])


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
    kernels = "slots" if mst.layout(tiny(family)).on_slots else "auto"
    at = Judged(family, prefix=ms.Prefix(), chunk=8, kernels=kernels)
    for number, text in enumerate(PROMPTS):
        at.ask(number, text=text)
    assert at.results()[5].cached == 16  # 16 tokens have a state and KV; the last token is computed
    assert len(seen) == NEW * len(PROMPTS)
    assert farthest(seen, KNOWN[at.model]) < BOUND
    seen.clear()
    for name in at.mem.planes:
        at.mem.planes[name].neg_()
    (spoiled,) = mst.serve(at.model, at.mem, [mst.Prompt(PROMPTS[5], most=NEW)])
    assert spoiled.cached == 16
    assert farthest(seen[:1], KNOWN[at.model]) > 10 * BOUND
    at.ends()


def test_B29a_lengths_of_a_prompt_are_rounded_down_to_pages() -> None:
    for lengths, start in (((), 0), ((11, 10**6), 8), ([12], 12)):
        at = Judged(prefix=ms.Prefix())
        for text, cached in ((TEXT, 0), ([*TEXT[:14], 1, 2], start)):
            at.ask(cached, text=text, snapshot_at=lengths)
            assert at.results()[cached].cached == cached
        at.ends()


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


@pytest.mark.parametrize("wrong", [True, False])
def test_a_stream_that_is_left_or_gets_a_wrong_request_ends_its_requests(wrong: bool) -> None:
    model = tiny("qwen3_next")
    mem = managed(model, prefix=None)
    events = mst.stream(model, mem, iter([*PROMPTS[:2], *[[97]] * wrong]))
    with pytest.raises(ms.InvalidArgument, match=r"^requests\[2\]: prompt 2 has token 97") if wrong else nullcontext():
        assert len(list(islice(events, 4))) == 4
        assert mem.free_slots < 16
        events.close()
    assert (mem.free_slots, mem.free_pages, len(mem.rows)) == (16, 60, 0)


def test_requests_join_a_running_batch() -> None:
    model, mem, starts = tiny("qwen3_next"), managed(tiny("qwen3_next")), []

    def arrivals() -> Iterator[mst.Prompt | None]:
        yield mst.Prompt(TEXT[:9], "first", most=12)
        for _ in range(4):
            yield None
        starts.append(mem.stats().rows_used)
        yield mst.Prompt([11, 12], "second", most=3)

    assert [one.id for one in mst.serve(model, mem, arrivals())] == ["second", "first"]
    assert starts == [1]  # one request was running when the second came


class Calls(TorchDispatchMode):
    """Counts the calls of torch."""

    count = 0

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return call(*args, **(kwargs or {}))


def test_a_step_of_decode_calls_torch_a_few_times_more_than_the_own_cache() -> None:
    model, ids = tiny("qwen3_next"), torch.tensor([TEXT[:9]] * 3)
    server, cache = mst.Server(model, managed(model, prefix=None)), own_cache(model)
    for _ in range(3):
        server.submit(mst.Prompt(TEXT[:9]))
    counts = []
    with torch.inference_mode():
        for start, tokens in ((0, ids), (9, ids[:, :1])):  # the prompts, then a token of each
            with Calls() as ours:
                server.step()
            with Calls() as own:
                read(model, cache_argument(model), cache, tokens, start)
            counts.append(ours.count - own.count)
    attend = sum(kind == "full_attention" for kind in model.config.layer_types)
    assert counts[1] <= 23 + 8 * attend


def test_states_and_kv_come_back_from_host_memory() -> None:
    pages = ms.Pages(size=4, count=24, per_row=16)
    at = Judged("lfm3", slots=4, max_requests=1, pages=pages, prefix=ms.Prefix(), tiers=ms.Tiers("tiny", host_slots=32))
    for turn in range(2):  # this model has a sliding window
        for shift in range(5):
            at.ask((turn, shift), text=[*TEXT[shift:], *TEXT[:shift]])
    assert at.rest() == [] and at.mem.stats().tiers.host_hit_tokens > 0
    assert [one.cached > 0 for one in at.ends().values()] == [False] * 5 + [True] * 5


def test_the_kind_of_a_prompt_comes_to_what_it_leaves() -> None:
    at = Judged(prefix=ms.Prefix())
    at.ask("a", text=TEXT, kind="chat")
    at.rest()
    assert at.mem.prefix and {node.kind for node in at.mem.prefix.stated()} == {"chat"}


def cached(folder: Path, salt: str | None = None, **prefetch: Any) -> tuple[int, str]:
    """Serves a prompt with a new manager over a folder. Returns what was cached, and how it was fetched."""
    at = Judged(prefix=ms.Prefix(), tiers=stored(folder, **(prefetch or {"stop": "wait_complete"})))
    at.ask("a", text=TEXT, salt=salt)
    one = at.results()["a"]
    at.mem.close()
    return one.cached, one.prefetch


@pytest.mark.parametrize(("first", "salt", "found"), [("a", "a", 24), ("a", None, 0), ("a", "b", 0), (None, None, 24)])
def test_storage_is_asked_before_a_request_starts_for_what_its_own_salt_has(
    first: str | None, salt: str | None, found: int, tmp_path: Path
) -> None:
    assert cached(tmp_path, first) == (0, "missed")
    assert cached(tmp_path, salt) == (found, "complete" if found else "missed")


@pytest.mark.parametrize("how", ["abort", "close", "refused"])
def test_what_storage_reads_for_a_request_that_never_starts_is_cancelled(how: str, tmp_path: Path) -> None:
    cached(tmp_path)
    at = Judged(prefix=ms.Prefix(), tiers=stored(tmp_path))
    at.ask("never", text=TEXT, most=1000 if how == "refused" else NEW, to=ignore)
    at.server.admit()
    assert at.mem.stats().tiers.prefetch.in_flight == 1
    at.abort("never") if how == "abort" else at.server.close() if how == "close" else at.rest()
    at.results(never="too_large" if how == "refused" else "aborted")
    assert at.mem.stats().tiers.prefetch.in_flight == 0
    at.ends(others={"too_large", "aborted"})


def test_a_prefetch_that_was_stopped_is_told_with_the_result(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cached(tmp_path)
    caplog.set_level("WARNING", "memstate.tiers")
    assert cached(tmp_path, timeout=0.0, timeout_per_page=0.0) == (0, "stopped")
    assert "outcome='stopped'" in caplog.text and "stopped by timeout after" in caplog.text


def test_layers_whose_kv_pages_cannot_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(DynamicLayer):
        pass

    model = tiny("qwen3_next")
    mem = managed(model)
    monkeypatch.setitem(DYNAMIC_LAYER_TYPE_MAPPING, "full_attention", Other)
    with pytest.raises(ms.ConfigurationError, match="layer 1 is a Other"):
        mst.Server(model, mem)


def sampled(samples: int = 1, **more: Any) -> GenerationConfig:
    return GenerationConfig(do_sample=True, temperature=0.9, top_k=30, num_return_sequences=samples, **more)


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_samples_are_those_of_single_requests_and_their_prompt_is_read_once(family: str) -> None:
    at, read = Judged(family, max_requests=4), list[int]()
    three = at.ask("three", text=TEXT[:19], config=sampled(3, repetition_penalty=1.3), seed=7)
    at.ask("other")
    with hooked(at.model, lambda _, args, given: read.append(given["input_ids"].numel())):
        at.rest()
    at.ends()
    assert len({tuple(one.tokens) for one in three.results}) == 3  # each sample has its own seed
    assert sum(read) == 2 * 19 + 4 * (NEW - 1)  # prompts padded to 19 tokens, then 4 tokens per step


@pytest.mark.sample(1)
@pytest.mark.parametrize("tracking", [ms.Redirect(every=4), ms.PingPong(every=4)], ids=str)
@pytest.mark.parametrize("settings", [
    {"max_requests": 3}, {"slots": 10, "max_requests": 8},
    {"max_requests": 8, "pages": ms.Pages(size=4, count=16, per_row=16)},
    {"max_requests": 5, "prefix": None, "overlap": False},
], ids=str)  # fmt: skip
def test_samples_wait_for_rows_slots_and_pages_and_none_is_lost(
    tracking: ms.Tracking, settings: dict[str, Any]
) -> None:
    at = Judged("lfm2", tracking=tracking, debug=True, chunk=6, **{"prefix": ms.Prefix(), **settings})
    for n in range(6):
        at.ask(n, text=TEXT[n : n + 5 + n], config=sampled(1 + n % 3), seed=10 * n)
    at.ends()


def test_samples_that_never_fit_are_refused_whole() -> None:
    at = Judged("lfm2", slots=3, max_requests=4)
    at.ask(*"ab", config=sampled(4), seed=1)
    at.ask("other")
    at.ends(a="too_large", b="too_large")
    errors = {one.error for asked in at.asked[:2] for one in asked.results}
    assert errors == {"5 slots needed at once, there are 3: ask for less"}  # a wait would not help


def test_an_abort_ends_all_samples_of_what_runs_and_what_waits() -> None:
    at = Judged("bamba", max_requests=4)
    at.ask("three", "waits", config=sampled(3), seed=1)
    at.step(2)
    at.abort("three")
    at.step()
    at.abort("waits")
    at.step()
    at.ask("last", config=sampled(3), seed=1)
    assert at.server.waiting == 1
    at.abort("last")
    ended = at.ends(others="aborted")
    assert (len(ended["three"].tokens), ended["last"].tokens) == (2, [])
