"""Tests the order of a server's requests: priorities, tenants, and prompts that wait for others or for room."""

from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

import memstate as ms
from tests.support.tiny_served import TEXT

pytest.importorskip("transformers")
import memstate.integrations.transformers as mst
from memstate.integrations.transformers.line import PASSES, Line, shared
from memstate.integrations.transformers.running import Submission, shares
from tests.integrations.servers import Crowd, Judged, hooked, raising

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
    at = Judged(chunk=8, max_requests=3)
    at.ask("long", text=[*TEXT, *TEXT][:50], most=1)
    at.step()
    for number in range(2):
        at.ask(number, text=TEXT[number:][:4], most=1)
    assert [one.id for _ in range(9) for one in at.step() if isinstance(one, mst.Served)] == [0, 1, "long"]
    at.ends()


@pytest.mark.sample(2)
@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("family", ["qwen3_next", "mamba2", "lfm3"])
def test_what_prompts_begin_with_is_read_once(family: str, steps: int) -> None:
    """The other prompts come together with the first or while it is read. No chunk ends where prompts part."""
    at = Judged(family, chunk=6, prefix=ms.Prefix(), slots=40, max_requests=6)
    first, more = [*BEGIN, 1, 2, 3], [[*BEGIN, 7, 8], [*BEGIN[:28], 4, 4, 4, 4, 4], [*OTHER, 1], [*OTHER, 2]]
    at.ask("first", text=first)
    at.step(steps)
    for number, text in enumerate(more):
        at.ask(number, text=text)
    at.rest()
    assert at.mem.stats().missed == at.mem.stats().refused == 0
    assert [one.cached for one in at.ends().values()] == [0, 32, 28, 0, 32]


def test_prompts_under_another_salt_or_of_a_higher_priority_do_not_wait() -> None:
    at = Judged(prefix=ms.Prefix(), max_requests=3, chunk=4)
    at.ask("a", text=[*BEGIN, 1], most=1, salt="a")
    at.step()
    for salt, priority in (("b", 0), ("a", 1), ("a", 0)):
        at.ask((salt, priority), text=[*BEGIN, 2], most=1, salt=salt, priority=priority)
    at.step()
    assert (at.server.running, at.server.waiting) == (3, 1)
    at.ends()


@pytest.mark.parametrize("how", ["abort", "fail", "timeout"])
def test_the_next_one_reads_what_its_reader_leaves_unread(how: str) -> None:
    clock = ms.testing.Clock()
    at = Judged(prefix=ms.Prefix(), max_requests=3, chunk=8, clock=clock)
    at.ask("reader", text=[*BEGIN, 1], most=1, timeout=1.0)
    for number in range(2):
        at.ask(number, text=[*BEGIN, number])
    at.step()
    assert (at.server.running, at.server.waiting) == (1, 2)
    if how == "abort":
        at.abort("reader")
    elif how == "timeout":
        clock.advance(1.0)
    else:
        with hooked(at.model, raising(ArithmeticError)):
            at.step(raises=ArithmeticError)
    at.step()
    assert (at.server.running, at.server.waiting) == (1, 1)
    served = at.ends(reader={"abort": "aborted", "fail": "failed"}.get(how, how))
    assert [served[name].cached for name in (0, 1)] == [0, 32]


def test_where_no_slot_is_left_for_the_state_all_wait_once_and_go_together() -> None:
    """Four rows hold all slots, so no state of the shared beginning is kept.

    The other prompts wait once, for the first prompt, then run together.
    """
    at = Judged(max_requests=4, slots=4, tracking=ms.Redirect(every=1024), prefix=ms.Prefix(), chunk=8)
    held = [at.mem.admit([ms.Request(name)]) for name in "ab"]  # these rows take two slots
    for number in range(3):
        at.ask(number, text=[*BEGIN, number])
    at.rest()
    for rows in held:
        at.mem.end(rows)
    at.ends()


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(20))
def test_random_bursts_that_share_are_answered_rightly_and_leave_nothing(seed: int) -> None:
    random = Random(seed)
    settings: dict[str, Any] = random.choice([
        {}, {"slots": 7}, {"slots": 40, "max_requests": 8, "pages": ms.Pages(size=4, count=200, per_row=16)},
        {"tracking": ms.PingPong(every=4)}, {"tracking": ms.PingPong(every=4), "slots": 12}, {"max_requests": 1},
    ])  # fmt: skip
    at = Judged(prefix=ms.Prefix(), debug=True, chunk=random.choice([3, 8, 64]), **settings)
    Crowd(random, longest=46, samples=0).play(at, aborts=0.4)
    at.ends(others={"length", "aborted"})


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["qwen3_next", "jamba", "lfm3"])
@pytest.mark.parametrize("tracking", [ms.Redirect(every=4), ms.PingPong(every=4), ms.LazyPingPong(every=4)], ids=str)
def test_short_memory_evictions_and_faults_change_no_token(family: str, tracking: Any) -> None:
    pages = ms.Pages(size=4, count=28, per_row=10)
    at = Judged(family, slots=8, tracking=tracking, pages=pages, prefix=ms.Prefix(), debug=True, chunk=7)
    ms.testing.Faults(ms.testing.Chaos(seed=3, admissions=0.3, claims=0.3)).inject(at.mem)
    crowd = Crowd(Random(5), longest=26, samples=0)
    crowd.roots[1:] = []  # so that there are hits
    for _ in range(14):
        crowd.ask(at)
    at.rest()
    assert at.mem.stats().chaos.admissions > 0
    assert sum(one.cached for one in at.ends().values()) > 0
