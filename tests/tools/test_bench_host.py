"""Tests `bench host`: its entries, its checks, and its peer SGLang."""

import sys
from array import array
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from memstate.engine.manager import StateManager
from memstate.requests.tracking import PingPong
from memstate_tools.bench import BenchResult, drafts, host, host_peer, host_sides, online, parking, run
from memstate_tools.bench.task import Setting
from tests.support.kernel_runs import not_interpreted

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="launches that do nothing")
CPU = Setting("reference", torch.device("cpu"), toy=True)
LIFE = {"admit", "publish", "release", "drop"}  # operations on the life of a request
STEP = {"plan", "settle", "decode"}
ONLINE = {"step", "states"}
DRAFTS = {"plan", "accept", "verify", "states"}
PARK = {"end", "park", "resume"}
IDLE = {"prefix cache", "sessions", "tiers"}


def toy(peer: str | None = None, case: str = "") -> BenchResult:
    return run(["host"], "reference", toy=True, peer=peer, case=case)


class Spends:
    """Stands in for the peer: operations that do nothing, and their launches, uploads and syncs."""

    def __init__(self, ops: set[str], *counts: int) -> None:
        self.ops, self.counts = ops, np.array(counts)

    def turn(self, timer: Callable[[str, Callable[[], object]], object]) -> None:
        for op in self.ops:
            timer(op, lambda: None)

    def counted(self, act: Callable[[], object]) -> NDArray[np.int64]:
        return self.counts

    def silence(self) -> None:
        pass

    def wrong(self) -> str:
        return ""


def spends(size: int, every: int, lazy: bool, due: int | None = None, adapted: bool = False) -> Spends:
    return Spends(LIFE if due is None else {"decode"}, 1, 0, 0)


def spends_online(
    size: int, every: int, lazy: bool, changes: int, form: str, states: bool = True, adapted: bool = False
) -> Spends:
    """Returns a stand-in for the peer with 10 launches per step, 4 of them not for states."""
    return Spends({"changes", "decode"}, 5 if states else 2, 0, 0)


def spends_drafts(size: int, every: int, lazy: bool, due: int, states: bool = True) -> Spends:
    """Returns a stand-in for the peer with 2 launches per step, 1 of them not for states."""
    return Spends({"plan", "accept"}, int(states), 1, 0)


@on_cpu
def test_every_operation_is_measured_beside_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_peer, "load", lambda: None)
    monkeypatch.setattr(host_peer, "SglangStates", spends)
    monkeypatch.setattr(online, "SglangOnline", spends_online)
    monkeypatch.setattr(drafts, "SglangDrafts", spends_drafts)
    outcome = toy("sglang")
    ops = LIFE | STEP | ONLINE | DRAFTS | PARK | {"together"}
    assert outcome.wrong == [] and {entry.op for entry in outcome.entries} == ops
    assert len({(entry.op, entry.case, entry.unit) for entry in outcome.entries}) == len(outcome.entries)
    for entry in outcome.entries:
        assert entry.case.startswith("toy R=") and (entry.value > 0 or entry.unit != "host us")
        if entry.op in {"plan", "settle"} and "drafts" not in entry.case:
            assert entry.peer is None
        elif entry.peer_value:
            assert entry.peer == "sglang" and entry.ratio == pytest.approx(entry.value / entry.peer_value)
    adapted = {entry.op for entry in outcome.entries if entry.case.endswith("adapters")}
    assert adapted == {*LIFE, "decode", "together", "step"}
    values = {(entry.op, entry.case, entry.unit): (entry.value, entry.peer_value) for entry in outcome.entries}
    assert values["admit", "toy R=3 redirect", "launches"] == (2, 1)
    assert values["together", "toy R=3 redirect", "launches"] == (2, 4)
    assert values["drop", "toy R=3 lazy", "uploads"] == (1, 0)
    assert values["verify", "toy R=3 lazy, drafts, 1 due", "launches"] == (1, 2)
    assert values["states", "toy R=3 lazy, drafts, 1 due", "uploads"] == (0, 0)
    forms = [f", {form}".removesuffix(", ") for form, has in online.FORMS.items() if has.beside]
    for form in forms:
        case = f"toy R=3 lazy, 1 changed, online{form}"
        assert values["step", case, "uploads"] == (1 + ("prefill" in form), 0)
        ours, theirs = values["step", case, "launches"]
        assert (theirs, values["states", case, "launches"]) == (10, (ours, 6))
        frames, calls = (values["step", case, unit] for unit in host_sides.CALLS)
        assert 0 < frames[0] < calls[0] and frames[1] is calls[1] is None
    assert {entry.op for entry in outcome.entries if entry.unit in host_sides.CALLS} == ops - {"states"}
    large = {entry.peer for entry in outcome.entries if entry.case == "toy R=3 lazy, drafts, 1000 slots"}
    assert large == {None}  # its peer is a small pool
    assert not [entry for entry in outcome.entries if entry.case.endswith("0 changed, online, prefill")]


@on_cpu
def test_a_case_is_measured_alone() -> None:
    """The full name of a case selects only this case. Any other text selects every case with it in its name."""
    whole = "R=3 lazy, 1 changed, online, prefix cache"
    assert {entry.case for entry in toy("device-copy", whole).entries} == {f"toy {whole}"}
    outcome = toy("device-copy", whole.removesuffix("e"))
    cases = {f"toy R=3 lazy, 1 changed, online, {form}" for form in online.FORMS if form.startswith("prefix cache")}
    assert outcome.wrong == [] and {entry.case for entry in outcome.entries} == cases
    assert {(entry.op, entry.peer) for entry in outcome.entries} == {("step", None)}


@on_cpu
def test_what_a_step_does_not_use_is_measured_beside_the_plain_step() -> None:
    outcome = toy("plain-step", "R=3 redirect, 1 changed, online, idle")
    assert outcome.wrong == [] and {entry.peer for entry in outcome.entries} == {"plain-step"}
    assert {entry.unit for entry in outcome.entries} == {*host_sides.UNITS, *host_sides.CALLS, "host us"}
    assert {entry.case.rpartition(", ")[2] for entry in outcome.entries} == {f"idle {what}" for what in IDLE}
    for entry in outcome.entries:
        assert entry.peer_value is not None
        assert entry.unit not in host_sides.UNITS or entry.value == entry.peer_value
        assert entry.unit not in host_sides.CALLS or entry.value >= entry.peer_value > 100


@on_cpu
@pytest.mark.sample
@pytest.mark.parametrize("form", online.FORMS)
@pytest.mark.parametrize("changes", [0, 1, 3])
def test_requests_that_end_leave_as_many_states_as_go(changes: int, form: str) -> None:
    for kind in host.KINDS.values():
        side = online.Online(CPU, kind(online.FORMS[form].every), 3, changes, form)
        before = side.mem.stats()
        for _ in range(4):
            side.turn(lambda op, act: act())
            assert side.wrong() == ""
        stats, went = side.mem.stats(), 4 * changes
        if form != "sessions":  # sessions move states instead of publishing
            assert (stats.published - before.published, stats.dropped - before.dropped) == (went, went)
        assert [side.mem.info(row).length >= online.EVERY for row in side._running] == [True] * 3
        side._size += 1
        assert side.wrong() == "3 states of 4"
        side._taken += 1  # one more row at a boundary
        assert side.wrong().endswith(f" snapshots of {side._taken - 1}")


@on_cpu
@pytest.mark.parametrize("form", online.FORMS)
def test_prompts_are_arrays_that_are_there_before_the_step(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, given = list[object](), list[Any]()
    real = online._prompt
    monkeypatch.setattr(online, "_prompt", lambda *of: made.append(of) or real(*of))

    def timed(op: str, act: Callable[[], object]) -> None:
        before = len(made)
        act()
        assert len(made) == before

    side = online.Online(CPU, PingPong(online.FORMS[form].every), 3, 1, form)
    admit = side.mem.admit
    monkeypatch.setattr(side.mem, "admit", lambda requests: given.extend(requests) or admit(requests))
    side.turn(timed)
    kinds = {type(request.tokens) for request in given}
    assert made and kinds == ({array} if online.FORMS[form].uses else {type(None)})


@on_cpu
def test_a_turn_goes_on_from_the_state_of_its_session() -> None:
    side = online.Online(CPU, PingPong(online.FORMS["sessions"].every), 3, 1, "sessions")
    plans = side.mem.backend.counts.launches["plan"]
    lengths = [side.mem.info(row).length for row in side._running]
    for _ in range(6):
        side.turn(lambda op, act: act())
    assert side.mem.backend.counts.launches["plan"] == plans + 6  # a turn does not read its prompt again
    assert min(side.mem.info(row).length for row in side._running) > max(lengths)


@on_cpu
@pytest.mark.parametrize(("size", "tokens"), parking.TOY_CASES)
def test_requests_go_on_where_they_parked_and_others_leave_a_state(size: int, tokens: int) -> None:
    side = parking.Parks(CPU, size, tokens)
    host = side.mem.tiers.host
    for turn in range(1, 4):
        side.turn(lambda op, act: act())
        assert side.wrong() == "" and host.moved == (turn * size, turn * size, 3 * turn * size, 3 * turn * size)
    side._lengths[0] -= 1
    assert side.wrong().endswith(f"of {tokens}")
    side._lengths[0] += 1
    side._filed -= 1
    assert side.wrong().startswith(f"{size - 1} states of {size} cached")


@on_cpu
def test_tiers_that_are_used_move_states_and_ask_their_store() -> None:
    side = online.Online(CPU, PingPong(online.EVERY), 3, 1, "prefix cache, tiers, prefetch")
    for _ in range(4):
        side.turn(lambda op, act: act())
    tiers = side.mem.stats().tiers
    assert tiers.written > 0
    assert tiers.prefetch.started == tiers.prefetch.missed == online.FIRST + 4


@on_cpu
def test_without_the_peer_one_line_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(host_peer, "load", Mock(side_effect=ImportError("it is not installed")))
    monkeypatch.setattr(host, "KINDS", {"ping-pong": PingPong})
    outcome = toy()
    assert outcome.wrong == [] and {entry.peer for entry in outcome.entries} == {None, "plain-step"}
    assert capsys.readouterr().err == "host: measured without sglang: it is not installed\n"
    assert not host_sides.peer_can_run(Setting("reference", torch.device("cpu"), True, "device-copy"))
    assert capsys.readouterr().err == ""


@on_cpu
@pytest.mark.parametrize(
    ("method", "does", "says"),
    [
        ("drop", lambda mem, snapshots: None, "raises OutOfSlots"),
        ("publish", lambda mem, rows: [None] * 3, "0 snapshots of 6"),
    ],
)
def test_requests_that_leave_something_behind_are_not_timed(
    monkeypatch: pytest.MonkeyPatch, method: str, does: Callable[..., object], says: str
) -> None:
    monkeypatch.setattr(StateManager, method, does)
    monkeypatch.setattr(host, "KINDS", {"ping-pong": PingPong})
    monkeypatch.setattr(host, "TOY_DECODES", ())
    monkeypatch.setattr(host, "TOY_LIVES", (3,))
    monkeypatch.setattr(online, "TOY_CASES", ())
    monkeypatch.setattr(drafts, "TOY_CASES", ())
    monkeypatch.setattr(drafts, "TOY_SLOTS", ())
    monkeypatch.setattr(parking, "TOY_CASES", ())
    outcome = toy("device-copy")
    assert outcome.entries == [] and len(outcome.wrong) == 1 and says in outcome.wrong[0]


@on_cpu
@pytest.mark.parametrize("due", [0, 1, 3])
@pytest.mark.parametrize("side_of", [host.Decode, drafts.Drafts])
def test_as_many_rows_are_at_a_boundary_as_a_step_says(side_of: Any, due: int) -> None:
    for kind in host.KINDS.values():
        side = side_of(CPU, kind(16), 3, due)
        for _ in range(3):
            side.turn(lambda op, act: act())
            assert side.wrong() == ""
        side._taken += 1
        assert side.wrong() == f"{due + 1} snapshots of {due}"
        if side_of is drafts.Drafts:
            side._length[0] += 1
            assert side.wrong().startswith("lengths [")


@on_cpu
def test_a_step_with_drafts_makes_as_many_calls_for_any_number_of_rows() -> None:
    for kind in host.KINDS.values():
        calls = set()
        for size in (9, 64):  # fewer are decided in plain integers
            side = drafts.Drafts(CPU, kind(16), size, 0)
            side.turn(lambda op, act: act())
            side.silence()
            calls.add(tuple(host_sides._of_ops(side, host_sides.python_calls)["verify"].tolist()))
        assert len(calls) == 1


def test_frames_and_calls_are_those_of_the_call() -> None:
    assert host_sides.python_calls(lambda: None).tolist() == [0, 0]
    assert host_sides.python_calls(lambda: sorted([2, 1], key=lambda n: abs(n))).tolist() == [2, 5]
    with pytest.raises(ZeroDivisionError):
        host_sides.python_calls(lambda: 1 // 0)
    assert sys.getprofile() is None


COUNT = """
import json, torch
from memstate_tools.bench import host_sides, online
from memstate_tools.bench.task import Setting
from memstate.requests.tracking import LazyPingPong, PingPong

counts = []
for kind in PingPong, LazyPingPong:
    side = online.Online(Setting("reference", torch.device("cpu"), False), kind(online.EVERY), 64, 1)
    counts.append(host_sides._of_ops(side, side.counted)["step"].tolist())
    side.silence()
    counts.append(host_sides._of_ops(side, host_sides.python_calls)["step"].tolist())
print(json.dumps(counts))
"""


def test_a_step_in_which_one_request_changes_makes_few_calls() -> None:
    """One of 64 rows changes: one upload, no sync, two launches beside the plan, and few frames and calls of Python.

    Frames and calls of the bench count, too. The step runs in another process, because here fixtures of the tests watch
    launches and memory, which adds calls.
    """
    counts = not_interpreted("-c", COUNT)
    assert counts[::2] == [[1 + 2, 1, 0]] * 2
    for frames, calls in counts[1::2]:
        assert frames <= 120
        assert calls <= 300


@pytest.mark.parametrize("lazy", [False, True])
def test_sglang_keeps_its_slots(lazy: bool) -> None:
    pytest.importorskip("sglang", reason="sglang is not installed: see benchmarks/README.md")
    for due in (None, 0, 1, 3):
        side = host_peer.SglangStates(3, 128, lazy, due)
        for _ in range(2):
            side.turn(lambda op, act: act())
            assert side.wrong() == ""
        counts = {op: numbers.tolist() for op, numbers in host_sides._of_ops(side, side.counted).items()}
        each = {"admit": [2 * 3 + 6, 1, 0], "publish": [9, 0, 0], "release": [6, 0, 0], "drop": [3, 0, 0]}
        if due is None:
            assert counts == each | {"together": [30, 1, 0]}
        else:
            assert counts == {"decode": [3 + 5 * due * lazy, 2, 0]}
        batch = side._batch
        assert due is None or batch.mamba_track_mask_cpu == [True] * due + [False] * (3 - due)
        assert side._pool.mamba_pool.size == side._slots


@pytest.mark.parametrize("lazy", [False, True])
def test_sglang_keeps_its_slots_while_it_verifies_drafts(lazy: bool) -> None:
    pytest.importorskip("sglang", reason="sglang is not installed: see benchmarks/README.md")
    for due in (0, 1, 3):
        side, bare = (drafts.SglangDrafts(3, 128, lazy, due, states) for states in (True, False))
        for one in (side, bare):
            for _ in range(3):
                one.turn(lambda op, act: act())
                assert one.wrong() == ""
            assert [req.kv.kv_committed_len - n for req, n in zip(one._reqs, one._accepted, strict=True)] == [
                127 if i < due else 64 for i in range(3)
            ]
        assert [req.kv.mamba_last_track_seqlen for req in side._reqs] == [128] * due + [None] * (3 - due)
        counts = {op: numbers.tolist() for op, numbers in host_sides._of_ops(side, side.counted).items()}
        assert counts["plan"] == [1 + 2 * due * lazy, 3, 0] and counts["accept"] == [3 * due * lazy, 0, 0]
        assert host_sides._of_ops(bare, bare.counted)["verify"].tolist() == [0, 2, 0]


@pytest.mark.parametrize("form", [form for form, has in online.FORMS.items() if has.beside])
@pytest.mark.parametrize("lazy", [False, True])
def test_sglang_keeps_its_slots_while_requests_end_and_come(lazy: bool, form: str) -> None:
    pytest.importorskip("sglang", reason="sglang is not installed: see benchmarks/README.md")
    every, kept, counts = online.FORMS[form].every, 0 if form == "sessions" else 3, {}
    for changes in (0, 1, 3):
        side, bare = (online.SglangOnline(3, every, lazy, changes, form, states) for states in (True, False))
        for one in (side, bare):
            for _ in range(4):
                one.turn(lambda op, act: act())
                assert one.wrong() == "" and len(one._kept) == kept
            free = 6 * every  # 6 of 12 prompts are free: 3 run, 3 are cached
            assert "prefix cache" not in form or one._tree.token_to_kv_pool_allocator.available_size() == free
        assert {slot is None for slot in bare._kept} <= {True}
        assert len({int(slot) for slot in side._kept}) == kept
        with_states, without = (host_sides._of_ops(one, one.counted)["step"] for one in (side, bare))
        assert with_states[2] == without[2] == 0 and with_states[0] > without[0]
        counts[changes] = with_states.tolist()
        batch = side._batch
        assert [req.kv.req_pool_idx for req in batch.reqs] == batch.req_pool_indices.tolist()
        if changes and "prefill" in form:  # prefill keeps the state of each whole prompt
            assert side._extend.mamba_prefill_track_mask_cpu == [True] * changes
            assert [req.kv.mamba_last_track_seqlen for req in batch.reqs[-changes:]] == [every] * changes
    assert counts[0] == [3, 2, 0] and counts[3][1] == (11 if "prefill" in form else 3)


@pytest.mark.parametrize("lazy", [False, True])
def test_sessions_of_sglang_keep_what_they_hold(lazy: bool) -> None:
    pytest.importorskip("sglang", reason="sglang is not installed: see benchmarks/README.md")
    side = online.SglangOnline(3, online.EVERY, lazy, 1, "sessions")
    held = {name: slot.kv for name, slot in side._streams.slots.items()}
    rows = {name: kv.req_pool_idx for name, kv in held.items()}
    for _ in range(6):
        side.turn(lambda op, act: act())
        assert [side._streams.slots[req.session.session_id].kv is req.kv for req in side._reqs] == [True] * 3
    assert {name: slot.kv.req_pool_idx for name, slot in side._streams.slots.items()} == rows
    assert len(set(rows.values())) == 6
