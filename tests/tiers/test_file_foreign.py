"""A storage folder with files of others: no link is followed at any level, and foreign files stay as they are."""

import os
import socket
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memstate import errors
from memstate.errors import ConfigurationError
from memstate.tiers.stores.file import FileStore
from tests.support.file_case import DONE, FAILED, OLD, files, get, holds, key, keys, place, put, record, shard

pytestmark = pytest.mark.sample
LINKS = ("folder", "file", "dangling", "loop")
OTHERS, ANOTHER = (0o777, 0o770, 0o720, 0o702, 0o1777), 0
STALE = ".1-0123456789abcdef.tmp"


@pytest.fixture
def away(tmp_path: Path) -> Path:
    """A folder elsewhere with files that a store would delete: an old record, and a file that a dead process left."""
    folder = tmp_path / "away"
    folder.mkdir(0o700)
    for name in (key("a"), STALE):
        old(folder / name, 100)
    return folder


def old(path: Path, size: int) -> Path:
    """Makes a file that was last used long ago."""
    path.parent.mkdir(0o700, exist_ok=True)
    path.write_bytes(bytes(size))
    os.utime(path, (OLD, OLD))
    return path


def link(path: Path, kind: str, away: Path) -> None:
    """Makes a link to a folder, to an old record, to nothing or to itself."""
    targets = {"folder": away, "file": away / key("a"), "dangling": away / "nothing", "loop": path}
    path.symlink_to(targets[kind])


def look(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Returns path -> the figures that change if somebody touches the file, for everything below a folder."""
    stats = {path: path.lstat() for path in [folder, *sorted(folder.rglob("*"))]}
    return {
        str(path): (was.st_ino, was.st_mode, was.st_uid, was.st_size, was.st_mtime_ns, was.st_nlink)
        for path, was in stats.items()
    }


def refuses_all(store: FileStore, fault: str) -> None:
    """Requires that each call for a record fails or finds nothing, and that the faults are counted."""
    assert store.exists(keys(["a"])) == [False]
    assert get(store, "a")[0] is FAILED
    assert put(store, "a", record(0)) is FAILED
    store.discard(keys(["a"]))
    store.clean()
    assert set(store.faults) == {fault} and store.faults[fault] >= 4 and store.evicted == 0


@pytest.mark.parametrize("kind", LINKS)
def test_a_folder_that_becomes_a_link(kind: str, away: Path, tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store", capacity=100)
    store.folder.path.rename(tmp_path / "was")
    (away / shard("a")).mkdir(0o700)
    (away / shard("a") / key("a")).write_bytes(bytes(1000))
    link(tmp_path / "store", kind, away)
    before = look(away)
    refuses_all(store, "ENOTDIR")
    assert look(away) == before


def test_links_in_front_of_the_folder_are_the_users(away: Path, tmp_path: Path) -> None:
    link(tmp_path / "link", "folder", away)
    store = FileStore(tmp_path / "link" / "deep" / "store")
    assert put(store, "a", record(0)) is DONE and holds(store, "a", record(0)) and not store.faults
    assert (away / "deep" / "store" / shard("a") / key("a")).read_bytes() == record(0).tobytes()


PLACES = [("folder", kind) for kind in LINKS] + [("shard", kind) for kind in (*LINKS, "pipe", "no link")]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("where", "kind"), PLACES)
def test_what_is_no_folder_is_refused(where: str, kind: str, shared: bool, away: Path, tmp_path: Path) -> None:
    path = tmp_path / "store"
    if where == "shard":
        FileStore(path)
        path /= shard("a")
    make = {"pipe": os.mkfifo, "no link": lambda path: path.write_bytes(b"mine")}
    make.get(kind, lambda path: link(path, kind, away))(path)
    before = look(away), look(tmp_path / "store")
    for given in (tmp_path / "store", f"{tmp_path}/store/"):
        with pytest.raises(errors.UnsafeFolder, match=rf"{path}: mode .* is (a link|no folder)") as caught:
            FileStore(given, shared=shared)
        assert isinstance(caught.value, ConfigurationError) and caught.value.path == str(path)
    assert (look(away), look(tmp_path / "store")) == before


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", LINKS)
def test_a_shard_that_becomes_a_link(kind: str, shared: bool, away: Path, tmp_path: Path) -> None:
    """Nothing behind the link is found, read, written or deleted; other records are served."""
    store = FileStore(tmp_path / "store", capacity=100, shared=shared)
    put(store, "b", record(1))
    link(tmp_path / "store" / shard("a"), kind, away)
    before = look(away)
    refuses_all(store, "ENOTDIR")
    assert store.put(keys(["a", "c"]), [record(0), record(2)]) == [FAILED, DONE]  # the write of c evicts b
    assert store.exists(keys(["b", "c"])) == [False, True] and look(away) == before and store.evicted == 1


@pytest.mark.parametrize("kind", LINKS)
def test_a_record_that_is_a_link(kind: str, away: Path, tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store", capacity=100)
    place(store, "a").parent.mkdir(0o700)
    link(place(store, "a"), kind, away)
    before = look(away)
    assert store.exists(keys(["a"])) == [False] and get(store, "a")[0] is FAILED
    assert put(store, "b", record(1)) is DONE and put(store, "c", record(2)) is DONE  # c evicts b
    store.clean()
    assert place(store, "a").is_symlink() and store.evicted == 1
    assert put(store, "a", record(0)) is DONE and holds(store, "a", record(0))  # a write replaces the link
    assert look(away) == before and store.faults == {"ELOOP": 1}


@pytest.mark.parametrize("kind", LINKS)
def test_a_temporary_file_that_is_a_link(kind: str, away: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """A clean-up does not delete the link, and a write does not follow it, even if its name is guessed."""
    store = FileStore(tmp_path / "store")
    put(store, "a", record(0))
    path = place(store, "a").with_name(STALE)
    link(path, kind, away)
    os.utime(path, (OLD, OLD), follow_symlinks=False)
    before = look(away)
    store.clean()
    assert path.is_symlink() and look(away) == before
    store.discard(keys(["a"]))
    monkeypatch.setattr(store.folder, "temporary", lambda *_: STALE)
    assert put(store, "a", record(0)) is FAILED and store.faults == {"EEXIST": 1}
    assert look(away) == before


@pytest.mark.parametrize("kind", ["pipe", "folder", "socket"])
def test_what_is_no_file_is_no_record(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of a record may belong to something that is no file.

    The store does not wait for it, count it or delete it.
    """
    store = FileStore(tmp_path, capacity=100)
    path = place(store, "a")
    path.parent.mkdir(0o700)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        monkeypatch.chdir(path.parent)  # a path of a socket must be short
        with socket.socket(socket.AF_UNIX) as end:
            end.bind(path.name)
    os.utime(path, (OLD, OLD))
    before = path.lstat()
    assert store.exists(keys(["a"])) == [False]
    assert get(store, "a", 0)[0] is FAILED and get(store, "a", before.st_size + 1)[0] is FAILED
    assert store.put(keys(["b", "c"]), [record(1), record(2)]) == [DONE] * 2
    store.clean()
    assert (path.lstat().st_ino, path.lstat().st_mtime) == (before.st_ino, before.st_mtime) and store.evicted == 1
    assert store.faults == {"EISDIR" if kind == "folder" else "ENXIO": 2}
    assert put(store, "a", record(0)) is (FAILED if kind == "folder" else DONE)


def test_a_second_name_of_a_foreign_file(tmp_path: Path) -> None:
    """The record is a second name (hard link) of a foreign file.

    The store may remove this name, but changes neither bytes nor times of the file.
    """
    mine = tmp_path / "mine"
    store = FileStore(tmp_path / "store", capacity=200)
    place(store, "a").parent.mkdir(0o700)
    for call, there in ((get, True), (put, True), (lambda store, *_: put(store, "b", record(1, 150)), False)):
        mine.write_bytes(record(0).tobytes())
        os.utime(mine, (OLD, OLD))
        place(store, "a").unlink(missing_ok=True)
        os.link(mine, place(store, "a"))
        call(*((store, "a") if call is get else (store, "a", record(0))))
        store.clean()
        assert mine.read_bytes() == record(0).tobytes() and mine.stat().st_mtime == OLD
        assert place(store, "a").exists() == there
    os.link(mine, place(store, "a"))
    assert put(store, "a", record(2, 50)) is DONE and mine.read_bytes() == record(0).tobytes()


DIGEST = key("a").removeprefix("kv-")
FOREIGN = ["id_rsa", ".keep", "kv-", "records-00", f"x{STALE}", f"{STALE}.bak", ".1-0123456789abcde.tmp"]
FOREIGN += [DIGEST, f"kv-{DIGEST[1:]}", f"kv-{DIGEST}0", f"kv-{DIGEST.upper()}", f"x-{DIGEST}", f"kv-{DIGEST}\n"]


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_names_are_left_alone(name: str, tmp_path: Path) -> None:
    """Foreign files in the folder and in shards are neither deleted nor counted, so they evict no record."""
    store = FileStore(tmp_path / "store", capacity=1600)
    put(store, "a", record(0))
    os.utime(place(store, "a"), (OLD + 1, OLD + 1))
    mine = f"records-{zlib.crc32(name.encode()) % 256:02x}"  # the shard of a record of this name
    folders = [tmp_path / "store" / folder for folder in ("", "records-00", shard("a"), mine)]
    foreign = {}
    for folder in folders:
        if not (folder / name).exists():
            foreign[folder / name] = old(folder / name, 1000).stat()
    other = FileStore(tmp_path / "store", capacity=1600)
    assert other.put(keys(f"n{n}" for n in range(15)), [record(n) for n in range(15)]) == [DONE] * 15
    other.clean()
    assert other.exists(keys(["a"])) == [True] and other.evicted == 0  # 1600 bytes of records are the whole capacity
    assert put(other, "new", record(1)) is DONE and other.evicted == 2  # room for the new record, and a sixteenth
    assert {path: path.stat() for path in foreign} == foreign and len(foreign) >= 2 and not other.faults


def another_owns(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> None:
    """Makes the system say that files belong to another user, whoever runs the tests."""
    theirs = {path.stat().st_ino for path in paths}

    def told(status: os.stat_result) -> Any:
        values = {name: getattr(status, name) for name in dir(status) if name.startswith("st_")}
        return SimpleNamespace(**values | {"st_uid": status.st_uid + 1}) if status.st_ino in theirs else status

    def patched(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **settings: told(real(*arguments, **settings))

    class Entry:
        def __init__(self, real: Any) -> None:
            self.name, self.path, self.is_file, self.stat = real.name, real.path, real.is_file, patched(real.stat)

    scandir = os.scandir

    @contextmanager
    def scanned(where: Any) -> Iterator[Any]:
        with scandir(where) as entries:
            yield map(Entry, entries)

    for name in ("stat", "lstat", "fstat"):
        monkeypatch.setattr(os, name, patched(getattr(os, name)))
    monkeypatch.setattr(os, "scandir", scanned)


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a superuser's store refuses the folder, because the owner of the folder could make up states."""
    folder = tmp_path / "store"
    put(FileStore(folder), "a", record(0))
    for path in (folder, folder / shard("a")):
        before = look(folder)
        with monkeypatch.context() as patch:
            another_owns(patch, path)
            with pytest.raises(ConfigurationError, match=rf"{path}: mode 0o700, owner {os.geteuid() + 1}, is another"):
                FileStore(folder)
            assert holds(FileStore(folder, shared=True), "a", record(0))
        assert {name: was[:4] for name, was in look(folder).items()} == {name: was[:4] for name, was in before.items()}


def test_a_record_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path, capacity=200)
    theirs = [old(place(store, "a"), 150), old(place(store, "a").with_name(STALE), 150)]
    with monkeypatch.context() as patch:
        another_owns(patch, *theirs)
        assert store.exists(keys(["a"])) == [False]
        assert get(store, "a", 150)[0] is FAILED and get(store, "a", 100)[0] is FAILED and store.faults == {"EPERM": 2}
        assert store.put(keys(["b", "c"]), [record(1), record(2)]) == [DONE] * 2
        store.clean()
        # files of other users are not counted
        assert store.evicted == 0 and all(path.stat().st_mtime == OLD for path in theirs)
        assert put(store, "a", record(3)) is DONE  # a write replaces the file, and does not read it
    assert holds(store, "a", record(3))


@pytest.mark.parametrize("mode", OTHERS, ids=oct)
def test_a_folder_that_others_may_write_to_is_refused(mode: int, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    put(FileStore(folder), "a", record(0))
    for path in (folder, folder / shard("a")):
        path.chmod(mode)
        before = look(folder)
        with pytest.raises(
            ConfigurationError, match=r"others may write to: chmod go-w, .* or say shared=True"
        ) as caught:
            FileStore(folder)
        error = caught.value
        assert isinstance(error, errors.UnsafeFolder)
        assert (error.path, error.mode, error.owner) == (str(path), mode, os.geteuid())
        assert f"{path}: mode {mode:#o}, owner {os.geteuid()}, is" in str(error)
        assert look(folder) == before
        store = FileStore(folder, shared=True)
        assert holds(store, "a", record(0)) and put(store, "b", record(1)) is DONE and not store.faults
        store.discard(keys(["b"]))
        path.chmod(0o700)


@pytest.mark.parametrize("mode", [*OTHERS, ANOTHER], ids=lambda mode: oct(mode) if mode else "another user's")
@pytest.mark.parametrize("level", ["folder", "shard"])
def test_a_folder_that_others_may_write_to_since(
    level: str, mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path / "store", capacity=50)
    put(FileStore(tmp_path / "store"), "a", record(0))
    before, folder = look(place(store, "a")), store.folder.path if level == "folder" else place(store, "a").parent
    with monkeypatch.context() as patch:
        another_owns(patch, folder) if mode == ANOTHER else folder.chmod(mode)
        refuses_all(store, "EPERM")
    assert look(place(store, "a")) == before


@pytest.mark.parametrize("mode", [0o700, 0o711, 0o750, 0o755, 0o2700], ids=oct)
def test_a_folder_that_others_may_only_read_is_taken_as_it_is(mode: int, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(mode)
    store = FileStore(tmp_path / "store")
    assert put(store, "a", record(0)) is DONE and holds(FileStore(tmp_path / "store"), "a", record(0))
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == mode
    assert stat.S_IMODE(place(store, "a").parent.stat().st_mode) == 0o700


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    yield
    os.umask(before)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077, 0o177], ids=oct)
@pytest.mark.parametrize("shared", [False, True])
def test_what_is_made_is_for_this_user_alone(shared: bool, mask: int, tmp_path: Path) -> None:
    tmp_path.chmod(0o2777)  # new folders would inherit its group
    with umask(mask):
        store = FileStore(tmp_path / "store", shared=shared)
        put(store, "a", record(0))
    for path in (store.folder.path, place(store, "a").parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE(place(store, "a").stat().st_mode) == 0o600


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="this system does not say what is open")
def test_nothing_stays_open(away: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path / "store", capacity=250)
    link(tmp_path / "store" / shard("a"), "folder", away)
    place(store, "b").parent.mkdir(0o700, exist_ok=True)
    link(place(store, "b"), "folder", away)
    before = os.listdir("/proc/self/fd")
    for _ in range(2):
        store.put(keys(["a", "b", "c", "d", "e"]), [record(n) for n in range(5)])
        store.exists(keys(["a", "b", "c", "d", "e"]))
        for size in (100, 99):
            get(store, "c", size), get(store, "b", size), get(store, "a", size)
        store.discard(keys(["a", "b", "c"]))
        store.clean()
    with pytest.raises(ConfigurationError):
        FileStore(tmp_path / "store")
    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        store.folder.root()
    assert os.listdir("/proc/self/fd") == before and len(files(store)) <= 4


def test_a_system_without_descriptors_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memstate.tiers.stores.folder.DESCRIPTORS", False)
    with pytest.raises(ConfigurationError, match="relative to a folder"):
        FileStore(tmp_path / "store")
    assert not list(tmp_path.iterdir())


REFUSED = [({"shared": value}, ConfigurationError, "expected True or False") for value in ("false", "0", 1, None)]
REFUSED += [
    ({"path": path}, errors.InvalidArgument, "expected the folder of a file") for path in ("", None, 3, b"store")
]
REFUSED += [({"path": path}, errors.InvalidArgument, "no null byte") for path in ("a\0b", "\0", Path("a\0", "b"))]
REFUSED += [({"capacity": value}, errors.InvalidArgument, "capacity") for value in (0, -1, 1.5, "1 GiB")]


@pytest.mark.parametrize(("settings", "error", "message"), REFUSED)
def test_settings_that_make_no_sense_are_refused(
    settings: dict[str, Any], error: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        FileStore(**({"path": tmp_path / "records"} | settings))
    assert not list(tmp_path.iterdir())


def test_a_relative_path_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("here", "there"):
        (tmp_path / name / "records").mkdir(parents=True, mode=0o700)
    monkeypatch.chdir(tmp_path / "here")
    store = FileStore("records")
    monkeypatch.chdir(tmp_path / "there")
    assert store.folder.path == tmp_path / "here" / "records"
    assert not list((tmp_path / "there" / "records").iterdir())
