"""Salts on the device: tenants with the same tokens never share a state, and each finds its own."""

from array import array
from collections.abc import Hashable

import pytest

import memstate as ms
from memstate.prefix.policies import ReturnRate
from memstate.prefix.tree import Tree
from memstate.tokens import BYTES, SaltedTokens, encode
from tests.proof.stateful.script import Play, script
from tests.support.tenants import PAGE, House, T

SALTS = (("a", "b"), ("a", None), (None, "a"), ("", None), (1, "1"))  # of two tenants
two_tenants = pytest.mark.parametrize(("mine", "other"), SALTS)


@script(of=SALTS, prefix=True, page_size=4, every=8)
def test_B53_admission_and_match_find_what_its_own_salt_has(play: Play) -> None:
    mine, other = play.of
    for salt in (mine, other):
        play.turn(T[:8], salt=salt)
        for asked in (other, mine):
            play.match(T[:9], asked)
            play.turn(T[:9], salt=asked, how="release")
    play.reached("hit_tokens")


@script(of=SALTS, how=("end", "publish", "cancel"), strategy="redirect", prefix=True, page_size=4, every=8)
def test_B53_what_a_row_leaves_goes_under_its_salt(play: Play) -> None:
    mine, other = play.of
    (row,) = play.admit(T[:12], salt=mine)
    play.run(row, T[:9])  # one token beyond 8, so that the running row can publish its state of 8
    if play.how == "cancel":
        play.cancel(play.step([row], 3, run=False), how="told")
    else:
        getattr(play, play.how)(row)
    for salt in (other, mine):
        play.match(T[:9], salt)
        play.turn(T[:12], salt=salt, how="release")
    play.reached("hit_tokens")


@script(of=SALTS, strategy="redirect", page_size=4, every=8, prefix=(False, True))
def test_B53_a_turn_after_an_abort_goes_on_under_its_own_salt(play: Play) -> None:
    """With a cache, a state that the session has left is superseded by a turn of the same salt alone."""
    mine, other = play.of
    for salt in (other, mine):
        (talk,) = play.open(f"talk {salt}")
        play.turn(T[:8], talk, salt=mine)
        (row,) = play.admit(T[:16], sessions=[talk], salt=mine)
        play.run(row, T[:13], publish=play.settings.prefix)
        play.end(row, how="release")
        play.turn(T[:16], talk, salt=salt)
    (row,) = play.admit(T[:24], sessions=[talk], salt=other)
    play.run(row, T[:20])
    play.end(row, how="release")
    play.turn(T[:24], talk, salt=mine)


@script(of=SALTS, prefix=True, page_size=4, every=8)
def test_B53_what_recover_keeps_stays_under_its_salt(play: Play) -> None:
    mine, other = play.of
    (talk,) = play.open("chat")
    play.turn(T[:8], salt=mine)
    play.turn(T[:12], talk, salt=mine)
    play.recover()
    for salt in (other, mine):
        play.match(T[:9], salt)
        play.turn(T[:16], talk, salt=salt)
        play.turn(T[:9], salt=salt)
    play.reached("hit_tokens")


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
