"""A file store whose system calls fail: a fault costs the record that met it, and is counted."""

import errno
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memstate.errors import ConfigurationError
from memstate.tiers.stores.base import RECORD, Outcome
from memstate.tiers.stores.file import FileStore
from tests.support.file_case import OLD, files, get, holds, key, keys, place, put, record, refuse

MISSING, DONE, DAMAGED, FAILED = Outcome


def is_file(descriptor: int) -> bool:
    """Returns whether a descriptor is a file, not a folder."""
    return stat.S_ISREG(os.stat(descriptor).st_mode)


@pytest.mark.sample
@pytest.mark.parametrize("call", ["open", "write", "fsync", "close", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_a_refused_write_leaves_nothing(call: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store writes five records. One system call of the third record fails."""
    store = FileStore(tmp_path, durable=True)
    names, data = keys([f"n{n}" for n in range(5)]), [record(n) for n in range(5)]
    for name in names:
        place(store, name).parent.mkdir(exist_ok=True)
    turn = 2 * 2 if call == "fsync" else 2  # for each record, a file and a folder are flushed
    calls = iter(range(1000))
    with monkeypatch.context() as patch:
        counts = {"open": lambda path, *_: path.endswith(".tmp"), "close": is_file}.get(call, lambda *_: True)
        refuse(patch, call, code, lambda *given: counts(*given) and next(calls) == turn)
        outcomes = store.put(names, data)
    assert outcomes == [DONE, DONE, FAILED, DONE, DONE]
    assert store.faults == {errno.errorcode[code]: 1}
    assert [path.name for path in files(store)].count(key("n2")) == 0 and len(files(store)) == 4
    assert [n for n in range(5) if holds(store, names[n], data[n])] == [0, 1, 3, 4]
    assert put(store, "n2", data[2]) is DONE and holds(store, "n2", data[2])


def test_a_disk_that_fills_up_in_the_middle(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes at most 7 bytes per write, until it is full."""
    real, room = os.write, [0]

    def write(descriptor: int, data: memoryview) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "full")
        done = real(descriptor, data[: room[0]][:7])
        room[0] -= done
        return done

    monkeypatch.setattr(os, "write", write)
    for size in range(100):
        room[0] = size
        assert put(store, "a", record(0)) is FAILED
        assert not files(store) and not store.exists(keys(["a"]))[0]
    room[0] = 100
    assert put(store, "a", record(0)) is DONE and holds(store, "a", record(0))
    assert store.faults == {"ENOSPC": 100}


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.EMFILE, errno.ESTALE])
@pytest.mark.parametrize("call", ["open", "fstat"])
def test_a_refused_read_fails_alone(call: str, code: int, store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    names, data = keys(["a", "b", "c"]), [record(n) for n in range(3)]
    store.put(names, data)
    calls = iter(range(100))
    counts = {"open": lambda path, *_: RECORD.fullmatch(path), "fstat": is_file}[call]
    refuse(monkeypatch, call, code, lambda *given: counts(*given) and next(calls) == 1)
    buffers = [np.empty(100, np.uint8) for _ in names]
    assert store.get(names, buffers) == [DONE, FAILED, DONE]
    assert store.faults == {errno.errorcode[code]: 1}
    assert holds(store, "b", data[1])  # the failed read has deleted nothing


def in_parts(monkeypatch: pytest.MonkeyPatch, before: Callable[[int], object]) -> list[int]:
    """Makes each read give three bytes at a time, and calls `before` in every second read.

    Returns the sizes of the reads.
    """
    real, reads = os.readv, []

    def readv(file: int, views: Sequence[memoryview]) -> int:
        if len(reads) % 2:
            before(file)
        reads.append(real(file, [views[0][:3]]))
        return reads[-1]

    monkeypatch.setattr(os, "readv", readv)
    return reads


def test_short_reads_are_continued(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, "a", record(0))
    reads = in_parts(monkeypatch, lambda file: None)
    assert holds(store, "a", record(0)) and reads == [3] * 33 + [1]


@pytest.mark.parametrize("left", [0, 3, 50, 99])
def test_B67_a_record_that_is_cut_while_it_is_read(left: int, store: FileStore, monkeypatch: Any) -> None:
    put(store, "a", record(0))
    in_parts(monkeypatch, lambda file: os.truncate(place(store, "a"), left))
    assert get(store, "a")[0] is DAMAGED and get(store, "a")[0] is MISSING


def test_a_record_evicted_while_it_is_read_comes_whole(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, "a", record(0))
    os.utime(place(store, "a"), (OLD, OLD))  # so old that a read notes its use
    in_parts(monkeypatch, lambda file: place(store, "a").unlink(missing_ok=True))
    assert holds(store, "a", record(0)) and not store.faults


def test_a_folder_that_vanishes_and_comes_back(store: FileStore) -> None:
    put(store, "a", record(0))
    away = store.folder.path.rename(store.folder.path.with_name("away"))
    assert put(store, "b", record(1)) is FAILED and store.faults == {"ENOENT": 1}
    assert store.exists(keys(["a"])) == [False] and get(store, "a")[0] is MISSING
    store.discard(keys(["a"]))
    store.clean()
    assert not store.folder.path.exists()  # no folder is made in place of one that is not mounted
    away.rename(store.folder.path)
    assert holds(store, "a", record(0)) and put(store, "b", record(1)) is DONE
    assert store.faults == {"ENOENT": 1}


@pytest.mark.parametrize("below", ["", "/deeper", "/deeper/still"])
def test_a_folder_that_cannot_be_made_is_refused(below: str, tmp_path: Path) -> None:
    path = f"{tmp_path}/file{below}"
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigurationError, match=rf"file store in {path}: .*(is no folder|Not a directory).* name a"):
        FileStore(path)


def test_a_home_is_found_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", f"{tmp_path}/home")
    for path in ("~/store", Path("~/store"), Path("~") / "store"):
        assert FileStore(path).folder.path == tmp_path / "home" / "store"
    with pytest.raises(ConfigurationError, match=r"~no-such user/x: there is no such home; write \./~no-such user/x"):
        FileStore("~no-such user/x")
    assert not list((tmp_path / "here").iterdir())
    assert put(FileStore("./~no-such user/x"), "a", record(0)) is DONE
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["~no-such user"]


@pytest.mark.parametrize("call", ["mkdir", "open"])
def test_a_folder_that_cannot_be_written_is_refused(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, call, errno.EACCES, lambda *_: True)
    with pytest.raises(ConfigurationError, match=rf"{tmp_path}/store: Permission denied"):
        FileStore(tmp_path / "store")
