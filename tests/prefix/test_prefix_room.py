"""Who gives way to whom: requests before snapshots that are due, both before what is cached, and never more than lacks.

Pages of 4 tokens; every prompt of whole pages leaves one state, at its end (`Whole`).
"""

from collections.abc import Sequence
from typing import Any

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.prefix.policies import Lru, LruPages
from memstate.requests.tracking.mirror import Mirror
from tests.support.planes import every_snapshot, every_strategy
from tests.support.serving import Server

pytestmark = pytest.mark.sample(interpreter=0)  # without MEMSTATE_PROOF the reference alone


PROMPTS = [[100 * n + i for i in range(8)] for n in range(1, 7)]


def server(backend: Backend, name: str, spare: int, cached: int = 3, every: int = 64, **more: Any) -> Server:
    """A pool with `cached` states, oldest first, and `spare` free slots."""
    prefix = {key: more.pop(key) for key in ("most_states", "evict") if key in more}
    settings = {"prefix": ms.Prefix(states=Lru(), pages=LruPages(), **prefix), "pages": 30, "rows": 4} | more
    at = Server(backend, name, whole=True, slots=cached + spare, every=every, **settings)
    for tokens in PROMPTS[:cached]:
        row = at.start(tokens)
        at.prefill(row, publish=False)
        at.end([row])
    at.look(idle=True)
    assert len(at.states_by_prefix()) == min(cached, at.cache.settings.most_states or cached)
    return at


def cached(at: Server) -> list[int]:
    """Which prompts are still here."""
    return [n for n, tokens in enumerate(PROMPTS) if tuple(tokens) in at.states_by_prefix()]


def fresh(n: int, tokens: Sequence[int] = (1, 2, 3)) -> list[ms.Request]:
    return [ms.Request(i, tokens=[900 + i, *tokens]) for i in range(n)]


NEEDS = {"none": 1, "ping-pong": 3, "lazy": 2, "redirect": 1}


@every_strategy
def test_admit_evicts_exactly_what_is_missing(name: str, backend: Backend) -> None:
    needs = NEEDS[name]
    for lacking in range(min(3, 2 * needs) + 1) if backend.name == "reference" else (2,):
        at = server(backend, name, spare=2 * needs - lacking)
        rows = at.admit(*fresh(2))
        assert cached(at) == list(range(lacking, 3)) and at.mem.free_slots == 0
        assert at.mem.stats().prefix.evicted_states == lacking  # type: ignore[union-attr]
        at.run(rows)
        at.look()


@every_strategy
def test_admit_evicts_nothing_where_that_is_not_enough(name: str, backend: Backend) -> None:
    at = server(backend, name, spare=NEEDS[name] * 4 - 4)
    with pytest.raises(ms.OutOfSlots) as caught:
        at.mem.admit(fresh(4))
    assert (caught.value.requested, caught.value.evictable) == (4 * NEEDS[name], 3)
    assert cached(at) == [0, 1, 2] and at.mem.stats().prefix.lookups == 3  # type: ignore[union-attr]
    with pytest.raises(ms.OutOfPages):  # 3 slots could be had: the pages are asked for first
        at.mem.admit(fresh(3, range(40)))
    assert cached(at) == [0, 1, 2] and at.mem.free_pages == 30 - 6


def test_pages_come_from_the_leaves_that_were_followed_least_recently(backend: Backend) -> None:
    at = server(backend, "redirect", spare=6, pages=10)
    at.mem.match(PROMPTS[0])  # a look is no use
    assert at.turn([*PROMPTS[0], 1], publish=False) == 8
    row = at.start(range(500, 517))  # 5 pages, 4 are free
    assert cached(at) == [0, 2] and at.mem.free_pages == 1
    at.mem.extend([row], [20])
    assert cached(at) == [0, 2]
    at.mem.extend([row], [28])  # two more, one is free
    assert cached(at) == [0] and at.mem.free_pages == 1
    with pytest.raises(ms.OutOfPages):
        at.mem.extend([row], [44])  # 4 more; 3 could be had
    assert cached(at) == [0] and at.mem.free_pages == 1
    at.look()
    hit = at.start([*PROMPTS[0], *range(3)])  # shares two pages, which its lease keeps
    assert at.mem.info(hit).length == 8 and at.cache.evictable_pages == 0
    with pytest.raises(ms.OutOfPages):
        at.mem.extend([row], [32])


def test_a_leaf_given_up_for_its_pages_gives_its_slot_too(backend: Backend) -> None:
    at = server(backend, "redirect", spare=0, pages=6)
    (row,) = at.admit(ms.Request("a", tokens=[1, 2, 3]))  # a page and a slot: one leaf has both
    assert cached(at) == [1, 2] and (at.mem.free_slots, at.mem.free_pages) == (0, 1)
    at.run([row])


@pytest.mark.sample(interpreter=1)
@pytest.mark.parametrize("name", ["lazy", "redirect"])
def test_B24a_one_cached_state_goes_for_the_snapshot_that_is_due(name: str, backend: Backend) -> None:
    at = server(backend, name, spare=NEEDS[name], every=8)
    row = at.start([9] * 3)
    while at.mem.info(row).length < 17:  # without publishing: both lanes are filled, or the one is
        before = cached(at)
        at.run([row], publish=False)
        gone = len(before) - len(cached(at))
        due = at.mem.info(row).length == (9 if name == "redirect" else 16)
        assert gone == due, "exactly one, and only where a claim is due"
    assert at.mem.stats().degraded == 0 and cached(at) == [1, 2]
    at.look()
    at.end([row])
    assert len(at.states_by_prefix()) >= 3


@every_snapshot
@pytest.mark.parametrize("rows", [2, 3])
def test_B24a_one_for_each_row_that_lacks_one(name: str, rows: int, backend: Backend) -> None:
    """A mark of each prompt takes one, at 4 tokens, and lanes at 8 and 16. None goes while a slot is free."""
    at = server(backend, name, spare=NEEDS[name] * rows + 1, cached=6, every=8)
    running = at.admit(*fresh(rows, [9] * 6))
    marks, lanes = rows, {"ping-pong": 0, "lazy": rows, "redirect": rows}[name]
    for end, claims in ((4, 0), (7, marks), (17, marks + lanes)):
        while at.mem.info(running[0]).length < end:
            at.run(running, publish=False)
        assert len(cached(at)) == 6 - max(0, claims - 1), end
    assert at.mem.stats().degraded == at.mem.stats().refused == 0
    at.look()


@pytest.mark.parametrize("evict", [True, False], ids=["limited", "off"])
def test_B24b_nothing_cached_goes_where_that_is_not_wanted(evict: bool, backend: Backend) -> None:
    at = server(backend, "lazy", spare=2, every=8, evict=evict)
    row = at.start([9] * 3)
    while at.mem.info(row).length < 17:
        at.mem.extend([row], [at.mem.info(row).length + 8])
        step = at.mem.plan([row], 1 if at.mem.info(row).length else 7, limit=0 if evict else 5)
        at.mem.settle(step)
    assert cached(at) == [0, 1, 2] and at.mem.info(row).slots == 2  # the only lane was overwritten
    assert at.mem.stats().degraded == 1
    at.mem.end([row])
    at.mem.recover(keep=False)


def test_the_reserve_is_evicted_for_too(backend: Backend) -> None:
    """A snapshot leaves the reserve free, whoever has to go for it."""
    at = server(backend, "redirect", spare=2, every=8, reserve=1)
    row = at.start([9] * 3)
    while at.mem.info(row).length < 10:
        at.run([row], publish=False)
    assert cached(at) == [1, 2] and at.mem.free_slots == 1 and at.mem.stats().degraded == 0


@pytest.mark.sample(interpreter=1)
@every_strategy
@pytest.mark.parametrize("most", [0, 1, 2])
def test_no_more_states_than_the_settings_allow(name: str, most: int, backend: Backend) -> None:
    at = server(backend, name, spare=8, cached=0, most_states=most, pages=60)
    for n, tokens in enumerate(PROMPTS):
        assert at.turn(tokens, goal=5) == 0
        assert min(most, n + 1) <= at.cache.states <= most
    at.look(idle=True)
    figures = at.mem.stats().prefix
    assert figures and figures.states == most and figures.pages == 3 * 6  # KV stays
    assert at.mem.free_slots == 8 - most
    assert at.turn([*PROMPTS[-1], 1], publish=False) in ((0,) if most == 0 else (0, 8, 12))


@every_strategy
def test_without_pages_no_leaf_stays_without_a_state(name: str, backend: Backend) -> None:
    """KV is the caller's: a leaf without a state would tell nobody anything."""
    at = server(backend, name, spare=9, cached=0, pages=0, every=8)
    assert at.turn(PROMPTS[0][:7]) == 0 and at.cache.tree.nodes == (0 if name == "none" else 1)
    assert at.turn([*PROMPTS[0], 1, 2]) == (0 if name == "none" else 4)
    assert at.turn([*PROMPTS[0], 3, 4]) == (0 if name == "none" else 8)
    assert at.turn(PROMPTS[1], goal=1) == 0 and at.turn([*PROMPTS[1], 5]) == 8
    for _, node in at.cache.tree.walk():
        assert node.children or node.snapshot, f"{node} is a bare leaf"
    row = at.start([*PROMPTS[1], 5])
    at.cache.evict_states(99)
    assert at.cache.states == (name == "redirect")  # it is about to be read
    at.run([row])
    at.mem.end([row])
    at.cache.evict_states(99)
    assert at.cache.tree.nodes == 0 and not at.cache.tree.roots


def test_without_pages_a_shorter_key_leaves_no_bare_leaf(backend: Backend) -> None:
    at = server(backend, "none", spare=3, cached=0, pages=0)
    row = at.start([*PROMPTS[0], *PROMPTS[1]])
    at.prefill(row)
    all_tokens = [*PROMPTS[0], *PROMPTS[1]]
    at.mem.end([row], keep="cache", lengths=[len(PROMPTS[0])], tokens=[all_tokens])  # cut off at a stop word
    assert at.cache.tree.nodes == 0


@every_strategy
def test_a_hit_keeps_no_request_out_that_would_fit_without_it(name: str, backend: Backend) -> None:
    """Nothing runs, so that waiting cannot help."""
    at = server(backend, name, spare=NEEDS[name] - 1, cached=1)
    row = at.start([*PROMPTS[0], 1])
    at.run([row])


@every_snapshot
def test_a_step_without_a_boundary_does_not_ask_what_a_full_pool_lacks(
    name: str, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache keeps the pool full. Only a step that can take snapshots counts them."""
    needs = NEEDS[name]
    at = server(backend, name, spare=needs, every=8)
    (row,) = at.admit(ms.Request("a", tokens=[900], length=20))
    assert at.mem.free_slots == 0
    asked: list[int] = []
    claims = Mirror.claims

    def counted(mirror: Mirror, rows: Any, length: Any, *more: Any) -> int:
        asked.extend(length.tolist())
        return claims(mirror, rows, length, *more)

    monkeypatch.setattr(Mirror, "claims", counted)
    for _ in range(16):
        at.mem.settle(at.mem.plan([row]))
    assert asked == ([0, 8] if name == "redirect" else [7, 15])
