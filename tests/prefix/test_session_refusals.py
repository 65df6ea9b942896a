"""Refusals take nothing from anybody, and pages that count as room can be evicted."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import memstate as ms
from memstate.prefix.policies import Lru, LruPages, ReturnRate
from memstate.prefix.tree import Node
from tests.support import owners
from tests.support.build import Whole, build
from tests.support.held import held

LAYOUT = ms.StateLayout((ms.Plane("ssm", (2,), torch.float32),), 1)
PAGES, SIZE = 12, 4
T = list(range(16))


def manager(prefix: ms.Prefix, **settings: Any) -> ms.StateManager:
    sizes = {"slots": 8, "max_requests": 3, "pages": PAGES, "page_size": SIZE, "pages_per_row": PAGES, "snapshots": 5}
    given = sizes | {"tracking": ms.LazyPingPong(4), "prefix": prefix, "backend": "reference"} | settings
    return build(LAYOUT, **given)  # type: ignore[arg-type]


def prefill(mem: ms.StateManager, row: ms.Row, tokens: list[int]) -> None:
    """Reads the tokens to their end, or as far as there are pages."""
    while (done := mem.info(row).length) < len(tokens):
        end = min(mem.info(row).next_boundary, len(tokens))
        mem.extend([row], [end])
        mem.settle(mem.plan([row], [end - done]))


def turn(mem: ms.StateManager, tokens: list[int], session: ms.Session | None = None) -> None:
    (row,) = mem.admit([ms.Request("turn", tokens=tokens, session=session)])
    prefill(mem, row, tokens)
    mem.publish([row], keep="cache", tokens=[tokens])
    mem.end([row], keep="cache", tokens=[tokens])


def nobody_is_on_what_is_gone(mem: ms.StateManager) -> bool:
    """Returns True if no lease keeps a node that has lost its KV."""
    assert mem.prefix
    return not any(node.leases for _, node in mem.prefix.tree.walk() if node.ghost)


def room(mem: ms.StateManager) -> int:
    """Returns how many pages the cache says it could free at most."""
    assert mem.prefix
    return max((n for n in range(1, PAGES + 1) if mem.prefix.can_evict(n)), default=0)


class Twice(LruPages):
    """A policy that offers each leaf twice."""

    def victims(self) -> Iterator[Node]:
        for node in super().victims():
            yield node
            yield node


def test_B17_a_leaf_that_a_policy_offers_twice_is_room_once() -> None:
    mem = manager(ms.Prefix(Lru(), Twice()), pages=6)
    turn(mem, [90, 91, 92, 93])
    assert mem.prefix and mem.prefix.evict_states(1) == 1
    (row,) = mem.admit([ms.Request("a", tokens=T)])
    prefill(mem, row, T)
    mem.publish([row], keep="cache", tokens=[T])
    assert mem.end([row], keep="handle") != [None]  # this snapshot also holds the pages
    before = held(mem)
    assert (mem.free_pages, room(mem)) == (1, 1)  # the request below needs three pages
    with pytest.raises(ms.OutOfPages):
        mem.admit([ms.Request("other", tokens=range(50, 62))])
    assert held(mem) == before and nobody_is_on_what_is_gone(mem)


def test_leaves_whose_pages_others_have_too_hide_no_room_behind_them() -> None:
    """A page under two salts becomes free once both leaves are evicted.

    A trunk can be evicted even if the eviction of its branch has freed no page.
    """
    mem = manager(ms.Prefix(states=ReturnRate()), pages=6)
    (row,) = mem.admit([ms.Request("a", tokens=T, salt="a")])
    prefill(mem, row, T)
    mem.publish([row], keep="cache", tokens=[T])
    (handle,) = mem.end([row], keep="handle")
    assert handle
    (row,) = mem.admit([ms.Request("b", tokens=[*T, 16], salt="b", resume=handle)])
    mem.drop([handle])
    mem.end([row], keep="cache", tokens=[T])
    assert mem.prefix and mem.prefix.tree.total_pages == 8 and mem.free_pages == 2
    assert room(mem) == 4
    mem.end(mem.admit([ms.Request("c", length=6 * SIZE)]))
    assert mem.free_pages == 6


class Shy(LruPages):
    """A policy that offers nothing."""

    def victims(self) -> Iterator[Node]:
        return iter(())


def test_leaves_that_a_policy_does_not_offer_are_room() -> None:
    mem = manager(ms.Prefix(states=Lru(), pages=Shy()), pages=8)
    turn(mem, T)
    turn(mem, [*T[:8], 77, 78, 79, 80])
    assert mem.prefix and mem.free_pages == 3 and room(mem) == 5
    assert mem.prefix.evict_pages(2) == 2 and mem.prefix.tree.total_pages == 3  # children go before their parents
    mem.end(mem.admit([ms.Request("a", length=8 * SIZE)]))


@pytest.mark.parametrize("pages", [LruPages, Shy])
def test_a_leaf_whose_end_somebody_else_has_is_given_up_from_there_on(pages: type[LruPages]) -> None:
    mem = manager(ms.Prefix(states=Lru(), pages=pages(), placement=Whole(None)), ends=True)
    turn(mem, T)
    assert mem.prefix and mem.prefix.evict_states(8) == 1
    ((_, leaf),) = mem.prefix.tree.walk()
    last = leaf.pages[-1:]
    owners.kv_pages(mem).share(last)
    assert room(mem) == mem.prefix.evict_pages(3) == 3
    owners.kv_pages(mem).release(last)
    assert mem.free_pages == PAGES
