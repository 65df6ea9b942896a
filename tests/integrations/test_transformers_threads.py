"""Tests a server that several threads use, and code that its steps call: each request gets one right answer."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

import memstate as ms
from tests.support.tiny_models import tiny
from tests.support.tiny_served import NEW, TEXT, alone, managed

pytest.importorskip("transformers")
from transformers import GenerationConfig, LogitsProcessor

import memstate.integrations.transformers as mst
from tests.integrations.servers import hooked, raising, require_free, rest, results, server_of

PROMPTS = [TEXT[:9], TEXT[:4], [*TEXT[:8], 77, 78], TEXT[5:16]]
WAITS = 60  # seconds to wait for a thread; only a defect takes so long


def prompt(number: int, id: Any = None, most: int = NEW, **settings: Any) -> mst.Prompt:
    return mst.Prompt(PROMPTS[number], number if id is None else id, most=most, **settings)


@pytest.fixture(scope="module")
def answers() -> list[list[int]]:
    return [alone(tiny("qwen3_next"), tokens, {}) for tokens in PROMPTS]


@pytest.fixture
def eager() -> Iterator[None]:
    """Makes Python switch threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def stored(folder: Path) -> ms.Tiers:
    return ms.Tiers("tiny", host_slots=16, store=ms.FileStore(str(folder)), prefetch=ms.Prefetch(threshold=4))


def run(*works: Callable[[], object], here: Callable[[], object] = lambda: None) -> None:
    """Runs each of `works` in its own thread and `here` in this thread; raises the first exception of a thread."""
    threads = ThreadPoolExecutor(len(works))
    jobs = [threads.submit(work) for work in works]
    here()
    for job in jobs:
        job.result(WAITS)
    threads.shutdown()


@pytest.mark.sample
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("drives", ["main", "thread"])
@pytest.mark.parametrize("storage", [False, True], ids=["device", "storage"])
def test_threads_submit_and_abort_while_another_one_steps(
    storage: bool, drives: str, answers: list[list[int]], tmp_path: Path
) -> None:
    tiers = stored(tmp_path) if storage else None
    server = server_of(chunk=5, tiers=tiers, prefix=ms.Prefix(), debug=drives == "main")
    events, news = list[Any](), SimpleQueue[bool]()

    def client(number: int) -> None:
        try:
            for turn in range(8):
                server.submit(prompt((number + turn) % 4, (number, turn)))
                news.put(False)
                if turn % 3 == 2:
                    for name in ((number, turn), (number, turn - 1), (number, turn - 1)):
                        server.abort(name)
                assert server.waiting >= 0 and server.running <= 3
        finally:
            news.put(True)

    def driver() -> None:
        ended = 0
        for _ in range(3000):
            if server.busy:
                events.extend(server.step())
            elif ended < 4:
                ended += news.get(timeout=WAITS)
            else:
                break
        assert not server.busy

    clients = [lambda number=number: client(number) for number in range(4)]
    run(*clients, here=driver) if drives == "main" else run(driver, *clients)
    served = results(events)
    assert served.keys() == {(number, turn) for number in range(4) for turn in range(8)}
    for (number, turn), one in served.items():
        assert one.tokens == answers[(number + turn) % 4][: len(one.tokens)]
        assert one.reason == "aborted" or (one.reason, len(one.tokens)) == ("length", NEW)
        assert one.reason != "aborted" or turn % 3
    server.mem.prefix.clear()  # type: ignore[union-attr]
    require_free(server)
    if drives == "main":
        server.mem.close()  # with debug, close looks for leaks


@pytest.mark.parametrize("name", ["submit", "abort", "close"])
def test_a_call_in_the_middle_of_a_step_takes_effect_in_the_next(name: str, answers: list[list[int]]) -> None:
    """The call of another thread begins and returns while the forward runs."""
    server = server_of()
    for number in range(2):
        server.submit(prompt(number))
    server.step()
    calls: dict[str, Callable[[], object]] = {
        "submit": lambda: server.submit(prompt(2)),
        "abort": lambda: server.abort(1),
        "close": server.close,
    }
    with hooked(server.model, lambda *_: run(calls[name])):
        events = server.step()
    assert [event.id for event in events] == [0, 1]  # the call has no effect on this step
    assert server.busy and server.running == 2 and server.waiting == (name == "submit")
    served = results(events + server.step() + rest(server))
    ids = {"submit": [0, 1, 2], "abort": [0, 1], "close": []}[name]
    assert sorted(served) == ids
    for number in ids:
        aborted = name == "abort" and number == 1
        assert served[number].tokens == answers[number][: 2 if aborted else NEW]
        assert served[number].reason == ("aborted" if aborted else "length")
    require_free(server)


def test_code_that_a_step_calls_can_submit_and_abort_but_not_step(answers: list[list[int]]) -> None:
    server, calls = server_of(), list[Any]()

    class Calls(LogitsProcessor):
        def __call__(self, ids: Any, scores: Any) -> Any:
            if not calls:
                server.submit(prompt(1, "new"))
                server.abort("old")
                calls.append(True)
                for call in (server.step, server.admit):
                    with pytest.raises(ms.InvalidArgument, match="a step is running"):
                        call()
            return scores

    server.submit(prompt(0, "calls", processors=[Calls()]))
    server.submit(prompt(2, "old"))
    events = server.step()
    assert calls == [True] and server.waiting == 1
    served = results(events + rest(server))
    assert (served["calls"].tokens, served["new"].tokens) == (answers[0], answers[1])
    assert (served["old"].tokens, served["old"].reason) == (answers[2][:1], "aborted")
    require_free(server)


def test_an_abort_of_another_thread_ends_what_came_before_it_and_no_more(answers: list[list[int]]) -> None:
    server = server_of()

    def client() -> None:
        server.submit(prompt(0, "one"))
        server.abort("one")
        server.submit(prompt(1, "one"))

    run(client)
    ended = [(one.reason, one.tokens) for one in rest(server) if isinstance(one, mst.Served)]
    assert ended == [("aborted", []), ("length", answers[1])]


def test_a_thread_that_has_ended_leaves_the_server_to_others() -> None:
    server = server_of()
    server.submit(prompt(0, "one"))
    run(server.step)
    server.abort("one")
    assert [(one.reason, len(one.tokens)) for one in server.step()] == [("aborted", 1)]
    require_free(server)


@pytest.mark.parametrize("storage", [False, True], ids=["device", "storage"])
def test_a_turn_waits_for_the_last_turn_of_its_session(storage: bool, answers: list[list[int]], tmp_path: Path) -> None:
    server = server_of(prefix=ms.Prefix(), tiers=stored(tmp_path) if storage else None)
    chat, model = server.mem.sessions.open("chat"), server.model
    turns = [PROMPTS[0], [*PROMPTS[0], *answers[0], 77, 78]]
    turns.append([*turns[1], *alone(model, turns[1], {}), 11])
    server.submit(mst.Prompt(turns[0], "turn 0", most=NEW, session=chat))
    events = server.step()
    while server.waiting:  # the first turn waits for storage
        events += server.step()
    for number in (1, 2):
        server.submit(mst.Prompt(turns[number], f"turn {number}", most=NEW, session=chat))
    server.submit(prompt(1, "other", most=1))
    served = results(events + rest(server))
    assert list(served) == ["other", "turn 0", "turn 1", "turn 2"]
    assert served["other"].tokens == answers[1][:1]
    for number, before in ((0, 0), (1, len(turns[0]) + NEW - 1), (2, len(turns[1]) + NEW - 1)):
        one = served[f"turn {number}"]
        assert (one.reason, one.tokens, one.cached) == ("length", alone(model, turns[number], {}), before)
    assert server.mem.audit().clean


def test_a_turn_whose_session_is_busy_elsewhere_is_refused_by_name() -> None:
    first = server_of(prefix=ms.Prefix())
    second, chat = mst.Server(first.model, first.mem), first.mem.sessions.open("chat")
    first.submit(prompt(0, "one", session=chat))
    first.step()
    second.submit(prompt(0, "two", session=chat))
    refused = results(second.step())["two"]
    assert refused.reason == "invalid" and "has a turn running" in refused.error


def test_a_server_whose_room_others_have_says_what_to_do(answers: list[list[int]]) -> None:
    server = server_of(max_requests=2)
    lost = server.mem.admit([ms.Request(name, length=8) for name in ("a", "b")])
    server.submit(prompt(0, "one"))
    refused = results(server.step())["one"]
    assert refused.reason == "no_room"
    assert "2 rows of the manager are not this server's" in refused.error and "recover()" in refused.error
    del lost
    server.mem.recover()
    server.submit(prompt(0, "two"))
    assert results(rest(server))["two"].tokens == answers[0]


def test_rows_that_could_not_be_aborted_are_aborted_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step fails while another thread is inside a call of the manager, so the rows cannot be aborted yet."""
    server = server_of(max_requests=2)
    for number in range(2):
        server.submit(prompt(number))
    server.step()
    with monkeypatch.context() as patch:
        for call in ("end", "poll"):
            patch.setattr(server.mem, call, raising(ms.Broken("close_session")))
        with pytest.raises(ms.Broken):
            server.step()
    assert (server.running, server.mem.stats().rows_used) == (0, 2)
    server.submit(prompt(2))
    assert [one.reason for one in results(rest(server)).values()] == ["failed", "failed", "length"]
    require_free(server)


def test_a_manager_that_was_closed_serves_without_its_storage(answers: list[list[int]], tmp_path: Path) -> None:
    server = server_of(prefix=ms.Prefix(), tiers=stored(tmp_path))
    server.submit(prompt(0))
    server.submit(prompt(1, "gone"))
    server.mem.close()
    server.abort("gone")
    server.submit(prompt(1))
    tokens = {name: one.tokens for name, one in results(rest(server)).items()}
    assert tokens == {0: answers[0], 1: answers[1], "gone": []}


@pytest.mark.parametrize("call", ["admit", "fork"])
def test_rows_whose_admission_was_interrupted_are_given_back(
    call: str, answers: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes after the manager has admitted the rows, and before the server knows them."""
    server = server_of()
    real = getattr(server.mem, call)
    config = GenerationConfig(do_sample=True, top_k=1, num_return_sequences=3, max_new_tokens=NEW)
    server.submit(mst.Prompt(PROMPTS[0], "one", config=config, seed=1))

    def interrupted(*given: Any) -> None:
        real(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(server.mem, call, interrupted)
        for _ in range(4):  # rows that leak would run out
            with pytest.raises(KeyboardInterrupt):
                server.step()
    assert [one.tokens for one in rest(server) if isinstance(one, mst.Served)] == [answers[0]] * 3
    require_free(server)


class Odd:
    """An object whose comparison raises."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("odd")

    __hash__ = object.__hash__


def test_odd_sessions_and_names_are_refused_at_once(answers: list[list[int]]) -> None:
    server = server_of()
    server.submit(prompt(0, "good"))
    server.step()
    with pytest.raises(ms.InvalidArgument, match="expected a Prompt"):
        server.submit(TEXT)  # type: ignore[arg-type]
    for session in (Odd(), TEXT, 3):
        with pytest.raises(ms.InvalidArgument, match=r"prompt 'bad': session=.*what sessions\.open\(\) returned"):
            server.submit(prompt(0, "bad", session=session))
    for call in (lambda: server.submit(prompt(0, [1])), lambda: server.abort([1])):  # type: ignore[arg-type]
        with pytest.raises(ms.InvalidArgument, match="hashable"):
            call()
    assert results(rest(server))["good"].tokens == answers[0]


def test_what_was_noted_and_raises_is_told_once(answers: list[list[int]]) -> None:
    server = server_of()
    server.submit(prompt(0, "good"))
    server.step()
    run(lambda: server.abort(Odd()))
    with pytest.raises(ValueError, match="odd"):
        server.step()
    assert results(rest(server))["good"].tokens == answers[0]


def test_serve_reads_on_while_a_turn_waits_for_the_one_before(answers: list[list[int]]) -> None:
    """Requests behind the waiting turn overtake it. `serve` reads only as many of them as there is room for."""
    model = tiny("qwen3_next")
    mem = managed(model, max_requests=2)
    chat, read, ended = mem.sessions.open("chat"), list[int](), list[Any]()

    def arriving() -> Iterator[mst.Prompt]:
        turns = [PROMPTS[0], [*PROMPTS[0], *answers[0], 77, 78]]
        for number, tokens in enumerate([*turns, PROMPTS[1], PROMPTS[3], PROMPTS[3][1:]]):
            read.append(number)
            yield mst.Prompt(tokens, number, most=NEW if number < 2 else 1, session=chat if number < 2 else None)

    for event in mst.stream(model, mem, arriving()):
        if isinstance(event, mst.Served):
            ended.append(event.id)
        elif not ended:
            assert len(read) <= 4, "the fourth has no room yet"
    assert ended == [2, 3, 4, 0, 1]
