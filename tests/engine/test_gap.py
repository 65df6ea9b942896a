"""Between the plan of a step and its forward: whatever is called there, no slot that the step names changes owners.

The states here are numbers, so that a state of another request shows.
"""

from collections.abc import Callable, Sequence

import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support import inside, owners
from tests.support.build import on
from tests.support.planes import MAKERS, every_strategy
from tests.support.scan import scan
from tests.support.tiered import Tiered, settle, whole

pytestmark = pytest.mark.sample(interpreter=0)  # the same host code on every backend

LAYOUT = ms.StateLayout(planes=(ms.Plane("s", (3,), torch.float32),), layers=2)
GARBAGE = 1000.0


def manager(backend: Backend, name: str = "redirect", slots: int = 4, **settings: object) -> ms.StateManager:
    return on(backend, LAYOUT, slots=slots, max_requests=3, tracking=MAKERS[name](), **settings)


def forward(mem: ms.StateManager, step: ms.Step, more: float = 1.0) -> None:
    """A step of a model: each state becomes larger by `more`; the null slot is scrubbed."""
    for state in mem.planes["s"]:
        state[step.write] = state[step.snapshot] = state[step.read] + more
    mem.device.scrub_null()


def run(mem: ms.StateManager, rows: Sequence[ms.Row], tokens: int = 1, more: float = 1.0) -> None:
    """A whole step."""
    step = mem.plan(rows, tokens)
    forward(mem, step, more)
    mem.settle(step)


def value(mem: ms.StateManager, slot: int) -> float:
    (number,) = mem.planes["s"][:, slot].unique().tolist()
    return float(number)


def live(mem: ms.StateManager, row: ms.Row) -> int:
    return int(mem.device.live_slots[row.index])


def given_up(mem: ms.StateManager, *more: str) -> tuple[ms.Step, ms.Row, *tuple[ms.Row, ...]]:
    """A step in the gap whose row is aborted, that row, and rows that were admitted beside it."""
    a, *others = mem.admit([ms.Request(name) for name in ("a", *more)])
    step = mem.plan([a])
    mem.end([a])
    return step, a, *others


def named_by(step: ms.Step) -> set[int]:
    return {*step.read.tolist(), *step.write.tolist(), *step.snapshot.tolist()} - {0}


# What a caller may do in the gap that sends something, or looks at the device.
CALLS: dict[str, Callable[[ms.StateManager, Sequence[ms.Row]], object]] = {
    "nothing": lambda mem, rows: None, "submit": lambda mem, rows: mem.submit(),
    "submit twice": lambda mem, rows: (mem.submit(), mem.submit()),
    "read_slots": lambda mem, rows: mem.device.read_slots(rows), "check": lambda mem, rows: mem.device.check(),
    "audit": lambda mem, rows: mem.audit().raise_if_leaking(), "snapshot": lambda mem, rows: mem.inspect(),
    "pool.claim": lambda mem, rows: mem.pool.release(mem.pool.claim(0)),
}  # fmt: skip
every_call = pytest.mark.parametrize("call", CALLS)


@every_call
@every_strategy
def test_G1_a_row_given_up_in_the_gap_keeps_its_slot_until_the_forward(backend: Backend, name: str, call: str) -> None:
    """a is aborted between plan and forward; b and c are admitted, c is aborted: b must not start from a's bytes."""
    slots = {"none": 2, "ping-pong": 7, "lazy": 4, "redirect": 2}[name]
    mem = manager(backend, name, slots)
    step, _ = given_up(mem)
    CALLS[call](mem, [])
    b, c = mem.admit([ms.Request("b"), ms.Request("c")])
    CALLS[call](mem, [b, c])
    mem.end([c])
    CALLS[call](mem, [b])
    assert mem.free_slots == slots - mem.info(b).slots
    named = named_by(step)
    words = mem.pool.allocator.bitmap.tolist()
    assert not any(words[slot // 32] >> slot % 32 & 1 for slot in named), "a slot that the step names is free already"
    forward(mem, step, GARBAGE)
    following = mem.plan([b])
    assert value(mem, int(following.read[0])) == 0.0
    forward(mem, following)
    mem.settle(step)
    mem.settle(following)
    assert value(mem, live(mem, b)) == 1.0
    scan(mem)
    mem.end([b])
    scan(mem)


@pytest.mark.parametrize("how", ["plan", "settle", "submit(step)", "cancel"])
def test_G1_what_waits_is_sent_once_the_forward_is_in_order(backend: Backend, how: str) -> None:
    mem = manager(backend, slots=2)
    step, a, b = given_up(mem, "b")
    (slot,) = step.write.tolist()
    mem.submit()
    assert live(mem, a) == slot and inside.commands(mem).waiting, "it was sent in front of the forward"
    forward(mem, step)
    if how == "plan":
        mem.plan([b])
    elif how == "cancel":
        mem.cancel(step)
        mem.submit()
    elif how == "settle":
        mem.settle(step)
        mem.submit()
    else:
        mem.submit(step)
    assert live(mem, a) == 0 and not inside.commands(mem).waiting
    scan(mem)


def test_G1_an_older_step_that_is_settled_says_nothing_of_the_newest(backend: Backend) -> None:
    mem = manager(backend)
    (a,) = mem.admit([ms.Request("a")])
    first = mem.plan([a])
    forward(mem, first)
    second = mem.plan([a])
    mem.settle(first, [True])
    mem.end([a])
    mem.submit()
    assert live(mem, a) == int(second.write[0])
    with pytest.raises(ms.StaleHandle):
        mem.submit(first)
    mem.submit(second)
    assert live(mem, a) == 0
    with pytest.raises(ms.InvalidArgument):
        mem.submit("step")  # type: ignore[arg-type]
    mem.settle(second)
    (b,) = mem.admit([ms.Request("b")])
    first, _ = mem.plan([b]), mem.plan([b])
    with pytest.raises(ms.InvalidArgument, match=r"comes first \(newest unsettled\)"):
        mem.submit(first)


@every_strategy
def test_G1_a_cached_state_that_a_first_step_reads_is_dropped_behind_it(backend: Backend, name: str) -> None:
    """The slot that a step reads instead of its own is no more free than the one that it writes."""
    mem = manager(backend, name, slots=9)
    (a,) = mem.admit([ms.Request("a")])
    while mem.info(a).length < 8:
        run(mem, [a])
    (snapshot,) = mem.end([a], keep="handle")
    assert snapshot
    (b,) = mem.admit([ms.Request("b", resume=snapshot)])
    step = mem.plan([b])
    mem.drop([snapshot])
    tenants = mem.admit([ms.Request("c"), ms.Request("d")])
    mem.submit()
    mem.end(tenants)
    assert value(mem, int(step.read[0])) == 8.0
    forward(mem, step)
    assert value(mem, int(step.write[0])) == 9.0
    mem.settle(step)
    scan(mem)


@every_call
def test_B31_an_arrival_in_the_gap_waits_with_what_is_before_it(backend: Backend, call: str) -> None:
    mem = manager(backend, slots=2)
    step, _ = given_up(mem)
    b, c = mem.admit([ms.Request("b"), ms.Request("c")])
    slots = mem.device.read_slots([b, c])
    assert not slots.ready
    with pytest.raises(ms.InvalidArgument, match="wait for the newest step's forward"):
        slots.wait()
    mem.device.arrived([b], [3])
    CALLS[call](mem, [b])
    forward(mem, step, GARBAGE)
    mem.submit(step)
    assert slots.wait().tolist() == [live(mem, b), live(mem, c)] and slots.ready
    assert mem.info(b).length == 3 == int(inside.registers(mem).table.labels[3 * b.index])
    scan(mem)


def test_a_slot_that_is_not_waited_for_is_read_back_at_once(backend: Backend) -> None:
    mem = manager(backend)
    a, b = mem.admit([ms.Request("a"), ms.Request("b")])
    mem.plan([a])
    assert mem.device.read_slots([a, b]).wait().tolist() == [live(mem, a), live(mem, b)]
    mem.end([b])
    mem.submit()
    assert live(mem, b) == 0 and not inside.commands(mem).waiting, "b is in no step"


def test_a_fork_in_the_gap_reads_what_the_row_holds(backend: Backend) -> None:
    """The share of a live state is recorded behind an abort that waits; it goes with it, and nothing is overtaken."""
    mem = manager(backend, slots=6)
    a, b = mem.admit([ms.Request("a"), ms.Request("b")])
    for _ in range(3):
        run(mem, [a, b])
    step = mem.plan([a])
    mem.end([a])
    (child,) = mem.fork(b, ["child"]).rows
    mem.submit()
    forward(mem, step, GARBAGE)
    following = mem.plan([b, child])
    assert [value(mem, slot) for slot in following.read.tolist()] == [3.0, 3.0]
    forward(mem, following)
    mem.settle(step)
    mem.settle(following)
    assert [value(mem, live(mem, row)) for row in (b, child)] == [4.0, 4.0]
    scan(mem)


@pytest.mark.parametrize("name", ["ping-pong", "lazy"])
def test_a_snapshot_of_an_in_place_engine_is_copied_behind_the_forward(backend: Backend, name: str) -> None:
    mem = manager(backend, name, slots=6, in_place=True)
    (a,) = mem.admit([ms.Request("a")])
    for _ in range(MAKERS[name]().every):
        step = mem.plan([a])
        mem.submit()
        mem.device.check()
        for state in mem.planes["s"]:
            state[step.write] += 1
        mem.settle(step)
    (snapshot,) = mem.publish([a])
    assert snapshot
    slot = int(mem.device.read_slots([snapshot]).wait()[0])
    assert value(mem, slot) == snapshot.length


def test_B1_ids_in_hand_do_not_hang_on_a_release_that_waits(backend: Backend) -> None:
    mem = manager(backend, slots=3)
    step, a, b = given_up(mem, "b")
    assert mem.free_slots == 2
    with pytest.raises(ms.OutOfSlots) as short:
        mem.pool.claim(2)
    assert (short.value.requested, short.value.free) == (2, 1)
    (free,) = mem.pool.claim(1).tolist()
    assert free not in (live(mem, a), live(mem, b))
    (c,) = mem.admit([ms.Request("c")])
    with pytest.raises(ms.OutOfSlots) as short:
        mem.pool.claim(1)
    assert short.value.free == 0
    mem.device.check()
    assert mem.free_slots == 0
    forward(mem, step)
    mem.submit(step)
    assert live(mem, c) == int(step.write[0])
    scan(mem, [free])
    mem.device.check()


def test_a_check_in_the_gap_keeps_the_count(backend: Backend) -> None:
    mem = manager(backend, slots=3)
    given_up(mem, "b")
    for free in (2, 0):
        mem.device.check()
        assert mem.free_slots == free
        mem.admit([ms.Request(x) for x in range(free)])
    assert mem.audit().owned_by_kind == {"live": 3}


def test_a_step_is_not_cancelled_once_what_it_computes_was_published(backend: Backend) -> None:
    mem = manager(backend, "ping-pong", slots=9)
    (a,) = mem.admit([ms.Request("a")])
    step = mem.plan([a], 4)
    (snapshot,) = mem.publish([a])
    assert snapshot and snapshot.length == 4
    with pytest.raises(ms.InvalidArgument, match=r"rows \[1\] was handed out since its plan"):
        mem.cancel(step)
    forward(mem, step)
    mem.settle(step)
    assert value(mem, int(mem.device.read_slots([snapshot]).wait()[0])) == 1.0
    second = mem.plan([a], 2)
    assert mem.publish([a]) == [None]
    mem.cancel(second)  # nothing of it was handed out
    scan(mem)
    (b,) = mem.admit([ms.Request("b")])
    third = mem.plan([b], 1)
    mem.submit(third)
    with pytest.raises(ms.InvalidArgument, match="its forward was launched"):
        mem.cancel(third)


def test_a_step_is_cancelled_beside_others_that_take_its_row(backend: Backend) -> None:
    """Row 1 of the step is given up, and another tenant of it hands out more than the step's had: not this step's."""
    mem = manager(backend, slots=9, direct_hits=False)
    (old,) = mem.admit([ms.Request("old")])
    for tokens in (4, 4):
        run(mem, [old], tokens)
    (kept,) = mem.end([old], keep="handle")
    assert kept and kept.length == 8
    a, b = mem.admit([ms.Request("a"), ms.Request("b")])
    step = mem.plan([a, b])
    mem.end([a])
    (c,) = mem.admit([ms.Request("c", resume=kept)])
    assert c.index == a.index
    (again,) = mem.end([c], keep="handle")
    assert again and again.length == 8
    mem.cancel(step)
    scan(mem)


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
@pytest.mark.parametrize("how", ["settle", "cancel"])
def test_what_is_asked_for_comes_without_another_plan(backend: Backend, overlap: bool, how: str) -> None:
    """A server that waits for a state from elsewhere has nothing to plan before the ids are there."""
    mem = manager(backend, slots=2, overlap=overlap)
    step, _ = given_up(mem)
    (b,) = mem.admit([ms.Request("b")])
    slots = mem.device.read_slots([b])
    assert not slots.ready
    forward(mem, step)
    mem.settle(step) if how == "settle" else mem.cancel(step)
    assert slots.wait().tolist() == [live(mem, b)] and slots.ready
    scan(mem)


def test_a_reset_forgets_what_waits_the_last_first() -> None:
    """A record that waits to be filled, and a hit that waits for it: the record goes once nobody has it pinned."""
    mem = manager(
        plain(), slots=8, overlap=False, prefix=ms.Prefix(states=ms.policies.Lru()),
        tiers=ms.Tiers("toy", host_slots=6, write="back"), ends=True,
    )  # fmt: skip
    prompt = [7] * 9
    (a,) = mem.admit([ms.Request("a", tokens=prompt)])
    for tokens in (4, 4):
        step = mem.plan([a], tokens)
        if mem.info(a).length < 8:
            mem.settle(step)
    mem.publish([a], keep="cache", tokens=[prompt])  # of a step whose forward is not launched
    assert mem.prefix and owners.pinned(mem), "the row goes on from the state that it published"
    mem.end([a])
    assert mem.prefix.evict_states(5) == 1 and inside.commands(mem).waiting
    (b,) = mem.admit([ms.Request("b", tokens=[*prompt, 2])])
    assert mem.info(b).length == 8, "a hit in host memory that is not filled yet"
    mem.recover(keep=False)
    assert mem.free_slots == 8 and not inside.commands(mem).waiting
    mem.settle(mem.plan(mem.admit([ms.Request("c")])))
    scan(mem)
    stats = mem.stats().tiers
    assert stats and stats.leaked_records == 0 and stats.host_states == 0


# Below the device.

ONE, TWO = whole(1), whole(2)


def tiered(backend: Backend, name: str = "redirect", **settings: object) -> Tiered:
    return Tiered(backend, name, pages=0, **settings)  # type: ignore[arg-type]


def plain() -> Backend:
    return Backend("reference")


@every_strategy
def test_a_hit_from_below_waits_for_the_slot_that_it_gets(name: str) -> None:
    """Nothing is written to a slot that the step in flight is about to write."""
    at = tiered(plain(), name, slots=7)
    assert at.turn(ONE) == 0
    at.cache.evict_states(9)
    settle(at)
    assert at.mem.match([*ONE, 1]).host_length == len(ONE)
    row = at.start(TWO)
    at.mem.submit()
    step = at.step([row], run=False)
    at.mem.end([row])
    named = named_by(step)
    (other,) = at.admit(ms.Request("hit", tokens=[*ONE, 1]))
    assert at.mem.info(other).length == len(ONE) and inside.commands(at.mem).waiting
    at.mem.submit()
    for plane in at.mem.planes.values():  # the forward of the row that was aborted
        plane[:, sorted(named)] = 0x55
    at.mem.settle(step)
    at.prefill(other)
    at.end([other])
    at.look(idle=True)


@every_strategy
def test_a_state_published_and_evicted_in_the_gap_goes_down_behind_the_forward(name: str) -> None:
    at = tiered(plain(), name, every=4, slots=9)
    row = at.start(ONE)
    while at.mem.info(row).length + 4 < len(ONE):
        at.run([row], 4, publish=False)
    length = at.mem.info(row).length
    step = at.step([row], 4, run=False)
    at.mem.end([row], keep="cache", tokens=[at.text[row]])
    evicted = at.cache.evict_states(9)
    assert evicted or name == "none"
    for refused in (at.mem.tiers.flush, at.mem.tiers.clear, at.mem.close):  # type: ignore[union-attr]
        with pytest.raises(ms.InvalidArgument, match="wait for the newest step's forward"):
            refused()
    text = at.text.pop(row)
    at.planes.forward(step, [tuple(text[length : length + 4])])
    at.mem.submit(step)
    settle(at)
    assert all(entry.length in (4, 8) for entry in at.mem.tiers.host.states.entries())  # type: ignore[union-attr]
    at.look(idle=True)


def test_a_fork_that_copies_a_page_is_refused_while_changes_wait(backend: Backend) -> None:
    mem = manager(backend, slots=9, pages=20, page_size=4, pages_per_row=8)
    a, b = mem.admit([ms.Request("a", length=4), ms.Request("b", length=4)])
    run(mem, [b], 2)
    step = mem.plan([a], 1)
    mem.end([a])
    before = mem.free_slots, mem.free_pages
    with pytest.raises(ms.InvalidArgument, match=r"submit\(step\), then fork"):
        mem.fork(b, ["c"])
    assert (mem.free_slots, mem.free_pages) == before
    forward(mem, step)
    mem.submit(step)
    assert len(mem.fork(b, ["c"]).page_copies) == 1
    scan(mem)


@pytest.mark.parametrize("name", ["ping-pong", "lazy", "redirect"])
def test_a_snapshot_published_in_the_gap_is_used_behind_the_forward(backend: Backend, name: str) -> None:
    """The step writes it (ping-pong, lazy), or reads it (redirect): whoever is given its slot comes later."""
    mem = manager(backend, name, slots=9, direct_hits=False)
    (a,) = mem.admit([ms.Request("a")])
    step = mem.plan([a], 4)
    if name == "redirect":  # the snapshot of a boundary is the slot that the step behind it reads
        forward(mem, step, 4.0)
        mem.settle(step)
        step = mem.plan([a], 1)
    (snapshot,) = mem.publish([a])
    assert snapshot and snapshot.length == 4
    (b,) = mem.admit([ms.Request("b", resume=snapshot)])
    mem.drop([snapshot])
    mem.submit()
    (c,) = mem.admit([ms.Request("c")])  # gets the slot that the snapshot had
    mem.submit()
    forward(mem, step, 4.0 if name != "redirect" else 1.0)
    following = mem.plan([a, b, c])
    told = [5.0 if name == "redirect" else 4.0, 4.0, 0.0]
    assert [value(mem, slot) if slot else 0.0 for slot in following.read.tolist()] == told
    mem.settle(step)
    mem.settle(following)
    scan(mem)


def test_states_sleep_with_their_bytes_while_a_slot_waits_for_a_forward(backend: Backend) -> None:
    mem = manager(backend)
    step, _ = given_up(mem)
    assert mem.free_slots == 4
    with pytest.raises(ms.InvalidArgument, match="1 slots are held"):
        mem.device.sleep(keep=False)
    mem.device.sleep()
    mem.device.wake()
    forward(mem, step)
    mem.settle(step)
    mem.device.sleep(keep=False)
    mem.device.wake()
    scan(mem)


@pytest.mark.parametrize("cleared", [False, True], ids=["", "cleared"])
def test_kv_that_the_forward_has_still_to_write_does_not_go_down(cleared: bool) -> None:
    """x completes a page in the step in flight and offers it to the cache; y has a state of the same tokens, which is
    filed under x's page and then evicted.
    """
    at = Tiered(plain(), "none", prefix=ms.Prefix())
    x, y = at.admit(ms.Request("x", tokens=[*ONE, 1]), ms.Request("y", tokens=[*ONE, 1]))
    at.run([x, y], 4, publish=False)
    at.run([y], 4, publish=False)
    step = at.step([x], 4, run=False)
    at.publish([x])
    if cleared:
        at.below.clear()
    at.mem.end([y], keep="cache", tokens=[at.text[y][:8]])
    assert at.mem.match([*ONE, 1]).length == 8
    assert at.cache.evict_states(1) == 1
    assert at.tiers.refused == 1 and not len(at.mem.tiers.host.states)  # type: ignore[union-attr]
    at.mem.settle(step)
    at.mem.end([x])
    at.mem.audit().raise_if_leaking()
