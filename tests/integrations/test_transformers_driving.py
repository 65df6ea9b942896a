"""Tests a server that a thread drives: streams, deadlines and failures; every request ends once."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from random import Random
from threading import Thread, current_thread
from typing import Any

import pytest

import memstate as ms
from tests.support.tiny_models import tiny
from tests.support.tiny_served import NEW, TEXT, alone

pytest.importorskip("transformers")
from transformers import GenerationConfig

import memstate.integrations.transformers as mst
from tests.integrations.servers import Raises, hooked, raising, require_free, server_of

PROMPTS = [TEXT[:9], TEXT[:4], [*TEXT[:8], 77, 78], TEXT[5:16]]
WAITS = 60  # seconds to wait for a thread; only a defect takes so long
LONG = 40  # tokens of an answer whose reader leaves before the end


@pytest.fixture(scope="module")
def answers() -> list[list[int]]:
    return [alone(tiny("qwen3_next"), tokens, {}) for tokens in PROMPTS]


def prompt(number: int, id: Any = None, most: int = NEW, **settings: Any) -> mst.Prompt:
    return mst.Prompt(PROMPTS[number], id, most=most, **settings)


@contextmanager
def driven(server: mst.Server) -> Iterator[mst.Server]:
    """Drives the server in a thread during the block; checks that the thread ends and that nothing leaks."""
    thread = Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join(WAITS)
    assert not thread.is_alive()
    if server.mem.prefix is not None:
        server.mem.prefix.clear()
    require_free(server)


def ended(events: SimpleQueue[Any], samples: int = 1) -> list[mst.Served]:
    """Reads events until `samples` results have come, and returns the results."""
    results = list[mst.Served]()
    while len(results) < samples:
        event = events.get(timeout=WAITS)
        results += [event] if isinstance(event, mst.Served) else []
    return results


async def answer(server: mst.Server, given: mst.Prompt, most: int = 10**6) -> list[Any]:
    """Submits a request and returns its events; the reader leaves after `most` of them."""
    events = list[Any]()
    async for event in server.stream(given):
        events.append(event)
        if len(events) == most:
            break
    return events


def check(events: list[Any], expected: list[int]) -> None:
    """Checks that an answer has the expected tokens, and that their events come before the result."""
    *tokens, result = events
    assert [one.token for one in tokens] == result.tokens == expected
    assert result.reason == "length"


def test_streams_of_one_name_get_their_own_tokens(answers: list[list[int]]) -> None:
    async def together(server: mst.Server) -> list[list[Any]]:
        given = [prompt(number % 4, id="same" if number < 4 else None) for number in range(8)]
        return await asyncio.gather(*(answer(server, one) for one in given))

    with driven(server_of()) as server:
        streams = asyncio.run(together(server))
    for number, events in enumerate(streams):
        check(events, answers[number % 4])
    assert len({events[0].id for events in streams}) == 5


def test_two_loops_and_a_thread_are_served_at_once(answers: list[list[int]]) -> None:
    with driven(server_of(prefix=ms.Prefix())) as server:
        got = dict[int, list[Any]]()
        loops = [Thread(target=lambda n=n: got.update({n: asyncio.run(answer(server, prompt(n)))})) for n in range(2)]
        for loop in loops:
            loop.start()
        events = SimpleQueue[Any]()
        name = server.submit(prompt(2), to=events.put)
        (result,) = ended(events)
        for loop in loops:
            loop.join(WAITS)
    assert (result.id, result.tokens) == (name, answers[2])
    for number in range(2):
        check(got[number], answers[number])


@pytest.mark.parametrize("how", ["break", "cancel", "loop"])
def test_a_reader_that_goes_aborts_its_request_and_no_other(how: str, answers: list[list[int]]) -> None:
    async def leaves(server: mst.Server) -> list[Any]:
        long = asyncio.create_task(answer(server, prompt(0, "same", most=LONG), 3 if how == "break" else 10**6))
        other = await answer(server, prompt(1, "same"))
        if how == "cancel":
            long.cancel()
        if how != "loop":
            with suppress(asyncio.CancelledError):
                assert len(await long) == 3
        return other

    with driven(server_of()) as server:
        check(asyncio.run(leaves(server)), answers[1])
        events = SimpleQueue[Any]()
        server.submit(prompt(3), to=events.put)
        assert ended(events)[0].tokens == answers[3]


def test_a_slow_reader_stops_nobody(answers: list[list[int]]) -> None:
    async def slow(server: mst.Server) -> list[Any]:
        events = list[Any]()
        async for event in server.stream(prompt(0)):
            events.append(event)
            if len(events) == 1:
                for number in range(4):  # other requests begin and end meanwhile
                    check(await answer(server, prompt(number)), answers[number])
        return events

    with driven(server_of()) as server:
        check(asyncio.run(slow(server)), answers[0])


def test_a_prompt_that_is_wrong_raises_in_its_own_stream(answers: list[list[int]]) -> None:
    with driven(server_of()) as server:
        with pytest.raises(ms.InvalidArgument, match="token 99999"):
            asyncio.run(answer(server, mst.Prompt([99999])))
        for settings in ({"timeout": 0}, {"priority": 1.5}, {"tenant": []}):
            with pytest.raises(ms.InvalidArgument, match=next(iter(settings))):
                server.submit(prompt(0, **settings))
        check(asyncio.run(answer(server, prompt(0))), answers[0])


def test_a_closed_server_tells_its_streams_and_takes_no_more(answers: list[list[int]]) -> None:
    events, server = SimpleQueue[Any](), server_of()
    with driven(server):
        server.submit(prompt(0, most=LONG), to=events.put)
        server.submit(prompt(1, most=LONG, config=GenerationConfig(do_sample=True, num_return_sequences=2)), events.put)
        events.get(timeout=WAITS)
        server.close()
        assert [one.reason for one in ended(events, 3)] == ["aborted"] * 3
    assert events.empty()
    with pytest.raises(ms.InvalidArgument, match="the server is closed"):
        server.submit(prompt(0))
    server.abort("whatever")
    server.run()  # a closed server returns at once
    assert not server.busy


def test_a_forward_that_fails_is_told_and_the_server_goes_on(
    answers: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    events, other = SimpleQueue[Any](), SimpleQueue[Any]()
    with driven(server_of()) as server:
        with hooked(server.model, raising(ArithmeticError("in a forward"))):
            server.submit(prompt(0), to=events.put)
            (failed,) = ended(events)
        server.submit(prompt(1), to=other.put)
        assert ended(other)[0].tokens == answers[1]
    assert (failed.reason, failed.tokens, failed.error) == ("failed", [], "ArithmeticError: in a forward")
    assert "in a forward" in caplog.text and events.empty()


def test_code_of_a_request_that_raises_ends_that_request(answers: list[list[int]]) -> None:
    events, other = SimpleQueue[Any](), SimpleQueue[Any]()
    with driven(server_of()) as server:
        server.submit(prompt(0, processors=[Raises(11, ArithmeticError("mine"))]), to=events.put)
        server.submit(prompt(1), to=other.put)
        (failed,) = ended(events)
        assert ended(other)[0].tokens == answers[1]
    assert (failed.reason, failed.tokens) == ("failed", answers[0][:2])


def test_a_listener_that_raises_is_called_no_more(answers: list[list[int]], caplog: pytest.LogCaptureFixture) -> None:
    calls, other = list[Any](), SimpleQueue[Any]()

    def listens(event: mst.Event) -> None:
        calls.append(event)
        raise ConnectionError("gone")

    with driven(server_of()) as server:
        server.submit(prompt(0, "deaf", most=LONG), to=listens)
        server.submit(prompt(1), to=other.put)
        assert ended(other)[0].tokens == answers[1]
    assert len(calls) == 1 and "the listener of request 'deaf' has raised" in caplog.text


@pytest.mark.parametrize(("place", "lost"), [("start", 0), ("due", 2), ("end", 1)])
def test_an_interrupted_manager_is_recovered_and_what_waits_is_served(
    place: str, lost: int, answers: list[list[int]]
) -> None:
    """An exception ends a call of the manager in its middle; `lost` requests fail with it."""
    events = SimpleQueue[Any]()
    server = server_of(max_requests=2)
    with pytest.MonkeyPatch.context() as patch:

        def tears(*_: Any, **__: Any) -> Any:
            patch.undo()
            raise MemoryError

        patch.setattr(server.mem._parts.marks, place, tears)
        for number in range(4):
            server.submit(prompt(number, number), to=events.put)
        with driven(server):
            results = {one.id: one for one in ended(events, 4)}
    whole = [number for number, one in results.items() if one.reason == "length"]
    assert len(whole) == 4 - lost
    assert all(results[number].tokens == answers[number] for number in whole)


def test_what_ends_no_request_ends_the_run_and_its_requests() -> None:
    server, events = server_of(), SimpleQueue[Any]()
    server.submit(prompt(0), to=events.put)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.mem, "poll", raising(ArithmeticError("always")))
        with pytest.raises(ArithmeticError, match="always"):
            server.run()
    assert [(one.reason, one.error) for one in ended(events)] == [("failed", "ArithmeticError: always")]
    require_free(server)


def test_a_request_has_the_seconds_that_it_asks_for(answers: list[list[int]]) -> None:
    clock = ms.testing.Clock()
    server = server_of(max_requests=1)
    server = mst.Server(server.model, server.mem, clock=clock)
    server.submit(prompt(0, "runs", timeout=2.0))
    server.submit(prompt(1, "waits", timeout=1.0))
    server.submit(prompt(1, "patient"))
    events = server.step()
    clock.advance(1.0)
    events += server.step()
    clock.advance(1.0)
    while server.busy:
        events += server.step()
    results = {one.id: (one.reason, one.tokens) for one in events if isinstance(one, mst.Served)}
    assert results == {"waits": ("timeout", []), "runs": ("timeout", answers[0][:2]), "patient": ("length", answers[1])}
    require_free(server)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(12))
def test_random_clients_of_several_threads_get_one_end_each(seed: int, answers: list[list[int]]) -> None:
    """Threads submit and abort requests, some requests time out, and forwards and listeners fail.

    Then a thread closes the server.
    """
    random, told = Random(seed), dict[Any, list[Any]]()
    server = server_of(chunk=random.choice([1, 5, 256]), prefix=random.choice([None, ms.Prefix()]))
    fails = Random(seed + 100)

    def sometimes(*_: Any) -> None:
        if fails.random() < 0.1:
            raise ArithmeticError("sometimes")

    def client(number: int) -> None:
        own = Random(f"{seed} {number}")
        for turn in range(10):
            events = told[number, turn] = list[Any]()
            sampled = GenerationConfig(do_sample=True, top_k=1, num_return_sequences=own.choice([1, 1, 2]))
            given = prompt(
                (number + turn) % 4, (number, turn), config=sampled, timeout=own.choice([None, None, 0.02]),
                priority=own.randrange(2), tenant=number,
            )  # fmt: skip
            try:
                server.submit(given, to=events.append)
            except ms.InvalidArgument:  # the server is closed
                del told[number, turn]
                return
            if own.random() < 0.3:
                server.abort((number, own.randrange(turn + 1)))
        if number == 0 and seed % 2:
            server.close()

    with driven(server), hooked(server.model, sometimes):
        clients = [Thread(target=client, args=(number,)) for number in range(4)]
        for one in clients:
            one.start()
        for one in clients:
            one.join(WAITS)
        while server.busy and seed % 2 == 0:
            asyncio.run(asyncio.sleep(0.01))
    for (number, turn), events in told.items():
        results = [one for one in events if isinstance(one, mst.Served)]
        assert sorted(one.sample for one in results) in ([0], [0, 1]), (number, turn)
        for one in results:
            expected = answers[(number + turn) % 4]
            assert one.tokens == expected[: len(one.tokens)]
            assert one.reason != "length" or one.tokens == expected
            assert [event.token for event in events if isinstance(event, mst.Token) and event.sample == one.sample] == (
                one.tokens
            )


def test_any_thread_has_functions_called_in_the_driving_thread() -> None:
    with driven(server_of()) as server:
        chat = server.call(lambda: server.mem.sessions.open("chat")).result(WAITS)
        twin = server.call(lambda: server.fork(chat, "twin")).result(WAITS)
        assert server.call(current_thread).result(WAITS) is not current_thread()
        with pytest.raises(ZeroDivisionError):
            server.call(lambda: 1 // 0).result(WAITS)
        # a function that is added during a step waits for the next step, so it can be cancelled
        given_up = server.call(lambda: server.call(lambda: None).cancel())
        assert given_up.result(WAITS)
        for session in (chat, twin):
            server.call(partial(server.mem.sessions.close, session)).result(WAITS)
    with pytest.raises(ms.InvalidArgument, match="the server is closed"):
        server.call(lambda: None)


def test_a_thread_that_drives_beside_another_is_refused_alone(answers: list[list[int]]) -> None:
    with driven(server_of()) as server:
        server.call(lambda: None).result(WAITS)  # this call returns once the thread drives the server
        other = mst.Server(server.model, server.mem)
        for one, what in (
            (server, "this server: submit to it"),
            (other, "another server of this manager: step both from there"),
        ):
            for call in (one.run, one.step, one.admit):
                with pytest.raises(ms.InvalidArgument, match=f"another thread drives {what}"):
                    call()
        with pytest.raises(ms.InvalidArgument, match="another thread drives another server"):
            list(mst.serve(server.model, server.mem, PROMPTS))
        check(asyncio.run(answer(server, prompt(0))), answers[0])
    other.submit(prompt(1))  # no thread drives the manager any more
    while other.busy:
        events = other.step()
    assert [one.tokens for one in events if isinstance(one, mst.Served)] == [answers[1]]


def test_two_servers_of_a_manager_step_in_turn_in_any_thread(answers: list[list[int]]) -> None:
    first = server_of(prefix=ms.Prefix())
    events = dict[int, list[Any]]()

    def drive(number: int, server: mst.Server) -> None:
        for _ in range(4):
            server.submit(prompt(number))
            while server.busy:
                events.setdefault(number, []).extend(server.step())

    servers = enumerate((first, mst.Server(first.model, first.mem)))
    threads = [Thread(target=drive, args=given) for given in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAITS)
    for number in range(2):
        assert [one.tokens for one in events[number] if isinstance(one, mst.Served)] == [answers[number]] * 4


def test_a_manager_in_debug_mode_is_made_where_it_is_driven() -> None:
    server, events = server_of(debug=True), SimpleQueue[Any]()
    server.submit(prompt(0), to=events.put)
    refused = list[str]()

    def drive() -> None:
        try:
            server.run()
        except ms.MemstateError as error:
            refused.append(str(error))

    thread = Thread(target=drive)
    thread.start()
    thread.join(WAITS)
    (result,) = ended(events)
    assert result.reason == "failed" and len(refused) == 1 and refused[0] in result.error
    assert "debug=True: a manager is driven by one thread: make it in the thread that drives it" in result.error
