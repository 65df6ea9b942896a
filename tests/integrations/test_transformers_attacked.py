"""Tests a server under bad requests, exceptions and interrupts: it serves the others and leaks nothing."""

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import memstate as ms
from tests.support.tiny_models import tiny
from tests.support.tiny_served import NEW, TEXT, alone, managed

pytest.importorskip("transformers")
from transformers import GenerationConfig, LogitsProcessor

import memstate.integrations.transformers as mst
from memstate.integrations.transformers import paged
from tests.integrations.servers import SPECULATING, Interrupt, hooked, raising, require_free, rest, results, server_of

PROMPT = TEXT[:9]
CODE = str(Path(mst.__file__).parent)


def prompt(id: Any, tokens: Any = PROMPT, most: int = NEW, **settings: Any) -> mst.Prompt:
    return mst.Prompt(tokens, id, most=most, **settings)


def answers_of(server: mst.Server) -> dict[Any, list[int]]:
    return {id: one.tokens for id, one in results(rest(server)).items()}


@pytest.fixture(scope="module")
def answer() -> list[int]:
    return alone(tiny("qwen3_next"), PROMPT, {})


@pytest.mark.proof
def test_a_prompt_of_one_token_joins_a_running_batch_of_a_model_whose_windows_start_with_tokens() -> None:
    server = server_of("qwen4_exp_text")  # this model has a window of token ids that starts with end tokens
    texts = {"long": PROMPT, "joins": [23]}
    events = []
    for id, text in texts.items():
        server.submit(prompt(id, text))
        events += server.step()
    served = results(events + rest(server))
    assert {id: one.tokens for id, one in served.items()} == {
        id: alone(server.model, text, {}) for id, text in texts.items()
    }


def test_a_list_of_tokens_may_grow_while_its_request_runs(answer: list[int]) -> None:
    model, tokens = tiny("qwen3_next"), list(PROMPT)
    for event in mst.stream(model, managed(model), [prompt("chat", tokens)]):
        if isinstance(event, mst.Token):
            tokens.append(event.token)
        else:
            assert (event.tokens, event.reason) == (answer, "length")
    assert tokens == PROMPT + answer


def test_a_session_that_was_closed_refuses_its_request_and_stops_no_other(answer: list[int]) -> None:
    server = server_of(prefix=ms.Prefix())
    chat = server.mem.sessions.open("chat")
    server.submit(prompt("late", session=chat))
    server.submit(prompt("good"))
    server.mem.sessions.close(chat)
    served = results(rest(server))
    assert (served["late"].reason, served["good"].tokens) == ("invalid", answer)
    assert "it was closed" in served["late"].error


def test_a_refusal_is_told_before_the_next_request_is_asked_for() -> None:
    model, asked = tiny("qwen3_next"), []

    def arrivals() -> Iterator[mst.Prompt]:
        yield prompt("bad", most=1000)
        asked.append(True)

    results = mst.serve(model, managed(model), arrivals())
    assert (next(results).reason, asked) == ("too_large", [])
    assert list(results) == []


def test_gradients_reach_neither_slots_nor_the_next_step() -> None:
    model = tiny("qwen3_next")
    mem, ids, logits = managed(model, prefix=None), torch.tensor([PROMPT]), list[torch.Tensor]()
    for grad in (False, True):
        with torch.set_grad_enabled(grad), mst.StateCache(model, mem) as cache:
            for part in (ids[:, :5], ids[:, 5:8], ids[:, 8:]):
                out = model(input_ids=part, past_key_values=cache, use_cache=True).logits
        logits.append(out.detach())
        assert not any(mem.planes[name].requires_grad for name in mem.planes)
    assert torch.equal(*logits)


def test_a_manager_and_pages_made_in_inference_mode_work_outside(answer: list[int]) -> None:
    model = tiny("qwen3_next")
    with torch.inference_mode():
        mem = managed(model, prefix=None)
        mst.Server(model, mem)  # the server allocates the pages
    ids = torch.tensor([PROMPT])
    with mst.StateCache(model, mem, prompt=ids) as cache:
        assert model.generate(ids, past_key_values=cache, max_new_tokens=NEW)[0, 9:].tolist() == answer


def test_a_layout_read_under_autocast_has_the_dtypes_of_the_model() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        layout = mst.layout(tiny("lfm2", seed=8))
    assert {plane.dtype for plane in layout.state.planes} == {torch.float32}


def test_a_model_in_training_mode_is_refused() -> None:
    model = tiny("lfm2", seed=8)
    mem = managed(model)
    model.train()
    try:
        for make in (mst.Server, mst.StateCache):
            with pytest.raises(ms.ConfigurationError, match=r"in training mode.*model\.eval\(\)"):
                make(model, mem)
    finally:
        model.eval()


@pytest.mark.parametrize("keep", [True, False])
def test_rows_that_the_manager_ended_stop_neither_abort_nor_close(keep: bool, answer: list[int]) -> None:
    server = server_of()
    server.submit(prompt("first"))
    server.step()
    server.mem.recover(keep=keep)
    server.submit(prompt("second", TEXT[:4]))
    server.admit()
    server.abort("first")
    served = results(rest(server))
    assert {id: one.reason for id, one in served.items()} == {"first": "aborted", "second": "length"}
    server.submit(prompt("third"))
    assert answers_of(server) == {"third": answer}
    server.submit(prompt("fourth"))
    server.step()
    server.mem.recover(keep=keep)
    server.close()
    require_free(server)
    with pytest.raises(ms.InvalidArgument, match="'fifth': the server is closed"):
        server.submit(prompt("fifth"))


@pytest.mark.sample(1)
@pytest.mark.parametrize("part", range(40))
def test_an_interrupt_at_any_line_of_a_step_leaves_no_row_between_two_tokens(part: int) -> None:
    model, random = tiny("qwen3_next"), Random(part)
    texts = (TEXT[:3] * 3, PROMPT, PROMPT)
    expected = [alone(model, text, {}) for text in texts]
    sampled = GenerationConfig(do_sample=True, num_return_sequences=2, max_new_tokens=NEW)
    guessed = GenerationConfig(prompt_lookup_num_tokens=3, max_new_tokens=NEW)
    for line in (random.randrange(400), random.randrange(4000)):
        speculates = line % 2 == 0
        mem, kernels = (
            managed(model, prefix=None, **SPECULATING if speculates else {}),
            ("slots", "auto")[line // 2 % 2],
        )
        server, tracer, events = mst.Server(model, mem, chunk=6, kernels=kernels), Interrupt(line, CODE), []
        for number, text in enumerate(texts):
            server.submit(mst.Prompt(text, number, config=guessed if speculates else None, most=NEW))
        server.submit(mst.Prompt(TEXT[:6], "sampled", config=sampled, seed=3))
        steps = 0
        while server.busy and steps < 60:
            steps += 1
            with tracer.tracing():
                events += server.step()
        server.close()
        served = [one for one in events if isinstance(one, mst.Served)]
        told = Counter((one.id, one.sample) for one in served)
        assert told == Counter([(0, 0), (1, 0), (2, 0), ("sampled", 0), ("sampled", 1)]), tracer.where
        whole = [one for one in served if one.id != "sampled" and one.reason == "length"]
        assert all(one.tokens == expected[one.id] for one in whole), tracer.where
        assert steps < 60 and len(served) >= 1, tracer.where
        assert (server.mem.free_slots, server.mem.free_pages) == (16, 60), tracer.where


class Spoils(LogitsProcessor):
    """A logits processor that overwrites its arguments, and raises at one of its calls."""

    def __init__(self, call: int) -> None:
        self.left = call

    def __call__(self, ids: Any, scores: Any) -> Any:
        self.left -= 1
        if not self.left:
            raise ArithmeticError("in a processor")
        scored = scores.clone()
        ids.zero_()
        scores.zero_()
        return scored


def drawn(random: Random, id: int, texts: list[list[int]], speculates: bool) -> mst.Prompt:
    """Returns a random request; many requests share their first tokens."""
    tokens = random.choice(texts)[: random.choice([1, 2, 4, 7, 8, 12])] + random.sample(
        range(3, 97), random.choice([0, 0, 2])
    )
    config: dict[str, Any] = {"max_new_tokens": random.randint(1, 12)}
    if random.random() < 0.2:
        config |= {"do_sample": True, "num_return_sequences": random.randint(1, 3)}
    if speculates and random.random() < 0.7:
        config["prompt_lookup_num_tokens"] = random.randint(1, 4)
    processors = [Spoils(random.randint(1, 12))] if random.random() < 0.15 else []
    salt = random.choice([None, None, None, "tenant"])
    return mst.Prompt(tokens, id, config=GenerationConfig(**config), seed=id, processors=processors, salt=salt)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("family", ["qwen3_next", "lfm3", "jamba", "qwen4_exp_text", "glm5_next", "mamba2"])
def test_what_random_servers_answer_is_what_the_model_answers_alone(
    family: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, random = tiny(family), Random(f"{family} {seed}")
    monkeypatch.setattr(paged, "ROOM", random.choice([1, 3, 64]))
    speculates = mst.layout(model).continues and random.random() < 0.6
    settings = SPECULATING if speculates else {}
    rows, attends = random.choice([1, 2, 4]), bool(mst.layout(model).attended)
    tracking = random.choice([ms.Redirect(every=4), ms.PingPong(every=4), ms.LazyPingPong(every=4)])
    pages = ms.Pages(size=4, count=random.choice([8, 12, 40]), per_row=8) if attends else ms.Pages(size=4)
    mem = managed(
        model, slots=random.choice([4, 7, 16]) + 2 * rows, max_requests=rows, tracking=tracking, debug=True,
        pages=pages, prefix=random.choice([None, ms.Prefix()]), **settings,
    )  # fmt: skip
    chunks = [random.choice([1, 3, 7, 64]) for _ in range(random.randint(1, 2))]
    kernels: Any = "slots" if mst.layout(model).on_slots and seed % 2 else "auto"
    servers = [mst.Server(model, mem, chunk=chunk, kernels=kernels) for chunk in chunks]
    texts, prompts, events = [random.sample(range(3, 97), 12) for _ in range(2)], list[Any](), list[Any]()
    for step in range(400):
        if step < 8:
            for _ in range(random.choice([0, 1, 2])):
                prompts.append(drawn(random, len(prompts), texts, speculates))
                random.choice(servers).submit(prompts[-1])
            if random.random() < 0.1:
                random.choice(servers).abort(random.randrange(len(prompts) + 1))
        elif not any(server.busy for server in servers):
            break
        if random.random() < 0.1:
            mem.device.sleep()
            mem.device.wake()
        for server in servers:
            fails = hooked(model, raising(ArithmeticError)) if random.random() < 0.04 else nullcontext()
            with suppress(ArithmeticError, ExceptionGroup), fails:
                events += server.step()
    assert not any(server.busy for server in servers)
    results: list[Any] = [one for one in events if isinstance(one, mst.Served) and not prompts[one.id].config.do_sample]
    for one in results:
        expected = alone(model, prompts[one.id].tokens, {}, max(1, len(one.tokens)))
        assert one.tokens == expected[: len(one.tokens)]
        assert one.reason != "length" or len(one.tokens) == prompts[one.id].config.max_new_tokens
    assert any(one.reason == "length" for one in results)
    mem.close()  # with debug, close looks for leaks
    mem.recover(keep=False)
    assert mem.stats().rows_used == 0 and (not attends or mem.free_pages == pages.count)
