"""Tests the demo over host memory and storage: a second process hits the records of the first."""

import json
from pathlib import Path
from typing import Any

import pytest

from memstate.tiers import MooncakeStore
from memstate_tools.demo import DemoReport
from memstate_tools.demo.config import ENGINES, MODELS, STRATEGIES
from tests.support.demo_talks import demo, right
from tests.support.mooncake_server import running_master
from tests.support.object_server import running_server
from tests.support.processes import python


def twice(path: Path, **settings: Any) -> tuple[DemoReport, DemoReport]:
    """Runs the same conversations twice over one storage, as if the process started again; returns both reports."""
    first = right(storage="file", storage_path=path, **settings)
    return first, right(storage="file", storage_path=path, **settings)


@pytest.mark.sample(1)
@pytest.mark.parametrize("write", ["through", "selective", "back"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_restart_hits_storage(strategy: str, write: str, tmp_path: Path) -> None:
    """Without tracking, states stand only at the ends of requests, so the room is small: otherwise later turns would
    hit them before they are evicted to storage.
    """
    room = {"slots": 5, "host_slots": 2, "requests": 20} if strategy == "none" else {"slots": 8, "host_slots": 12}
    first, again = twice(tmp_path, strategy=strategy, write=write, fail_claims=0.3, **room)
    assert first.tiers and again.tiers and again.tiers.prefetch
    assert again.tiers.storage_hit_tokens > 0
    assert again.tiers.prefetch.complete > 0 and not again.tiers.prefetch.flaws
    if strategy != "none" and write == "through":  # other modes write only when the loop has time
        share = [report.meter.prefix_hit_tokens / report.meter.prompt_tokens for report in (first, again)]
        assert share[0] < share[1]
    assert again.answers == first.answers


@pytest.mark.sample(1)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("layout", ["layer-major", "slot-major"])
def test_engines_and_layouts_share_records(engine: str, layout: str, tmp_path: Path) -> None:
    """A record does not depend on the layout of the device that wrote it."""
    right(storage="file", storage_path=tmp_path, host_slots=8)
    again = right(storage="file", storage_path=tmp_path, host_slots=8, engine=engine, layout=layout)
    assert again.tiers and again.tiers.storage_hit_tokens > 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("other", [{"seed": 1}, {"model": MODELS[1]}, {"page_size": 16}])
def test_other_weights_models_and_pages_share_nothing(other: dict[str, Any], tmp_path: Path) -> None:
    """Records of another seed, model or page size have other names; the seed determines the weights."""
    right(storage="file", storage_path=tmp_path, requests=5)
    before = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    right(storage="file", storage_path=tmp_path, requests=5, **other)
    after = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    fresh = tmp_path / "fresh"
    right(storage="file", storage_path=fresh, requests=5, **other)
    own = {path.name for path in fresh.rglob("*") if path.is_file()}
    assert own and not own & before and own & (after - before) and after >= before


@pytest.mark.parametrize("host_slots", [1, pytest.param(8, marks=pytest.mark.proof)])
def test_host_memory_of_any_size_serves(host_slots: int) -> None:
    report = right(slots=5, host_slots=host_slots, sessions=2, requests=20)
    assert report.tiers and report.tiers.states_out > 0 and report.tiers.storage_hit_tokens == 0
    assert report.tiers.host_hit_tokens > 0 or host_slots == 1


def test_storage_without_a_path_goes_with_the_run() -> None:
    report = right(storage="file", slots=6, host_slots=2, requests=8)
    assert report.tiers and report.tiers.written > 0


@pytest.mark.proof
def test_sabotage_and_planted_leaks_are_noticed_over_tiers(tmp_path: Path) -> None:
    """Each run has its own storage, because a sabotaged run writes wrong records."""
    for number, expected in enumerate(
        ({"plant_leak": True}, {"sabotage": "swap"}, {"sabotage": "stale", "sessions": 2})
    ):
        report = demo(storage="file", storage_path=tmp_path / str(number), host_slots=8, requests=14, **expected)
        assert report.ok, report.failure()


def command(*options: str) -> dict[str, Any]:
    """Runs `memstate demo` in another process, checks that the run is right, and returns its JSON."""
    given = ("-m", "memstate", "demo", "--backend", "reference", "--requests", "8", "--json", "-")
    figures: dict[str, Any] = json.loads(python(*given, *options))
    assert figures["identical_to_uncached"] and not figures["leaked_slots"] and not figures["tiers"]["leaked_records"]
    return figures


@pytest.mark.proof
def test_two_processes_share_files(tmp_path: Path) -> None:
    options = ("--host-slots", "8", "--storage", "file", "--storage-path", str(tmp_path))
    first, again = command(*options), command(*options)
    assert again["storage_hit_tokens"] > first["storage_hit_tokens"]
    assert again["prefix_hit_tokens"] >= again["storage_hit_tokens"] + again["host_hit_tokens"]


@pytest.mark.proof
def test_two_processes_share_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_server() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        options = ("--host-slots", "8", "--storage", "objects", "--storage-path", "s3://bucket/demo")
        first, again = command(*options), command(*options)
    assert first["tiers"]["written"] > 0 and again["storage_hit_tokens"] > first["storage_hit_tokens"]


@pytest.mark.proof
def test_two_processes_share_a_mooncake_store() -> None:
    """The test's own process provides the memory of the store: memory that a process provides is gone when it ends."""
    with running_master() as master:
        keeper = MooncakeStore(master.settings(segment_bytes=64 << 20))
        options = ("--host-slots", "8", "--storage", "mooncake", "--mooncake-master", master.settings().master)
        first, again = command(*options), command(*options)
        keeper.close()
    assert first["tiers"]["written"] > 0 and again["storage_hit_tokens"] > first["storage_hit_tokens"]
