"""A server that several threads use, and code that its own steps call: every request is answered once, and rightly."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import pytest

import memstate as ms
from tests.support.tiny_models import tiny
from tests.support.tiny_served import NEW, TEXT, alone, managed

pytest.importorskip("transformers")
from transformers import GenerationConfig, LogitsProcessor

import memstate.integrations.transformers as mst
from memstate.integrations.transformers import sampling
from memstate.integrations.transformers import server as under_test
from memstate.integrations.transformers.sampling import Sampler

PROMPTS = [TEXT[:9], TEXT[:4], [*TEXT[:8], 77, 78], TEXT[5:16]]
WAITS = 60  # seconds for a thread; only a defect takes as long


@pytest.fixture(scope="module")
def answers() -> list[list[int]]:
    return [alone(tiny("qwen3_next"), prompt, {}) for prompt in PROMPTS]


@pytest.fixture
def eager() -> Iterator[None]:
    """Threads take turns as often as Python lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def stored(folder: Path) -> ms.Tiers:
    return ms.Tiers("tiny", host_slots=16, store=ms.FileStore(str(folder)), prefetch=ms.Prefetch(threshold=4))


def run(*works: Callable[[], None]) -> None:
    """Runs each in a thread of its own, and raises what one of them raised."""
    raised: SimpleQueue[BaseException] = SimpleQueue()

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            raised.put(error)

    threads = [Thread(target=guarded, args=[work], daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAITS)
        assert not thread.is_alive(), "a call does not come back"
    if not raised.empty():
        raise raised.get()


def results(events: list[Any]) -> dict[Any, mst.Served]:
    served = [one for one in events if isinstance(one, mst.Served)]
    assert max(Counter(one.id for one in served).values(), default=1) == 1, "a request has one result"
    return {one.id: one for one in served}


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("drives", ["main", "thread"])
@pytest.mark.parametrize("storage", [False, True], ids=["device", "storage"])
def test_threads_submit_and_abort_while_another_one_steps(
    storage: bool, drives: str, answers: list[list[int]], tmp_path: Path
) -> None:
    model = tiny("qwen3_next")
    mem = managed(model, tiers=stored(tmp_path) if storage else None, debug=drives == "main")
    server, events, news = mst.Server(model, mem, chunk=5), list[Any](), SimpleQueue[bool]()

    def client(number: int) -> None:
        try:
            for turn in range(8):
                server.submit(mst.Prompt(PROMPTS[(number + turn) % 4], (number, turn), most=NEW))
                news.put(False)
                if turn % 3 == 2:
                    for name in ((number, turn), (number, turn - 1), (number, turn - 1)):
                        events.extend(server.abort(name))
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
    if drives == "main":
        threads = [Thread(target=one, daemon=True) for one in clients]
        for thread in threads:
            thread.start()
        driver()
        for thread in threads:
            thread.join(WAITS)
    else:
        run(driver, *clients)
    found = results(events)
    assert found.keys() == {(number, turn) for number in range(4) for turn in range(8)}
    for (number, turn), one in found.items():
        assert one.tokens == answers[(number + turn) % 4][: len(one.tokens)]
        assert one.reason == "aborted" or (one.reason, len(one.tokens)) == ("length", NEW)
        assert one.reason != "aborted" or turn % 3
    assert (server.busy, server.running, mem.stats().rows_used) == (False, 0, 0)
    assert mem.audit().clean
    mem.prefix.clear()  # type: ignore[union-attr]
    assert (mem.free_slots, mem.free_pages) == (16, 60)
    if drives == "main":
        mem.close()  # debug: looks for leaks


@pytest.mark.parametrize("name", ["submit", "abort", "close"])
def test_a_call_in_the_middle_of_a_step_takes_effect_in_the_next(name: str, answers: list[list[int]]) -> None:
    """Another thread calls while the forward runs, and comes back while it runs."""
    model, said = tiny("qwen3_next"), list[Any]()
    mem = managed(model, prefix=None)
    server = mst.Server(model, mem)
    for number in range(2):
        server.submit(mst.Prompt(PROMPTS[number], number, most=NEW))
    server.step()
    calls = {
        "submit": lambda: server.submit(mst.Prompt(PROMPTS[2], 2, most=NEW)),
        "abort": lambda: said.append(server.abort(1)),
        "close": server.close,
    }
    hook = model.register_forward_pre_hook(lambda *_: run(calls[name]))
    events = server.step()
    hook.remove()
    assert [event.id for event in events] == [0, 1]  # as if nobody had called
    assert server.busy and server.running == 2 and server.waiting == (name == "submit")
    events += server.step()
    while server.busy:
        events += server.step()
    found = results(events)
    ids = {"submit": [0, 1, 2], "abort": [0, 1], "close": []}[name]
    assert sorted(found) == ids
    for number in ids:
        aborted = name == "abort" and number == 1
        assert found[number].tokens == answers[number][: 2 if aborted else NEW]
        assert found[number].reason == ("aborted" if aborted else "length")
    assert said == ([[]] if name == "abort" else [])
    assert (mem.free_slots, mem.stats().rows_used) == (16, 0)


def test_code_that_a_step_calls_can_submit_and_abort_but_not_step(answers: list[list[int]]) -> None:
    model = tiny("qwen3_next")
    mem = managed(model, prefix=None)
    server, calls = mst.Server(model, mem), list[Any]()

    class Calls(LogitsProcessor):
        def __call__(self, ids: Any, scores: Any) -> Any:
            if not calls:
                server.submit(mst.Prompt(PROMPTS[1], "new", most=NEW))
                calls.append(server.abort("old"))
                for call in (server.step, server.admit):
                    with pytest.raises(ms.InvalidArgument, match="a step is running"):
                        call()
            return scores

    server.submit(mst.Prompt(PROMPTS[0], "calls", most=NEW, processors=[Calls()]))
    server.submit(mst.Prompt(PROMPTS[2], "old", most=NEW))
    events = server.step()
    assert calls == [[]] and server.waiting == 1
    while server.busy:
        events += server.step()
    found = results(events)
    assert (found["calls"].tokens, found["new"].tokens) == (answers[0], answers[1])
    assert (found["old"].tokens, found["old"].reason) == (answers[2][:1], "aborted")
    assert mem.free_slots == 16


def test_an_abort_of_another_thread_ends_what_came_before_it_and_no_more(answers: list[list[int]]) -> None:
    model = tiny("qwen3_next")
    mem = managed(model)
    server = mst.Server(model, mem)

    def client() -> None:
        server.submit(mst.Prompt(PROMPTS[0], "one", most=NEW))
        assert server.abort("one") == []
        server.submit(mst.Prompt(PROMPTS[1], "one", most=NEW))

    run(client)
    events = []
    while server.busy:
        events += server.step()
    ended = [(one.reason, one.tokens) for one in events if isinstance(one, mst.Served)]
    assert ended == [("aborted", []), ("length", answers[1])]


def test_a_thread_that_has_ended_leaves_the_server_to_others() -> None:
    model = tiny("qwen3_next")
    mem = managed(model, prefix=None)
    server = mst.Server(model, mem)
    server.submit(mst.Prompt(PROMPTS[0], "one", most=NEW))
    run(lambda: server.step() and None)
    assert [(one.reason, len(one.tokens)) for one in server.abort("one")] == [("aborted", 1)]
    assert (server.busy, mem.free_slots) == (False, 16)


def test_a_stream_that_one_thread_reads_and_another_leaves_ends_its_requests() -> None:
    model = tiny("qwen3_next")
    mem = managed(model, prefix=None)
    events, begun, left = mst.stream(model, mem, [mst.Prompt(PROMPTS[0], most=NEW)]), Event(), Event()

    def reads() -> None:
        assert isinstance(next(events), mst.Token)
        begun.set()
        assert left.wait(WAITS)  # as a thread of a pool stays

    def leaves() -> None:
        assert begun.wait(WAITS)
        events.close()  # type: ignore[attr-defined]
        left.set()

    run(reads, leaves)
    assert (mem.free_slots, mem.stats().rows_used) == (16, 0)


def test_requests_of_two_threads_get_their_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    model, found = tiny("qwen3_next"), dict[int, int]()

    def client(most: int) -> None:
        found[most] = Sampler(model, mst.Prompt(PROMPTS[0], config=GenerationConfig(max_new_tokens=most))).most

    class Remembered(WeakKeyDictionary[Any, Any]):
        """Another thread comes where the first one has just remembered its settings."""

        def __setitem__(self, key: Any, value: Any) -> None:
            super().__setitem__(key, value)
            if 3 not in found:
                found[3] = 0
                run(lambda: client(3))

    monkeypatch.setattr(sampling, "LAST", Remembered())
    client(7)
    assert found == {7: 7, 3: 3}


@pytest.mark.parametrize("storage", [False, True], ids=["device", "storage"])
def test_a_turn_waits_for_the_last_turn_of_its_session(storage: bool, answers: list[list[int]], tmp_path: Path) -> None:
    model = tiny("qwen3_next")
    mem = managed(model, tiers=stored(tmp_path) if storage else None)
    server, chat = mst.Server(model, mem), mem.sessions.open("chat")
    turns = [PROMPTS[0], [*PROMPTS[0], *answers[0], 77, 78]]
    turns.append([*turns[1], *alone(model, turns[1], {}), 11])
    events = []
    server.submit(mst.Prompt(turns[0], "turn 0", most=NEW, session=chat))
    events += server.step()
    while server.waiting:  # it waits for storage
        events += server.step()
    for number in (1, 2):
        server.submit(mst.Prompt(turns[number], f"turn {number}", most=NEW, session=chat))
    server.submit(mst.Prompt(PROMPTS[1], "other", most=1))
    while server.busy:
        events += server.step()
    found = results(events)
    assert list(found) == ["other", "turn 0", "turn 1", "turn 2"]
    assert found["other"].tokens == answers[1][:1]
    for number, before in ((0, 0), (1, len(turns[0]) + NEW - 1), (2, len(turns[1]) + NEW - 1)):
        one = found[f"turn {number}"]
        assert (one.reason, one.tokens, one.cached) == ("length", alone(model, turns[number], {}), before)
    assert mem.audit().clean


def test_a_turn_whose_session_is_busy_elsewhere_is_refused_by_name() -> None:
    model = tiny("qwen3_next")
    mem = managed(model)
    chat = mem.sessions.open("chat")
    first, second = mst.Server(model, mem), mst.Server(model, mem)
    first.submit(mst.Prompt(PROMPTS[0], "one", most=NEW, session=chat))
    first.step()
    second.submit(mst.Prompt(PROMPTS[0], "two", most=NEW, session=chat))
    (refused,) = second.step()
    assert isinstance(refused, mst.Served)
    assert refused.reason == "refused" and "has a turn running" in refused.error


def test_a_server_whose_room_others_have_says_what_to_do(answers: list[list[int]]) -> None:
    model = tiny("qwen3_next")
    mem = managed(model, max_requests=2, prefix=None)
    lost = mem.admit([ms.Request(name, length=8) for name in ("a", "b")])
    server = mst.Server(model, mem)
    server.submit(mst.Prompt(PROMPTS[0], "one", most=NEW))
    (refused,) = server.step()
    assert isinstance(refused, mst.Served)
    assert refused.reason == "refused"
    assert "2 rows of the manager are not this server's" in refused.error and "recover()" in refused.error
    del lost
    mem.recover()
    server.submit(mst.Prompt(PROMPTS[0], "two", most=NEW))
    events = []
    while server.busy:
        events += server.step()
    assert results(events)["two"].tokens == answers[0]


def test_rows_that_could_not_be_aborted_are_aborted_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of the caller's own is inside a call of the manager when a step fails."""
    model = tiny("qwen3_next")
    mem = managed(model, max_requests=2, prefix=None)
    server = mst.Server(model, mem)
    for number in range(2):
        server.submit(mst.Prompt(PROMPTS[number], number, most=NEW))
    server.step()

    def busy(*_: Any) -> None:
        raise ms.Broken("close_session")

    with monkeypatch.context() as patch:
        patch.setattr(mem, "abort", busy)
        patch.setattr(mem, "poll", busy)
        with pytest.raises(ms.Broken):
            server.step()
        assert server.abort(0) == []
    assert (server.running, mem.stats().rows_used) == (0, 2)
    server.submit(mst.Prompt(PROMPTS[2], 2, most=NEW))
    events = []
    while server.busy:
        events += server.step()
    assert [one.reason for one in results(events).values()] == ["length"]
    assert (mem.free_slots, mem.stats().rows_used) == (16, 0)


def test_a_manager_that_was_closed_serves_without_its_storage(answers: list[list[int]], tmp_path: Path) -> None:
    model = tiny("qwen3_next")
    mem = managed(model, tiers=stored(tmp_path))
    server = mst.Server(model, mem)
    server.submit(mst.Prompt(PROMPTS[0], 0, most=NEW))
    server.submit(mst.Prompt(PROMPTS[1], "gone", most=NEW))
    mem.close()
    assert [one.reason for one in server.abort("gone")] == ["aborted"]
    server.submit(mst.Prompt(PROMPTS[1], 1, most=NEW))
    events = []
    while server.busy:
        events += server.step()
    assert {name: one.tokens for name, one in results(events).items()} == {0: answers[0], 1: answers[1]}


class Interrupt:
    """A tracer that raises KeyboardInterrupt before one line of the server's module, counted from the start."""

    def __init__(self, line: int) -> None:
        self.left, self.where = line, ""

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self.line if not self.where and frame.f_code.co_filename == under_test.__file__ else None

    def line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and not self.where:
            self.left -= 1
            if self.left < 0:
                self.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
                raise KeyboardInterrupt("injected")
        return self.line


@pytest.mark.parametrize("call", ["admit", "fork"])
def test_rows_whose_admission_was_interrupted_are_given_back(
    call: str, answers: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C behind the manager's call, and before the server knows the rows."""
    model = tiny("qwen3_next")
    mem = managed(model, prefix=None)
    server, real = mst.Server(model, mem), getattr(mem, call)
    config = GenerationConfig(do_sample=True, top_k=1, num_return_sequences=3, max_new_tokens=NEW)
    server.submit(mst.Prompt(PROMPTS[0], "one", config=config, seed=1))

    def interrupted(*given: Any) -> None:
        real(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(mem, call, interrupted)
        for _ in range(4):  # 3 rows would be lost by then
            with pytest.raises(KeyboardInterrupt):
                server.step()
    events = []
    while server.busy:
        events += server.step()
    assert [one.tokens for one in events if isinstance(one, mst.Served)] == [answers[0]] * 3
    assert (mem.free_slots, mem.stats().rows_used) == (16, 0)


@pytest.mark.sample(1)
@pytest.mark.parametrize("part", range(8))
def test_an_interrupt_at_any_line_leaves_no_row_that_nobody_knows(part: int, answers: list[list[int]]) -> None:
    """Each line of the calls that start and end requests; a row that nobody knows would keep its slot for ever."""
    model, line, told = tiny("qwen3_next"), part, True
    while told:
        mem = managed(model, prefix=None)
        server, tracer, events = mst.Server(model, mem), Interrupt(line), list[Any]()

        def calls(server: mst.Server = server, events: list[Any] = events) -> Iterator[Callable[[], Any]]:
            for number in range(3):
                yield lambda number=number: server.submit(mst.Prompt(PROMPTS[number], number, most=1))
            yield server.admit
            yield lambda: events.extend(server.abort(1))
            while server.busy:
                yield lambda: events.extend(server.step())

        before = sys.gettrace()
        for call in calls():
            sys.settrace(tracer)
            try:
                call()
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(before)
        for number, one in results(events).items():
            assert (one.reason, one.tokens) in [("length", answers[number][:1]), ("aborted", [])], tracer.where
        assert (mem.stats().rows_used, mem.free_slots, server.running) == (0, 16, 0), tracer.where
        told, line = bool(tracer.where), line + 8
    assert line > 100


class Odd:
    """Compares with nothing."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("odd")

    __hash__ = object.__hash__


def test_odd_sessions_and_names_are_refused_at_once(answers: list[list[int]]) -> None:
    model = tiny("qwen3_next")
    server = mst.Server(model, managed(model))
    server.submit(mst.Prompt(PROMPTS[0], "good", most=NEW))
    server.step()
    for session in (Odd(), TEXT, 3):
        with pytest.raises(
            ms.InvalidArgument, match=r"prompt 'bad': session=.*expected what open_session\(\) returned"
        ):
            server.submit(mst.Prompt(PROMPTS[0], "bad", most=NEW, session=session))  # type: ignore[arg-type]
    with pytest.raises(ms.InvalidArgument, match="hashable"):
        server.submit(mst.Prompt(PROMPTS[0], [1], most=NEW))  # type: ignore[arg-type]
    with pytest.raises(ms.InvalidArgument, match="hashable"):
        server.abort([1])  # type: ignore[arg-type]
    events = []
    while server.busy:
        events += server.step()
    assert results(events)["good"].tokens == answers[0]


def test_what_was_noted_and_raises_is_told_once(answers: list[list[int]]) -> None:
    model = tiny("qwen3_next")
    server = mst.Server(model, managed(model))
    server.submit(mst.Prompt(PROMPTS[0], "good", most=NEW))
    server.step()
    run(lambda: server.abort(Odd()))
    with pytest.raises(ValueError, match="odd"):
        server.step()
    events = []
    while server.busy:
        events += server.step()
    assert results(events)["good"].tokens == answers[0]


def test_serve_reads_on_while_a_turn_waits_for_the_one_before(answers: list[list[int]]) -> None:
    """Requests behind it go first, as they do with a server. Of the others as many are read as there is room for."""
    model = tiny("qwen3_next")
    mem = managed(model, max_requests=2)
    chat = mem.sessions.open("chat")
    read = []

    def arriving() -> Iterator[mst.Prompt]:
        turns = [PROMPTS[0], [*PROMPTS[0], *answers[0], 77, 78]]
        for number, tokens in enumerate([*turns, PROMPTS[1], PROMPTS[2], PROMPTS[3]]):
            read.append(number)
            yield mst.Prompt(tokens, number, most=NEW if number < 2 else 1, session=chat if number < 2 else None)

    ended = []
    for event in mst.stream(model, mem, arriving()):
        if isinstance(event, mst.Served):
            ended.append(event.id)
        elif not ended:
            assert len(read) <= 4, "the fourth has no room yet"
    assert ended == [2, 3, 4, 0, 1]
