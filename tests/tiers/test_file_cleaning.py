"""Eviction in a file store: the least recently used records go, no lock is held, and records written meanwhile stay."""

import errno
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memstate.tiers.stores.file import FileStore
from tests.support.file_case import DONE, FAILED, OLD, files, holds, key, keys, place, put, record, refuse
from tests.support.processes import ended, in_child

CALLS = ("open", "stat", "fstat", "scandir", "unlink", "close", "mkdir", "replace", "write")


def full(path: Path, capacity: int | None, n: int, apart: int = 1) -> FileStore:
    """Returns a store with n records of 100 bytes, even if they exceed its capacity. Record 0 is longest unused."""
    FileStore(path).put(keys(f"n{k}" for k in range(n)), [record(k) for k in range(n)])
    store = FileStore(path, capacity)
    for k in range(n):
        os.utime(place(store, f"n{k}"), (OLD, OLD + k * apart))
    return store


def hook(monkeypatch: pytest.MonkeyPatch, call: str, work: Callable[..., object]) -> None:
    """Does `work` before each call of a function of `os`."""
    real = getattr(os, call)

    def hooked(*arguments: Any, **settings: Any) -> Any:
        work(*arguments)
        return real(*arguments, **settings)

    monkeypatch.setattr(os, call, hooked)


def in_time(work: Callable[[], object]) -> bool:
    """Returns whether another thread finishes some work within 10 seconds."""
    done: list[object] = []
    thread = threading.Thread(target=lambda: done.append(work()), daemon=True)
    thread.start()
    thread.join(10)
    return bool(done)


def used(store: FileStore) -> int:
    return sum(path.stat().st_size for path in files(store))


def free(store: FileStore) -> bool:
    """Returns whether nobody holds the lock of the store."""
    acquired = store.folder._room.acquire(blocking=False)
    if acquired:
        store.folder._room.release()
    return bool(acquired)


@pytest.mark.parametrize("capacity", [None, 3200])
def test_no_lock_is_held_while_the_system_works(capacity: int | None, tmp_path: Path, monkeypatch: Any) -> None:
    store = full(tmp_path, capacity, 64)
    held: list[str] = []
    seen: list[str] = []
    for call in CALLS:
        hook(monkeypatch, call, lambda *_, call=call: (seen.append(call), free(store) or held.append(call)))
    assert put(store, "new", record(0)) is DONE
    store.clean()
    assert held == [] and seen.count("scandir") > 50 and store.evicted == (35 if capacity else 0)


@pytest.mark.parametrize("turn", [0, 1, 20, 30])
@pytest.mark.parametrize("capacity", [None, 6400])
def test_others_go_on_while_the_folder_is_looked_through(
    capacity: int | None, turn: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records written meanwhile are counted once, whether the scan has met them or not."""
    store = full(tmp_path, capacity, 40)
    store.clean()
    turns = iter(range(1000))
    went: list[bool] = []

    def beside() -> bool:
        written = store.put(keys(["new", "again", "n7"]), [record(1), record(2), record(7)]) == [DONE] * 3
        store.discard(keys(["n8"]))
        return written and holds(store, "new", record(1)) and holds(store, "n9", record(9))

    def work(*_: object) -> None:
        if next(turns) == turn:
            went.append(in_time(beside))

    hook(monkeypatch, "scandir", work)
    store.clean()
    assert went == [True] and holds(store, "new", record(1)) and store.evicted == 0
    if capacity:
        count = store.folder._used
        # the scan may have met n8 before it was discarded
        assert count is not None and used(store) <= count <= used(store) + 100


def test_a_record_written_during_a_clean_up_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new record has the name and the time of use of an old one, which is about to be deleted."""
    store = full(tmp_path, 16_000, 320)  # 170 records must go; after 161 have gone, one more fits
    deleted: list[str] = []
    again: list[str] = []

    def renew(word: str) -> bool:
        store.discard(keys([word]))
        written = put(store, word, record(9)) is DONE
        os.utime(place(store, word), (OLD, OLD))
        return written

    def work(name: str) -> None:
        if name in names and not again:
            deleted.append(name)
            if len(deleted) == 165:
                again.append(next(word for word in oldest if key(word) not in deleted))
                assert in_time(lambda: renew(again[0]))

    oldest = [f"n{k}" for k in range(170)]
    names = set(keys(oldest))
    hook(monkeypatch, "unlink", work)
    store.clean()
    assert len(again) == 1 and holds(store, again[0], record(9)) and store.evicted == 169
    assert store.exists(keys(oldest)) == [word == again[0] for word in oldest]
    # `_used` still counts the discarded record
    assert used(store) == 15_100 and store.folder._used == 15_200 and not store.faults


def test_a_record_used_during_a_clean_up_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = full(tmp_path, 3200, 64)
    met: list[str] = []

    def work(name: str) -> None:
        if name in names and not met:  # the scan has seen the record, which is used before it would be deleted
            met.append(name)
            os.utime(next(path for path in files(store) if path.name == name))

    names = set(keys(f"n{k}" for k in range(34)))
    hook(monkeypatch, "stat", lambda name, *_: work(name) if isinstance(name, str) else None)
    store.clean()
    assert store.exists(met) == [True] and store.evicted == 33


def reserves(store: FileStore, word: str, size: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Returns whether a record gets its room without waiting."""
    ready: list[bool] = []
    with monkeypatch.context() as patch:
        patch.setattr(store.folder._room, "wait_for", lambda asked: ready.append(asked()))
        store.folder.reserve(key(word), size)
    return ready == [True]


def test_who_writes_what_is_leaving_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer waits while the old record of its name is evicted: the eviction would delete the new record.

    Writers of other names do not wait.
    """
    store = full(tmp_path, None, 4)
    store.folder.capacity = 400
    asked: list[tuple[str, bool]] = []
    real = os.unlink

    def unlink(name: str, **where: Any) -> None:
        real(name, **where)
        if name == key("n0"):
            store.folder._used = 0  # there is room for every record
            asked.extend((word, reserves(store, word, 10, monkeypatch)) for word in ("n0", "other"))

    monkeypatch.setattr(os, "unlink", unlink)
    assert put(store, "new", record(5)) is DONE
    assert asked == [("n0", False), ("other", True)] and store.exists(keys(["n0", "new"])) == [False, True]


def test_a_clean_up_that_fails_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = full(tmp_path, 3200, 64)
    with monkeypatch.context() as patch:
        patch.setattr(store.folder, "_look", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            store.clean()
        with pytest.raises(ZeroDivisionError):
            put(store, "a", record(0))
    assert in_time(lambda: put(store, "b", record(1)) is DONE) and holds(store, "b", record(1))
    assert store.folder._used == used(store) and not store.folder._writing


@pytest.mark.parametrize("apart", [1, 0], ids=["", "all used at the same time"])
def test_the_least_recently_used_go_first_and_no_more_than_must(apart: int, tmp_path: Path) -> None:
    store = full(tmp_path, 3200, 32, apart)
    assert holds(store, "n0", record(0))  # a read is a use
    assert put(store, "n1", record(1)) is DONE  # a repeated write is a use
    assert put(store, "new", record(99)) is DONE
    there = store.exists(keys(f"n{k}" for k in range(32)))
    # evicted: 2 records (a sixteenth of the capacity), and one to make room for the new record
    assert there == [True] * 2 + [False] * 3 + [True] * 27 or not apart
    assert store.evicted == there.count(False) == 3 and holds(store, "new", record(99)) and not store.faults


@pytest.mark.parametrize("capacity", [100, 150, 1000, 3000])
def test_the_capacity_is_never_exceeded(capacity: int, tmp_path: Path) -> None:
    store, chance = FileStore(tmp_path, capacity=capacity), random.Random(capacity)
    for n in range(100):
        size = chance.choice([1, 40, 100])
        name = f"{size}-{chance.randrange(50)}"
        assert put(store, name, record(n, size)) is DONE and store.exists(keys([name])) == [True]
        assert used(store) <= capacity
    assert store.evicted > 0 and not store.faults


def test_a_full_store_is_looked_through_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store scans its folder once per sixteenth of its capacity that is written, not for every record."""
    store, looks = FileStore(tmp_path, capacity=64 * 100), []
    real = store.folder._look
    monkeypatch.setattr(store.folder, "_look", lambda: (looks.append(store.folder._cleaning), real())[1])
    for n in range(400):
        put(store, f"n{n}", record(n))
    assert 400 // 5 <= len(looks) <= 400 // 4 + 1
    assert all(looks)  # `_cleaning` is set during each scan, which keeps other threads from starting one


def test_a_record_beyond_the_capacity_costs_nobody_his_place(tmp_path: Path) -> None:
    store = FileStore(tmp_path, capacity=250)
    assert store.put(keys(["a", "big", "b"]), [record(0), record(1, 251), record(2)]) == [DONE, FAILED, DONE]
    assert store.faults == {"EFBIG": 1} and store.evicted == 0
    assert put(store, "exact", record(3, 250)) is DONE
    assert store.exists(keys(["a", "b", "exact"])) == [False, False, True]


def test_refused_writes_take_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path, capacity=3200)
    put(store, "a", record(0))
    with monkeypatch.context() as patch:
        refuse(patch, "write", errno.ENOSPC, lambda *_: True)
        for n in range(100):
            assert put(store, f"n{n}", record(n)) is FAILED
    assert store.put(keys([f"n{n}" for n in range(31)]), [record(n) for n in range(31)]) == [DONE] * 31
    assert store.evicted == 0 and holds(store, "a", record(0))


def test_two_processes_keep_the_capacity_together(tmp_path: Path) -> None:
    capacity, size = 20_000, 500

    def work(who: int) -> None:
        store = FileStore(tmp_path, capacity)
        for n in range(150):
            assert put(store, f"{who}-{n}", record(n, size)) is DONE
        assert store.evicted > 0 and not store.faults

    children = [in_child(lambda who=who: work(who)) for who in range(2)]
    assert [ended(child) for child in children] == [0, 0]
    store = FileStore(tmp_path, capacity)
    assert capacity // 2 < used(store) <= capacity + capacity // 16 + 2 * size
    store.clean()
    assert used(store) <= capacity


def test_what_cannot_be_deleted_does_not_stop_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = full(tmp_path, 3200, 32)
    with monkeypatch.context() as patch:
        refuse(patch, "unlink", errno.EPERM, lambda path: path == key("n0"))
        assert put(store, "new", record(99)) is DONE
    there = store.exists(keys(f"n{k}" for k in range(4)))
    assert store.faults == {"EPERM": 1} and there == [True, False, False, True]


@pytest.mark.parametrize("capacity", [None, 1000])
def test_what_the_dead_left_is_deleted(capacity: int | None, tmp_path: Path) -> None:
    first = FileStore(tmp_path)
    put(first, "a", record(0))
    left = [place(first, word).parent / first.folder.temporary() for word in ("a", "b")]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(5000))
    os.utime(left[0], (OLD, OLD))
    put(first, "c", record(2))  # this store has scanned the folder already
    assert left[0].exists()
    second = FileStore(tmp_path, capacity)
    put(second, "d", record(3))
    assert not left[0].exists() and left[1].exists()  # the other file is recent: somebody may be writing it
    os.utime(left[1], (OLD, OLD))
    first.clean()
    assert not left[1].exists() and first.exists(keys(["a", "c", "d"])) == [True] * 3


@pytest.mark.parametrize("ahead", [0, 700, 86400, -86400])
def test_a_clean_up_with_another_clock_spares_what_is_being_written(
    ahead: int, tmp_path: Path, monkeypatch: Any
) -> None:
    """Another machine cleans up before each write of this one. The folder's clock says how old files are."""
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + ahead)
    store, other = FileStore(tmp_path), FileStore(tmp_path)
    put(store, "b", record(1))
    left = place(store, "b").parent / store.folder.temporary()
    left.touch()
    hook(monkeypatch, "write", lambda *_: other.clean())
    assert put(store, "a", record(0)) is DONE and holds(store, "a", record(0)) and left.exists()
    os.utime(left, (OLD, OLD))
    other.clean()
    assert not left.exists() and not store.faults and not other.faults


def test_a_record_that_is_deleted_while_it_is_written_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    store = FileStore(tmp_path)
    hook(monkeypatch, "replace", lambda temporary, *_: next(tmp_path.rglob(temporary)).unlink())
    assert put(store, "a", record(0)) is FAILED and store.faults == {"ETIME": 1} and not files(store)
