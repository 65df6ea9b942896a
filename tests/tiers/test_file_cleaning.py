"""Cleaning up beside others: no lock is held while the system works, and what is written meanwhile stays."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memstate.tiers.stores.file import FileStore
from tests.support.file_case import DONE, OLD, files, get, holds, key, keys, place, put, record

CALLS = ("open", "stat", "fstat", "scandir", "unlink", "close", "mkdir", "replace", "write")


def full(path: Path, capacity: int | None, n: int) -> FileStore:
    """A store with n records of 100 bytes, the first of them longest unused, whatever its capacity."""
    FileStore(path).put(keys(f"n{k}" for k in range(n)), [record(k) for k in range(n)])
    store = FileStore(path, capacity)
    for k in range(n):
        os.utime(place(store, f"n{k}"), (OLD, OLD + k))
    return store


def hook(monkeypatch: pytest.MonkeyPatch, call: str, work: Callable[..., object]) -> None:
    """Does something ahead of each call of the system."""
    real = getattr(os, call)

    def hooked(*arguments: Any, **settings: Any) -> Any:
        work(*arguments)
        return real(*arguments, **settings)

    monkeypatch.setattr(os, call, hooked)


def in_time(work: Callable[[], object]) -> bool:
    """Whether another thread can do something now, in less than for ever."""
    done: list[object] = []
    thread = threading.Thread(target=lambda: done.append(work()), daemon=True)
    thread.start()
    thread.join(10)
    return bool(done)


def used(store: FileStore) -> int:
    return sum(path.stat().st_size for path in files(store))


def free(store: FileStore) -> bool:
    """Whether nobody has the lock of the store."""
    found = store.folder._room.acquire(blocking=False)
    if found:
        store.folder._room.release()
    return bool(found)


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
    """Records written meanwhile are counted once, whether they were met or not."""
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
        assert count is not None and used(store) <= count <= used(store) + 100  # n8 may have been met before it went


def test_a_record_written_during_a_clean_up_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the name of one that is about to be deleted, and even its time of use."""
    store = full(tmp_path, 16_000, 320)  # 170 must go, and after 161 there is room for one more
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
    assert used(store) == 15_100 and store.folder._used == 15_200 and not store.faults  # one was discarded


def test_a_record_used_during_a_clean_up_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = full(tmp_path, 3200, 64)
    met: list[str] = []

    def work(name: str) -> None:
        if name in names and not met:  # looked at, and used before it would be deleted
            met.append(name)
            os.utime(next(path for path in files(store) if path.name == name))

    names = set(keys(f"n{k}" for k in range(34)))
    hook(monkeypatch, "stat", lambda name, *_: work(name) if isinstance(name, str) else None)
    store.clean()
    assert store.exists(met) == [True] and store.evicted == 33


def reserves(store: FileStore, word: str, size: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a record gets its room without waiting for it."""
    ready: list[bool] = []
    with monkeypatch.context() as patch:
        patch.setattr(store.folder._room, "wait_for", lambda asked: ready.append(asked()))
        store.folder.reserve(key(word), size)
    return ready == [True]


def test_who_writes_what_is_leaving_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the new record would go for the old one; who writes another one does not wait."""
    store = full(tmp_path, None, 4)
    store.folder.capacity = 400
    asked: list[tuple[str, bool]] = []
    real = os.unlink

    def unlink(name: str, **where: Any) -> None:
        real(name, **where)
        if name == key("n0"):
            store.folder._used = 0  # there is room for all
            asked.extend((word, reserves(store, word, 10, monkeypatch)) for word in ("n0", "other"))

    monkeypatch.setattr(os, "unlink", unlink)
    assert put(store, "new", record(5)) is DONE
    assert asked == [("n0", False), ("other", True)] and store.exists(keys(["n0", "new"])) == [False, True]


def test_who_has_no_room_waits_for_who_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = full(tmp_path, 3200, 64)
    asked: list[bool] = []
    real = store.folder._evict

    def evict(*what: Any) -> None:
        asked.append(reserves(store, "second", 100, monkeypatch))
        real(*what)
        asked.append(reserves(store, "third", 100, monkeypatch))

    monkeypatch.setattr(store.folder, "_evict", evict)
    assert put(store, "first", record(0)) is DONE
    assert asked == [False, True]


def test_two_clean_ups_follow_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = full(tmp_path, 3200, 64)
    asked: list[bool] = []
    real = store.folder._look

    def look() -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(store.folder._room, "wait_for", lambda ready: asked.append(ready()))
            patch.setattr(store.folder, "_begin", lambda: None)
            patch.setattr(store.folder, "_clean", lambda: None)
            store.clean()
        return real()

    monkeypatch.setattr(store.folder, "_look", look)
    store.clean()
    monkeypatch.setattr(store.folder, "_look", real)
    store.clean()
    assert asked == [False] and store.evicted == 34


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


def test_a_record_written_by_two_at_a_time_is_counted_as_it_is(tmp_path: Path) -> None:
    """What was being written when a clean-up began has its name in it, or is counted by its name."""
    store = FileStore(tmp_path, capacity=3200)
    put(store, "a", record(0))
    store.folder.reserve(key("b"), 100)
    store.clean()
    assert store.folder._used == 200  # b is still being written
    store.folder.written(key("b"))  # and came to nothing
    store.clean()
    assert store.folder._used == 100 and get(store, "a")[0] is DONE
