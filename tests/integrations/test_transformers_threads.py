"""Tests a server that several threads use, and code that its steps call: each request gets one right answer."""

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any

import pytest

import memstate as ms
from tests.support.tiny_served import NEW, TEXT

pytest.importorskip("transformers")
from transformers import GenerationConfig

import memstate.integrations.transformers as mst
from tests.integrations.servers import Crowd, Judged, answer, hooked, ignore, raising, run, stored

OTHER, TWO = TEXT[5:16], GenerationConfig(do_sample=True, top_k=1, num_return_sequences=2)


@pytest.fixture
def eager() -> Iterator[None]:
    """Makes Python switch threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def turns(at: Judged, number: int) -> list[list[int]]:
    """Returns the prompts of the turns of a conversation."""
    texts = [TEXT[:9]]
    for more in range(1, number):
        texts.append([*texts[-1], *answer(at.model, texts[-1]), 77, more])
    return texts


@pytest.mark.sample(3)
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("drives", ["main", "thread", "run"])
@pytest.mark.parametrize("storage", [False, True], ids=["device", "storage"])
def test_random_clients_of_several_threads_get_one_end_each(
    storage: bool, drives: str, seed: int, tmp_path: Path
) -> None:
    """Threads submit and abort. If the server runs, requests time out, forwards fail, and a thread closes it."""
    random, fails, runs = Random(seed), Random(seed + 100), drives == "run"
    settings: dict[str, Any] = {"tiers": stored(tmp_path)} if storage else {}
    prefix = ms.Prefix() if storage else random.choice([None, ms.Prefix()])
    at = Judged(chunk=random.choice([1, 5, 256]), prefix=prefix, debug=drives == "main", **settings)
    left = list(range(4))

    def sometimes(*_: Any) -> None:
        if runs and fails.random() < 0.1:
            raise ArithmeticError("sometimes")

    def client(number: int) -> None:
        own = Random(f"{seed} {number}")
        crowd = Crowd(own, f"{number} ", samples=2, raises=0.1 * runs)
        try:
            for _ in range(7):
                crowd.ask(
                    at, most=6, to=ignore if runs else None, timeout=own.choice([None, None, 0.02]) if runs else None
                )
                if own.random() < 0.3:
                    at.abort(own.choice(crowd.ids))
                assert at.server.waiting >= 0 and at.server.running <= 3
            if runs and number == 0 and seed % 2:
                at.server.close()
        except ms.InvalidArgument:
            assert at.server._closed
        finally:
            left.remove(number)

    def driver() -> None:
        while left or at.server.busy:
            at.step()

    clients = [lambda number=number: client(number) for number in range(4)]
    with hooked(at.model, sometimes), at.driven() if runs else nullcontext():
        run(*clients, here=driver) if drives == "main" else run(*clients, *[driver] * (not runs))
    at.ends(others={"length", "aborted", *(["failed", "timeout"] if runs else [])})


@pytest.mark.parametrize("name", ["submit", "abort", "close"])
def test_a_call_in_the_middle_of_a_step_takes_effect_in_the_next(name: str) -> None:
    """The call of another thread begins and returns while the forward runs."""
    at = Judged()
    at.ask("stays", "goes", to=ignore)
    at.step()
    calls = {"submit": lambda: at.ask("new"), "abort": lambda: at.abort("goes"), "close": at.server.close}
    with hooked(at.model, lambda *_: run(calls[name])):
        at.step()
    assert {len(one.events) for one in at.asked[:2]} == {2}  # the call has no effect on this step
    assert at.server.busy and at.server.running == 2 and at.server.waiting == (name == "submit")
    gone = {"submit": [], "abort": ["goes"], "close": ["goes", "stays"]}[name]
    ended = at.ends(**dict.fromkeys(gone, "aborted"))
    assert {len(ended[id].tokens) for id in gone} <= {2}


def test_code_that_a_step_calls_can_submit_and_abort_but_not_step() -> None:
    at, seen = Judged(), list[Any]()

    def calls(ids: Any, scores: Any) -> Any:
        if not seen:
            seen.append(True)
            at.ask("new", text=OTHER)
            at.abort("old")
            for call in (at.server.step, at.server.admit):
                with pytest.raises(ms.InvalidArgument, match="a step is running"):
                    call()
        return scores

    at.ask("calls", processors=[calls])
    at.ask("old", text=TEXT[3:12])
    at.step()
    assert seen == [True] and at.server.waiting == 1
    assert len(at.ends(old="aborted")["old"].tokens) == 1


def test_an_abort_of_another_thread_ends_what_came_before_it_and_no_more() -> None:
    at = Judged()
    at.ask("first")
    run(at.step)  # this thread ends, and leaves the server to others
    run(lambda: (at.ask("one"), at.abort("one"), at.abort("first"), at.ask("one", text=OTHER)))
    at.ends(first="aborted", one={"aborted", "length"})
    assert [len(one.tokens) for asked in at.asked for one in asked.results] == [1, 0, NEW]


@pytest.mark.parametrize("storage", [False, True], ids=["device", "storage"])
def test_a_turn_waits_for_the_last_turn_of_its_session(storage: bool, tmp_path: Path) -> None:
    at = Judged(prefix=ms.Prefix(), tiers=stored(tmp_path) if storage else None)
    chat, texts = at.mem.sessions.open("chat"), turns(at, 3)
    at.ask(0, text=texts[0], session=chat)
    at.step()
    while at.server.waiting:  # the first turn waits for storage
        at.step()
    for number in (1, 2):
        at.ask(number, text=texts[number], session=chat)
    at.ask("other", text=OTHER, most=1)
    order = [one.id for _ in range(40) for one in at.step() if isinstance(one, mst.Served)]
    assert order == ["other", 0, 1, 2]
    served = at.ends()
    assert [served[n].cached for n in range(3)] == [0, *(len(text) + NEW - 1 for text in texts[:2])]


def test_a_turn_whose_session_is_busy_elsewhere_is_refused_by_name() -> None:
    first = Judged(prefix=ms.Prefix())
    second, chat = Judged(mem=first.mem), first.mem.sessions.open("chat")
    first.ask("one", session=chat)
    first.step()
    second.ask("two", session=chat)
    assert "has a turn running" in second.results(two="invalid")["two"].error
    first.ends()


def test_a_server_whose_room_others_have_says_what_to_do() -> None:
    at = Judged(max_requests=2)
    lost = at.mem.admit([ms.Request(name, length=8) for name in ("a", "b")])
    at.ask("one")
    refused = at.results(one="no_room")["one"]
    assert "2 rows of the manager are not this server's" in refused.error and "recover()" in refused.error
    del lost
    at.mem.recover()
    at.ask("two")
    at.ends(one="no_room")


def test_rows_that_could_not_be_aborted_are_aborted_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step fails while another thread is inside a call of the manager, so the rows cannot be aborted yet."""
    at = Judged(max_requests=2)
    at.ask(*"ab")
    at.step()
    with monkeypatch.context() as patch:
        for call in ("end", "poll"):
            patch.setattr(at.mem, call, raising(ms.Broken("close_session")))
        at.step(raises=ms.Broken)
    assert (at.server.running, at.mem.stats().rows_used) == (0, 2)
    at.ask("c")
    at.ends(a="failed", b="failed")


def test_a_manager_that_was_closed_serves_without_its_storage(tmp_path: Path) -> None:
    at = Judged(prefix=ms.Prefix(), tiers=stored(tmp_path))
    at.ask("waits", "gone")
    at.mem.close()
    at.abort("gone")
    at.ask("later", text=OTHER)
    at.ends(gone="aborted")


@pytest.mark.parametrize("call", ["admit", "fork"])
def test_rows_whose_admission_was_interrupted_are_given_back(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes after the manager has admitted the rows, and before the server knows them."""
    at = Judged()
    real = getattr(at.mem, call)
    at.ask("one", config=TWO, seed=1)

    def interrupted(*given: Any) -> None:
        real(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(at.mem, call, interrupted)
        for _ in range(4):  # rows that leak would run out
            at.step(raises=KeyboardInterrupt)
    at.ends()


class Odd:
    """An object whose comparison raises."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("odd")

    __hash__ = object.__hash__


def test_odd_sessions_and_names_are_refused_at_once_and_an_odd_abort_is_told_once() -> None:
    at = Judged()
    at.ask("good")
    at.step()
    with pytest.raises(ms.InvalidArgument, match="expected a Prompt"):
        at.server.submit(TEXT)  # type: ignore[arg-type]
    for session in (Odd(), TEXT, 3):
        with pytest.raises(ms.InvalidArgument, match=r"prompt 'bad': session=.*what sessions\.open\(\) returned"):
            at.ask("bad", session=session)
    for call in (at.ask, at.server.abort):
        with pytest.raises(ms.InvalidArgument, match="hashable"):
            call([1])
    run(lambda: at.server.abort(Odd()))
    at.step(raises=ValueError)
    at.ends()


def test_serve_reads_on_while_a_turn_waits_for_the_one_before() -> None:
    """Requests behind the waiting turn overtake it. `serve` reads only as many of them as there is room for."""
    at = Judged(max_requests=2, prefix=ms.Prefix())
    chat, read, ended = at.mem.sessions.open("chat"), list[int](), list[Any]()

    def arriving() -> Iterator[mst.Prompt]:
        for number, tokens in enumerate([*turns(at, 2), TEXT[:4], OTHER, OTHER[1:]]):
            read.append(number)
            yield mst.Prompt(tokens, number, most=NEW if number < 2 else 1, session=chat if number < 2 else None)

    for event in mst.stream(at.model, at.mem, arriving()):
        if isinstance(event, mst.Served):
            ended.append(event.id)
        elif not ended:
            assert len(read) <= 4, "the fourth has no room yet"
    assert ended == [2, 3, 4, 0, 1]
