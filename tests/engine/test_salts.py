"""Salts on the device: whatever requests do, tenants with the same tokens never meet, and each finds its own."""

from collections.abc import Hashable

import pytest

import memstate as ms
from memstate.prefix.policies import Lru, LruPages, ReturnRate
from memstate.prefix.tree import Tree
from memstate.tokens import BYTES, Prompt, encode
from tests.support import owners
from tests.support.tenants import NOTHING, PAGE, House, T, two_tenants

EDITED = [*T[:12], 98, 99, *T[14:]]  # another history from token 12 on


@two_tenants
def test_admission_and_match_find_what_its_own_salt_has(mine: Hashable, other: Hashable) -> None:
    house = House()
    assert house.turn(8, mine) == 0
    assert house.found(9, other) == NOTHING and house.found(9, mine) == (8, 8, 8, 0)
    assert house.starts(9, other) == 0 and house.starts(9, mine) == 8
    assert house.turn(8, other) == 0 and house.starts(9, other) == 8, "of equal tokens each has bytes of its own"
    house.idle()


@pytest.mark.parametrize("how", ["end", "publish", "cancel"])
@two_tenants
def test_what_a_row_leaves_goes_under_its_salt(mine: Hashable, other: Hashable, how: str) -> None:
    house = House()
    row = house.start(T[:12], mine)
    house.run(row, 9)  # a step beyond the state, which a running row can give then
    if how == "cancel":
        house.mem.cancel(house.step(row, 12), keep="cache", tokens=[T[:8]])
    else:
        getattr(house.mem, how)([row], keep="cache", tokens=[T[:9]])
    assert house.found(9, other) == NOTHING and house.found(9, mine) == (8, 8, 8, 0)
    assert house.starts(12, other) == 0 and house.starts(12, mine) == 8, "also where the request comes back"


@two_tenants
def test_a_row_that_resumes_a_handle_leaves_what_it_has_under_its_salt(mine: Hashable, other: Hashable) -> None:
    house = House()
    row = house.start(T[:8], mine)
    house.run(row, 8)
    (kept,) = house.mem.end([row], keep="handle")
    assert house.turn(16, mine, resume=kept) == 8
    assert house.found(17, other) == NOTHING and house.starts(17, other) == 0 and house.starts(17, mine) == 16


@two_tenants
def test_a_state_that_another_salt_has_is_no_second_one(mine: Hashable, other: Hashable) -> None:
    house = House()
    assert [house.turn(8, salt) for salt in (mine, other)] == [0, 0]
    figures = house.mem.stats().prefix
    assert figures is not None and (figures.states, figures.pages, figures.duplicates) == (2, 4, 0)
    assert [house.starts(9, salt) for salt in (mine, other)] == [8, 8]
    rows = [house.start(T[:8], mine) for _ in range(2)]
    for row in rows:
        house.run(row, 8)
    house.mem.end(rows, keep="cache", tokens=[T[:8]] * 2)
    assert (again := house.mem.stats().prefix) is not None and (again.states, again.duplicates) == (3, 3)
    assert [house.starts(8, salt) for salt in (mine, other)] == [4, 0], "the new one is where the KV of 8 tokens is met"


@pytest.mark.parametrize("parent", ["fresh", "hit", "without tokens"])
@two_tenants
def test_forks_leave_what_they_have_under_the_salt_of_their_row(mine: Hashable, other: Hashable, parent: str) -> None:
    house = House()
    if parent == "hit":
        house.turn(8, mine)
    row = house.start(None if parent == "without tokens" else T[:12], mine)  # type: ignore[arg-type]
    house.run(row, 12)
    first, second = house.fork(row, 2)
    house.mem.end([row])
    house.run(first, 16)
    house.mem.end([first], keep="cache", tokens=[T[:16]])
    assert house.found(17, other) == NOTHING and house.starts(17, other) == 0 and house.starts(17, mine) == 16
    (third,) = house.fork(second)  # a fork's fork
    house.run(third, 16)
    house.mem.end([second])
    house.run(third, 25)
    house.mem.publish([third], keep="cache", tokens=[T[:24]])
    house.mem.end([third])
    assert house.found(25, other) == NOTHING and house.starts(25, other) == 0 and house.starts(25, mine) == 24
    house.idle()


@two_tenants
def test_a_state_that_is_taken_over_goes_to_its_own_salt(mine: Hashable, other: Hashable) -> None:
    """One slot: who starts from the state gets it, and leaves a longer one."""
    house = House(slots=1)
    house.turn(8, mine)
    row = house.start(T[:16], mine)
    assert house.mem.info(row).length == 8 and house.mem.free_slots == 0, "taken over"
    house.run(row, 16)
    house.mem.end([row], keep="cache", tokens=[T[:16]])
    assert house.found(17, other) == NOTHING and house.found(17, mine)[0] == 16
    assert house.starts(17, other) == 0, "which costs the state its slot"
    assert house.found(17, mine) == (0, 16, 16, 0)


@two_tenants
def test_a_later_turn_of_a_session_goes_on_under_its_own_salt(mine: Hashable, other: Hashable) -> None:
    house = House(prefix=None)
    same, changed = (house.mem.sessions.open(name) for name in ("same", "changed"))
    assert [house.turn(end, mine, session=same) for end in (8, 16, 24)] == [0, 8, 16]
    assert house.turn(8, mine, session=changed) == 0
    assert house.turn(16, other, session=changed) == 0, "its states are those of the other salt"
    assert house.turn(24, mine, session=changed) == 0, "and they were given up for it"
    assert house.turn(32, mine, session=changed) == 24


@two_tenants
def test_what_a_later_turn_leaves_goes_under_its_salt(mine: Hashable, other: Hashable) -> None:
    """States go to the session, KV to the cache; a state that a turn publishes goes there too."""
    house = House()
    session = house.mem.sessions.open("talk")
    for end, start in ((8, 0), (16, 8), (24, 16)):
        assert house.turn(end, mine, session=session) == start
        assert house.found(33, mine, session=session)[0] == end and house.found(33, other, session=session) == NOTHING
        assert house.found(end + 1, other) == NOTHING and house.found(end + 1, mine) == (0, end, 0, 0)
    row = house.start(T[:34], mine, session=session)
    house.run(row, 33)
    house.mem.publish([row], keep="cache", tokens=[T[:32]])
    house.mem.end([row])
    assert house.starts(33, other) == 0 and house.starts(33, mine) == 32


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
    house.mem.end([row])  # of another salt: nothing is left, to either
    assert house.starts(24, mine, session=session) == 0


@two_tenants
def test_an_edited_history_goes_on_under_its_own_salt(mine: Hashable, other: Hashable) -> None:
    house = House(prefix=None, tracking=ms.PingPong(4))
    for salt, start in ((other, 0), (mine, 12)):
        session = house.mem.sessions.open("talk")
        house.turn(14, mine, session=session)
        row = house.start(EDITED[:20], salt, session=session)
        assert house.mem.info(row).length == start
        house.run(row, 20)
        house.mem.end([row], keep="cache", tokens=[EDITED[:20]])


@two_tenants
def test_what_an_idle_session_gave_up_stays_under_its_salt(mine: Hashable, other: Hashable) -> None:
    for there in (False, True):
        house = House()
        if there:
            house.turn(8, other)
        session = house.mem.sessions.open("talk")
        house.turn(8, mine, session=session)
        house.mem._parts.room.give_way(owners.session(house.mem, session))
        assert house.mem.stats().prefix.states == 1 + there  # type: ignore[union-attr]
        assert house.starts(9, mine) == 8 and house.starts(9, other) == 8 * there
        house.idle()


@two_tenants
def test_a_turn_supersedes_what_its_own_salt_left(mine: Hashable, other: Hashable) -> None:
    """A state of a turn that was aborted is the session's newest, until a later turn of its salt has a longer one."""
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
    assert house.found(9, other) == NOTHING and house.found(9, mine) == (8, 8, 8, 0)
    assert house.mem.match(T[:16], other, session).length == 0
    assert house.mem.match(T[:16], mine, session).length == 12
    assert house.starts(9, other) == 0 and house.starts(9, mine) == 8


@two_tenants
def test_the_tree_has_a_root_for_each_salt(mine: Hashable, other: Hashable) -> None:
    tree, key = Tree(PAGE * BYTES), encode(T[:8])
    ours, theirs = Prompt(key, mine), Prompt(key, other)
    node, had = tree.insert(ours, [1, 2])
    assert had == 0 and tree.salt(node) == mine and tree.find(theirs).kv == 0 and tree.find(ours).kv == 2
    second, had = tree.insert(theirs, [3, 4])
    assert had == 0 and second is not node and (tree.pages_to(node), tree.pages_to(second)) == ([1, 2], [3, 4])
    assert {(salt, one) for salt, one in tree.walk()} == {(mine, node), (other, second)}
    assert tree.root(mine) is node.parent and tree.root(other) is second.parent
    tree.remove(second)
    assert set(tree.roots) == {mine} and tree.find(ours).known is node and tree.find(theirs).known is not node


@two_tenants
def test_what_is_remembered_of_a_prompt_is_remembered_under_its_salt(mine: Hashable, other: Hashable) -> None:
    """KV is gone, and a policy that learns knows the place still: for one tenant, whoever else asks."""
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
