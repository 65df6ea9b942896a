"""Slots and pages of tenants: each slot and page counts for one tenant, and only the largest tenants are named."""

from collections.abc import Hashable

import pytest

import memstate as ms
from memstate.metrics.tenants import OTHER, UNKNOWN, Holding, holdings
from tests.support.metered import PAGE, manager, turn


def all_of(mem: ms.StateManager, most: int = 99) -> dict[str, tuple[int, int, int]]:
    """Returns tenant -> its slots, pages and tokens. Every slot and page in use must count for one of the tenants."""
    by_tenant = holdings(mem, str, most)
    stats = mem.stats()
    assert sum(each.slots for each in by_tenant.values()) == stats.capacity - stats.free
    assert sum(each.pages for each in by_tenant.values()) == stats.pages - stats.pages_free
    return {name: (each.slots, each.pages, each.tokens) for name, each in by_tenant.items()}


def test_cached_states_running_requests_and_sessions_count_for_their_salt() -> None:
    mem = manager(slots=20)
    assert all_of(mem) == {}
    turn(mem, 1, "a")
    assert all_of(mem) == {"a": (1, 3, 12)}
    turn(mem, 1, "b")  # the same tokens under another salt take pages of their own
    assert all_of(mem) == {"a": (1, 3, 12), "b": (1, 3, 12)}
    rows = mem.admit([ms.Request("runs", tokens=[1000 + at for at in range(12)] + [7] * 5, salt="b")])
    assert mem.info(rows[0]).length == 12
    assert all_of(mem)["b"] == (2, 5, 12), "what it found in the tree counts once"
    mem.settle(mem.plan(rows, 5))
    assert all_of(mem)["b"] == (2, 5, 17)
    talk = mem.sessions.open("talk")
    turn(mem, 3, "c", session=talk)
    slots, pages, tokens = all_of(mem)["c"]
    assert (pages, tokens) == (4, 14) and slots == mem.stats().held_by_sessions + 1
    mem.end(rows)
    assert all_of(mem)["b"] == (1, 3, 12)


def test_after_a_recovery_what_a_session_shares_counts_once() -> None:
    mem = manager(slots=20)
    turn(mem, 3, "c", session=mem.sessions.open("talk"))
    mem.recover()
    assert mem.stats().held_by_sessions == mem.stats().prefix.states == 1
    assert all_of(mem)["c"][1:] == (4, 14)


def test_a_fork_shares_pages_and_has_slots_of_its_own() -> None:
    mem = manager(slots=20)
    rows = mem.admit([ms.Request("a", tokens=list(range(9)), salt="a")])
    mem.settle(mem.plan(rows, 8))
    mem.settle(mem.plan(rows, 1))
    slots, pages, _ = all_of(mem)["a"]
    rows += mem.fork(rows[0], ["b", "c"]).rows
    assert all_of(mem) == {"a": (slots + 2, pages + 2, 27), UNKNOWN: (1, 0, 0)}, "each has a last page of its own"
    mem.extend(rows, [10] * 3)
    mem.settle(mem.plan(rows))  # the first step of the row has read the shared slot
    assert all_of(mem) == {"a": (slots + 2, pages + 2, 30)}


def test_slots_without_a_salt_are_unknown() -> None:
    mem = manager(prefix=None, pages=None)
    rows = mem.admit([ms.Request("a"), ms.Request("b")])
    mem.settle(mem.plan(rows, 8))
    mem.settle(mem.plan(rows))
    kept = mem.end(rows[:1], keep="handle")
    assert all(kept) and mem.stats().held_by_snapshots == 1
    assert all_of(mem).keys() == {UNKNOWN}


@pytest.mark.parametrize("most", [1, 2, 4, 5, 9])
def test_only_the_largest_have_names(most: int) -> None:
    mem = manager(slots=30)
    for who in range(5):
        for n in range(5 - who):
            turn(mem, 10 * who + n, f"t{who}")
    whole = holdings(mem, str, 99)
    assert [(name, held.slots) for name, held in whole.items()] == [(f"t{who}", 5 - who) for who in range(5)]
    named = all_of(mem, most)
    assert list(named) == [f"t{who}" for who in range(min(most, 5))] + [OTHER] * (most < 5)
    assert sum(tokens for _, _, tokens in named.values()) == sum(held.tokens for held in whole.values()) == 15 * 12


def test_a_tenant_with_most_of_the_pages_is_among_the_largest() -> None:
    mem = manager(slots=30)
    for n in range(3):
        turn(mem, n, "many", length=5)
        turn(mem, n, "more", length=5)
    turn(mem, 9, "long", length=40)
    assert all_of(mem, 1) == {"long": (1, 10, 40), OTHER: (6, 6, 24)}


def test_salts_map_to_tenants() -> None:
    mem = manager(slots=20)
    for n, salt in enumerate([("acme", 1), ("acme", 2), ("zoo", 1)]):
        turn(mem, n, salt)
    asked: list[Hashable] = []

    def tenant(salt: Hashable) -> str:
        asked.append(salt)
        return salt[0]  # type: ignore[index]

    assert holdings(mem, tenant, 9) == {"acme": Holding(2, 6, 24), "zoo": Holding(1, 3, 12)}
    assert sorted(asked) == [("acme", 1), ("acme", 2), ("zoo", 1)], "once for each salt"


def test_tokens_without_pages_of_memstate() -> None:
    mem = manager(below=True)
    turn(mem, 1, "a")
    assert all_of(mem) == {"a": (1, 0, 3 * PAGE)}
