"""Faults injected on purpose: results stay right, nothing leaks, and every fault is counted and logged."""

import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import memstate as ms
from memstate.stats import ChaosStats
from memstate.testing.chaos import Chaos, Faults, FaultyStore
from memstate.tiers import Outcome, Store
from tests.support.build import on
from tests.support.demo_talks import demo
from tests.support.planes import LAYOUT, I
from tests.support.tiered_small import CPU, tiered, turn, whole
from tests.support.virtual import MemoryStore

EVERYTHING = "seed={seed},claims=0.3,admissions=0.3,store_fails=0.3,store_late_s=0.0005,polls=0.4"


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "memstate.chaos")
    return caplog


def redirected(chaos: Chaos, slots: int = 16) -> ms.StateManager:
    return on(CPU, LAYOUT, slots=slots, max_requests=4, tracking=ms.Redirect(I), chaos=chaos)


def lines(log: pytest.LogCaptureFixture) -> list[str]:
    """Returns the logged lines about faults."""
    return [record.getMessage() for record in log.records if record.levelno == logging.INFO]


def require_logged(log: pytest.LogCaptureFixture, counted: ChaosStats) -> None:
    """Requires that the log has a numbered line for each counted fault. Faults after the count may add lines."""
    logged, kinds = lines(log), asdict(counted)
    assert [line.partition(",")[0] for line in logged] == [f"fault {n}" for n in range(1, len(logged) + 1)]
    for kind, n in kinds.items():
        assert sum(f", {kind} " in line for line in logged[: sum(kinds.values())]) == n


# -- results under any chaos ----------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("strategy", ["none", "ping-pong", "lazy", "redirect"])
def test_an_engine_computes_the_same_under_any_chaos(
    seed: int, strategy: str, tmp_path: Path, told: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, logits and states equal those of the uncached run, nothing leaks, and all records are right."""
    room = {"slots": 8, "host_slots": 12, "storage": "file", "storage_path": tmp_path, "sessions": seed % 3}
    met, may_lack = Counter[str](), set() if strategy == "redirect" else {"claims"}
    for again in range(9):  # threads decide how many calls each kind of fault can meet
        told.clear()
        monkeypatch.setenv("MEMSTATE_CHAOS", EVERYTHING.format(seed=2 * seed + again))
        report = demo(strategy=strategy, seed=seed, **room)
        assert report.ok, report.failure()
        require_logged(told, report.stats.chaos)
        met.update(asdict(report.stats.chaos))
        lacking = {kind for kind, n in met.items() if not n} - may_lack
        if again and not lacking:
            break
    assert not lacking


# -- each kind of fault ---------------------------------------------------------------------------------


def test_a_refused_claim_costs_a_snapshot_and_nothing_else(told: pytest.LogCaptureFixture) -> None:
    mem = redirected(Chaos(claims=1.0))
    rows = mem.admit([*map(ms.Request, "abc")])
    for _ in range(2 * I + 1):
        mem.settle(mem.plan(rows))
    stats = mem.stats()
    assert stats.snapshots == 0 and stats.degraded == 6 and stats.chaos == ChaosStats(claims=2)
    require_logged(told, stats.chaos)
    assert len(lines(told)) == 2 and "a step of 3 rows could make 0, 3 were refused" in lines(told)[0]


@pytest.mark.parametrize("tracking", [ms.PingPong(16), ms.LazyPingPong(16), ms.Redirect(16)], ids=repr)
def test_a_refused_mark_costs_a_state_and_nothing_else(tracking: ms.Tracking, told: pytest.LogCaptureFixture) -> None:
    chaos = {"chaos": Chaos(claims=1.0), "prefix": ms.Prefix(), "page_size": 4, "ends": True}
    mem = on(CPU, LAYOUT, slots=16, max_requests=4, tracking=tracking, **chaos)
    rows = mem.admit([ms.Request("a", tokens=range(12))])
    for tokens in (8, 4):  # the second plan would keep the state of 8 tokens
        mem.settle(mem.plan(rows, tokens))
    stats = mem.stats()
    assert (stats.prefix.states, stats.refused, stats.degraded, stats.chaos) == (0, 1, 0, ChaosStats(claims=1))
    require_logged(told, stats.chaos)
    assert "a step of 1 rows could make 0, 1 were refused" in lines(told)[0]


def test_claims_stay_below_the_caller_s_limit_and_count_only_where_chaos_refused() -> None:
    def taken(chaos: Chaos, limit: int) -> tuple[int, ChaosStats]:
        mem = redirected(chaos, slots=12)
        rows = mem.admit([*map(ms.Request, "abcd")])
        for _ in range(I + 1):
            mem.settle(mem.plan(rows, limit=limit))
        return mem.stats().snapshots, mem.stats().chaos

    nothing = ChaosStats()
    assert taken(Chaos(claims=0.0), 2) == (2, nothing)
    assert taken(Chaos(claims=1.0), 2) == (0, ChaosStats(claims=1))
    few = [taken(Chaos(seed=seed, claims=0.4), 2) for seed in range(20)]
    assert {made for made, _ in few} == {0, 1, 2}
    assert all((made < 2) == (counted == ChaosStats(claims=1)) for made, counted in few)


def test_a_refused_admission_changes_nothing_and_needs_another_request_that_runs(
    told: pytest.LogCaptureFixture,
) -> None:
    mem = redirected(Chaos(admissions=1.0))
    assert mem.admit([]) is not None
    (row,) = mem.admit([ms.Request("a")])
    mem.settle(mem.plan([row]))
    before = mem.free_slots, mem.stats().rows_used, mem.info(row).length
    for call in (lambda: mem.admit([ms.Request("b")]), lambda: mem.fork(row, ["c"])):
        with pytest.raises(ms.OutOfSlots, match="requested, 15 free") as refused:
            call()
        assert refused.value.__notes__ == ["memstate: refused on purpose, see memstate.testing"]
        assert (mem.free_slots, mem.stats().rows_used, mem.info(row).length) == before
    mem.admit([])
    assert mem.stats().chaos == ChaosStats(admissions=2)
    require_logged(told, mem.stats().chaos)
    mem.end([row])
    mem.admit([ms.Request("b")])
    mem.audit().raise_if_leaking()


def test_a_delayed_poll_moves_nothing(told: pytest.LogCaptureFixture) -> None:
    mem, seen = tiered(tiers={"store": MemoryStore()}, chaos=Chaos(polls=0.5)), []
    turn(mem, whole(1))
    mem.submit()
    for _ in range(40):
        due, skipped = list(mem.tiers._due), mem.stats().chaos
        mem.poll()
        seen.append(mem.stats().chaos != skipped)
        assert not seen[-1] or mem.tiers._due == due, "a poll that is delayed does nothing"
    assert 10 < sum(seen) < 30 and not mem.tiers._due
    require_logged(told, mem.stats().chaos)


# -- the store ------------------------------------------------------------------------------------------


class Kept(MemoryStore):
    """A store that records the calls that reach it."""

    def __init__(self) -> None:
        super().__init__()
        self.passed: list[str] = []

    def register(self, memory: torch.Tensor) -> None:
        self.passed.append(f"register {memory.numel()}")

    def close(self) -> None:
        self.passed.append("close")


def buffers(*values: int) -> list[Any]:
    return [np.full(16, value, np.uint8) for value in values]


def outcome(store: Store, call: str, names: Sequence[str], *more: Any) -> Any:
    """Returns the answer of a call, or "raises"."""
    try:
        return getattr(store, call)(names, *more)
    except OSError:
        return "raises"


def test_a_store_without_faults_passes_everything_through() -> None:
    inner = Kept()
    store = FaultyStore(inner, Faults(Chaos(claims=1.0, polls=0.5, admissions=1.0)))
    assert isinstance(store, Store)
    store.register(torch.zeros(7, dtype=torch.uint8))
    assert store.put(["a", "b"], buffers(1, 2)) == [Outcome.DONE] * 2
    assert store.exists(["a", "c"]) == [True, False]
    got = buffers(0, 0)
    assert store.get(["b", "c"], got) == [Outcome.DONE, Outcome.MISSING] and got[0].tolist() == [2] * 16
    store.discard(["a"])
    store.close()
    assert inner.passed == ["register 7", "close"] and store.records is inner.records
    assert [call for call, _ in inner.calls] == ["put", "exists", "get", "discard"]
    assert repr(store) == f"{inner!r} with chaos"


def test_a_store_that_always_fails_says_so_of_one_name_or_of_the_call() -> None:
    """Each call raises, or answers wrongly for one of three names. For the other names, answers are right."""
    inner, faults = Kept(), Faults(Chaos(seed=1, store_fails=1.0))
    store, names = FaultyStore(inner, faults), list("abc")
    inner.put(names, buffers(1, 2, 3))
    seen: dict[str, list[Any]] = {call: [] for call in ("exists", "get", "put", "discard")}
    for _ in range(60):
        seen["exists"].append(outcome(store, "exists", names))
        seen["get"].append(outcome(store, "get", names, buffers(0, 0, 0)))
        seen["put"].append(outcome(store, "put", names, buffers(1, 2, 3)))
        seen["discard"].append(outcome(store, "discard", names))
    assert faults.stats() == ChaosStats(store_fails=240)
    for call, right, wrong in (
        ("exists", True, {False}),
        ("get", Outcome.DONE, {Outcome.MISSING, Outcome.FAILED}),
        ("put", Outcome.DONE, {Outcome.FAILED}),
    ):
        answers = [answer for answer in seen[call] if answer != "raises"]
        assert 0 < len(answers) < 60
        assert all(answer.count(right) == 2 for answer in answers)
        assert {each for answer in answers for each in answer} == {right, *wrong}
        assert {place for answer in answers for place in range(3) if answer[place] != right} == {0, 1, 2}
    assert set(seen["discard"]) == {"raises"}
    assert 0 < len(inner.asked("discard")) < 180, "some removed the records before they failed"


def test_a_store_is_late(told: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("memstate.testing.chaos.time.sleep", slept.append)
    faults = Faults(Chaos(store_late_s=2.0))
    store = FaultyStore(MemoryStore(), faults)
    for _ in range(20):
        assert store.exists(["a"]) == [False]
    assert len(set(slept)) == 20 and 0 <= min(slept) < 0.5 and 1.5 < max(slept) <= 2.0
    assert faults.stats() == ChaosStats(store_late=20)
    require_logged(told, faults.stats())


# -- settings -------------------------------------------------------------------------------------------


def test_the_same_seed_and_calls_give_the_same_faults(told: pytest.LogCaptureFixture) -> None:
    def faults(seed: int) -> list[str]:
        told.clear()
        chaos = Chaos(seed=seed, claims=0.5, admissions=0.3, store_fails=0.3, polls=0.4)
        mem = tiered(tiers={"store": MemoryStore()}, chaos=chaos, slots=8, tracking=ms.Redirect(8))
        for n in range(4):
            turn(mem, whole(n, 5))
            mem.poll()
        return lines(told)

    assert faults(1) == faults(1) != faults(2)


def test_a_manager_gets_its_faults_once() -> None:
    mem = redirected(Chaos())
    with pytest.raises(ms.InvalidArgument, match="has faults already"):
        Faults(Chaos(claims=0.5)).inject(mem)


def test_the_environment_names_faults(told: pytest.LogCaptureFixture) -> None:
    assert Faults.from_environment({"MEMSTATE_CHAOS": ""}) is None
    text = " seed=-1, claims=0.1 ,admissions=1,store_fails=.5,store_late_s=2,polls=0.2"
    faults = Faults.from_environment({"MEMSTATE_CHAOS": text})
    assert faults is not None and faults.chaos == Chaos(
        seed=-1, claims=0.1, admissions=1.0, store_fails=0.5, store_late_s=2.0, polls=0.2
    )
    assert [record.levelname for record in told.records] == ["WARNING"] and "on purpose" in told.messages[0]


REFUSED: list[tuple[str | dict[str, Any], str]] = [  # the variable or the arguments of Chaos, and the message
    ("claims=2", "claims=2.0: expected a probability from 0 to 1"),
    ("claims", "could not convert string to float: ''"),
    ("seed=1.5", "invalid literal"),
    ("seed=1;claims=0.1", "invalid literal"),
    ("claim=0.1", "'claim'; expected settings such as seed=1,claims=0.1, of seed, claims, admissions"),
    ("claims=0.1,claims=0.2", "claims twice"),
    (",", "''"),
    ({"admissions": -0.1}, "admissions=-0.1: expected a probability from 0 to 1"),
    ({"store_fails": float("nan")}, "store_fails=nan: expected a probability"),
    ({"polls": 1}, "polls=1: expected a probability from 0 up to, but not, 1"),
    ({"polls": True}, "polls=True: expected a probability"),
    ({"claims": "0.1"}, "claims='0.1': expected a probability"),
    ({"store_late_s": float("inf")}, "store_late_s=inf: expected 0 to 3600 seconds"),
    ({"seed": 1.0}, "seed=1.0: expected a whole number"),
]


@pytest.mark.parametrize(("given", "said"), REFUSED)
def test_what_cannot_be_meant_is_refused(given: Any, said: str) -> None:
    start = f"MEMSTATE_CHAOS={given!r}: " if isinstance(given, str) else "chaos: "
    with pytest.raises(ms.ConfigurationError, match=f"^{re.escape(start)}.*{re.escape(said)}"):
        Faults.from_environment({"MEMSTATE_CHAOS": given}) if isinstance(given, str) else Chaos(**given)
