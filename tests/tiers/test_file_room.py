"""Room for records in files: the least recently used go, and what is not the store's stays."""

import errno
import os
import random
from pathlib import Path

import pytest

from memstate.tiers.stores.file import FileStore
from tests.support.file_case import DONE, FAILED, OLD, files, holds, key, keys, place, put, record, refuse
from tests.support.processes import ended, in_child


@pytest.mark.parametrize("apart", [1, 0], ids=["", "all used at the same time"])
def test_the_least_recently_used_go_first_and_no_more_than_must(apart: int, tmp_path: Path) -> None:
    store = FileStore(tmp_path, capacity=3200)
    names = keys([f"n{n}" for n in range(32)])
    order = random.Random(7).sample(range(32), 32)
    assert store.put(names, [record(n) for n in range(32)]) == [DONE] * 32
    assert store.evicted == 0
    for age, n in enumerate(order):
        os.utime(place(store, names[n]), (OLD, OLD + age * apart))
    assert holds(store, names[order[0]], record(order[0]))  # used
    assert put(store, names[order[1]], record(order[1])) is DONE  # used
    assert put(store, "new", record(99)) is DONE
    gone = {name for name, there in zip(names, store.exists(names), strict=True) if not there}
    assert gone == {names[n] for n in order[2:5]} or not apart  # a sixteenth is 2 records, and one for the new one
    assert store.evicted == len(gone) == 3 and holds(store, "new", record(99)) and not store.faults


@pytest.mark.parametrize("capacity", [100, 150, 1000, 3000])
def test_the_capacity_is_never_exceeded(capacity: int, tmp_path: Path) -> None:
    store, chance = FileStore(tmp_path, capacity=capacity), random.Random(capacity)
    for n in range(100):
        size = chance.choice([1, 40, 100])
        name = f"{size}-{chance.randrange(50)}"
        assert put(store, name, record(n, size)) is DONE and store.exists(keys([name])) == [True]
        assert sum(path.stat().st_size for path in files(store)) <= capacity
    assert store.evicted > 0 and not store.faults


def test_a_full_store_is_looked_through_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for every record: once for a sixteenth of the capacity, however long it goes on."""
    store, looks = FileStore(tmp_path, capacity=64 * 100), []
    real = store.folder._look
    monkeypatch.setattr(store.folder, "_look", lambda: (looks.append(store.folder._cleaning), real())[1])
    for n in range(400):
        put(store, f"n{n}", record(n))
    assert 400 // 5 <= len(looks) <= 400 // 4 + 1
    assert all(looks)  # one thread at a time


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


def test_what_another_process_wrote_counts(tmp_path: Path) -> None:
    """From the first record on, and after a sixteenth of new ones."""
    one = FileStore(tmp_path, capacity=3200)
    put(one, "first", record(0))
    other = FileStore(tmp_path, capacity=3200)
    other.put(keys([f"n{n}" for n in range(31)]), [record(n) for n in range(31)])
    assert one.evicted == other.evicted == 0
    one.put(keys(["x", "y", "z"]), [record(1), record(2), record(3)])
    assert one.evicted >= 3 and sum(path.stat().st_size for path in files(one)) <= 3200


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
    used = sum(path.stat().st_size for path in files(store))
    assert capacity // 2 < used <= capacity + capacity // 16 + 2 * size
    store.clean()
    assert sum(path.stat().st_size for path in files(store)) <= capacity


def test_two_that_clean_at_once_delete_no_more_than_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second has looked before the first deletes, and deletes after it."""
    big, one, other = (FileStore(tmp_path, capacity) for capacity in (None, 3200, 3200))
    names = keys([f"n{n}" for n in range(64)])
    big.put(names, [record(n) for n in range(64)])
    for n, name in enumerate(names):
        os.utime(place(big, name), (OLD, OLD + n))
    real = other.folder._evict
    monkeypatch.setattr(other.folder, "_evict", lambda *what: (one.clean(), real(*what)))
    other.clean()
    assert big.exists(names) == [False] * 34 + [True] * 30
    assert (one.evicted, other.evicted) == (34, 0) and not one.faults and not other.faults


def test_what_cannot_be_deleted_does_not_stop_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path, capacity=3200)
    names = keys([f"n{n}" for n in range(32)])
    store.put(names, [record(n) for n in range(32)])
    for n, name in enumerate(names):
        os.utime(place(store, name), (OLD, OLD + n))
    with monkeypatch.context() as patch:
        refuse(patch, "unlink", errno.EPERM, lambda path: path == key("n0"))
        assert put(store, "new", record(99)) is DONE
    assert store.faults == {"EPERM": 1} and store.exists(names[:4]) == [True, False, False, True]


@pytest.mark.parametrize("capacity", [None, 1000])
def test_what_the_dead_left_is_deleted(capacity: int | None, tmp_path: Path) -> None:
    first = FileStore(tmp_path)
    put(first, "a", record(0))
    left = [place(first, word).parent / first.folder.temporary() for word in ("a", "b")]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(5000))
    os.utime(left[0], (OLD, OLD))
    put(first, "c", record(2))  # has looked already
    assert left[0].exists()
    second = FileStore(tmp_path, capacity)
    put(second, "d", record(3))
    assert not left[0].exists() and left[1].exists()  # somebody may be writing the other
    os.utime(left[1], (OLD, OLD))
    first.clean()
    assert not left[1].exists() and first.exists(keys(["a", "c", "d"])) == [True] * 3
