"""Salts on the device: tenants with the same tokens never share a state, and each finds its own."""

from array import array
from collections.abc import Hashable, Sequence
from pathlib import Path

import pytest

import memstate as ms
from memstate.prefix.lease import NO_MATCH
from memstate.prefix.policies import ReturnRate
from memstate.prefix.tree import Tree
from memstate.tiers import FileStore
from memstate.tiers.keys import Keys
from memstate.tokens import BYTES, SaltedTokens, encode
from tests.proof.stateful.script import Play, script
from tests.support.splits import TOKENS, Model
from tests.support.tiered_small import PAGE, T, tiered, turn

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
    play.reached("hit_tokens" if play.settings.prefix else "snapshots")


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
    mem = tiered(tiers={"write": "selective"}, prefix=ms.Prefix(policy))
    turn(mem, T[:8], salt=mine)
    cache = mem.prefix
    cache.evict_pages(99)
    ((salt, ghost),) = cache.tree.walk()
    assert salt == mine and ghost.ghost and ghost.worth.uses == 0
    assert turn(mem, T[:9], keep=False, salt=other) == 0 and ghost.worth.uses == 0, "not what this one asked for"
    assert turn(mem, T[:8], salt=other) == 0 and ghost.ghost, "and filled again by nobody else"
    assert turn(mem, T[:9], keep=False, salt=mine) == 0 and ghost.worth.uses == 1
    assert turn(mem, T[:8], salt=mine) == 0 and not ghost.ghost
    assert [turn(mem, T[:9], keep=False, salt=salt) for salt in (mine, other)] == [8, 8]


@two_tenants
def test_a_hand_over_brings_what_its_own_salt_has(mine: Hashable, other: Hashable, tmp_path: Path) -> None:
    model, source, target = Model(), FileStore(tmp_path / "source"), FileStore(tmp_path / "target")
    model.put(source, 2, salt=mine)
    hand_over = model.hand_over(source, 2, target, 1, 0)
    assert hand_over.run(TOKENS, other).length == 0
    assert hand_over.run(TOKENS, mine).length == 5 * PAGE
    assert model.found(target, 1, 0, other) == 0 and model.found(target, 1, 0, mine) == 5 * PAGE


@two_tenants
def test_digests_are_of_one_salt(mine: Hashable, other: Hashable) -> None:
    keys, ours, theirs = Keys(bytes(32), PAGE), *(SaltedTokens(encode(T[:8]), salt) for salt in (mine, other))
    assert keys.of(ours) == keys.of(ours) and not set(keys.of(ours)) & set(keys.of(theirs))


@two_tenants
def test_nodes_and_prompts_have_the_digests_of_their_salt(mine: Hashable, other: Hashable) -> None:
    """Digests are the same whether they are computed from the tokens or from a node of the tree."""
    mem = tiered()
    host, cache, digests = mem.tiers.host, mem.prefix, dict[Hashable, Sequence[bytes]]()
    for salt in (mine, other):
        turn(mem, T[:8], salt=salt)
    for salt in (mine, other):
        prompt = SaltedTokens(encode(T[:16]), salt)
        digests[salt] = host.digests(prompt, NO_MATCH)
        assert host.digests(prompt, cache.match(prompt, 16)) == digests[salt]
    assert not set(digests[mine]) & set(digests[other])
    of_nodes = {salt: mem.tiers.keys.of_node(cache.tree, node) for salt, node in cache.tree.walk()}
    assert of_nodes == {salt: of[:2] for salt, of in digests.items()}
