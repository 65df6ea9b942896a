"""How old requests and sessions are, and how long they stand still: in figures, inspections and the terminal."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import memstate as ms
from memstate import metrics
from memstate.cli.top.scrape import parse
from memstate.cli.top.summary import summary
from memstate.cli.top.view import draw
from memstate.errors import InvalidArgument
from memstate.slots.inspect import Inspection
from memstate.viz.inspector import page
from tests.support import owners

LAYOUT = ms.StateLayout((ms.Plane("ssm", (4,), torch.float32),), layers=2)


class Clock:
    """A clock that counts who looks at it."""

    def __init__(self) -> None:
        self.now, self.looks = 1000.0, 0

    def __call__(self) -> float:
        self.looks += 1
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def mem(clock: Clock) -> ms.StateManager:
    return ms.StateManager(
        LAYOUT, slots=12, max_requests=4, tracking=ms.Redirect(8), prefix=ms.Prefix(), backend="reference",
        pages=ms.Pages(count=60, size=4, per_row=12), sessions=ms.SessionLimits(clock=clock),
    )  # fmt: skip


def admit(mem: ms.StateManager, name: str, **more: Any) -> ms.Row:
    (row,) = mem.admit([ms.Request(name, tokens=[1, 2, 3, 4, 5], **more)])
    return row


def step(mem: ms.StateManager, row: ms.Row, tokens: int = 1) -> None:
    mem.extend([row], [mem.info(row).length + tokens])
    mem.settle(mem.plan([row], tokens))


def ages(mem: ms.StateManager) -> dict[str, tuple[float, float]]:
    """Age and idle time of each request, as an inspection has them."""
    return {row["id"]: (row["age"], row["idle"]) for row in mem.inspect().rows}


def test_a_request_is_as_old_as_its_admission(mem: ms.StateManager, clock: Clock) -> None:
    first = admit(mem, "a")
    clock.now += 60
    step(mem, first, 5)
    admit(mem, "b")
    (fork,) = mem.fork(first, ["c"]).rows
    clock.now += 5
    assert {name: age for name, (age, _) in ages(mem).items()} == {"a": 65, "b": 5, "c": 5}
    assert mem.stats().oldest_row == 65
    mem.end([first])
    assert mem.stats().oldest_row == 5
    mem.end([fork, *mem.admit([ms.Request("d")])])
    mem.recover(keep=False)
    assert mem.stats().oldest_row == mem.stats().idlest_row == 0


def test_a_request_is_idle_while_its_length_stays(mem: ms.StateManager, clock: Clock) -> None:
    still, busy = admit(mem, "still"), admit(mem, "busy")
    step(mem, still, 5)
    step(mem, busy, 5)
    assert mem.stats().idlest_row == 0, "nobody has looked before"
    for _ in range(3):
        clock.now += 10
        step(mem, busy)
        mem.stats()
    assert ages(mem) == {"still": (30, 30), "busy": (30, 0)} and mem.stats().idlest_row == 30
    step(mem, still)
    clock.now += 2
    assert ages(mem)["still"] == (32, 0)
    mem.end([still])
    admit(mem, "again")  # in the same row
    clock.now += 7
    assert ages(mem)["again"] == (7, 0)


def test_a_step_does_not_look_at_the_clock_and_an_admission_looks_once(mem: ms.StateManager, clock: Clock) -> None:
    rows = mem.admit([ms.Request("a", tokens=[1]), ms.Request("b", tokens=[2])])
    assert clock.looks == 1
    for _ in range(20):
        mem.extend(rows, [mem.info(row).length + 1 for row in rows])
        mem.settle(mem.plan(rows))
    mem.end(rows)
    assert clock.looks == 1


def test_sessions_are_as_old_and_idle_as_they_say(mem: ms.StateManager, clock: Clock) -> None:
    one, two = (mem.sessions.open(name) for name in ("one", "two"))
    clock.now += 100
    row = admit(mem, "turn", session=one)
    step(mem, row, 5)
    clock.now += 10
    found = {each["id"]: (each["age"], each["idle"]) for each in mem.inspect().sessions}
    assert found == {"one": (110, 0), "two": (110, 110)}
    assert (mem.stats().oldest_session, mem.stats().idlest_session) == (110, 110)
    mem.sessions.close(two)
    assert (mem.stats().oldest_session, mem.stats().idlest_session) == (110, 0)
    mem.end([row], keep="cache", tokens=[[1, 2, 3, 4, 5]])
    clock.now += 3
    assert (mem.stats().oldest_session, mem.stats().idlest_session) == (113, 3)
    three = mem.sessions.open("three")
    row = admit(mem, "last", session=one)
    clock.now += 1
    assert mem.stats().idlest_session == 1
    mem.sessions.close(one)  # at the end of its turn
    mem.end([row])
    mem.sessions.close(three)
    assert (mem.stats().oldest_session, mem.stats().idlest_session) == (0, 0)
    assert not mem.audit().faults


def test_recovered_sessions_keep_their_ages(mem: ms.StateManager, clock: Clock) -> None:
    one, _ = (mem.sessions.open(name) for name in ("one", "two"))
    clock.now += 10
    admit(mem, "turn", session=one)
    clock.now += 10
    with pytest.raises(ZeroDivisionError), mem._parts.guard.changing("plan"):
        raise ZeroDivisionError
    mem.recover()
    assert (mem.stats().oldest_session, mem.stats().idlest_session) == (20, 20)
    assert {each["id"]: each["idle"] for each in mem.inspect().sessions} == {"one": 0, "two": 20}
    assert not mem.audit().faults


def test_a_session_that_is_noted_wrongly_is_a_fault(mem: ms.StateManager) -> None:
    mem.sessions.open("one")
    owners.sessions(mem).idling.clear()
    assert any("no turn" in fault for fault in mem.audit().faults)


def test_the_ages_are_metrics_and_in_the_terminal(mem: ms.StateManager, clock: Clock) -> None:
    from prometheus_client import CollectorRegistry, generate_latest
    from rich.console import Console

    step(mem, admit(mem, "a"), 5)
    mem.sessions.open("s")
    registry = CollectorRegistry()
    registry.register(metrics.collector(mem))
    clock.now += 7200
    text = generate_latest(registry).decode()
    for name in ("row_age", "row_idle", "session_age", "session_idle"):
        assert f'memstate_{name}_seconds{{manager="main",rank="0"}} 7200.0' in text
    found = summary(parse(text, "here"))
    assert set(found["managers"][0]["ages"].values()) == {7200.0}
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(draw(found, "here"))
    assert "request 2.0 h, standstill of one 2.0 h, session 2.0 h, idle session 2.0 h" in console.export_text()


def saved(mem: ms.StateManager, path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    mem.inspect().save(path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return path


def test_files_of_earlier_versions_are_read(mem: ms.StateManager, clock: Clock, tmp_path: Path) -> None:
    """They have no ages."""
    step(mem, admit(mem, "a"), 5)
    mem.sessions.open("s")
    clock.now += 2.5
    new = Inspection.load(saved(mem, tmp_path / "new.json", lambda content: None))
    assert (new.rows[0]["age"], new.sessions[0]["idle"], new.stats["oldest_row"]) == (2.5, 2.5, 2.5)

    def older(content: dict[str, Any]) -> None:
        for each in (*content["rows"], *content["sessions"]):
            del each["age"], each["idle"]
        content["stats"] = {
            name: n for name, n in content["stats"].items() if not name.startswith(("oldest", "idlest"))
        }

    old = Inspection.load(saved(mem, tmp_path / "old.json", older))
    assert "age" not in old.rows[0] and "age" not in old.sessions[0] and old.rows[0]["id"] == "a"
    assert "<html" in page(old) and "2.5" in page(new)


@pytest.mark.parametrize(
    "wrong", ["1", None, True, float("nan"), float("inf"), 10**400, [1]], ids=lambda wrong: repr(wrong)[:5]
)
def test_ages_that_are_none_are_refused(mem: ms.StateManager, tmp_path: Path, wrong: object) -> None:
    admit(mem, "a")
    for change, says in (
        (lambda content: content["rows"][0].update(age=wrong), r"rows\[0\].age is .*expected a number of seconds"),
        (lambda content: content["stats"].update(oldest_row=wrong), r"stats.oldest_row is .*expected a number of sec"),
    ):
        if wrong is not None or "rows" in says:  # a figure may be null
            with pytest.raises(InvalidArgument, match=says):
                Inspection.load(saved(mem, tmp_path / "x.json", change))
    with pytest.raises(InvalidArgument, match=r"rows\[0\].idle is missing"):
        Inspection.load(saved(mem, tmp_path / "x.json", lambda content: content["rows"][0].pop("idle")))
