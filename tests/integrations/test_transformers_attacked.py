"""Tests a server under bad requests, ended rows and interrupts: it serves the others and leaks nothing."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import memstate as ms
from tests.support.tiny_models import tiny
from tests.support.tiny_served import NEW, TEXT, managed

pytest.importorskip("transformers")
from transformers import GenerationConfig

import memstate.integrations.transformers as mst
from memstate.integrations.transformers import paged
from tests.integrations.servers import SPECULATING, Crowd, Judged, answer, hooked, ignore, raising
from tests.proof.injection.points import Tracer

PROMPT = TEXT[:9]
CODE = str(Path(mst.__file__).parent)
ENDS = {"length", "aborted", "failed", "too_large", "no_room"}  # two servers have the room of one manager


@pytest.mark.proof
def test_a_prompt_of_one_token_joins_a_running_batch_of_a_model_whose_windows_start_with_tokens() -> None:
    at = Judged("qwen4_exp_text")  # this model has a window of token ids that starts with end tokens
    at.ask("long")
    at.step()
    at.ask("joins", text=[23])
    at.ends()


def test_a_list_of_tokens_may_grow_while_its_request_runs() -> None:
    model, tokens = tiny("qwen3_next"), list(PROMPT)
    for event in mst.stream(model, managed(model), [mst.Prompt(tokens, "chat", most=NEW)]):
        if isinstance(event, mst.Token):
            tokens.append(event.token)
        else:
            assert event.tokens == tokens[9:]
    assert tokens == PROMPT + answer(model, PROMPT)


def test_a_session_that_was_closed_refuses_its_request_and_stops_no_other() -> None:
    at = Judged(prefix=ms.Prefix())
    chat = at.mem.sessions.open("chat")
    at.ask("late", session=chat)
    at.ask("good")
    at.mem.sessions.close(chat)
    assert "it was closed" in at.ends(late="invalid")["late"].error


def test_a_refusal_is_told_before_the_next_request_is_asked_for() -> None:
    model, asked = tiny("qwen3_next"), []

    def arrivals() -> Iterator[mst.Prompt]:
        yield mst.Prompt(PROMPT, "bad", most=1000)
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


def test_a_manager_and_pages_made_in_inference_mode_work_outside() -> None:
    model = tiny("qwen3_next")
    with torch.inference_mode():
        mem = managed(model, prefix=None)
        mst.Server(model, mem)  # the server allocates the pages
    ids = torch.tensor([PROMPT])
    with mst.StateCache(model, mem, prompt=ids) as cache:
        out = model.generate(ids, past_key_values=cache, max_new_tokens=NEW)
    assert out[0, 9:].tolist() == answer(model, PROMPT)


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


@pytest.mark.parametrize("keep", [True, False, None])
def test_rows_that_the_manager_ended_stop_neither_abort_nor_close_nor_others(keep: bool | None) -> None:
    at = Judged()

    def ended() -> None:
        at.step()
        at.mem.end([at.mem.rows[0]]) if keep is None else at.mem.recover(keep=keep)

    at.ask("first")
    ended()
    at.ask("second", text=TEXT[:4])
    at.server.admit()
    at.abort("first")
    at.rest()
    at.ask("third")
    at.results(first="aborted")
    at.ask("fourth", "fifth", to=ignore)
    ended()
    at.server.close()
    at.ends(first="aborted", fourth="aborted", fifth="aborted")
    with pytest.raises(ms.InvalidArgument, match="'sixth': the server is closed"):
        at.ask("sixth")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a destructor, it is ignored
@pytest.mark.sample(1)
@pytest.mark.parametrize("part", range(40))
def test_an_interrupt_at_any_line_of_a_step_leaves_no_row_between_two_tokens(part: int) -> None:
    random, guessed = Random(part), GenerationConfig(prompt_lookup_num_tokens=3)
    sampled = GenerationConfig(do_sample=True, num_return_sequences=2)
    for point in (random.randrange(1, 800), random.randrange(1, 8000)):
        speculates, kernels = point % 2 == 0, ("slots", "auto")[point // 2 % 2]
        at = Judged(chunk=6, kernels=kernels, **SPECULATING if speculates else {})
        tracer = Tracer(point, KeyboardInterrupt, CODE)
        for id, text in enumerate((TEXT[:3] * 3, PROMPT, PROMPT)):
            at.ask(id, text=text, config=guessed if speculates else None)
        at.ask("sampled", text=TEXT[:6], config=sampled, seed=3)
        for _ in range(60):
            with suppress(KeyboardInterrupt):
                tracer.run(at.step)
        at.server.close()
        assert at.ends(others={"length", "failed"}), tracer.place


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("family", ["qwen3_next", "lfm3", "jamba", "qwen4_exp_text", "glm5_next", "mamba2"])
def test_what_random_servers_answer_is_what_the_model_answers_alone(
    family: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, random = mst.layout(tiny(family)), Random(f"{family} {seed}")
    monkeypatch.setattr(paged, "ROOM", random.choice([1, 3, 64]))
    speculates, rows = layout.continues and random.random() < 0.6, random.choice([1, 2, 4])
    pages = ms.Pages(size=4, count=random.choice([8, 12, 40]), per_row=8) if layout.attended else ms.Pages(size=4)
    kernels: Any = "slots" if layout.on_slots and seed % 2 else "auto"
    first = Judged(
        family, chunk=random.choice([1, 3, 7, 64]), kernels=kernels, max_requests=rows, debug=True, pages=pages,
        slots=random.choice([4, 7, 16]) + 2 * rows, prefix=random.choice([None, ms.Prefix()]),
        tracking=random.choice([ms.Redirect(every=4), ms.PingPong(every=4), ms.LazyPingPong(every=4)]),
        **SPECULATING if speculates else {},
    )  # fmt: skip
    second = Judged(family, mem=first.mem, chunk=random.choice([1, 3, 7, 64]), kernels=kernels)

    @contextmanager
    def around(at: Judged) -> Iterator[None]:
        if random.random() < 0.1:
            at.mem.device.sleep()
            at.mem.device.wake()
        fails = hooked(at.model, raising(ArithmeticError)) if random.random() < 0.04 else nullcontext()
        with suppress(ArithmeticError, ExceptionGroup), fails:
            yield

    crowd = Crowd(random, samples=min(rows, 3), guesses=4 * speculates, raises=0.15)
    crowd.play(first, *[second] * random.randrange(2), around=around)
    assert any(one.reason == "length" for at in (first, second) for one in at.results(others=ENDS).values())
    second.ends(others=ENDS)
    first.ends(others=ENDS)
