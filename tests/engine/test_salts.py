"""Salts on the device: tenants with the same tokens never share a state, and each finds its own."""

from array import array
from collections.abc import Hashable

import pytest

import memstate as ms
from memstate.prefix.policies import Lru, LruPages, ReturnRate
from memstate.prefix.tree import Tree
from memstate.tokens import BYTES, SaltedTokens, encode
from tests.support.tenants import NOTHING, PAGE, House, T, two_tenants


@two_tenants
def test_admission_and_match_find_what_its_own_salt_has(mine: Hashable, other: Hashable) -> None:
    house = House()
    assert house.turn(8, mine) == 0
    assert house.matched(9, other) == NOTHING and house.matched(9, mine) == (8, 8, 8, 0)
    assert house.starts(9, other) == 0 and house.starts(9, mine) == 8
    assert house.turn(8, other) == 0 and house.starts(9, other) == 8, "of equal tokens each has bytes of its own"
    house.idle()


@pytest.mark.parametrize("how", ["end", "publish", "cancel"])
@two_tenants
def test_what_a_row_leaves_goes_under_its_salt(mine: Hashable, other: Hashable, how: str) -> None:
    house = House()
    row = house.start(T[:12], mine)
    house.run(row, 9)  # one token beyond 8, so that the running row can publish its state of 8
    if how == "cancel":
        house.mem.cancel(house.step(row, 12), keep="cache", tokens=[T[:8]])
    else:
        getattr(house.mem, how)([row], keep="cache", tokens=[T[:9]])
    assert house.matched(9, other) == NOTHING and house.matched(9, mine) == (8, 8, 8, 0)
    assert house.starts(12, other) == 0 and house.starts(12, mine) == 8, "also where the request comes back"


@two_tenants
def test_a_turn_after_an_abort_goes_on_under_its_own_salt(mine: Hashable, other: Hashable) -> None:
    house = House(prefix=None)
    for salt, start in ((other, 0), (mine, 8)):
        session = house.mem.sessions.open("talk")
        house.turn(8, mine, session=session)
        row = house.start(T[:16], mine, session=session)
        assert house.mem.info(row).length == 8
        house.mem.end([row])
        assert house.turn(16, salt, session=session) == start
    row = house.start(T[:24], other, session=session)
    house.run(row, 20)
    house.mem.end([row])  # this turn had another salt: the session keeps no state of either salt
    assert house.starts(24, mine, session=session) == 0


@two_tenants
def test_a_turn_supersedes_what_its_own_salt_left(mine: Hashable, other: Hashable) -> None:
    """The state of an aborted turn is the session's newest, until a later turn of the same salt has a longer one."""
    for salt in (other, mine):
        house = House(prefix=ms.Prefix(Lru(), LruPages()))
        cache = house.mem.prefix
        assert cache
        session = house.mem.sessions.open("talk")
        row = house.start(T[:12], mine, session=session)
        house.run(row, 9)
        house.mem.publish([row], keep="cache", tokens=[T[:8]])
        house.mem.end([row])
        assert cache.superseded_states == 0
        house.turn(16, salt, session=session)
        assert [(cache.tree.salt(node), node.end) for node in cache._superseded] == [(salt, 2)]


@two_tenants
def test_what_recover_keeps_stays_under_its_salt(mine: Hashable, other: Hashable) -> None:
    house = House()
    house.turn(8, mine)
    session = house.mem.sessions.open("chat")
    house.turn(12, mine, session=session)
    house.mem.submit()
    house.mem.recover()
    assert house.matched(9, other) == NOTHING and house.matched(9, mine) == (8, 8, 8, 0)
    assert house.mem.match(T[:16], other, session).length == 0
    assert house.mem.match(T[:16], mine, session).length == 12
    assert house.starts(9, other) == 0 and house.starts(9, mine) == 8


@two_tenants
def test_the_tree_has_a_root_for_each_salt(mine: Hashable, other: Hashable) -> None:
    tree, key = Tree(PAGE * BYTES), encode(T[:8])
    ours, theirs = SaltedTokens(key, mine), SaltedTokens(key, other)
    node, had = tree.insert(ours, array("q", [1, 2]))
    assert had == 0 and tree.salt(node) == mine and tree.find(theirs).kv == 0 and tree.find(ours).kv == 2
    second, had = tree.insert(theirs, array("q", [3, 4]))
    assert had == 0 and second is not node and (*tree.pages_to(node), *tree.pages_to(second)) == (1, 2, 3, 4)
    assert {(salt, one) for salt, one in tree.walk()} == {(mine, node), (other, second)}
    assert tree.root(mine) is node.parent and tree.root(other) is second.parent
    tree.remove(second)
    assert set(tree.roots) == {mine} and tree.find(ours).known is node and tree.find(theirs).known is not node


@two_tenants
def test_what_is_remembered_of_a_prompt_is_remembered_under_its_salt(mine: Hashable, other: Hashable) -> None:
    """A policy that learns still knows the place of evicted KV, but only for requests of the same salt."""
    policy = ReturnRate()
    house = House(prefix=ms.Prefix(policy))
    house.turn(8, mine)
    cache = house.mem.prefix
    assert cache is not None
    cache.evict_pages(99)
    ((salt, ghost),) = cache.tree.walk()
    assert salt == mine and ghost.ghost and ghost.worth.uses == 0
    assert house.starts(9, other) == 0 and ghost.worth.uses == 0, "not what this one asked for"
    assert house.turn(8, other) == 0 and ghost.ghost, "and filled again by nobody else"
    assert house.starts(9, mine) == 0 and ghost.worth.uses == 1
    assert house.turn(8, mine) == 0 and not ghost.ghost and house.starts(9, mine) == house.starts(9, other) == 8
