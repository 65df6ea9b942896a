"""Tests `bench tiers`: its entries, peers and checks, and the examples of docs/tiers.md."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import memstate
from memstate.integrations.handover import HandOver
from memstate.state import presets
from memstate.state.sharding import Part
from memstate.tiers import FileStore
from memstate.tiers import Outcome as Became
from memstate.tiers.host.packing import Packing, in_records
from memstate.tiers.keys import Keys, fingerprint
from memstate.tiers.records import RecordFormat
from memstate.tokens import SaltedTokens, encode
from memstate_tools.bench import (
    PEERS,
    BenchResult,
    Measured,
    clock,
    run,
    tiers_mooncake,
    tiers_objects,
    tiers_stores,
    tiers_turns,
)
from memstate_tools.bench.task import Setting, Task
from memstate_tools.bench.tiers_turns import MIB, TurnSide, rates
from tests.support import object_server
from tests.support.mooncake_server import missing
from tests.support.processes import python

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
OPS = {"file put", "file get", "transfer out", "transfer in"}
TOYS = [f"toy {tiers_turns.sized(*case)}" for case in tiers_turns.TOY_CASES]


@pytest.fixture
def no_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the imports of Mooncake's client and of obstore fail."""
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setattr(tiers_objects, "NEEDED", ["no_such_package"])


def toy(peer: str | None = None) -> BenchResult:
    return run(["tiers"], "reference", toy=True, peer=peer)


def setting(backend: str = "reference", peer: str | None = None) -> Setting:
    return Setting(backend, CPU, True, peer)


# -- entries ---------------------------------------------------------------------------------------


def test_every_operation_is_measured_beside_a_plain_copy(no_extras: None) -> None:
    outcome = toy()
    assert outcome.wrong == [] and {entry.op for entry in outcome.entries} == OPS
    entries = {(entry.op, entry.case, entry.unit, entry.peer): entry for entry in outcome.entries}
    assert len(entries) == len(outcome.entries)
    for case in TOYS:
        for op in ("file put", "file get"):
            assert {(op, case, "bytes/s", peer) for peer in ("memory-copy", "plain-file")} <= set(entries)
        for op in ("transfer out", "transfer in"):
            assert (op, case, "bytes/s", "memory-copy") in entries
    for entry in outcome.entries:
        assert entry.case.startswith("toy ")
        assert entry.value > 0 and entry.unit == "bytes/s" and entry.peer in PEERS
        assert entry.ratio == entry.value / (entry.peer_value or 0)


# -- turns of the sides ----------------------------------------------------------------------------


def test_each_side_has_a_call_in_every_round_and_is_first_in_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A false clock goes on only in the measured calls. The first round and `undo` are not counted."""
    now, calls = [0.0], list[str]()
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    takes = {"ours": [9.0, 2.0, 4.0, 100.0], "memory-copy": [9.0, 1.0, 1.0, 1.0]}

    def act(name: str) -> None:
        calls.append(name)
        now[0] += takes[name].pop(0)

    def undo() -> None:
        now[0] += 1000

    sides = {name: TurnSide(partial(act, name), undo) for name in takes}
    monkeypatch.setattr(tiers_turns, "TOY_ROUNDS", 3)
    (entry,) = rates(setting(), "op", "case", 8, sides.pop("ours"), sides)
    assert calls == ["ours", "memory-copy", "memory-copy", "ours"] * 2
    assert entry == Measured("op", "toy case", 2.0, "bytes/s", "memory-copy", 8.0, 0.25)


def test_a_peer_that_fails_leaves_and_ours_that_fails_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise OSError("no\nroom")

    fine = TurnSide(lambda: None)
    entries = rates(setting(), "op", "case", 8, fine, {"plain-file": TurnSide(fails), "memory-copy": fine})
    assert [entry.peer for entry in entries] == ["memory-copy"]
    assert capsys.readouterr().err == "op, case: peer plain-file raises OSError: no room\n"
    assert [entry.peer for entry in rates(setting(), "op", "case", 8, fine, {"plain-file": TurnSide(fails)})] == [None]
    with pytest.raises(OSError, match="no\nroom"):
        rates(setting(), "op", "case", 8, TurnSide(fails), {"memory-copy": fine})
    assert rates(setting(peer="plain-file"), "op", "case", 8, fine, {"memory-copy": fine})[0].peer is None


def test_nothing_is_left_behind(no_extras: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen = set[str]()
    with (one := setting()).held:
        for task in list(tiers_stores.tasks(one)):
            (folder,) = tmp_path.iterdir()
            assert task.check() == "" and task.measure()
            files = [path for path in folder.rglob("*") if path.is_file()]
            assert files == []
            seen.add(task.name)
    assert seen == {f"file, {case.removeprefix('toy ')}" for case in TOYS} and list(tmp_path.iterdir()) == []


# -- Mooncake and objects --------------------------------------------------------------------------


def stored(task: Task) -> list[Measured]:
    assert task.check() == ""
    return task.measure()


def test_other_stores_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    beside = {"folder": ["memory-copy", "plain-file"], "s3": ["memory-copy"], "mooncake": ["memory-copy"]}
    for store, why in (("folder", object_server.missing()), ("s3", object_server.missing()), ("mooncake", missing())):
        beside.pop(store) if why else None
    if not beside:
        pytest.skip(f"Mooncake: {missing()}; S3 server: {object_server.missing()}")
    with (one := setting()).held:
        entries = [
            entry for task in tiers_stores.tasks(one) if task.name.startswith((*beside,)) for entry in stored(task)
        ]
    measured = {(entry.op, entry.case, entry.peer) for entry in entries}
    ops = [(f"{store} {way}", peer) for store, peers in beside.items() for peer in peers for way in ("put", "get")]
    assert measured == {(op, case, peer) for op, peer in ops for case in TOYS}
    said = "tiers: s3 measures moto, a server in one Python process, not S3"
    assert (said in capsys.readouterr().err) == ("s3" in beside)


def test_without_extras_lines_say_so(no_extras: None, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = toy()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in lines] == [
        f"measured without {name}" for name in ("folder", "s3", "mooncake")
    ]
    assert "objects need obstore" in lines[0] and "no no_such_package; pip install obstore" in lines[1]
    assert "pip install '.[mooncake]' in a checkout" in lines[2]
    assert outcome.wrong == [] and {entry.op for entry in outcome.entries} == OPS


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("PATIENCE_S", -1.0, "mooncake_master on port "),
        ("HOLD", "raise SystemExit(3)", "no process could give 1048576 bytes to the store at 127.0.0.1:"),
    ],
)
def test_processes_that_do_not_start_are_told_and_ended(
    name: str, value: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why := missing():
        pytest.skip(f"Mooncake: {why}")
    started = list[subprocess.Popen[Any]]()

    def note(*given: Any, true: Any = subprocess.Popen, **more: Any) -> Any:
        started.append(true(*given, **more))
        return started[-1]

    monkeypatch.setattr(tiers_mooncake, name, value)
    monkeypatch.setattr(tiers_mooncake, "subprocess", SimpleNamespace(Popen=note, DEVNULL=subprocess.DEVNULL, PIPE=-1))
    with pytest.raises(tiers_mooncake.Unavailable, match=says), tiers_mooncake.loopback(MIB):
        pytest.fail("there is a store")
    assert started and all(process.poll() is not None for process in started)


# -- faults that are not measured ------------------------------------------------------------------


def _lost(true: Any, store: FileStore, names: Any, buffers: Any) -> Any:
    """A fault: leaves out the last record, but returns that it was written."""
    return [*true(store, names[:-1], buffers[:-1]), Became.DONE]


def _bit(true: Any, store: FileStore, names: Any, buffers: Any) -> Any:
    outcomes = true(store, names, buffers)
    buffers[-1][-1] ^= 1
    return outcomes


def _no_layer(
    true: Any, packing: Packing, slots: Any, index: Any, places: Any, records: Any, layers: Any = None
) -> None:
    true(packing, slots, index, places, records, (0, packing.layout.layers - 2) if layers is None else layers)


def _first_group(
    true: Any, packing: Packing, slots: Any, index: Any, places: Any, records: Any, layers: Any = None
) -> None:
    if layers is None or layers[0] == 0:
        true(packing, slots, index, places, records, layers)


FILES = {f"file, {tiers_turns.sized(*case)}" for case in tiers_turns.TOY_CASES}
WAYS = {f"transfers, {tiers_turns.sized(*case)}" for case in tiers_turns.TOY_CASES}


@pytest.mark.parametrize(
    ("owner", "name", "fault", "lost"),
    [
        (FileStore, "put", _lost, FILES),
        (FileStore, "get", _bit, FILES),
        (Packing, "pack", _no_layer, WAYS),
        (Packing, "unpack", _first_group, WAYS),
    ],
)
def test_checks_find_what_is_wrong_and_it_has_no_entry(
    owner: type, name: str, fault: Callable[..., Any], lost: set[str], no_extras: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    true = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given: fault(true, *given))
    outcome = toy("sglang")  # this benchmark has no such peer
    assert {line.split(": ")[0] for line in outcome.wrong} == lost
    gone = {each[:4] for each in lost}
    assert gone and not any(entry.op.startswith(each) for entry in outcome.entries for each in gone)


# -- docs/tiers.md ---------------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "tiers.md").read_text()


def test_the_loop_of_the_page_runs_and_prints_what_it_says(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(import .*?)```\s*```text\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 1
    printed = python("-c", blocks[0][0], cwd=tmp_path)  # readers run it without the interpreter
    # If storage answers the second request late, this request starts from a state that the first request has published,
    # or keeps a state at the place where the two prompts part.
    said = printed.replace("begins at [0, 16]", "begins at [0, 0]").replace(" 12 records", " 11 records")
    assert said == blocks[0][1]


def test_the_page_hands_over_what_another_split_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "machines.md").read_text()
    (block,) = re.findall(r"```python\n(whole = .*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    prompt = list(range(9))
    names: dict[str, Any] = {"ms": memstate, "torch": torch, "FileStore": FileStore, "HandOver": HandOver}
    names |= {"Part": Part, "prompt": prompt}
    exec(block, names)
    assert names["length"] == 0  # the old store is empty
    form = names["whole"].shard(4)
    for rank in range(2):  # the records of these ranks are the sources of rank 0 of 2
        mark = fingerprint("model", form, None, 4, rank, 4)
        record, key = RecordFormat("state", form, mark), Keys(mark, 4).of(SaltedTokens(encode(prompt), None))[1]
        body = np.zeros(record.nbytes, np.uint8)
        record.seal(body, key, 8)
        assert names["old"].put([record.name(key)], [body]) == [Became.DONE]
    exec(block, names)
    assert names["length"] == 8
    names["prompt"] = prompt[:8]
    exec(block, names)
    assert names["length"] == 0 and names["move"].run(prompt[:8], most=8).length == 8


def test_sizes_of_the_page_are_those_of_the_presets() -> None:
    rows = re.findall(r"^\| ([\w.-]+)[^|]* \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.MULTILINE)
    made = {
        "Qwen3-Next-80B-A3B": (presets.qwen3_next, 2), "Qwen3.5-27B": (presets.qwen3_5, 2),
        "Nemotron-H": (presets.nemotron_h, 1), "Falcon-H1": (presets.falcon_h1, 1),
        "Granite-4": (presets.granite_hybrid, 1), "Kimi-Linear-48B": (presets.kimi_linear, 2),
    }  # fmt: skip
    assert {name for name, *_ in rows} == set(made)
    for name, *said in rows:
        preset, axis = made[name]
        exact, short = preset(), preset(ssm_dtype=torch.bfloat16)
        dense = in_records(exact, {"ssm": axis})
        assert [float(each) for each in said] == [
            pytest.approx(layout.bytes_per_slot / MIB, abs=0.006) for layout in (exact, short, dense)
        ]
