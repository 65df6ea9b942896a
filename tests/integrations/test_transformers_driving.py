"""Tests a server that a thread drives: streams, deadlines, recovery; every request ends once."""

import asyncio
from contextlib import suppress
from functools import partial
from threading import current_thread
from typing import Any

import pytest

import memstate as ms
from tests.support.tiny_served import TEXT

pytest.importorskip("transformers")
from transformers import GenerationConfig

import memstate.integrations.transformers as mst
from tests.integrations.servers import WAITS, Asked, Judged, ignore, run

TEXTS = [TEXT[:9], TEXT[:4], [*TEXT[:8], 77, 78], TEXT[5:16]]
LONG = 40  # tokens of an answer whose reader leaves before the end
TWO = GenerationConfig(do_sample=True, num_return_sequences=2)


def test_streams_of_one_name_in_two_loops_and_a_thread_get_their_own_tokens() -> None:
    at = Judged(prefix=ms.Prefix())

    async def together() -> list[Asked]:
        ids = ["same"] * 4 + [None] * 4
        return await asyncio.gather(*(at.stream(id, text=TEXTS[n % 4]) for n, id in enumerate(ids)))

    with at.driven():
        run(*[lambda: asyncio.run(together())] * 2, lambda: at.ask("thread", text=TEXTS[2], to=ignore))
    at.ends()
    assert len({one.events[0].id for one in at.asked}) == 10


@pytest.mark.parametrize("how", ["break", "cancel", "loop"])
def test_a_reader_that_goes_aborts_its_request_and_no_other(how: str) -> None:
    at = Judged()

    async def leaves() -> None:
        long = asyncio.create_task(at.stream("same", reads=3 if how == "break" else LONG, most=LONG))
        await at.stream("same", text=TEXTS[1])
        if how == "cancel":
            long.cancel()
        if how != "loop":
            with suppress(asyncio.CancelledError):
                await long

    with at.driven():
        asyncio.run(leaves())
        at.ask("later", text=TEXTS[3], to=ignore)
    at.ends()
    assert sum(one.deaf for one in at.asked) == 1


def test_a_slow_reader_stops_nobody() -> None:
    at = Judged()

    async def slow() -> None:
        async for event in at.server.stream(mst.Prompt(TEXT[:9], "slow", most=6)):
            heard.append(event)
            if len(heard) == 1:
                for n, text in enumerate(TEXTS):  # other requests begin and end meanwhile
                    await at.stream(n, text=text)

    with at.driven():
        heard = list[Any]()
        asyncio.run(slow())
    assert at.ends()[0].tokens == heard[-1].tokens == [one.token for one in heard[:-1]]


def test_a_prompt_that_is_wrong_raises_in_its_own_stream() -> None:
    at = Judged()
    with at.driven():
        with pytest.raises(ms.InvalidArgument, match="token 99999"):
            asyncio.run(at.stream("wrong", text=[99999]))
        asyncio.run(at.stream("right"))
    at.ends()


def test_a_closed_server_tells_its_streams_and_takes_no_more() -> None:
    at = Judged()
    with at.driven():
        at.ask("long", most=LONG, to=ignore)
        at.ask("two", "waits", "and waits", most=LONG, config=TWO, to=ignore)
        at.wait("long", events=1)
        at.server.close()
    at.ends(others="aborted")
    with pytest.raises(ms.InvalidArgument, match="the server is closed"):
        at.ask("late")
    at.abort("whatever")
    at.server.run()  # a closed server returns at once
    assert not at.server.busy


@pytest.mark.parametrize(("part", "place", "lost"), [("marks", "start", 0), ("mirror", "plan", 2), ("marks", "end", 1)])
def test_an_interrupted_manager_is_recovered_and_what_waits_is_served(part: str, place: str, lost: int) -> None:
    """An exception ends a call of the manager in its middle; `lost` requests fail with it."""
    at = Judged(max_requests=2)
    with pytest.MonkeyPatch.context() as patch:

        def tears(*_: Any, **__: Any) -> Any:
            patch.undo()
            raise MemoryError

        patch.setattr(getattr(at.mem._parts, part), place, tears)
        for number, text in enumerate(TEXTS):
            at.ask(number, text=text, to=ignore)
        with at.driven():
            pass
    ended = at.ends(others={"length", "failed"}).values()
    assert sum(one.reason == "failed" for one in ended) == lost


def test_a_request_has_the_seconds_that_it_asks_for() -> None:
    clock = ms.testing.Clock()
    at = Judged(max_requests=1, clock=clock)
    at.ask("runs", timeout=2.0)
    at.ask("waits", "waits too", timeout=1.0)
    at.ask("patient", text=TEXTS[1])
    for _ in range(2):
        at.step()
        clock.advance(1.0)
    ended = at.ends(runs="timeout", waits="timeout", **{"waits too": "timeout"})
    assert [len(ended[id].tokens) for id in ("runs", "waits")] == [2, 0]


def test_any_thread_has_functions_called_in_the_driving_thread() -> None:
    at = Judged()
    server = at.server
    with at.driven():
        chat = server.call(lambda: server.mem.sessions.open("chat")).result(WAITS)
        twin = server.call(lambda: server.fork(chat, "twin")).result(WAITS)
        assert server.call(current_thread).result(WAITS) is not current_thread()
        with pytest.raises(ZeroDivisionError):
            server.call(lambda: 1 // 0).result(WAITS)
        # a function that is added during a step waits for the next step, so it can be cancelled
        assert server.call(lambda: server.call(lambda: None).cancel()).result(WAITS)
        for session in (chat, twin):
            server.call(partial(server.mem.sessions.close, session)).result(WAITS)
    at.ends()
    with pytest.raises(ms.InvalidArgument, match="the server is closed"):
        server.call(lambda: None)


def test_a_thread_that_drives_beside_another_is_refused_alone() -> None:
    at = Judged()
    other = Judged(mem=at.mem)
    with at.driven():
        at.server.call(lambda: None).result(WAITS)  # this call returns once the thread drives the server
        whose = {at: "this server: submit to it", other: "another server of this manager: step both from there"}
        for one, what in whose.items():
            for call in (one.server.run, one.server.step, one.server.admit):
                with pytest.raises(ms.InvalidArgument, match=f"another thread drives {what}"):
                    call()
        with pytest.raises(ms.InvalidArgument, match="another thread drives another server"):
            list(mst.serve(at.model, at.mem, TEXTS))
        asyncio.run(at.stream("right"))
    at.ends()
    other.ask("later", text=TEXTS[1])  # no thread drives the manager any more
    other.ends()


def test_two_servers_of_a_manager_step_in_turn_in_any_thread() -> None:
    first = Judged(prefix=ms.Prefix())
    servers = first, Judged(mem=first.mem)

    def drive(at: Judged, text: list[int]) -> None:
        for number in range(4):
            at.ask(number, text=text)
            at.rest()

    run(*(partial(drive, *given) for given in zip(servers, TEXTS, strict=False)))
    for at in servers:
        assert len(at.ends()) == 4


def test_a_manager_in_debug_mode_is_made_where_it_is_driven() -> None:
    at, why = Judged(debug=True), "a manager is driven by one thread: make it in the thread that drives it"
    at.ask("a", to=ignore)
    with pytest.raises(ms.MemstateError, match=f"debug=True: {why}") as refused:
        run(at.server.run)
    assert str(refused.value) in at.ends(a="failed")["a"].error
