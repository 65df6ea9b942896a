"""Bytes that take their time: nothing reads them before they are there, nothing takes their records meanwhile."""

from collections.abc import Sequence

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support.endings import unchecked
from tests.support.planes import every_strategy
from tests.support.tiered import T, Tiered, below, settle, whole
from tests.support.tiered_late import Late
from tests.support.ways import every_order_and_strategy

pytestmark = pytest.mark.sample

ONE = whole(1)


class Layerwise(Tiered):
    """An engine that waits for each layer right before it reads it. waited: for which, in the last step."""

    lazy = False  # it forgets to

    def _forward(self, step: ms.Step, fed: Sequence[Sequence[int]]) -> None:
        for kind in ("state", "kv") if not self.lazy else ():
            for layer in range(2):
                self.below.wait_layer(kind, layer)
        super()._forward(step, fed)


TWO = (ONE, whole(2, 3))  # what only host memory has


@every_order_and_strategy
def test_nothing_reads_a_state_before_it_is_there(name: str, overlap: bool, late: list[Late], plain: Backend) -> None:
    at = below(plain, name, *TWO, overlap=overlap)
    rows = at.admit(*[ms.Request(n, tokens=[*ONE, n]) for n in range(2)])
    states, kv = late
    assert len(states.unread("into")) == len(kv.unread("into")) == 1
    at.run([*rows, None], publish=False)  # reads what came, and checks it
    assert not states.unread("into") and not kv.unread("into")
    at.mem.poll()
    assert at.below.host.loads, "the host has not heard of it"
    for ticket in (*states.flying("into"), *kv.flying("into")):
        ticket.land()
    at.mem.poll()
    assert at.landed


@every_strategy
def test_in_place_engines_copy_a_state_once_it_is_there(name: str, late: list[Late], plain: Backend) -> None:
    at = below(plain, name, *TWO, in_place=True)
    row = at.start([*ONE, 1])
    at.checked([row])
    at.end([row])


@every_strategy
def test_a_request_that_ends_at_once_leaves_its_load_to_itself(name: str, late: list[Late], plain: Backend) -> None:
    """The record stays in use until the bytes have arrived; the state is a cached one, and right."""
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


@every_strategy
def test_a_state_is_evicted_again_before_its_load_is_there(name: str, late: list[Late], plain: Backend) -> None:
    """Its slot goes to others, whose bytes the load must not touch."""
    at = below(plain, name, *TWO, slots=4)
    at.mem.end([at.start([*ONE, 1])])
    assert late[0].flying("into") and at.cache.evict_states(9) == 1 and at.moved[0] == 2
    rows = [at.start([60 + n]) for n in range(at.mem.free_slots // (3 if name == "ping-pong" else 2))]
    at.run(rows, publish=False)
    at.checked(rows)


def test_a_state_goes_down_behind_its_own_load(late: list[Late], plain: Backend) -> None:
    """The load fills the register that a dense record is packed from. Packing waits for this load, and for no other."""
    at = below(plain, "redirect", *TWO, tiers={"write": "back", "dense_slots": 2})
    at.cache_prompts(whole(3))
    settle(at)
    dense = at.below.host.dense
    assert dense is not None and dense.evict(9) == 2
    at.mem.end([at.start([*ONE, 1])])
    (load,) = late[0].flying("into")
    at.cache.evict_states(1)
    assert len(dense) == 1 and load.waits == [], "the state of another prompt went down"
    at.cache.evict_states(1)
    assert len(dense) == 2 and load.waits == [None]
    at.checked([at.hit(8, [*ONE, 1])])
    assert at.tiers.dense_hit_tokens == 8


@every_strategy
def test_a_canceled_step_leaves_the_hit_where_it_is(name: str, late: list[Late], plain: Backend) -> None:
    at = below(plain, name, *TWO)
    row = at.start([*ONE, 1])
    at.mem.cancel(at.step([row], run=False))
    settle(at)
    at.look(idle=True)
    assert at.mem.match([*ONE, 1]).length == 8
    row = at.start([*ONE, 1])
    assert at.mem.info(row).length == 8 and at.moved[1] == 1
    snaps = at.mem.end([row], keep="handle")
    at.mem.drop([snap for snap in snaps if snap])


def test_a_fork_before_the_first_step_waits_as_well(late: list[Late], plain: Backend) -> None:
    for name in ("redirect", "lazy"):
        del late[:]
        at = below(plain, name, *TWO)
        row = at.start([*ONE, 1])
        (other,) = at.mem.fork(row, ["other"]).rows
        at.text[other] = [*ONE, 2]
        at.checked([row, other])


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


def test_a_hit_on_bytes_that_are_still_leaving_comes_back_right(late: list[Late], plain: Backend) -> None:
    at = Tiered(plain, slots=6, tiers={"write": "back"})
    at.cache_prompts(ONE)
    at.mem.submit()
    at.cache.evict_states(1)
    at.cache.evict_pages(60)
    assert late[0].flying("out") and late[1].flying("out")
    at.checked([at.hit(8, [*ONE, 1])])


def test_a_caller_that_waits_for_layers_gets_them_one_by_one(late: list[Late], plain: Backend) -> None:
    at = below(plain, "redirect", *TWO, kind=Layerwise, tiers={"layerwise": True, "layer_groups": 2})
    row = at.start([*ONE, 1])
    tickets = [ticket for each in late for ticket in each.flying("into")]
    assert len(tickets) == 2 and [ticket.groups for ticket in tickets] == [[range(1), range(1, 2)], [range(2)]]
    step = at.step([row], run=False)
    assert [ticket.waits for ticket in tickets] == [[], []], "the plan does not wait for the copy engine"
    at._forward(step, [[1]])
    assert [ticket.waits for ticket in tickets] == [[0, 1], [0, 1]]
    at.mem.settle(step)
    rows = [row, at.start([9])]
    at.run(rows, publish=False)
    assert [ticket.waits for ticket in tickets] == [[0, 1, None], [0, 1, None]], "the next packet waits for the rest"


@every_strategy
def test_layerwise_engines_read_what_they_waited_for(name: str, late: list[Late], plain: Backend) -> None:
    at = below(plain, name, *TWO, kind=Layerwise, tiers={"layerwise": True})
    rows = at.admit(*[ms.Request(n, tokens=[*prompt, n]) for n, prompt in enumerate((ONE, whole(2, 3)))])
    for _ in range(3):
        at.run(rows)
        at.mem.poll()
        at.look()
    at.end(rows)


def test_a_layerwise_engine_that_does_not_wait_reads_rubbish(late: list[Late], plain: Backend) -> None:
    """The harness would notice."""
    at = below(plain, "redirect", *TWO, kind=Layerwise, tiers={"layerwise": True})
    assert isinstance(at, Layerwise)
    at.lazy = True
    row = at.start([*ONE, 1])
    with pytest.raises(AssertionError, match="not its prompt's"):
        at.step([row])
    unchecked()


def test_states_and_kv_are_waited_for_apart(late: list[Late], plain: Backend) -> None:
    at = below(plain, "redirect", *TWO, tiers={"layerwise": True, "layer_groups": 2})
    at.start([*ONE, 1])
    states, kv = (each.unread("into")[0] for each in late)
    at.below.wait_layer("state", 1)
    assert (states.waits, kv.waits, states.left) == ([1], [], {0})
    at.below.wait_layer("kv", 0)
    assert (states.waits, kv.waits, kv.left) == ([1], [0], set())


def test_copies_on_write_wait_although_the_caller_waits_for_layers(late: list[Late], plain: Backend) -> None:
    """The packet itself copies the state: it cannot wait for the forward."""
    at = below(plain, "lazy", *TWO, kind=Layerwise, tiers={"layerwise": True})
    row = at.start([*ONE, 1])
    at.mem.submit()
    loads = [ticket for each in late for kind, _, ticket in each.tickets if kind == "into"]
    assert [ticket.waits for ticket in loads] == [[None], [None]]
    at.checked([row])


@pytest.mark.parametrize("ending", ["sleep", "reset", "clear", "close", "flush"])
def test_whatever_is_on_its_way_arrives_first(ending: str, late: list[Late], plain: Backend) -> None:
    at = below(plain, "redirect", *TWO, slots=12)
    at.cache_prompts(whole(3))
    at.mem.submit()
    at.mem.poll()  # on its way down
    at.mem.end([at.start([*ONE, 1])])  # on its way up
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
    assert [len(cache.pool._users) for cache in at.caches] == [0, 0]
    at.look(idle=True)
    if ending in ("reset", "clear", "close"):
        assert [len(cache) for cache in at.caches] == [0, 0]
    if ending != "close":
        assert at.turn([*T[:9]]) == 0
        at.empty()
