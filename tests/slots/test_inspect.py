"""The file of an inspection: `load` gives back what `save` wrote and refuses all else by name; `save` is atomic."""

import copy
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import memstate as ms
from memstate import viz
from memstate.prefix.policies import Lru
from memstate.slots import inspect as module
from memstate.slots.audit import audit
from memstate.slots.inspect import Inspection
from tests.support.build import build

LAYOUT = ms.StateLayout((ms.Plane("ssm", (4,), torch.float32),), 1)
T = list(range(16))
Tree = dict[str, Any]


@cache
def busy() -> Inspection:
    """A manager with everything that a file can hold: rows, a cache, sessions, ids in an open group, and a journal."""
    mem = build(
        LAYOUT, slots=12, max_requests=3, snapshots=8, page_size=4, journal=9,
        tracking=ms.Redirect(8), prefix=ms.Prefix(states=Lru()), tiers=ms.Tiers("toy", 4),
        backend="reference",
    )  # fmt: skip
    session = mem.sessions.open("chat")
    for request in (ms.Request("a", tokens=T, salt="tenant"), ms.Request("b", tokens=T[:9], session=session)):
        (row,) = mem.admit([request])
        mem.extend([row], [len(request.tokens)])  # type: ignore[arg-type]
        while (done := mem.info(row).length) < len(request.tokens):  # type: ignore[arg-type]
            mem.settle(mem.plan([row], min(mem.info(row).next_boundary, len(request.tokens)) - done))  # type: ignore[arg-type]
        mem.end([row], keep="cache", tokens=[request.tokens])
    rows = mem.admit([ms.Request("c", tokens=T, salt="tenant"), ms.Request("d\ud800\n")])
    mem.plan(rows, 1)
    with mem.pool.allocator.group(2):
        return mem.inspect()


def tree() -> Tree:
    """What `save` writes, as JSON reads it."""
    found: Tree = json.loads(json.dumps(vars(busy())))
    return {"format": module.FORMAT, **found}


def stored(folder: Path, content: Any) -> Path:
    path = folder / "own\ners.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def refusal(path: Path) -> str:
    """What is said of a file that is refused: one line that can be read and names the file."""
    with pytest.raises(ms.InvalidArgument, match="not an inspection") as caught:
        Inspection.load(path)
    text = str(caught.value)
    assert text.startswith(f"{str(path)!r}: not an inspection: ") and text.isprintable() and len(text) < 600
    return text


def test_the_inspection_of_these_tests_has_everything(tmp_path: Path) -> None:
    found = busy()
    empty = [name for name, value in vars(found).items() if value in ([], {})]
    assert (
        empty == ["summary", "faults"]
        and any(node["register"] for node in found.prefix)
        and found.sessions[0]["states"]
    )
    found.save(tmp_path / "x")
    assert Inspection.load(tmp_path / "x") == found


def put(*path: str | int, value: Any) -> Callable[[Tree], None]:
    """Sets a value; an index one past the end of a list appends."""

    def change(found: Any) -> None:
        for part in path[:-1]:
            found = found[part]
        if isinstance(found, list) and path[-1] == len(found):
            found.append(value)
        else:
            found[path[-1]] = value

    return change


def drop(*path: str | int) -> Callable[[Tree], None]:
    def change(found: Any) -> None:
        for part in path[:-1]:
            found = found[part]
        del found[path[-1]]

    return change


REGISTER = next(iter(busy().names))
EMPTY = busy().slots.index(0)
LAST = len(busy().slots)
WRONG: dict[str, tuple[Callable[[Tree], None], str]] = {
    **{
        f"capacity={value!r}": (put("capacity", value=value), f"capacity is {value!r}, expected")
        for value in (True, -1, 0, 12.0, "12", None, [12], 2**31, float("nan"), float("inf"))
    },
    "another capacity": (put("capacity", value=13), "owners has 13 entries, expected 14"),
    "no capacity": (drop("capacity"), "capacity is missing"),
    "no format": (drop("format"), "format is missing"),
    "format": (put("format", value="memstate inspection 1"), "format is 'memstate inspection 1', expected 'memstate"),
    "more": (put("colour", value="red"), "'colour' is no field"),
    "no stats": (drop("stats"), "stats is missing"),
    "owners: short": (drop("owners", 3), "owners has 12 entries, expected 13"),
    "owners: negative": (put("owners", 3, value=-1), "owners[3] is -1, expected"),
    "owners: too many": (put("owners", 3, value=LAST + 1), f"owners[3] is {LAST + 1}, expected"),
    "owners: boolean": (put("owners", 3, value=False), "owners[3] is False, expected"),
    "owners: None": (put("owners", value=None), "owners is None, expected a list"),
    "free: number": (put("free", 0, value=0), "free[0] is 0, expected true or false"),
    "free: long": (put("free", 13, value=True), "free has 14 entries, expected 13"),
    "slots: huge": (put("slots", 3, value=2**31), "slots[3] is 2147483648, expected"),
    "slots: text": (put("slots", 3, value="1"), "slots[3] is '1', expected"),
    "slots: float": (put("slots", 3, value=1.0), "slots[3] is 1.0, expected"),
    "slots: object": (put("slots", value={"0": 1}), "slots is {'0': 1}, expected a list"),
    "slots: a held register empty": (put("slots", REGISTER, value=0), f"names['{REGISTER}'] is "),
    "slots: an empty register held": (put("slots", EMPTY, value=4), f"names['{EMPTY}'] is missing"),
    "labels: short": (drop("labels", 0), f"labels has {LAST - 1} entries, expected {LAST}"),
    "labels: huge": (put("labels", 0, value=-(2**31) - 1), "labels[0] is -2147483649, expected"),
    "labels: boolean": (put("labels", 0, value=True), "labels[0] is True, expected"),
    **{
        f"{field}: {key!r}": (put(field, key, value="live"), f"{field}[{key!r}] is 'live', expected no such")
        for field in ("names", "kinds", "tags")
        for key in ("-1", str(LAST), str(EMPTY), "9" * 50, "x", "", f"0{REGISTER}", f" {REGISTER}", "1.0", "\u0663")
    },
    "names: number": (put("names", str(REGISTER), value=4), f"names['{REGISTER}'] is 4, expected a text"),
    "names: list": (put("names", value=[]), "names is [], expected an object"),
    "names: missing": (drop("names", str(REGISTER)), f"names['{REGISTER}'] is missing"),
    "kinds: missing": (drop("kinds", str(REGISTER)), f"kinds['{REGISTER}'] is missing"),
    "kinds: free": (put("kinds", str(REGISTER), value="free"), f"kinds['{REGISTER}'] is 'free', expected one of"),
    "kinds: list": (put("kinds", str(REGISTER), value=[]), f"kinds['{REGISTER}'] is [], expected one of"),
    "tags: None": (put("tags", str(REGISTER), value=None), f"tags['{REGISTER}'] is None, expected a text"),
    **{
        f"by_id: {value!r}": (put("by_id", 1, value=value), f"by_id[1] is {value!r}, expected")
        for value in (-1, 13, True, 2.5, 10**30, busy().by_id[0])
    },
    "rows: number": (put("rows", value=3), "rows is 3, expected a list"),
    "rows: list": (put("rows", 0, value=[]), "rows[0] is [], expected an object"),
    "rows: null row": (put("rows", 0, "row", value=0), "rows[0].row is 0, expected"),
    "rows: unknown": (put("rows", 1, "row", value=LAST // 3), f"rows[1].row is {LAST // 3}, expected"),
    "rows: twice": (put("rows", 1, "row", value=busy().rows[0]["row"]), "rows[1].row is"),
    "rows: length": (put("rows", 0, "length", value=-1), "rows[0].length is -1, expected"),
    "rows: finished": (put("rows", 0, "finished", value=1), "rows[0].finished is 1, expected true or false"),
    "rows: id": (put("rows", 0, "id", value=1), "rows[0].id is 1, expected a text"),
    "rows: more": (put("rows", 0, "more", value=1), "rows[0]: 'more' is no field"),
    "rows: less": (drop("rows", 0, "unsettled"), "rows[0].unsettled is missing"),
    "prefix: register": (put("prefix", 0, "register", value=LAST), f"prefix[0].register is {LAST}, expected"),
    "prefix: start": (put("prefix", 0, "start", value=10**6), "prefix[0].start is 1000000, expected"),
    "prefix: salt": (put("prefix", 0, "salt", value=5), "prefix[0].salt is 5, expected"),
    "prefix: ghost": (put("prefix", 0, "ghost", value="no"), "prefix[0].ghost is 'no', expected true or false"),
    "prefix: children": (put("prefix", 0, "children", value=-1), "prefix[0].children is -1, expected"),
    "sessions: row": (put("sessions", 0, "row", value=LAST), f"sessions[0].row is {LAST}, expected"),
    "sessions: state": (put("sessions", 0, "states", 0, value=[1]), "sessions[0].states[0] has 1 entries, expected 2"),
    "sessions: register": (put("sessions", 0, "states", 0, 0, value=LAST), "sessions[0].states[0][0] is"),
    "sessions: length": (put("sessions", 0, "states", 0, 1, value=-1), "sessions[0].states[0][1] is -1, expected"),
    "prefix: parent": (put("prefix", 1, "parent", value=1), "prefix[1].parent is 1, expected"),
    "prefix: root": (put("prefix", 0, "parent", value=-2), "prefix[0].parent is -2, expected"),
    "prefix: apart": (put("prefix", 0, "start", value=1), "prefix[0].start is 1, expected"),
    "changes: number": (put("changes", 0, value=1), "changes[0] is 1, expected an object"),
    "changes: what": (put("changes", 0, "what", value="lost"), "changes[0].what is 'lost', expected one of claim"),
    "changes: order": (put("changes", 1, "serial", value=1), "changes[1].serial is 1, expected more than"),
    "layout: order": (put("layout", "order", value=3), "layout.order is 3, expected a text"),
    "layout: shape": (put("layout", "planes", 0, "shape", value=[-1]), "layout.planes[0].shape[0] is -1, expected"),
    "layout: page": (put("layout", "page_size", value=0), "layout.page_size is 0, expected"),
    "faults: number": (put("faults", value=[1]), "faults[0] is 1, expected a text"),
    "stats: negative": (put("stats", "launches", value=-1), "stats.launches is -1, expected"),
    "stats: boolean": (put("stats", "launches", value=True), "stats.launches is True, expected"),
    "stats: NaN": (put("stats", "tiers", "states_in", value=float("nan")), "stats.tiers.states_in is nan, expected"),
    "stats: huge": (put("stats", "prefix", "pages", value=2**63), "stats.prefix.pages is 9223372036854775808"),
    "stats: list": (put("stats", "prefix", value=[]), "stats.prefix is [], expected"),
    "stats: deep": (put("stats", "x", value={"a": {"b": {"c": {"d": 1}}}}), "stats.x.a.b.c is"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_save_does_not_write_is_refused_by_field_and_value(tmp_path: Path, case: str) -> None:
    found, (change, why) = tree(), WRONG[case]
    change(found)
    assert why in refusal(stored(tmp_path, found))


TEXTS = {
    "nothing": (b"", "Expecting value"),
    "no JSON": (b"{'a': 1}", "Expecting property name"),
    "a list": (b"[]", "it is [], expected an object"),
    "null": (b"null", "it is None, expected an object"),
    "Latin-1": (b'{"format": "\xe9"}', "utf-8"),
    "UTF-16": (json.dumps(tree()).encode("utf-16"), "utf-8"),
    "a mark": (b"\xef\xbb\xbf" + json.dumps(tree()).encode(), "BOM"),
    "two": (json.dumps(tree()).encode() * 2, "Extra data"),
    "a field twice": (json.dumps(tree()).encode()[:-1] + b', "capacity": 12}', "'capacity' stands there twice"),
    "a key twice": (b'{"format": "memstate inspection 2", "names": {"3": "a", "3": "b"}}', "'3' stands there twice"),
    "digits": (json.dumps(tree()).encode().replace(b'"capacity": 12', b'"capacity": ' + b"1" * 5000), "digits"),
    **{f"{depth} lists": (b"[" * depth + b"]" * depth, "") for depth in (10, 500, 990, 5_000, 100_000)},
    **{f"{depth} objects": (b'{"a": ' * depth + b"1" + b"}" * depth, "") for depth in (500, 990, 100_000)},
}  # fmt: skip


@pytest.mark.parametrize(("content", "why"), TEXTS.values(), ids=TEXTS)
def test_what_is_no_json_of_one_object_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    assert why in refusal(stored(tmp_path, content))


def test_nesting_within_a_field_is_refused(tmp_path: Path) -> None:
    text = json.dumps(tree() | {"faults": ["HERE"]}).encode()
    for depth in (3, 900, 100_000):
        refusal(stored(tmp_path, text.replace(b'"HERE"', b"[" * depth + b"]" * depth)))


def test_large_files_are_refused_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stored(tmp_path, tree())
    size = path.stat().st_size
    monkeypatch.setattr(module, "LARGEST", size)
    assert Inspection.load(path) == busy()
    monkeypatch.setattr(module, "LARGEST", size - 1)
    assert f"it has more than {size - 1} bytes" in refusal(path)
    monkeypatch.undo()
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # a hole: no machine could read it
    assert f"it has more than {module.LARGEST} bytes" in refusal(path)
    if os.path.exists("/dev/zero"):  # has no size
        refusal(Path("/dev/zero"))


def test_places_without_a_file(tmp_path: Path) -> None:
    for name in ("none", "."):
        with pytest.raises(OSError):
            Inspection.load(tmp_path / name)
    with pytest.raises(ms.InvalidArgument, match="null"):
        Inspection.load("a\0b")


@pytest.mark.parametrize("slot", [13, 2**31 - 1, -1, -(2**31)])
def test_a_foreign_slot_of_a_faulty_device_is_kept_for_the_audit(tmp_path: Path, slot: int) -> None:
    """A register of a device can hold any int32. The audit names its owner, so a file keeps it."""
    found = tree()
    found["slots"][REGISTER] = slot
    read = Inspection.load(stored(tmp_path, found))
    assert audit(read).foreign == [read.names[REGISTER]]
    assert len(viz.holdings(read)) == read.capacity


def places(found: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every place of a tree."""
    inner = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    return [path, *(place for key, value in inner for place in places(value, (*path, key)))]


PLACES = places(tree())
NUMBERS = st.sampled_from(
    [0, 1, -1, 2, 3, 12, 13, 24, 2**31 - 1, 2**31, -(2**31), 2**63, 10**40, 0.0, 1.0, -0.0, 1e400]
)
VALUES = st.one_of(
    NUMBERS, st.integers(-3, 30), st.none(), st.booleans(), st.text(max_size=3), st.just(float("nan")),
    st.sampled_from(["live", "free", "0", "1", "-1", "\ud800"]),
    st.recursive(NUMBERS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner)),
)  # fmt: skip
EDITS = st.tuples(st.sampled_from(PLACES), st.sampled_from(["set", "drop", "copy", "key"]), VALUES)


def edited(found: Any, path: tuple[str | int, ...], how: str, value: Any) -> Any:
    """A tree with one change; as it is where an earlier change took the place away."""
    if not path:
        return value if how == "set" else found
    inner, last = found, path[-1]
    try:
        for part in path[:-1]:
            inner = inner[part]
        old = inner[last]
        if how == "set":
            inner[last] = value
        elif how == "drop":
            del inner[last]
        elif isinstance(inner, list):
            inner.append(copy.deepcopy(old))
        else:
            inner[str(value)] = inner.pop(last) if how == "key" else copy.deepcopy(old)
    except (LookupError, TypeError, AttributeError):
        pass
    return found


def loads_whole_or_refuses(path: Path) -> bool:
    """Whether it was loaded: then it is saved as what it was, and all that uses an inspection works."""
    try:
        found = Inspection.load(path)
    except ms.InvalidArgument as error:
        assert "\n" not in str(error) and str(path.name) in str(error)
        return False
    again = path.with_suffix(".again")
    found.save(again)
    assert Inspection.load(again) == found
    Inspection.load(again).save(path)
    assert path.read_bytes() == again.read_bytes()
    report = audit(found)
    assert str(report) and report.free <= found.capacity
    assert len(viz.holdings(found)) == found.capacity
    return True


FUZZ = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(edits=st.lists(EDITS, min_size=1, max_size=3))
def test_a_changed_tree_loads_whole_or_is_refused(tmp_path: Path, edits: list[Any]) -> None:
    found: Any = tree()
    for path, how, value in edits:
        found = edited(found, path, how, value)
    path = tmp_path / "x.json"
    path.write_text(json.dumps(found))
    loads_whole_or_refuses(path)


@FUZZ
@given(data=st.data())
def test_a_changed_text_loads_whole_or_is_refused(tmp_path: Path, data: st.DataObject) -> None:
    """Bytes in place of others, lines that go or come twice, and an end that is cut off."""
    path = tmp_path / "x.json"
    busy().save(path)
    text = path.read_bytes()
    at, to = sorted(data.draw(st.integers(0, len(text))) for _ in range(2))
    to = data.draw(st.sampled_from([at, at + 1, at + 8, to]))
    new = data.draw(st.sampled_from([b"", text[at:to] * 2, b"1", b"-", b'"', b"[", b"}", b",", b".5", b"\xff"]))
    path.write_bytes(text[:at] + new + text[to:])
    loads_whole_or_refuses(path)


# The file is written whole or not at all.


def test_a_failure_in_the_middle_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    busy().save(path)
    old = path.read_bytes()
    for name in ("fsync", "replace"):

        def fails(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
            patch.setattr(os, name, fails)
            busy().save(path)
        assert path.read_bytes() == old and os.listdir(tmp_path) == ["x.json"]


KILLED = """
import os, signal, sys
from memstate.slots.inspect import Inspection
found = Inspection.load(sys.argv[1])
os.replace = lambda *given: os.kill(os.getpid(), signal.SIGKILL)
found.faults.extend(["more"] * 10_000)
found.save(sys.argv[1])
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no such signal here")
def test_a_kill_in_the_middle_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    busy().save(path)
    old = path.read_bytes()
    ended = subprocess.run([sys.executable, "-c", KILLED, path], cwd=Path(__file__).parents[2])
    assert ended.returncode == -signal.SIGKILL and path.read_bytes() == old
    assert Inspection.load(path) == busy()


def test_a_link_a_mode_and_a_pipe_stay_what_they_are(tmp_path: Path) -> None:
    path, link = tmp_path / "x.json", tmp_path / "link.json"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to("x.json")
    busy().save(str(link))
    assert link.is_symlink() and Inspection.load(path) == busy() and path.stat().st_mode & 0o777 == 0o640
    busy().save(os.devnull)
    assert not os.path.isfile(os.devnull)
    if hasattr(os, "mkfifo"):
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE) as reader:
            busy().save(pipe)
            assert reader.communicate()[0] == path.read_bytes()
        pipe.unlink()
    with pytest.raises(OSError):
        busy().save(tmp_path)
    with pytest.raises(OSError):
        busy().save(tmp_path / "none" / "x.json")
    assert sorted(os.listdir(tmp_path)) == ["link.json", "x.json"]


@pytest.mark.skipif(not os.path.exists("/dev/stdout"), reason="no such name here")
def test_it_can_be_printed(tmp_path: Path) -> None:
    busy().save(tmp_path / "x")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as cat:
        assert cat.stdin is not None and cat.stdout is not None
        Inspection.load(tmp_path / "x").save(f"/dev/fd/{cat.stdin.fileno()}")
        cat.stdin.close()
        assert cat.stdout.read() == (tmp_path / "x").read_bytes()


def test_a_new_file_has_the_mode_that_the_user_gives_to_new_files(tmp_path: Path) -> None:
    mask = os.umask(0o077)
    try:
        busy().save(tmp_path / "x.json")
    finally:
        os.umask(mask)
    assert (tmp_path / "x.json").stat().st_mode & 0o777 == 0o600
