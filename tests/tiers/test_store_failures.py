"""Failures of a store: their reasons are in the log and in the figures, without a flood of lines."""

import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import memstate as ms
from memstate import logs, metrics
from memstate.testing import Clock, MemoryStore
from memstate.tiers import FileStore
from memstate.tiers.stores.base import reason_of, why_of
from tests.support.file_case import refuse
from tests.support.tiered_small import fetch, push_down, tiered, whole

Told = Callable[[str], list[dict[str, Any]]]


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Told:
    """A function that returns the fields of all logged warnings with a given name."""
    caplog.set_level(logging.WARNING, "memstate")
    return lambda name: [
        {key: value for key, value in fields.items() if key != "event"}
        for record in caplog.records
        if (fields := getattr(record, logs.FIELDS, {})).get("event") == name
    ]


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on a disk with room for a few records."""
    writes = iter(range(1_000_000))
    refuse(monkeypatch, "write", errno.ENOSPC, lambda *_: next(writes) > 3)
    return tmp_path / "disk"


def served(store: Any, prompts: int, clock: Clock | None = None) -> ms.StateManager:
    """Returns a manager that has tried to write the states and pages of some prompts, one after the other."""
    mem = tiered(tiers={"store": store, "clock": clock or Clock()})
    for n in range(prompts):
        push_down(mem, whole(n))
    return mem


def samples(mem: ms.StateManager, name: str) -> dict[tuple[str, ...], float]:
    """Returns the values of a metric by its own labels."""
    (family,) = (each for each in metrics.collector(mem).collect() if f"{each.name}_total" == name)
    return {
        tuple(value for label, value in sample.labels.items() if label not in ("manager", "rank")): sample.value
        for sample in family.samples
    }


@pytest.mark.parametrize("call", ["get", "exists"])
def test_a_read_that_fails_is_named(call: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "memstate")
    store = FileStore(tmp_path)
    mem = served(store, 1)
    mem.tiers.clear()
    mem.prefix.clear()
    with pytest.MonkeyPatch.context() as patch:
        refuse(
            patch, "open" if call == "get" else "stat", errno.EACCES, lambda path, *_: str(path)[:3] in ("sta", "kv-")
        )
        ended = fetch(mem, [*whole(0), 1])
    assert ended.why == "EACCES"
    assert mem.stats().tiers.failures.keys() == {"EACCES"}
    (said,) = (
        record.memstate
        for record in caplog.records
        if getattr(record, logs.FIELDS, {}).get("event") == "prefetch ended"
    )
    assert said["why"] == "EACCES" and said["outcome"] == ("failed" if call == "get" else "missed")


def test_a_store_that_raises_is_named_by_the_kind_of_its_error(told: Told) -> None:
    store = MemoryStore()
    full = OSError(errno.ENOSPC, "full")
    errors = iter([full, OSError("no answer"), ZeroDivisionError("defect"), full])
    store.put = lambda names, buffers: (_ for _ in ()).throw(next(errors))  # type: ignore[method-assign]
    mem = served(store, 1)
    push_down(mem, whole(1))
    assert told("write failed")[0]["why"] == "ENOSPC: OSError(28, 'full')"
    assert mem.stats().tiers.failures == {"ENOSPC": 2, "OSError": 1, "ZeroDivisionError": 1}
    assert [why_of(OSError("no")), reason_of(OSError("no")), reason_of(KeyError(1))] == [
        "OSError('no')", "OSError", "KeyError",
    ]  # fmt: skip


def test_repeated_failures_are_one_line_a_minute_with_their_count(full: Path, told: Told) -> None:
    clock, store = Clock(), FileStore(full)
    mem = served(store, 60, clock)
    assert len(told("write failed")) == 1
    clock.now = 61.0
    mem.poll()
    first, rest = told("write failed")
    assert rest["times"] > 30 and first["why"] == rest["why"] == "ENOSPC"
    assert first["records"] + rest["records"] == mem.stats().tiers.write_failed == store.faults["ENOSPC"]
    figures = mem.stats().tiers
    assert figures.written and samples(mem, "memstate_storage_failures_total") == {("ENOSPC",): figures.write_failed}
    push_down(mem, whole(60))  # these writes fail within the next minute
    mem.tiers.close()
    assert sum(each["records"] for each in told("write failed")) == mem.stats().tiers.write_failed


def test_what_a_store_deletes_to_make_room_is_a_figure(tmp_path: Path) -> None:
    store = FileStore(tmp_path, capacity=6_000)
    mem = served(store, 12)
    assert store.evicted and mem.stats().tiers.store_evicted == store.evicted
    assert samples(mem, "memstate_storage_evictions_total") == {(): store.evicted}
