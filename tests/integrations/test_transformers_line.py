"""Tests the order of a server's requests: priorities, tenants, and prompts that wait for a shared beginning."""

from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

import memstate as ms
from tests.support.tiny_models import tiny
from tests.support.tiny_served import NEW, TEXT, alone, managed

pytest.importorskip("transformers")
import memstate.integrations.transformers as mst
from memstate.integrations.transformers.line import PASSES, Line, shared
from memstate.integrations.transformers.running import Submission, shares
from tests.integrations.servers import hooked, raising, rest, results, server_of, tokens

BEGIN = [*TEXT, *TEXT][:32]  # tokens of 8 pages
OTHER = BEGIN[::-1]


def asked(id: Any, tenant: Any = None, priority: int = 0) -> Submission:
    return Submission(mst.Prompt([1], id, tenant=tenant, priority=priority), [])


def started(line: Line, running: Sequence[Submission] = (), cost: int = 10) -> Any:
    """Starts the next request, and returns its id."""
    one = line.order(running)[0]  # type: ignore[arg-type]
    line.start(one, cost)
    return one.prompt.id


def test_priorities_go_first_and_equal_ones_as_they_came() -> None:
    line = Line()
    line.waiting.extend(
        [asked("a"), asked("b", priority=1), asked("c"), asked("d", priority=1), asked("e", priority=-1)]
    )
    assert [started(line) for _ in range(5)] == ["b", "d", "a", "c", "e"]


def test_tenants_get_as_many_tokens_as_each_other() -> None:
    line, got = Line(), {"flood": 0, "few": 0, "long": 0}
    line.waiting.extend(asked((name, n), name) for name in got for n in range(100))
    for _ in range(60):
        name, _ = started(line, cost=(cost := {"flood": 10, "few": 10, "long": 40}[line.order(())[0].prompt.tenant]))
        got[name] += cost
    assert max(got.values()) - min(got.values()) <= 40 and sum(got.values()) > 700


def test_a_tenant_that_comes_back_has_saved_nothing_and_owes_what_it_owed() -> None:
    line = Line()
    line.waiting.extend([asked("a", "busy"), asked("b", "busy"), asked("c", "rich")])
    assert [started(line, cost=50) for _ in range(2)] == ["a", "c"]
    line.charge(asked("c", "rich"), 100)
    line.order(())  # "rich" has no request left in line
    line.waiting.append(asked("d", "idle"))  # a new tenant starts with the 50 tokens of "busy", not with 0
    line.waiting.append(asked("e", "rich"))  # "rich" keeps its 150 tokens
    assert [started(line, cost=1) for _ in range(3)] == ["b", "d", "e"]


def test_nobody_waits_for_ever_behind_tenants_that_are_new() -> None:
    """A new tenant always has the smallest count of tokens and goes first.

    Only the limit `PASSES` lets the first request start.
    """
    line = Line()
    line.waiting.extend([asked("first", "rich"), asked("second", "rich"), asked("n", "new 0")])
    line.order(())
    line.charge(asked("x", "rich"), 10**6)
    order = []
    for number in range(1, 3 * PASSES):
        line.waiting.append(asked("n", f"new {number}"))
        order.append(started(line))
    assert [place for place, id in enumerate(order) if id != "n"] == [PASSES, 2 * PASSES + 1]


def test_half_of_a_step_is_for_the_oldest_and_the_rest_for_who_needs_least() -> None:
    def row(unread: int, priority: int = 0) -> Any:
        return SimpleNamespace(unread=unread, prompt=SimpleNamespace(priority=priority))

    def given(*rows: Any, budget: int = 100) -> dict[int, int]:
        chunks = {}
        for one, kept in shares(rows, budget):
            chunks[one.unread] = max(0, min(one.unread, budget - kept))
            budget -= chunks[one.unread]
        return chunks

    assert given(row(1000), row(30), row(10)) == {10: 10, 30: 30, 1000: 60}
    assert given(row(1000), row(90), row(10)) == {10: 10, 90: 40, 1000: 50}
    assert given(row(20), row(1000), row(500)) == {20: 20, 500: 80, 1000: 0}
    assert given(row(1000), row(30), row(200, 1), row(20, 1)) == {20: 20, 200: 80, 30: 0, 1000: 0}


@pytest.mark.parametrize(("other", "length"), [(BEGIN, 32), (BEGIN[:31], 28), ([*BEGIN[:9], 1, 2, 3], 8), (OTHER, 0),
                                               (BEGIN[:3], 0), ([], 0), ([*BEGIN, 1], 32)])  # fmt: skip
def test_prompts_share_whole_pages(other: list[int], length: int) -> None:
    assert shared(BEGIN, other, 4) == shared(other, BEGIN, 4) == length


def test_a_long_prompt_does_not_stop_the_first_tokens_of_others() -> None:
    server = server_of(chunk=8, max_requests=3)
    server.submit(mst.Prompt([*TEXT, *TEXT][:50], "long", most=1))
    server.step()
    for number in range(2):
        server.submit(mst.Prompt(TEXT[number:][:4], number, most=1))
    order = [one.id for one in rest(server) if isinstance(one, mst.Served)]
    assert order == [0, 1, "long"]


def run(server: mst.Server, bursts: Sequence[Sequence[Sequence[int]]], steps: int = 1) -> dict[Any, mst.Served]:
    """Serves bursts of prompts, with steps between the bursts. Checks that each answer is that of the prompt alone.

    Returns:
        Number of the prompt -> its result.
    """
    events, prompts = list[Any](), list[Sequence[int]]()
    for burst in bursts:
        for one in burst:
            server.submit(mst.Prompt(one, len(prompts), most=NEW))
            prompts.append(one)
        for _ in range(steps):
            events += server.step()
    served = results(events + rest(server))
    for number, one in enumerate(prompts):
        assert served[number].tokens == alone(server.model, one, {})
    return served


@pytest.mark.sample(2)
@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("family", ["qwen3_next", "mamba2", "lfm3"])
def test_what_prompts_begin_with_is_read_once(family: str, steps: int) -> None:
    """The other prompts come together with the first or while it is read. No chunk ends where prompts part."""
    server = server_of(family, chunk=6, prefix=ms.Prefix(), slots=40, max_requests=6)
    first, more = [*BEGIN, 1, 2, 3], [[*BEGIN, 7, 8], [*BEGIN[:28], 4, 4, 4, 4, 4], [*OTHER, 1], [*OTHER, 2]]
    served = run(server, [[first], more], steps)
    assert [served[number].cached for number in range(5)] == [0, 32, 28, 0, 32]
    assert server.mem.stats().missed == server.mem.stats().refused == 0


def test_prompts_under_another_salt_do_not_wait() -> None:
    server = server_of(prefix=ms.Prefix(), max_requests=2)
    for salt in ("a", "b"):
        server.submit(mst.Prompt([*BEGIN, 1], salt, most=1, salt=salt))
    server.admit()
    assert server.running == 2


def test_a_prompt_does_not_wait_for_one_of_lower_priority() -> None:
    server = server_of(prefix=ms.Prefix(), max_requests=3, chunk=4)
    server.submit(mst.Prompt([*BEGIN, 1], "low", most=1))
    server.step()
    for priority in (1, 0):
        server.submit(mst.Prompt([*BEGIN, 2], priority, most=1, priority=priority))
    server.step()
    assert (server.running, server.waiting) == (2, 1)


@pytest.mark.parametrize("how", ["abort", "fail", "timeout"])
def test_the_next_one_reads_what_its_reader_leaves_unread(how: str) -> None:
    clock = ms.testing.Clock()
    server = server_of(prefix=ms.Prefix(), max_requests=3)
    server = mst.Server(server.model, server.mem, chunk=8, clock=clock)
    server.submit(mst.Prompt([*BEGIN, 1], "reader", most=1, timeout=1.0))
    for number in range(2):
        server.submit(mst.Prompt([*BEGIN, number], number, most=NEW))
    events = server.step()
    assert (server.running, server.waiting) == (1, 2)
    if how == "abort":
        server.abort("reader")
    elif how == "timeout":
        clock.advance(1.0)
    else:
        with hooked(server.model, raising(ArithmeticError)), pytest.raises(ArithmeticError):
            server.step()
    events += server.step()
    assert (server.running, server.waiting) == (1, 1)
    served = results(events + rest(server))
    assert [served[name].cached for name in (0, 1)] == [0, 32]
    assert all(served[number].tokens == alone(server.model, [*BEGIN, number], {}) for number in range(2))


def test_where_no_slot_is_left_for_the_state_all_wait_once_and_go_together() -> None:
    """Four rows hold all slots, so no state of the shared beginning is kept.

    The other prompts wait once, for the first prompt, then run together.
    """
    model = tiny("qwen3_next")
    mem = managed(model, max_requests=4, slots=4, tracking=ms.Redirect(every=1024), prefix=ms.Prefix())
    held = [mem.admit([ms.Request(name)]) for name in "ab"]  # these rows take two slots
    server = mst.Server(model, mem, chunk=8)
    served = run(server, [[[*BEGIN, number] for number in range(3)]], 12)
    assert {one.reason for one in served.values()} == {"length"}
    for rows in held:
        mem.end(rows)


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(20))
def test_random_bursts_that_share_are_answered_rightly_and_leave_nothing(seed: int) -> None:
    random, model = Random(seed), tiny("qwen3_next")
    roots = [[random.randrange(3, 97) for _ in range(40)] for _ in range(3)]
    settings: dict[str, Any] = random.choice([
        {}, {"slots": 7}, {"slots": 40, "max_requests": 8, "pages": ms.Pages(size=4, count=200, per_row=16)},
        {"tracking": ms.PingPong(every=4)}, {"tracking": ms.PingPong(every=4), "slots": 12}, {"max_requests": 1},
    ])  # fmt: skip
    mem = managed(model, debug=True, **settings)
    server, prompts, events = mst.Server(model, mem, chunk=random.choice([3, 8, 64])), list[Any](), list[Any]()
    for _ in range(6):
        for _ in range(random.randrange(5)):
            text = random.choice(roots)[: random.choice([0, 5, 8, 20, 33, 40])]
            text = text + [random.randrange(3, 97) for _ in range(random.randint(1, 6))]
            most = random.choice([1, NEW])
            prompts.append(
                mst.Prompt(text, len(prompts), most=most, priority=random.randrange(2), tenant=random.choice("ab"))
            )
            server.submit(prompts[-1])
        if prompts and random.random() < 0.4:
            server.abort(random.randrange(len(prompts)))
        for _ in range(random.randrange(5)):
            events += server.step()
    ended = results(events + rest(server))
    assert ended.keys() == set(range(len(prompts)))
    for number, one in ended.items():
        expected = alone(model, prompts[number].tokens, {})[: prompts[number].most]
        assert one.tokens == tokens(events, number) or one.tokens == expected[: len(one.tokens)]
        assert one.reason == "aborted" or (one.reason, one.tokens) == ("length", expected)
    mem.prefix.clear()  # type: ignore[union-attr]
    assert mem.stats().rows_used == 0 and mem.audit().clean
    mem.close()  # with debug, close looks for leaks
