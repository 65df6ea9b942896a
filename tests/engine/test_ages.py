"""How old requests and sessions are, and how long without progress: in figures, inspections and the terminal."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console

import memstate as ms
from memstate import metrics
from memstate.cli.top.scrape import parse
from memstate.cli.top.summary import summary
from memstate.cli.top.view import draw
from memstate.slots.inspect import Inspection
from memstate.viz.inspector import page

LAYOUT = ms.StateLayout((ms.Plane("ssm", (4,), torch.float32),), layers=2)


class Clock:
    """A clock that counts its calls."""

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


def idle(mem: ms.StateManager) -> dict[str, float]:
    """Returns request id -> seconds without progress, as an inspection shows them."""
    return {row["id"]: row["idle"] for row in mem.inspect().rows}


def test_a_request_is_as_old_as_its_admission(mem: ms.StateManager, clock: Clock) -> None:
    first = admit(mem, "a")
    clock.now += 60
    step(mem, first, 5)
    admit(mem, "b")
    mem.fork(first, ["c"])
    clock.now += 5
    assert {row["id"]: row["age"] for row in mem.inspect().rows} == {"a": 65, "b": 5, "c": 5}
    assert mem.stats().oldest_row == 65
    mem.end([first])
    assert mem.stats().oldest_row == 5
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
    assert idle(mem) == {"still": 30, "busy": 0} and mem.stats().idlest_row == 30
    mem.end([still])
    admit(mem, "again")  # "again" gets the row that "still" had
    clock.now += 7
    assert idle(mem)["again"] == 0


def test_a_step_does_not_look_at_the_clock_and_an_admission_looks_once(mem: ms.StateManager, clock: Clock) -> None:
    rows = mem.admit([ms.Request("a", tokens=[1]), ms.Request("b", tokens=[2])])
    assert clock.looks == 1
    for _ in range(20):
        mem.extend(rows, [mem.info(row).length + 1 for row in rows])
        mem.settle(mem.plan(rows))
    mem.end(rows)
    assert clock.looks == 1


def test_sessions_are_as_old_and_idle_as_they_say(mem: ms.StateManager, clock: Clock) -> None:
    def oldest() -> tuple[float, float]:
        return mem.stats().oldest_session, mem.stats().idlest_session

    one, two = (mem.sessions.open(name) for name in ("one", "two"))
    clock.now += 100
    row = admit(mem, "turn", session=one)
    clock.now += 10
    ages = {each["id"]: (each["age"], each["idle"]) for each in mem.inspect().sessions}
    assert ages == {"one": (110, 0), "two": (110, 110)} and oldest() == (110, 110)
    mem.recover()
    assert oldest() == (110, 110), "recovered sessions keep their ages"
    mem.sessions.close(two)
    row = admit(mem, "turn", session=one)
    step(mem, row, 5)
    assert oldest() == (110, 0)
    mem.end([row], keep="cache", tokens=[[1, 2, 3, 4, 5]])
    clock.now += 3
    assert oldest() == (113, 3)
    row = admit(mem, "last", session=one)
    mem.sessions.close(one)  # the session closes when its turn ends
    mem.end([row])
    assert oldest() == (0, 0) and not mem.audit().faults


def test_the_ages_are_metrics_and_in_the_terminal(mem: ms.StateManager, clock: Clock) -> None:
    step(mem, admit(mem, "a"), 5)
    mem.sessions.open("s")
    registry = CollectorRegistry()
    registry.register(metrics.collector(mem))
    clock.now += 7200
    overview = summary(parse(generate_latest(registry).decode(), "here"))
    ages = overview["managers"][0]["ages"]
    assert len(ages) == 4 and set(ages.values()) == {7200.0}
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(draw(overview, "here"))
    assert "request 2 h, standstill of one 2 h, session 2 h, idle session 2 h" in console.export_text()


def test_an_older_file_without_ages_is_shown(mem: ms.StateManager, tmp_path: Path) -> None:
    admit(mem, "a")
    mem.inspect().save(tmp_path / "x.json")
    content = json.loads((tmp_path / "x.json").read_text())
    for name in ("age", "idle"):
        del content["rows"][0][name]
    (tmp_path / "x.json").write_text(json.dumps(content))
    older = Inspection.load(tmp_path / "x.json")
    assert "age" not in older.rows[0] and "<html" in page(older)
