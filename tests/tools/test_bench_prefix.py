"""Tests `bench prefix`: its entries, its timing, its checks, and peers that fail or are missing."""

import random
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import memstate as ms
from memstate.prefix import PrefixCache
from memstate.prefix.lease import NO_MATCH
from memstate.requests.page_table import PageTable
from memstate.slots.commands import CommandBuffer
from memstate_tools.bench import BenchResult, clock, prefix, radix_peer, run
from memstate_tools.bench.prefix_prompt import FORMS, LongPrompt
from memstate_tools.bench.prefix_sides import OURS, Key, TimedCache
from memstate_tools.bench.task import Setting
from tests.support import inside, owners

CASES = [f"{nodes} nodes, {pages * size} tokens, pages of {size}" for nodes, pages, size in prefix.TOY_TREES]
CHAT = f"chat, S={prefix.TOY_CHAT[1]}"
PROMPTS = [f"{tokens} tokens, pages of {size}, {form}" for tokens, size in prefix.TOY_PROMPTS for form in FORMS]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes toy runs small: one tree with pages of four tokens, and few requests."""
    small = (("TOY_TREES", ((42, 8, 4),)), ("TOY_CHAT", (24, 4, 300)), ("SAMPLE", 24), ("TOY_PROMPTS", ()))
    for name, value in small:
        monkeypatch.setattr(prefix, name, value)


class Plain:
    """A stand-in for a peer: a list of prefixes in the order of their last use."""

    def __init__(self, states: int, pages: int, longest: int, size: int) -> None:
        assert longest <= pages
        self.states, self.size, self.kept = states, size, list[tuple[int, ...]]()

    @property
    def held(self) -> tuple[int, int]:
        ends = {key[:n] for key in self.kept for n in range(self.size, len(key) + 1, self.size)}
        return len(self.kept), len(ends)

    def match(self, ids: Key) -> int:
        best = max((key for key in self.kept if tuple(ids[: len(key)]) == key), key=len, default=())
        if best:
            self.kept.append(self.kept.pop(self.kept.index(best)))
        return len(best)

    def insert(self, ids: Key) -> float:
        self.kept = [key for key in self.kept if key != tuple(ids)] + [tuple(ids)]
        del self.kept[: -self.states]
        return 5e-6


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, small: None) -> Callable[..., None]:
    """A function that replaces the peer by a stand-in."""

    def put(kind: type) -> None:
        monkeypatch.setattr(radix_peer, "load", lambda: None)
        monkeypatch.setattr(radix_peer, "SglangCache", kind)

    return put


def toy(peer: str | None = None) -> BenchResult:
    return run(["prefix"], "reference", toy=True, peer=peer)


def test_every_case_is_checked_and_measured_for_both_policies() -> None:
    outcome = toy("device-copy")  # this benchmark has no such peer
    assert outcome.wrong == []
    measured = [(entry.op, entry.case) for entry in outcome.entries]
    cases = [f"toy {case}, {policy}" for case in (CHAT, *CASES) for policy in OURS]
    calls = [f"prompt, {call}" for call in ("admit", "plan", "publish", "end", "request")]
    expected = [(op, case) for op in ("match", "insert", "learn") for case in cases]
    assert sorted(measured) == sorted([*expected, *((call, f"toy {case}") for call in calls for case in PROMPTS)])
    for entry in outcome.entries:
        assert entry.value > 0 and (entry.unit, entry.peer, entry.ratio) == ("host us", None, None)


# -- peers -----------------------------------------------------------------------------------------


def test_each_policy_stands_beside_each_peer(stand_in: Callable[..., None]) -> None:
    stand_in(Plain)
    outcome = toy()
    assert outcome.wrong == []
    assert {entry.op for entry in outcome.entries if entry.peer is None} == {"learn"}
    for entry in outcome.entries:
        if entry.peer is None:
            continue
        assert entry.peer == "sglang" and entry.ratio == entry.value / (entry.peer_value or 0)
        if entry.op == "insert":
            assert entry.peer_value == pytest.approx(5)  # the peer returns microseconds
    matches = [(entry.case, entry.peer) for entry in outcome.entries if entry.op == "match"]
    assert len(matches) == len(set(matches)) == 2 * len(OURS)


class Deaf(Plain):
    def match(self, ids: Key) -> int:
        return max(0, super().match(ids) - 1)


class Absent(Plain):
    def __init__(self, *given: Any) -> None:
        raise RuntimeError("no such\ncore")


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Deaf, " tokens, a naive search "),
        (Absent, " raises RuntimeError: no such core"),
    ],
)
def test_a_peer_that_fails_takes_nothing_from_the_others(
    kind: type, says: str, stand_in: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(kind)
    outcome = toy()
    assert outcome.wrong == []
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("prefix, chat, S=4: peer sglang ") and says in lines[0]
    assert not [entry for entry in outcome.entries if "chat" in entry.case and entry.peer]


def test_a_peer_that_is_not_there_is_told_in_one_line(
    small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(radix_peer, "load", Mock(side_effect=ImportError("it is not installed")))
    outcome = toy()
    assert outcome.wrong == [] and {entry.peer for entry in outcome.entries} == {None}
    assert capsys.readouterr().err == "prefix: measured without sglang: it is not installed\n"
    assert toy("device-copy").wrong == []
    assert capsys.readouterr().err == ""


def test_sglang_that_is_missing_or_broken_is_an_import_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(
        ImportError, match="sglang is not installed: pip install --no-deps -r tests/proof/engines/sglang"
    ):
        radix_peer.load.__wrapped__()
    with pytest.raises(SystemExit, match=r"sglang.*: pip install"):
        runpy.run_path(str(Path(__file__).parents[2] / "examples" / "sglang_pool.py"))
    monkeypatch.delitem(sys.modules, "sglang")
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "srt" / "__init__.py").write_text("raise RuntimeError('no device\\nhere')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ImportError, match="sglang is there and cannot be used: RuntimeError: no device here"):
        radix_peer.load.__wrapped__()
    sys.modules.pop("sglang", None)


def test_sglang_finds_what_a_list_of_prefixes_finds() -> None:
    pytest.importorskip("sglang", reason="sglang is not installed: pip install --no-deps sglang==0.5.23")
    draw = random.Random("sglang")
    keys = [list(range(1, draw.randint(2, 12))) for _ in range(3)]
    for at in range(60):
        known = draw.choice(keys)
        keys.append(known[: draw.randint(0, len(known))] + [100 * at + 1000 + n for n in range(draw.randint(1, 4))])
    roomy, tight = (radix_peer.SglangCache(states, pages, 100) for states, pages in ((99, 999), (3, 300)))
    plain = Plain(99, 999, 100, 1)
    for key in draw.choices(keys, k=200):
        assert roomy.match(key) == plain.match(key)
        tight.match(key)
        for side in (roomy, tight, plain):
            assert side.insert(key) > 0
        assert roomy.held == plain.held and tight.held[0] <= 3
    assert type(roomy.tree.tree_core).__name__.startswith("Rust")


# -- timing ----------------------------------------------------------------------------------------


def test_the_figures_hold_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """A false clock goes on only in the measured calls, by a known time in each."""
    now = [0]
    costs = {
        (PrefixCache, "match"): 1,
        (PrefixCache, "use"): 10,
        (PrefixCache, "evict_pages"): 100,
        (PrefixCache, "file"): 1000,
        (PageTable, "start"): 10**5,
        (CommandBuffer, "submit"): 10**6,
        (PrefixCache, "hold"): 10**7,
        (PrefixCache, "release"): 10**8,
        (PrefixCache, "learn"): 10**9,
    }
    for (owner, name), cost in costs.items():
        real = getattr(owner, name)

        def call(*given: Any, real: Callable[..., Any] = real, cost: int = cost) -> Any:
            now[0] += cost
            return real(*given)

        monkeypatch.setattr(owner, name, call)
    monkeypatch.setattr(clock, "time", SimpleNamespace(thread_time_ns=lambda: now[0] * 10**9))
    ours = TimedCache(2, 8, 4, "lru", 1)
    assert clock.cpu_seconds(lambda: ours.match([1, 2, 3])) == pytest.approx(11)
    assert ours.insert([1, 2, 3]) == pytest.approx(1100) and ours.learned == [pytest.approx(10**9)]
    assert ours.match([1, 2, 3, 4]) == 3 and ours.held == (1, 3)


# -- faults that are not measured ------------------------------------------------------------------


def _keep(true: Any, *given: Any) -> int:
    return 0


def _emptied(true: Any, cache: PrefixCache, lease: Any) -> None:
    """Empties a register of the cache by hand, once, so that its slot has no owner."""
    true(cache, lease)
    if cache._counts["inserted"] == 3:
        inside.commands(cache).submit()
        inside.commands(cache).registers.table.slots[next(iter(owners.nodes(cache)))] = 0


@pytest.mark.parametrize(
    ("owner", "name", "fault", "says"),
    [
        (PrefixCache, "evict_states", _keep, "raises OutOfSlots"),
        (PrefixCache, "release", _emptied, "leaked slots: {'lru': 1, 'return-rate': 1}"),
    ],
)
def test_checks_find_a_wrong_cache(
    owner: type, name: str, fault: Any, says: str, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given: fault(true, *given))
    outcome = toy("device-copy")
    assert outcome.wrong and outcome.wrong[0].startswith("prefix, chat, S=4: ") and says in outcome.wrong[0]
    assert not [entry for entry in outcome.entries if "chat" in entry.case]


def test_a_long_prompt_that_is_not_found_again_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting("reference", torch.device("cpu"), toy=True)
    prompt = LongPrompt(setting, 256, 16).task()
    assert prompt.check() == ""
    monkeypatch.setattr(ms.StateManager, "match", lambda *_: NO_MATCH)
    assert prompt.check() == "0 of 256 tokens are found again, expected 240"
