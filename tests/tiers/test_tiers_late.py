"""Late transfers: nothing reads their bytes before they arrive, and nothing takes their records meanwhile."""

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support.planes import every_strategy
from tests.support.tiered import T, Tiered, below, settle, whole
from tests.support.tiered_late import Late
from tests.support.ways import every_order_and_strategy

pytestmark = pytest.mark.sample

ONE = whole(1)


TWO = (ONE, whole(2, 3))  # prompts that only host memory has


@every_order_and_strategy
def test_nothing_reads_a_state_before_it_is_there(name: str, overlap: bool, late: list[Late], plain: Backend) -> None:
    at = below(plain, name, *TWO, overlap=overlap)
    rows = at.admit(*[ms.Request(n, tokens=[*ONE, n]) for n in range(2)])
    states, kv = late
    assert len(states.unread("into")) == len(kv.unread("into")) == 1
    at.run([*rows, None], publish=False)  # the step reads and checks the loaded states
    assert not states.unread("into") and not kv.unread("into")
    at.mem.poll()
    assert at.below.host.loads, "the host has not heard of it"
    for ticket in (*states.flying("into"), *kv.flying("into")):
        ticket.land()
    at.mem.poll()
    assert at.landed


@every_strategy
def test_a_request_that_ends_at_once_leaves_its_load_to_itself(name: str, late: list[Late], plain: Backend) -> None:
    """The row ends before its load has arrived. The record stays in use until then, and the loaded state is cached."""
    at = below(plain, name, *TWO)
    row = at.start([*ONE, 1])
    at.mem.end([row])
    host = at.below.host
    assert host.states.evict(9) == 1 and at.keeps() == {tuple(ONE)}, "the one that is not being copied"
    at.mem.poll()
    assert late[0].flying("into") and host.loads
    at.look(idle=True)
    at.below.settle()
    assert not host.loads and at.landed
    at.look(idle=True)
    assert at.mem.match([*ONE, 1]).length == 8


def test_a_record_that_is_being_filled_is_nobody_else_s(late: list[Late], plain: Backend) -> None:
    at = Tiered(plain, slots=6, tiers={"write": "back", "host_slots": 1, "host_pages": 8})
    at.cache_prompts(whole(1), whole(2))
    at.mem.submit()
    at.cache.evict_states(1)
    assert at.keeps() == {tuple(whole(1))} and late[0].flying("out")
    at.mem.poll()
    assert not at.landed, "poll waits for nothing"
    at.cache.evict_states(1)
    assert at.keeps() == {tuple(whole(1))} and at.tiers.refused == 1 and at.tiers.evicted_states == 0
    at.look(idle=True)
    settle(at)
    assert at.landed
    at.look(idle=True)
    at.cache_prompts(whole(3))
    at.give_up()
    assert at.keeps() == {tuple(whole(3))} and (at.tiers.refused, at.tiers.evicted_states) == (1, 1)


@pytest.mark.parametrize("ending", ["sleep", "reset", "clear", "close", "flush"])
def test_whatever_is_on_its_way_arrives_first(ending: str, late: list[Late], plain: Backend) -> None:
    at = below(plain, "redirect", *TWO, slots=12)
    at.cache_prompts(whole(3))
    at.mem.submit()
    at.mem.poll()  # the save is on its way
    at.mem.end([at.start([*ONE, 1])])  # the load is on its way
    assert [len(late[0].flying(kind)) for kind in ("out", "into")] == [1, 1]
    if ending == "sleep":
        at.mem.device.sleep()
        assert at.landed
        at.mem.device.wake()
    elif ending == "reset":
        at.mem.recover(keep=False)
    elif ending == "close":
        at.mem.close()
    else:
        getattr(at.below, ending)()
    assert not late[0].flying("into") and not late[0].flying("out") and at.landed
    assert [cache._pinned for cache in at.caches] == [0, 0]
    at.look(idle=True)
    if ending in ("reset", "clear", "close"):
        assert [len(cache) for cache in at.caches] == [0, 0]
    if ending != "close":
        assert at.turn([*T[:9]]) == 0
        at.empty()
