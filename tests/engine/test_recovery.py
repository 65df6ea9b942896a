"""Calls that an exception interrupts are noticed; `reset` and `recover` make the manager usable again."""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import memstate as ms
from memstate.engine.stepping import Stepping
from memstate.guard import Changing, Guard
from memstate.kernels.dispatch import Backend
from memstate.prefix.policies import Lru
from memstate.prefix.tree import Node
from memstate.requests.holdings import PUBLISHED
from memstate.requests.page_table import PageTable
from memstate.slots.commands import Action
from memstate.slots.registers import RegisterFile
from memstate.tiers.host.transfers import Transfers
from memstate.tiers.workers import Workers
from tests.engine.calls import CALLS
from tests.proof.stateful.script import ALL, Play, script
from tests.support import inside, owners
from tests.support.tiered_small import push_down, tiered, turn, whole
from tests.support.virtual import AtOnce, ByHand, MemoryStore

T = list(range(8))
RIG: dict[str, Any] = {"strategy": "redirect", "every": 8, "page_size": 4, "pages": 60, "slots": 16}


@pytest.fixture
def plain() -> Backend:
    return Backend("reference", "cpu")


def interrupted(mem: ms.StateManager, rows: Sequence[ms.Row], error: BaseException | None = None) -> None:
    """Interrupts a plan after the host has counted the step, and before the device runs it."""
    at_the_device = mock.patch.object(RegisterFile, "plan", side_effect=error or MemoryError("no memory"))
    with at_the_device, pytest.raises((MemoryError, KeyboardInterrupt, ms.MemstateError)):
        mem.plan(rows)


@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("recover", "close", "device.wake")])
def test_every_call_says_that_an_earlier_one_was_interrupted(name: str) -> None:
    mem = tiered()
    (row,) = mem.admit([ms.Request("a", tokens=T)])
    mem.extend([row], [8])
    interrupted(mem, [row])
    with pytest.raises(ms.Broken, match=r"plan\(\) was interrupted .*no memory.* recover\(\)") as raised:
        CALLS[name](mem, [row], None, [])
    assert (raised.value.call, raised.value.why) == ("plan", "MemoryError('no memory')")
    assert mem.stats().rows_used == 1
    mem.recover(keep=False)
    mem.audit().raise_if_leaking()


def test_an_interrupt_at_the_very_end_is_noticed() -> None:
    guard = Guard()
    at_the_end = mock.patch.object(Changing, "__exit__", side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt), at_the_end, guard.changing("settle"):
        pass
    with pytest.raises(ms.Broken, match=r"settle\(\) was interrupted .*at its end"):
        guard.require_whole()


@script(strategy=ALL, overlap=True, prefix=True, sent=(False, True))
def test_M18_recover_keeps_what_no_unsent_change_touches(play: Play) -> None:
    """The state of `b` moves to the cache behind a change that waits for the open step. Without it, its KV stays."""
    (talk,), (other,) = play.open("talk"), play.open("busy")
    play.turn(T, talk)
    play.fork_session(talk)  # both have the state of `talk`, which stays the owner
    (kept,) = play.admit([*T, 1])
    play.run(kept, [*T, 1, 2])
    (a,), (b,) = play.admit(None), play.admit([9, *T], sessions=[other])
    snaps = play.end(kept, how="publish")
    ids = play.claim(2)
    play.run(b, [9, *T[:7]])
    (c,) = play.admit([8, *T])
    play.run(c, [8, *T[:7]])
    step = play.step([a], run=False)
    play.end(a, how="release", land=False)
    play.end(c, how="told", land=False)
    if play.sent:
        play.launch(step, tell=True)
    play.recover(ids[:1])
    for text in (T, [9, *T], [8, *T]):
        play.match(text)
        play.turn(text, talk)
    play.admit(None, None, resume=snaps[0] if snaps else None)
    play.recover(ids[:1])
    play.reached(*[] if play.sent else ["evicted_states"])


@pytest.mark.script
def test_a_snapshot_that_was_not_sent_is_lost(plain: Backend) -> None:
    """On the device, the snapshot's register still holds another state of the same length."""
    play = Play(plain, strategy="redirect", every=8, snapshots=1)
    mem, rows = play.mem, play.admit(None, None, None)
    play.run_all(rows[:2], [range(9), range(9)])
    (first,) = play.publish(rows[0], handles=True)
    play.submit()
    mem.drop([first])
    (snap,) = mem.publish(rows[1:2])
    assert snap is not None and (first.register, first.length) == (snap.register, snap.length)
    assert inside.registers(mem).table.labels[snap.register] == 8  # still the label of the first state
    with pytest.raises(MemoryError), mock.patch.object(PageTable, "extend", side_effect=MemoryError):
        mem.extend(rows[2:], [1])
    kept = mem.recover()
    assert (kept.lost, kept.snapshots) == ([snap], [])
    with pytest.raises(ms.StaleHandle):
        mem.admit([ms.Request("b", resume=snap)])
    mem.audit().raise_if_leaking()
    assert mem.free_slots == mem.stats().capacity


@pytest.mark.parametrize("pages", [60, 0])
def test_states_whose_bytes_were_not_loaded_are_not_kept(pages: int) -> None:
    """The registers have labels on the device and the pages are in the tree, but no byte was loaded."""
    bare = {} if pages else {"pages": 0, "pages_per_row": 0}
    mem = tiered(tiers=None if pages else {"kv": None, "host_pages": None}, **bare)
    push_down(mem, whole(1))
    with pytest.raises(MemoryError), mock.patch.object(Transfers, "into", side_effect=MemoryError):
        mem.admit([ms.Request("a", tokens=[*whole(1), 1])])
    kept = mem.recover()
    match = mem.match([*whole(1), 1])
    assert (kept.cached, match.length) == (0, 0) and (not pages or match.kv_length == 0)
    mem.audit().raise_if_leaking()
    assert turn(mem, [*whole(1), 1]) == 0


@pytest.mark.script
@pytest.mark.parametrize("when", ["before", "in the publish and in recover"])
def test_kv_that_the_open_step_must_still_write_is_not_kept(when: str, plain: Backend) -> None:
    play = Play(plain, **RIG | {"strategy": "none"}, prefix=True)
    mem, text = play.mem, [*range(16)]
    (row,) = play.admit(text[:15])
    play.run(row, text[:15])
    step = play.step([row], run=False)  # the forward would complete a page, but never runs
    if when == "before":
        mem.publish([row], keep="cache", tokens=[text])
        assert step is not None and step.step.after.tolist() == [16] and mem.match([*text, 1]).kv_length == 16
        with pytest.raises(MemoryError), mock.patch.object(PageTable, "extend", side_effect=MemoryError):
            mem.extend([row], [16])
    else:
        with pytest.raises(MemoryError), mock.patch.object(Stepping, "promise", side_effect=MemoryError):
            mem.publish([row], keep="cache", tokens=[text])
    if when.endswith("recover"):
        with pytest.raises(KeyboardInterrupt), mock.patch.object(RegisterFile, "reset", side_effect=KeyboardInterrupt):
            mem.recover()
    mem.recover()
    assert mem.match([*text, 1]).kv_length == 0 and mem.audit().clean


@pytest.mark.parametrize(
    ("said", "arguments"),
    [
        ("keep='no': expected True or False", {"keep": "no"}),
        ("keep=0: expected True or False", {"keep": 0}),
        (r"held=\[1\] with keep=False", {"held": torch.tensor([1]), "keep": False}),
        ("slots", {"held": 5, "keep": False}),
    ],
)
@pytest.mark.script
def test_what_a_recover_is_to_keep_is_said_or_refused(said: str, arguments: dict[str, Any], plain: Backend) -> None:
    play = Play(plain)
    play.admit(None)
    play.refuses(ms.InvalidArgument, lambda: play.mem.recover(**arguments), said)


@pytest.mark.script
def test_slots_held_by_id_are_named(plain: Backend) -> None:
    play = Play(plain, **RIG, prefix=True)
    mem, ids = play.mem, play.claim(3)
    play.turn(range(9))
    play.submit()
    (cached,) = owners.nodes(mem.prefix)
    taken = int(inside.registers(mem).table.slots[cached])
    for wrong in ([*ids, ids[0]], [0], [99], [-1], [taken], [16]):
        play.refuses(ms.InvalidArgument, lambda wrong=wrong: mem.recover(wrong), "^held")
    assert mem.recover(torch.tensor(ids[:2])).cached == 1 and mem.free_slots == 16 - 2 - 1
    assert mem.pool.claim(1).tolist() == [ids[2]]
    mem.pool.release(ids)
    mem.audit().raise_if_leaking()


class Shy(Lru):
    """A policy that raises memstate's own error."""

    def used(self, node: Node) -> None:
        raise ms.OutOfSlots(1, 0)


@pytest.mark.script
def test_back_pressure_that_a_policy_raises_is_no_back_pressure(plain: Backend) -> None:
    play = Play(plain, **RIG, prefix=True)
    play.turn(range(9))
    (row,) = play.admit(range(9))
    step = play.mem.plan([row], 1)
    with mock.patch.object(Lru, "used", Shy.used), pytest.raises(ms.OutOfSlots):
        play.mem.settle(step)  # settle tells policies of new requests
    with pytest.raises(ms.Broken, match="settle"):
        play.mem.poll()
    assert play.mem.recover().ended == ["r2"] and play.mem.match(range(9)).length == 8


def test_a_reset_puts_an_allocator_without_a_manager_right(plain: Backend) -> None:
    allocator = ms.SlotAllocator(4, plain)
    with pytest.raises(MemoryError), mock.patch.object(Backend, "claim", side_effect=MemoryError):
        allocator.claim(2)
    with pytest.raises(ms.Broken, match=r"claim\(\).* reset\(\)"):
        allocator.claim(2)
    allocator.reset()
    assert allocator.claim(4).tolist() == [1, 2, 3, 4]


@pytest.mark.script
def test_close_of_a_broken_manager_ends_its_threads_and_writes_nothing() -> None:
    at = Busy()
    at.play.turn(whole(11))
    written = dict(at.play.machine.lower.store.records)
    interrupted(at.mem, [at.idle])
    at.mem.close()
    assert at.play.machine.lower.store.records == written
    with pytest.raises(ms.Broken):
        at.mem.admit([ms.Request("a")])
    at.mem.recover()
    with pytest.raises(ms.ConfigurationError, match="closed"):
        at.mem.prefetch([*whole(3), 1])


def test_work_whose_job_was_lost_never_begins_after_a_drain() -> None:
    jobs, done = ByHand(), list[int]()
    workers = Workers(jobs)
    given = [workers.submit(done.append, n) for n in (1, 2)]
    assert jobs.jobs[0].begin()
    jobs.jobs[0].finish()
    workers.drain()
    assert jobs.jobs[1].begin()
    jobs.jobs[1].finish()
    assert done == [1] and [job.done for job in given] == [True, True] and given[1].cancelled
    given.append(workers.submit(done.append, 3))
    assert jobs.jobs[2].begin()
    jobs.jobs[2].finish()
    assert done == [1, 3] and not given[2].cancelled


@pytest.mark.parametrize("call", ["recover", "close"])
def test_no_thread_waits_for_a_lock_that_an_interrupt_left(call: str, tmp_path: Path) -> None:
    """Raises at each point in the standard library's thread code that a poll passes, on entry and on exit."""
    points = count(1)
    while True:
        at_point = next(points)
        mem = tiered(tiers={"store": ms.FileStore(tmp_path / str(at_point)), "threads": 2, "executor": None})
        turn(mem, whole(1))
        mem.submit()
        seen = [0]

        def trace(frame: Any, event: str, argument: object, seen: list[int] = seen, last: int = at_point) -> Any:
            if event != "line" and "/threading.py" in frame.f_code.co_filename:
                seen[0] += 1
                if seen[0] == last:
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            for _ in range(3):
                mem.poll()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        getattr(mem, call)()
        mem.close()
        if seen[0] < at_point:
            return


def test_work_that_stays_in_the_queue_of_an_executor_that_raised_never_begins(plain: Backend) -> None:
    """An executor raises but keeps the work in its queue, where a thread finds it later; the work must not begin."""
    jobs, done = ByHand(), list[int]()
    submit, workers = jobs.submit, Workers(jobs)

    def raising(*given: Any) -> None:
        submit(*given)
        raise RuntimeError("can't start new thread")

    jobs.submit = raising  # type: ignore[method-assign,assignment]
    job = workers.submit(done.append, 1)
    assert job.done and isinstance(job.error, RuntimeError)
    jobs.jobs[0].work()
    assert done == []


@pytest.mark.parametrize("call", ["clear", "recover", "close"])
def test_an_executor_that_throws_work_away_is_not_waited_for(call: str, tmp_path: Path) -> None:
    executor, hold = ThreadPoolExecutor(1), Event()
    executor.submit(hold.wait)
    mem = tiered(tiers={"store": ms.FileStore(tmp_path), "executor": executor})
    turn(mem, whole(1))
    mem.submit()
    mem.poll()
    executor.shutdown(wait=False, cancel_futures=True)
    hold.set()
    getattr(mem.tiers if call == "clear" else mem, call)()


@pytest.mark.script
@pytest.mark.parametrize("why", ["waiting work fills it", "the interrupted call took it"])
def test_a_published_snapshot_keeps_only_pages_that_are_sure(why: str, plain: Backend) -> None:
    """The snapshot's state is certainly right, but the KV of its page may be wrong, and a state needs its KV."""
    play = Play(plain, **RIG)
    mem, rows = play.mem, play.admit(None, None, None)
    play.run_all(rows, [range(9)] * 3)
    unsure, sure = play.publish(*rows[:2], handles=True)
    assert len(unsure.pages) == len(sure.pages) == 2
    play.end(*rows[:2], how="release")
    play.submit()
    if why == "waiting work fills it":
        play.step(rows[2:], run=False)
        play.end(rows[2], how="release", land=False)  # this release waits for the forward, and so do later changes
        inside.commands(mem).then(Action(lambda: None, pages=unsure.pages[1:]))
    else:
        with pytest.raises(MemoryError), mem._parts.guard.changing("extend"):
            mem._parts.guard.pages.append(unsure.pages[1:])
            raise MemoryError
    assert not inside.commands(mem).unsure()[[unsure.register, sure.register]].any()
    kept = mem.recover()
    assert (kept.lost, kept.snapshots) == ([unsure], [sure])
    assert (mem.free_slots, mem.free_pages) == (16 - 1, 60 - 2)
    with pytest.raises(ms.StaleHandle):
        mem.admit([ms.Request("b", resume=unsure)])
    mem.admit([ms.Request("b", resume=sure)])
    mem.audit().raise_if_leaking()


@pytest.mark.script
def test_an_idle_session_whose_pages_are_unsure_is_empty_after_a_recover(plain: Backend) -> None:
    """The session's states are certainly right, but they would be read with KV that was never written."""
    play = Play(plain, **RIG)
    mem, chats = play.mem, play.open("a", "b")
    for chat in chats:
        play.turn(T, chat)
    play.submit()
    unsure = owners.session(mem, chats[0]).pages[-1]
    with pytest.raises(MemoryError), mem._parts.guard.changing("extend"):
        mem._parts.guard.pages.append([unsure])
        raise MemoryError
    assert mem.recover().in_sessions == 1
    assert [(info.tokens, info.states, info.pages) for info in mem.sessions.infos()] == [(0, 0, 0), (8, 1, 2)]
    mem.audit().raise_if_leaking()


def test_a_close_that_was_interrupted_can_be_repeated() -> None:
    store = MemoryStore()
    mem = tiered(tiers={"store": store})
    with mock.patch.object(store, "close", side_effect=[KeyboardInterrupt, None]) as closed:
        with pytest.raises(KeyboardInterrupt):
            mem.close()
        mem.close()
        mem.close()
    assert closed.call_count == 2


class Busy:
    """A manager with cached prompts, two sessions, a snapshot and three rows, of which one runs a turn."""

    def __init__(self) -> None:
        play = self.play = Play(
            Backend("reference", "cpu"), strategy="redirect", prefix=True, tiered=True, storing=True, host_slots=12,
            host_pages=40, rows=8, slots=30, page_size=4,
        )  # fmt: skip
        self.mem, self.cache, self.caches = play.mem, play.mem.prefix, play.machine.lower.caches
        self.chat, self.talk = play.open("chat", "talk")
        for text, session in ((whole(1), None), (whole(2), None), (whole(4), self.chat), (whole(5), self.talk)):
            play.turn(text, session)
        play.drain()
        (maker,) = play.admit(whole(6))
        play.run(maker, whole(6))
        (self.kept,) = play.end(maker, how="publish")
        self.idle, self.first = play.admit(whole(7), [*whole(1), 5, 6, 7])
        (self.talker,) = play.admit([*whole(5), 1, 2], sessions=[self.talk])
        play.extend(self.idle, 8)
        for row, more in ((self.first, 5), (self.talker, 1)):
            play.run(row, [*self.play.machine.handles[row].prompt[:-1], *range(more)])
        play.submit()


class Planted:
    """A manager with requests, and its tables. A test makes one count wrong, as an interrupted call could."""

    def __init__(self, at: Busy) -> None:
        self.at, self.mem, self.cache = at, at.mem, at.cache
        self.node = next(node for _, node in at.cache.tree.walk() if node.snapshot)
        self.pages, self.holders, self.table = owners.kv_pages(at.mem), owners.holdings(at.mem), owners.table(at.mem)
        self.register = 3 * at.first.index
        self.empty = self.table._free[0]  # a free row

    @property
    def snap(self) -> ms.Snapshot:
        assert self.node.snapshot
        return self.node.snapshot


PLANTS: dict[str, Callable[[Planted], object]] = {
    "are noted as free, and rows": lambda p: p.table._free.pop(),
    "KV pages and no request": lambda p: owners.row_pages(p.mem)._rows.__setitem__(p.empty, p.pages.claim(1)),
    "a lease and no request": lambda p: p.cache.leases.update({p.empty: p.cache.leases[p.at.first.index]}),
    "a request and no slot": lambda p: inside.registers(p.mem).held.__setitem__(p.register, False),
    "counted for 2 holders and has 1": lambda p: p.pages.share(owners.pages_of(p.mem, p.at.idle)[:1]),
    "noted as free, and these are not": lambda p: p.pages._is_free.__setitem__(p.pages.pages, 0),
    "77 KV pages are noted as free": lambda p: setattr(p.pages, "free", 77),
    "KV pages are noted as free, and": lambda p: setattr(p.pages, "_low", p.pages.pages),
    "are pinned": lambda p: p.holders.begin_read(p.snap.register),
    "are not the": lambda p: p.holders._free.pop(),
    "holds a slot and no snapshot": lambda p: p.holders.held["snapshot"].pop(p.at.kept.register),
    "are noted as": lambda p: p.holders.held["cached"].pop(p.snap.register),
    "says that row": lambda p: owners.sessions(p.mem).by_row.pop(p.at.talker.index),
    "runs a turn of session": lambda p: setattr(owners.session(p.mem, p.at.talk), "row", 0),
    "is noted for session": lambda p: owners.session(p.mem, p.at.chat).kept.pop(),
    "both have": lambda p: owners.session(p.mem, p.at.chat).kept.append(p.snap),
    "leases": lambda p: p.cache.tree.lease(p.node),
    "leased pages are noted": lambda p: setattr(p.cache.tree, "leased_pages", 77),
    "nodes are noted": lambda p: setattr(p.cache.tree, "nodes", 77),
    "KV in": lambda p: setattr(p.node, "carriers", 77),
    "noted is snapshot": lambda p: p.holders.give(p.snap, PUBLISHED),
    "pins and": lambda p: p.at.caches[0].pin(next(iter(p.at.caches[0].entries()))),
    "are claimed": lambda p: p.at.caches[1].pool.claim(1),
    "tokens for the host": lambda p: np.add.at(inside.registers(p.mem).labels, p.register, 1),
    "are counted as free": lambda p: setattr(p.mem.pool.allocator, "free", 3),
    "KV page 0 is page": lambda p: p.mem.device.page_table[p.at.first.index].fill_(7),
    "KV page 4 is page 0 for the host": lambda p: p.mem.device.page_table[p.empty, 4].fill_(1),
    "tokens, ": lambda p: np.add.at(owners.row_pages(p.mem).room, p.at.first.index, 4),
    "states at marks": lambda p: owners.marks(p.mem)._ends.update({p.empty: (8, "prompt")}),
}


@pytest.mark.script
@pytest.mark.sample(9)
@pytest.mark.parametrize("what", PLANTS)
def test_an_audit_names_the_count_that_is_wrong(what: str) -> None:
    at = Busy()
    at.mem.audit().raise_if_leaking()
    at.mem.device.check()
    PLANTS[what](Planted(at))
    report = at.mem.audit()
    assert not report.clean and any(what in text for text in report.miscounts), report.miscounts
    with pytest.raises(ms.LeakFound, match=what):
        report.raise_if_leaking()


def test_a_state_whose_load_an_exception_ends_is_nobody_s() -> None:
    """The claim of a slot for the state has been sent, but its load still waits for a forward."""
    layout = ms.StateLayout((ms.Plane("fold", (2,), torch.float32),), layers=1)
    tiers = ms.Tiers("m", host_slots=4, executor=AtOnce())
    mem = ms.StateManager(
        layout, slots=24, max_requests=5, tracking=ms.NoTracking(), tiers=tiers, pages=ms.Pages(size=4),
        prefix=ms.Prefix(), backend="reference",
    )  # fmt: skip
    prompt = [9] * 28
    (row,) = mem.admit([ms.Request("r", tokens=prompt)])
    step = mem.plan([row], [28])
    mem.planes["fold"][:, step.write] = 28.0
    mem.settle(step)
    mem.end([row], keep="cache", tokens=[prompt])
    mem.submit()
    mem.poll()
    mem.prefix.clear()
    (row,) = mem.admit([ms.Request("b")])
    mem.settle(mem.plan([row], [8]))
    step = mem.plan([row], [4])
    mem.end([row])  # this release waits for the forward, and so do later changes
    (row,) = mem.admit([ms.Request("a", tokens=[*prompt, 1])])
    assert mem.info(row).length == 28
    with mock.patch.object(Transfers, "into", side_effect=MemoryError), pytest.raises(MemoryError):
        mem.submit(step)
    assert mem.recover().cached == 0
    (row,) = mem.admit([ms.Request("a", tokens=[*prompt, 1])])
    assert mem.info(row).length == 0 and mem.audit().clean
