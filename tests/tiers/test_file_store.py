"""Records in files: what was put comes back, and other files in place of a record do no harm."""

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memstate import Plane, StateLayout
from memstate.tiers.records import FLAWS, RecordFormat
from memstate.tiers.stores.base import Outcome
from memstate.tiers.stores.file import FileStore
from tests.support.file_case import OLD, get, holds, keys, place, put, record

MISSING, DONE, DAMAGED, FAILED = Outcome

FORM = RecordFormat("kv", StateLayout((Plane("k", (3,), torch.int8), Plane("v", (17,), torch.int8)), 1), bytes(32))
KEY = bytes(range(32))


@pytest.mark.parametrize("size", [0, 1, 15, 4096, 1 << 20])
def test_what_was_put_comes_back(size: int, store: FileStore, tmp_path: Path) -> None:
    names, data = keys([f"kv-{n}" for n in range(5)]), [record(n, size) for n in range(5)]
    assert store.exists(names) == [False] * 5
    assert store.put(names[:3], data[:3]) == [DONE] * 3
    assert store.exists(names) == [True] * 3 + [False] * 2
    buffers = [np.full(size, 0x5A, np.uint8) for _ in names]
    other = FileStore(tmp_path / "store")
    assert other.get(names, buffers) == [DONE] * 3 + [MISSING] * 2
    assert [b.tobytes() for b in buffers[:3]] == [d.tobytes() for d in data[:3]]
    assert not store.faults and not other.faults
    store.close()


def test_a_record_that_is_there_stays(store: FileStore) -> None:
    put(store, "a", record(0))
    inode, old = place(store, "a").stat().st_ino, (OLD, OLD)
    os.utime(place(store, "a"), old)
    assert put(store, "a", record(1)) is DONE
    assert place(store, "a").stat().st_ino == inode and holds(store, "a", record(0))
    assert place(store, "a").stat().st_mtime > OLD  # a repeated put counts as a use


def test_a_use_is_noted_once_a_minute(store: FileStore) -> None:
    put(store, "a", record(0))
    path = place(store, "a")
    for age, noted in ((30, False), (90, True), (-90, True)):  # -90: written by a machine whose clock is ahead
        os.utime(path, (OLD, before := path.stat().st_mtime - age))
        before = path.stat().st_mtime
        assert holds(store, "a", record(0))
        assert (path.stat().st_mtime != before) == noted


@pytest.mark.parametrize("durable", [False, True])
def test_durable_flushes_before_and_after_the_name(durable: bool, tmp_path: Path, monkeypatch: Any) -> None:
    store, calls = FileStore(tmp_path, durable=durable), []
    for name in ("write", "fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, real=real, name=name, **k: (calls.append(name), real(*a, **k))[1])
    put(store, "a", record(0))
    put(store, "a", record(0))
    folder = ["fsync"] * durable
    assert calls == [*folder, "write", *folder, "replace", *folder]


@pytest.mark.parametrize("durable", [False, True])
def test_durable_flushes_every_folder_that_has_a_new_name(durable: bool, tmp_path: Path, monkeypatch: Any) -> None:
    """A folder is flushed after its last new name. A folder that another process has just made counts as new."""
    calls: list[tuple[str, Path]] = []
    mkdir, fsync = os.mkdir, os.fsync

    def made(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        mkdir(path, mode, dir_fd=dir_fd)
        calls.append(("in", Path(os.readlink(f"/proc/self/fd/{dir_fd}") if dir_fd is not None else path.parent)))

    def flushed(file: int) -> None:
        fsync(file)
        calls.append(("flush", Path(os.readlink(f"/proc/self/fd/{file}"))))

    monkeypatch.setattr(os, "mkdir", lambda path, *a, **k: made(Path(path), *a, **k))
    monkeypatch.setattr(os, "fsync", flushed)
    FileStore(tmp_path / "a" / "b" / "store", durable=durable)
    named = [tmp_path, tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "store"]
    assert {folder for what, folder in calls if what == "in"} == set(named)
    for folder in named:
        assert [what for what, where in calls if where == folder] == ["in"] + ["flush"] * durable, folder
    calls.clear()
    FileStore(tmp_path / "a" / "b" / "store", durable=durable)
    assert {folder for what, folder in calls if what == "flush"} == (set(named[2:]) if durable else set())


def test_B67_a_truncated_record_is_a_miss_and_makes_room(store: FileStore) -> None:
    for size in [*range(100), 101, 5000]:
        place(store, "a").parent.mkdir(exist_ok=True)
        place(store, "a").write_bytes(bytes(size))
        assert get(store, "a")[0] is DAMAGED
        assert get(store, "a")[0] is MISSING
    place(store, "a").write_bytes(bytes(99))
    # so far, no read has removed the damaged file
    assert put(store, "a", record(0)) is DONE and holds(store, "a", record(0))
    assert not store.faults


def test_B67_every_damaged_byte_of_a_file_is_found(store: FileStore) -> None:
    whole = record(0, FORM.nbytes)
    FORM.seal(whole, KEY, 64)
    name = FORM.name(KEY)
    put(store, name, whole)
    for at in range(FORM.nbytes):
        damaged = bytearray(whole.tobytes())
        damaged[at] ^= random.Random(at).randrange(1, 256)
        place(store, name).write_bytes(damaged)
        outcome, body = get(store, name, FORM.nbytes)
        assert outcome is DONE and FORM.flaw(body, KEY, 64) in FLAWS
    store.discard(keys([name]))
    assert put(store, name, whole) is DONE
    assert FORM.flaw(get(store, name, FORM.nbytes)[1], KEY, 64) == ""
