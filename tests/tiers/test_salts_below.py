"""Salts between ranks and processes: tenants never share states, and digests are of one salt."""

from collections.abc import Hashable, Sequence
from pathlib import Path

import pytest

import memstate as ms
from memstate.prefix.lease import NO_MATCH
from memstate.tiers import FileStore, manager
from memstate.tiers.keys import Keys
from memstate.tokens import SaltedTokens, encode
from tests.support.splits import TOKENS, Model
from tests.support.tenants import PAGE, House, T, two_tenants


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> House:
    """One of two ranks; the other rank always agrees."""
    monkeypatch.setattr(manager, "Ranks", lambda group: None)
    return House(tiers={"rank": 0, "ranks": 2, "group": object()})


@two_tenants
def test_what_ranks_have_agreed_on_is_for_its_own_salt(mine: Hashable, other: Hashable, rank: House) -> None:
    rank.turn(8, mine)
    rank.go_down()
    nothing, fetch = rank.fetch(9, other), rank.fetch(9, mine)
    assert (nothing.length, fetch.length) == (0, 8)
    with pytest.raises(ms.InvalidArgument, match="other tokens or another salt"):
        rank.start(T[:9], other, fetch=fetch)
    assert rank.starts(9, other, fetch=nothing) == 0 and rank.starts(9, mine, fetch=fetch) == 8


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
    house = House(tiers={})
    host, cache = house.mem.tiers.host, house.mem.prefix  # type: ignore[union-attr]
    assert cache is not None

    def both(salt: Hashable) -> tuple[Sequence[bytes], Sequence[bytes]]:
        prompt = SaltedTokens(encode(T[:16]), salt)
        return host.digests(prompt, cache.match(prompt, 16)), host.digests(prompt, NO_MATCH)

    for salt in (mine, other):
        house.turn(8, salt)
    of_mine, of_other = both(mine), both(other)
    assert of_mine[0] == of_mine[1] and of_other[0] == of_other[1] and not set(of_mine[0]) & set(of_other[0])
    of_nodes = {salt: house.mem.tiers.keys.of_node(cache.tree, node) for salt, node in cache.tree.walk()}
    assert of_nodes == {mine: of_mine[0][:2], other: of_other[0][:2]}
