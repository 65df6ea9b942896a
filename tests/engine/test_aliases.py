"""Names of former versions: each does what it did, and warns once with what takes its place."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import memstate as ms
from memstate.engine import aliases
from tests.support.planes import I, Loop

CPU = ms.Backend("reference")


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(aliases, "_WARNED", set())
    yield


@pytest.fixture
def loop() -> Loop:
    return Loop(CPU, ms.Redirect(I), journal=8)


def told(act: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a call returns, and what it warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = act()
    assert all(each.category is DeprecationWarning and each.filename == __file__ for each in caught)
    return value, [str(each.message) for each in caught]


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("mem.length", lambda mem, row: mem.length(row), lambda mem, row: mem.info(row).length),
        ("mem.confirmed", lambda mem, row: mem.confirmed(row), lambda mem, row: mem.info(row).confirmed),
        ("mem.next_boundary", lambda mem, row: mem.next_boundary(row), lambda mem, row: mem.info(row).next_boundary),
        ("mem.slots_held", lambda mem, row: mem.slots_held(row), lambda mem, row: mem.info(row).slots),
        ("mem.page_size", lambda mem, row: mem.page_size, lambda mem, row: mem.pages.size),
        ("mem.changes", lambda mem, row: mem.changes, lambda mem, row: list(mem.journal.changes)),
        ("mem.live_slots", lambda mem, row: mem.live_slots.tolist(), lambda mem, row: mem.device.live_slots.tolist()),
        ("mem.check", lambda mem, row: mem.check(), lambda mem, row: mem.device.check()),
        ("sessions()", lambda mem, row: mem.sessions(), lambda mem, row: mem.sessions.infos()),
    ],
)
def test_a_former_name_says_the_same_and_warns_once(name: str, old: Any, new: Any, loop: Loop) -> None:
    (row,) = loop.admit(ms.Request("a"))
    loop.advance([row], I + 1)
    value, warned = told(lambda: old(loop.mem, row))
    assert value == new(loop.mem, row)
    assert len(warned) == 1 and warned[0].startswith(f"{name} is now mem.") and "version 0.3" in warned[0]
    assert told(lambda: old(loop.mem, row)) == (value, [])


@pytest.mark.parametrize(
    ("old", "kept"),
    [
        (lambda mem, rows: mem.abort(rows), None),
        (lambda mem, rows: mem.release(rows), [None]),
        (lambda mem, rows: mem.release(rows, True), [2 * I]),
        (lambda mem, rows: mem.release(rows, publish=[I]), [I]),
        (lambda mem, rows: mem.retract(rows), [2 * I]),
    ],
)
def test_the_former_ends_keep_what_they_kept(old: Any, kept: list[int | None] | None) -> None:
    loop = Loop(CPU, ms.PingPong(I), slots=8)
    (row,) = loop.admit(ms.Request("a"))
    loop.advance([row], 2 * I)
    left, warned = told(lambda: old(loop.mem, [row]))
    assert len(warned) == 1 and "mem.end(rows" in warned[0]
    assert (left and [snap.length if snap else None for snap in left]) == kept
    with pytest.raises(ms.StaleHandle, match="was ended"):
        loop.mem.info(row)


def test_sessions_and_tokens_of_the_former_calls() -> None:
    loop = Loop(CPU, ms.Redirect(I), pages=8, pages_per_row=4, page_size=2, prefix=ms.Prefix())
    talk, _ = told(lambda: loop.mem.open_session("talk"))
    (row,) = loop.admit(ms.Request("a", tokens=[1, 2, 3], session=talk))
    loop.mem.settle(loop.mem.plan([row], 3))
    told(lambda: loop.mem.release([row], tokens=[[1, 2, 3]]))
    assert loop.mem.sessions.infos()[0].tokens == 3
    told(lambda: loop.mem.close_session(talk))
    assert loop.mem.sessions.infos() == []
    told(lambda: loop.mem.reset())
    assert loop.mem.free_slots == loop.mem.stats().capacity


def test_what_no_version_had_is_an_ordinary_error(loop: Loop) -> None:
    with pytest.raises(AttributeError, match="'StateManager' object has no attribute 'tokens_of'"):
        loop.mem.tokens_of  # noqa: B018
    assert not hasattr(loop.mem, "snapshot")


@pytest.mark.parametrize("name", ["Capacity", "Chaos", "EmptyRegister", "Fork", "StatePool", "TierStats"])
def test_names_that_left_the_top_level_are_found_there_for_a_version(name: str) -> None:
    vars(ms).pop(name, None)
    value, warned = told(lambda: getattr(ms, name))
    assert value.__name__ == name and len(warned) == 1 and warned[0].startswith(f"memstate.{name} is now memstate.")
