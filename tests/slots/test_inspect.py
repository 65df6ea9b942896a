"""Files of inspections: `load` returns what `save` wrote and refuses all else by name; `save` is atomic."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
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
from memstate.viz.inspector import page
from tests.support.build import build

LAYOUT = ms.StateLayout((ms.Plane("ssm", (4,), torch.float32),), 1)
T = list(range(16))
Tree = dict[str, Any]


@cache
def busy() -> Inspection:
    """Returns the inspection of a manager with rows, a cache, sessions, ids in an open group, and a journal."""
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
    """Returns what `save` writes, as JSON reads it."""
    content: Tree = json.loads(json.dumps(vars(busy())))
    return {"format": module.FORMAT, **content}


def stored(folder: Path, content: Any) -> Path:
    path = folder / "own\ners.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def refusal(path: Path) -> str:
    """Returns the message of a refused file, which must be one printable line that names the file."""
    with pytest.raises(ms.InvalidArgument, match="not an inspection") as caught:
        Inspection.load(path)
    text = str(caught.value)
    assert text.startswith(f"{str(path)!r}: not an inspection: ") and text.isprintable() and len(text) < 600
    return text


def test_the_inspection_of_these_tests_has_everything(tmp_path: Path) -> None:
    seen = busy()
    empty = [name for name, value in vars(seen).items() if value in ([], {})]
    assert (
        empty == ["summary", "faults"] and any(node["register"] for node in seen.prefix) and seen.sessions[0]["states"]
    )
    seen.save(tmp_path / "x")
    assert Inspection.load(tmp_path / "x") == seen


GONE = object()
Path_ = tuple[str | int, ...]


def changed(content: Any, path: Path_, value: object) -> Any:
    """Returns a tree with `value` at the place `path`, or without this place. An index at the end of a list appends."""
    inner = content
    for part in path[:-1]:
        inner = inner[part]
    if value is GONE:
        del inner[path[-1]]
    elif isinstance(inner, list) and path[-1] == len(inner):
        inner.append(value)
    else:
        inner[path[-1]] = value
    return content


def undrawn() -> Iterator[tuple[Path_, object, str]]:
    """Yields places of a file, a value for each with which nothing can be drawn, and a part of the refusal."""
    seen = busy()
    held, last = str(next(iter(seen.names))), len(seen.slots)
    values: dict[Path_, list[object]] = {
        ("capacity",): [True, -1, 0, 12.0, "12", None, [12], 2**31, 13, GONE], ("format",): [[], None, GONE],
        ("owners", 3): [GONE], ("owners",): [None], ("free", 0): [GONE], ("free", 13): [True], ("free", 3): ["x"],
        ("slots", int(held)): ["1", 1.0, None], ("slots",): [{"0": 1}], ("labels", 0): [GONE],
        ("names", str(last)): ["live"], ("names", "x"): ["live"], ("names",): [[]], ("names", "9" * 50): ["live"],
        ("kinds", held): [[], GONE], ("by_id", 0): [13, 2.5, 10**30], ("rows",): [3], ("rows", 0): [[]],
        ("rows", 0, "length"): [[], GONE], ("prefix",): [4], ("prefix", 0, "parent"): [0, -2, "x", None, GONE],
        ("prefix", 1, "parent"): [1, 10**6], ("sessions", 0, "states"): [4], ("changes", 0): [1],
        ("changes", 0, "what"): [GONE], ("layout", "planes"): [3], ("layout", "bytes_per_slot"): ["x", 10**400],
        ("faults", 0): [1], ("stats",): [4],
    }  # fmt: skip
    for path, each in values.items():
        for value in each:
            yield path, value, ""
    yield (
        ("format",),
        "memstate inspection 1",
        "its format is 'memstate inspection 1', expected 'memstate inspection 2'",
    )
    yield ("owners", 3), GONE, "capacity is 12, and owners and free have (12, 13) entries, expected one more"
    yield ("labels", 0), GONE, f"slots and labels have {last} and {last - 1} entries"
    yield ("prefix", 1, "parent"), 1, "prefix[1].parent is 1, expected -1 or a node before it"
    yield ("colour",), "red", "'colour' is no field"
    yield ("slots",), GONE, "missing 1 required positional argument: 'slots'"
    yield ("kinds", held), GONE, f"it cannot be drawn: KeyError({held})"
    yield ("changes", 0, "owner"), 7, "changes[0].owner is 7, expected a text"
    yield ("changes", 0, "submit"), 1 << 63, f"changes[0].submit is {1 << 63}, expected a number"
    yield ("changes", 0, "source"), GONE, "it cannot be drawn: KeyError('source')"
    yield ("labels", 0), None, "labels[0] is None, expected a number"
    for field in ("names", "tags"):
        yield (field, held), 5, "a name, kind or tag is 5, expected a text"
    for number in ("nan", "inf"):
        yield ("stats", "prefix", "pages"), float(number), "is no number that a page can show"


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    for path, value, why in undrawn():
        assert why in refusal(stored(tmp_path, changed(tree(), path, value))), (path, value)


def test_a_number_that_is_too_large_is_refused(tmp_path: Path) -> None:
    text = json.dumps(tree()).replace('"capacity": 12', '"capacity": 1e400')
    assert "'1e400' is no number that a page can show" in refusal(stored(tmp_path, text.encode()))


def test_what_a_page_cannot_show_is_one_named_error(tmp_path: Path) -> None:
    """`load` tries only a short drawing, but the page shows each row and each node."""
    more = [dict(tree()["rows"][0], row=at, id=f"r{at}") for at in range(12)]
    for path, value in (
        (("rows",), [*more, {"row": 3}]), (("prefix", 0, "end"), GONE), (("rows", 0, "id"), 5),
        (("layout", "page_size"), GONE), (("summary",), GONE),
    ):  # fmt: skip
        seen = Inspection.load(stored(tmp_path, changed(tree(), path, value)))
        if path == ("summary",):
            assert page(seen)  # an older file has no summary
            continue
        with pytest.raises(ms.InvalidArgument, match=r"^x: the inspection cannot be drawn: \w+\(") as caught:
            page(seen, "x")
        assert str(caught.value).isprintable() and len(str(caught.value)) < 600


def test_what_is_no_json_of_one_object_is_refused(tmp_path: Path) -> None:
    text = json.dumps(tree()).encode()
    nested = [opening * depth + closing * depth for opening, closing in ((b"[", b"]"), (b'{"a": ', b"}"))
              for depth in (10, 500, 990, 100_000)]  # fmt: skip
    faults = json.dumps(tree() | {"faults": ["HERE"]}).encode()
    nested += [faults.replace(b'"HERE"', b"[" * depth + b"]" * depth) for depth in (3, 900, 100_000)]
    for content, why in (
        (b"", "Expecting value"), (b"{'a': 1}", "Expecting property name"), (b"[]", "its format is [], expected"),
        (b"null", "its format is None, expected"),
        (b'"memstate inspection 2"', "it cannot be drawn: "), (b'{"format": "\xe9"}', "utf-8"),
        (json.dumps(tree()).encode("utf-16"), "utf-8"), (b"\xef\xbb\xbf" + text, "BOM"), (text * 2, "Extra data"),
        (text[:-1] + b', "capacity": 12}', "'capacity' stands there twice"),
        (b'{"format": "memstate inspection 2", "names": {"3": "a", "3": "b"}}', "'3' stands there twice"),
        (text.replace(b'"capacity": 12', b'"capacity": ' + b"1" * 5000), "digits"), *((each, "") for each in nested),
    ):  # fmt: skip
        assert why in refusal(stored(tmp_path, content))


def test_large_files_are_refused_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stored(tmp_path, tree())
    size = path.stat().st_size
    monkeypatch.setattr(module, "LARGEST", size)
    assert Inspection.load(path) == busy()
    monkeypatch.setattr(module, "LARGEST", size - 1)
    assert f"it has more than {size - 1} bytes" in refusal(path)
    monkeypatch.undo()
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # a sparse file, too large to read
    assert f"it has more than {module.LARGEST} bytes" in refusal(path)
    if os.path.exists("/dev/zero"):  # this file has no size
        refusal(Path("/dev/zero"))


@pytest.mark.parametrize("slot", [13, 2**31 - 1, -1, -(2**31)])
def test_a_foreign_slot_of_a_faulty_device_is_kept_for_the_audit(tmp_path: Path, slot: int) -> None:
    """A register of a device can hold any int32. The audit names its owner, so a file keeps it."""
    register = next(iter(busy().names))
    read = Inspection.load(stored(tmp_path, changed(tree(), ("slots", register), slot)))
    assert audit(read).foreign == [read.names[register]]
    assert len(viz.holdings(read)) == read.capacity


def places(content: Any, path: Path_ = ()) -> list[Path_]:
    """Returns every place of a tree, except its root."""
    inner = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [place for key, value in inner for place in ((*path, key), *places(value, (*path, key)))]


NUMBERS = st.sampled_from(
    [0, 1, -1, 2, 3, 12, 13, 24, 2**31 - 1, 2**31, -(2**31), 2**63, 10**40, 0.0, 1.0, -0.0, 1e400]
)
VALUES = st.one_of(
    NUMBERS, st.integers(-3, 30), st.none(), st.booleans(), st.text(max_size=3), st.just(float("nan")), st.just(GONE),
    st.sampled_from(["live", "free", "0", "1", "-1", "\ud800"]),
    st.recursive(NUMBERS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner)),
)  # fmt: skip


def loads_whole_or_refuses(path: Path) -> bool:
    """Returns whether a file loads.

    If it does, saving it must give the same file, and the page must show it or refuse it by name.
    """
    try:
        seen = Inspection.load(path)
    except ms.InvalidArgument as error:
        assert "\n" not in str(error) and str(path.name) in str(error)
        return False
    again = path.with_suffix(".again")
    seen.save(again)
    assert Inspection.load(again) == seen
    Inspection.load(again).save(path)
    assert path.read_bytes() == again.read_bytes()
    assert len(viz.holdings(seen)) == seen.capacity and seen.sheet()
    for drawn in (viz.holdings_over, page):
        with suppress(ms.InvalidArgument):
            drawn(seen)
    return True


FUZZ = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(data=st.data())
def test_a_changed_tree_loads_whole_or_is_refused(tmp_path: Path, data: st.DataObject) -> None:
    content = tree()
    for path, value in data.draw(st.lists(st.tuples(st.sampled_from(places(content)), VALUES), min_size=1, max_size=3)):
        with suppress(LookupError, TypeError):  # an earlier change has removed this place
            changed(content, path, value)
    path = tmp_path / "x.json"
    path.write_text(json.dumps(content))
    loads_whole_or_refuses(path)


# The file is written whole or not at all.


KILLED = """
import os, signal, sys
from memstate.slots.inspect import Inspection
from memstate.viz.inspector import page
seen = Inspection.load(sys.argv[1])
os.replace = lambda *given: os.kill(os.getpid(), signal.SIGKILL)
seen.faults.extend(["more"] * 10_000)
seen.save(sys.argv[1])
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


def test_a_new_file_has_the_mode_that_the_user_gives_to_new_files(tmp_path: Path) -> None:
    mask = os.umask(0o077)
    try:
        busy().save(tmp_path / "x.json")
    finally:
        os.umask(mask)
    assert (tmp_path / "x.json").stat().st_mode & 0o777 == 0o600
