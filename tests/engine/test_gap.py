"""In the gap between the plan of a step and its forward, no call changes the owner of a slot that the step names.

Each state is filled with one number, so that the state of another request is noticed.
"""

from collections.abc import Callable, Sequence
from weakref import WeakSet

import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.slots.readback import Readback
from tests.support import inside
from tests.support.build import on
from tests.support.planes import MAKERS, every_strategy
from tests.support.scan import scan
from tests.support.tiered import Tiered, settle, whole

LAYOUT = ms.StateLayout(planes=(ms.Plane("s", (3,), torch.float32),), layers=2)
GARBAGE = 1000.0


@pytest.fixture(autouse=True)
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes slot ids arrive only when a test waits for them, as on a slow device."""
    wait, waited = Readback.wait, WeakSet[Readback]()

    def waiting(self: Readback) -> object:
        slots = wait(self)
        waited.add(self)
        return slots

    monkeypatch.setattr(Readback, "wait", waiting)
    monkeypatch.setattr(Readback, "ready", property(lambda self: self in waited))


def manager(backend: Backend, name: str = "redirect", slots: int = 4, **settings: object) -> ms.StateManager:
    return on(backend, LAYOUT, slots=slots, max_requests=3, tracking=MAKERS[name](), **settings)


def forward(mem: ms.StateManager, step: ms.Step, more: float = 1.0) -> None:
    """Runs one step of a model: each state grows by `more`, and the null slot is set to zero."""
    for state in mem.planes["s"]:
        state[step.write] = state[step.snapshot] = state[step.read] + more
    mem.device.scrub_null()


def run(mem: ms.StateManager, rows: Sequence[ms.Row], tokens: int = 1, more: float = 1.0) -> None:
    """Plans, computes and settles a step."""
    step = mem.plan(rows, tokens)
    forward(mem, step, more)
    mem.settle(step)


def value(mem: ms.StateManager, slot: int) -> float:
    (number,) = mem.planes["s"][:, slot].unique().tolist()
    return float(number)


def live(mem: ms.StateManager, row: ms.Row) -> int:
    return int(mem.device.live_slots[row.index])


def given_up(mem: ms.StateManager, *more: str) -> tuple[ms.Step, ms.Row, *tuple[ms.Row, ...]]:
    """Returns an open step, its only row, which was aborted after the plan, and further rows, which are in no step."""
    a, *others = mem.admit([ms.Request(name) for name in ("a", *more)])
    step = mem.plan([a])
    mem.end([a])
    return step, a, *others


# name -> a call in the gap that sends a packet or looks at the device
CALLS: dict[str, Callable[[ms.StateManager, Sequence[ms.Row]], object]] = {
    "nothing": lambda mem, rows: None, "submit": lambda mem, rows: mem.submit(),
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
    words = mem.pool.allocator.bitmap.tolist()
    named = {*step.read.tolist(), *step.write.tolist(), *step.snapshot.tolist()} - {0}
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


# name -> a call that closes a step, whose forward has been launched; without overlap, settle comes before the next plan
CLOSES: dict[str, Callable[[ms.StateManager, ms.Step, ms.Row], object]] = {
    "plan": lambda mem, step, row: mem.plan([row]), "settle": lambda mem, step, row: mem.settle(step),
    "settle in turn": lambda mem, step, row: mem.settle(step), "cancel": lambda mem, step, row: mem.cancel(step),
    "submit(step)": lambda mem, step, row: mem.submit(step),
}  # fmt: skip


@pytest.mark.parametrize("how", CLOSES)
def test_G1_what_waits_is_sent_once_the_forward_is_in_order(backend: Backend, how: str) -> None:
    """A server that waits for slot ids gets them when the step closes, without another call."""
    mem = manager(backend, slots=2, overlap=how != "settle in turn")
    step, a, b = given_up(mem, "b")
    mem.submit()
    slots = mem.device.read_slots([b])
    assert live(mem, a) == int(step.write[0]) and inside.commands(mem).waiting, "it was sent in front of the forward"
    assert not slots.ready
    forward(mem, step)
    CLOSES[how](mem, step, b)
    assert slots.wait().tolist() == [live(mem, b)] and slots.ready
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
    (b,) = mem.admit([ms.Request("b")])
    run(mem, [b], 4)
    second = mem.plan([b])
    (snapshot,) = mem.publish([b])
    assert snapshot and snapshot.length == int(second.before[0]) == 4
    mem.cancel(second)  # nothing that this step computes was published
    scan(mem)
    (b,) = mem.admit([ms.Request("b")])
    third = mem.plan([b], 1)
    mem.submit(third)
    with pytest.raises(ms.InvalidArgument, match="its forward was launched"):
        mem.cancel(third)


# tiers

ONE = whole(1)


@every_strategy
def test_a_state_published_and_evicted_in_the_gap_goes_down_behind_the_forward(name: str) -> None:
    at = Tiered(Backend("reference"), name, pages=0, every=4, slots=9)
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
    """The open step writes the snapshot (ping-pong, lazy) or reads it (redirect).

    Its slot gets a new owner only afterwards.
    """
    mem = manager(backend, name, slots=9, direct_hits=False)
    (a,) = mem.admit([ms.Request("a")])
    step = mem.plan([a], 4)
    if name == "redirect":  # here the snapshot is the slot that the next step reads
        forward(mem, step, 4.0)
        mem.settle(step)
        step = mem.plan([a], 1)
    (snapshot,) = mem.publish([a])
    assert snapshot and snapshot.length == 4
    (b,) = mem.admit([ms.Request("b", resume=snapshot)])
    mem.drop([snapshot])
    mem.submit()
    (c,) = mem.admit([ms.Request("c")])  # c gets the slot that the snapshot had
    mem.submit()
    forward(mem, step, 4.0 if name != "redirect" else 1.0)
    following = mem.plan([a, b, c])
    told = [5.0 if name == "redirect" else 4.0, 4.0, 0.0]
    assert [value(mem, slot) if slot else 0.0 for slot in following.read.tolist()] == told
    mem.settle(step)
    mem.settle(following)
    scan(mem)


@pytest.mark.parametrize("cleared", [False, True], ids=["", "cleared"])
def test_kv_that_the_forward_has_still_to_write_does_not_go_down(cleared: bool) -> None:
    """In the open step, row x fills a page and publishes it. Row y ends, and leaves a state of the same tokens in the
    cache; this state is then evicted.
    """
    at = Tiered(Backend("reference"), "none", prefix=ms.Prefix())
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
