"""Who gets room first: requests, then due snapshots, then cached states; no more is evicted than is missing.

Pages hold 4 tokens; every prompt of whole pages leaves one state, at its end (placement `Whole`).
"""

from typing import Any

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.prefix.policies import Lru, LruPages
from memstate.requests.tracking.mirror import Mirror
from tests.support.planes import every_snapshot
from tests.support.serving import Server
from tests.support.talks import Talks

PROMPTS = [[100 * n + i for i in range(8)] for n in range(1, 7)]


def server(backend: Backend, name: str, spare: int, cached: int = 3, every: int = 64, **more: Any) -> Server:
    """Returns a server whose pool holds `cached` states, oldest first, and `spare` free slots."""
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
    """Returns the numbers of the prompts whose states are still cached."""
    return [n for n, tokens in enumerate(PROMPTS) if tuple(tokens) in at.states_by_prefix()]


NEEDS = {"none": 1, "ping-pong": 3, "lazy": 2, "redirect": 1}


def test_pages_come_from_the_leaves_that_were_followed_least_recently(backend: Backend) -> None:
    at = server(backend, "redirect", spare=6, pages=10)
    at.mem.match(PROMPTS[0])  # a match does not count as a use
    assert at.turn([*PROMPTS[0], 1], publish=False) == 8
    row = at.start(range(500, 517))  # the row needs 5 pages, 4 are free
    assert cached(at) == [0, 2] and at.mem.free_pages == 1
    at.mem.extend([row], [20])
    assert cached(at) == [0, 2]
    at.mem.extend([row], [28])  # the row needs two more pages, one is free
    assert cached(at) == [0] and at.mem.free_pages == 1
    with pytest.raises(ms.OutOfPages):
        at.mem.extend([row], [44])  # the row needs 4 more pages; only 3 could be freed
    assert cached(at) == [0] and at.mem.free_pages == 1
    at.look()
    hit = at.start([*PROMPTS[0], *range(3)])  # this row shares two pages, which its lease keeps
    assert at.mem.info(hit).length == 8 and at.cache.evictable_pages == 0
    with pytest.raises(ms.OutOfPages):
        at.mem.extend([row], [32])


@pytest.mark.parametrize("name", ["lazy", "redirect"])
def test_B24a_one_cached_state_goes_for_the_snapshot_that_is_due(name: str, backend: Backend) -> None:
    at = server(backend, name, spare=NEEDS[name], every=8)
    row = at.start([9] * 3)
    while at.mem.info(row).length < 17:  # nothing is published, so every lane is filled
        before = cached(at)
        at.run([row], publish=False)
        gone = len(before) - len(cached(at))
        due = at.mem.info(row).length == (9 if name == "redirect" else 16)
        assert gone == due, "exactly one, and only where a claim is due"
    assert at.mem.stats().degraded == 0 and cached(at) == [1, 2]
    at.look()
    at.end([row])
    assert len(at.states_by_prefix()) >= 3


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


@every_snapshot
def test_a_step_without_a_boundary_does_not_ask_what_a_full_pool_lacks(
    name: str, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a cache the pool is nearly always full, so only steps that may take snapshots count the missing slots."""
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


def test_a_node_stays_while_a_register_is_freed_for_its_state(backend: Backend) -> None:
    """The only register holds the state of a lower node.

    Once that state is evicted, nothing else keeps the upper node.
    """
    talks = Talks(backend, "none", overlap=False, slots=6, pages=0, pages_per_row=0, snapshots=1)
    talks.run(row := talks.turn([1, 2, 3, 4]), [1, 2, 3, 4])
    talks.whole([1, 2, 3, 4, 5, 6, 7, 8])
    assert talks.cached() == [8]
    talks.end(row)
    assert talks.cached() == [4]
    assert talks.mem.match([1, 2, 3, 4, 9]).length == 4
    talks.look()
