"""Tests `memstate top`: figures, view and advice from a URL, and the four troubles of the example."""

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from io import StringIO
from itertools import islice
from pathlib import Path
from socketserver import BaseServer
from threading import Event
from types import ModuleType
from typing import Any

import pytest
from prometheus_client import generate_latest
from rich.console import Console
from typer.testing import CliRunner

import memstate as ms
from memstate import metrics
from memstate.cli import app as cli
from memstate.cli.top.advice import advice
from memstate.cli.top.scrape import Figures, parse
from memstate.cli.top.summary import summary
from memstate.cli.top.view import draw
from tests.support.metered import manager, turn


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes servers check every 0.01 seconds whether they must end, so that tests do not wait for them."""
    monkeypatch.setattr(BaseServer.serve_forever, "__defaults__", (0.01,))


def printed(report: Any) -> str:
    console = Console(file=StringIO(), width=120, color_system=None)
    console.print(draw(report, "http://x"))
    return console.file.getvalue()  # type: ignore[attr-defined]


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def served() -> Iterator[tuple[ms.StateManager, str]]:
    mem = manager(below=True)
    with metrics.serve(mem, 0, tenant=str, steps=True) as server:
        turn(mem, 1, "[bold]acme")
        yield mem, server.url


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["top", *arguments])


def test_one_frame_shows_slots_prompts_tiers_steps_and_tenants(served: tuple[ms.StateManager, str]) -> None:
    done = run(served[1], "--once", "--every", "0")
    assert done.exit_code == 0, done.output
    for text in (
        "since the start of the process", "main, rank 0", "Redirect(every=8)", "cached", "free", "rows",
        "13 prompt tokens of 1 requests, hit rate 0.0%", "no_sharing", "records, host state", "writes to storage",
        "host time of a step", "host time by call", "[bold]acme",
    ):  # fmt: skip
        assert text in done.output, text


def test_json_has_what_happened_between_two_scrapes(
    served: tuple[ms.StateManager, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mem, url = served
    monkeypatch.setattr(time, "sleep", lambda seconds: turn(mem, 1, "[bold]acme") if seconds == 7 else None)
    done = run(url, "--every", "7", "--json", "-")
    report = json.loads(done.stdout)
    (of,) = report["managers"]
    assert report["seconds"] > 0 and of["prompts"]["requests"] == 1 and of["prompts"]["hit"] == 12
    assert 0 < of["steps"]["count"] < 9 and of["slots"]["free"] == mem.free_slots
    assert sum(of["slots"].values()) == 12 and of["tenants"]["[bold]acme"]["slots"] == 1


def test_the_live_view_goes_on_until_it_is_interrupted(
    served: tuple[ms.StateManager, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mem, url = served
    sleeps: list[float] = []

    def sleep(seconds: float) -> None:
        if seconds == 2:
            sleeps.append(seconds)
            turn(mem, len(sleeps))
            if len(sleeps) == 3:
                raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    done = run(url)
    assert len(sleeps) == 3 and "prompt tokens of 1 requests" in done.output and done.exit_code == 130


def test_a_name_steers_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    mem = manager()
    turn(mem, 1, "a\x1b]0;title\x07\x9b31m")
    report = summary(parse(generate_latest(metrics.registry({"m\x1b[2J": mem}, tenant=str)).decode(), "x"))
    text = printed(report)
    assert "a\ufffd]0;title\ufffd\ufffd31m" in text and "m\ufffd[2J, rank 0" in text and "\x1b" not in text

    def refuses(url: str, largest: int) -> bytes:
        raise ms.InvalidArgument("the server answers 500 \x1b[2J")

    monkeypatch.setattr("memstate.cli.top.scrape.fetch", refuses)
    assert "500 \ufffd[2J" in run("http://x", "--once").stderr


def test_figures_of_a_later_version_are_shown() -> None:
    mem = manager()
    text = generate_latest(metrics.registry(mem)).decode()
    more = 'memstate_refusals_total{manager="main",rank="0",reason="more"} 3\n'
    report = summary(parse(text + more, "x"))
    assert report["managers"][0]["refusals"]["more"] == 3 and "3 more" in printed(report)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "1e308", "1e18", "-1"])
def test_a_figure_that_cannot_be_is_refused(value: str) -> None:
    with pytest.raises(
        ms.InvalidArgument, match=r"'somewhere': .*memstate_slots is .*, expected a number from 0 to 1e\+18"
    ):
        parse(f"memstate_slots {value}\n", "somewhere")


@pytest.mark.parametrize("text", ["", "up 1\n", "# nothing\n", "<html>no</html>", 'memstate_slots{owner="live" 1\n'])
def test_text_of_something_else_is_refused(text: str) -> None:
    with pytest.raises(ms.InvalidArgument, match="'somewhere'"):
        parse(text, "somewhere")


# -- figures ---------------------------------------------------------------------------------------


def figures(**values: float) -> Figures:
    return Figures({(name, frozenset({("x", "y")})): value for name, value in values.items()})


def test_counters_grow_and_begin_again() -> None:
    assert figures(a=7, b=2, c=1).since(figures(a=5, b=9)).values == figures(a=2, b=2, c=1).values
    assert figures(a=7).total("a", x="y") == 7 and figures(a=7).total("a", x="z") == 0
    assert figures(a=7).by("a", "x") == {"y": 7} and figures(a=7).label("a", "x") == "y"


def test_two_managers_are_two_frames_and_a_name_is_no_markup() -> None:
    both = {"[red]target": manager(), "draft": manager(slots=5)}
    report = summary(parse(generate_latest(metrics.registry(both)).decode(), "x"))
    text = printed(report)
    assert "[red]target, rank 0" in text and "draft, rank 0" in text
    assert [sum(each["slots"].values()) for each in report["managers"]] == [12, 5]


def held(slots: int, pages: int) -> dict[str, int]:
    return {"slots": slots, "pages": pages}


def quiet() -> dict[str, Any]:
    """Returns the figures of a manager that gets no advice."""
    mem = manager(below=True)
    turn(mem, 1)
    turn(mem, 1)
    (of,) = summary(parse(generate_latest(metrics.registry(mem, tenant=str, steps=True)).decode(), "x"))["managers"]
    assert of["advice"] == []
    return of


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (["interrupted"], True, "A call was interrupted"),
        (["age_seconds"], 40.0, "40 s old"),
        (["tiers", "leaked_records"], 2, "2 host records have leaked"),
        (["refusals", "pages"], 3, "3 calls were refused for lack of pages"),
        (["slots", "snapshot"], 9, "published handles"),
        (["slots", "by_id"], 9, "claimed by id"),
        (["degradations", "no_slot"], 5, "no slot was free"),
        (["refusals", "rows"], 3, "some were never released"),
        (["degradations", "no_register"], 5, "raise snapshots="),
        (["degradations", "no_chunk"], 5, "chunk()"),
        (["prompts", "lost", "evicted"], 20, "had been evicted; more slots"),
        (["prompts", "lost", "no_snapshot"], 20, "never had a state"),
        (["prompts", "lost", "no_sharing"], 24, "were new: look at salts"),
        (["tiers", "writes", "missed"], 7, "Storage does not keep up: 7 records"),
        (["tiers", "writes_pending"], 700, "700 records wait"),
        (["tiers", "failures"], {"ENOSPC": 2}, "Storage failed 2 times (ENOSPC)"),
        (["tiers", "late"], 2, "Prefetches come too late"),
        (["tiers", "prefetches"], {"stopped": 3, "complete": 4}, "3 of 7 were stopped"),
        (["tiers", "lost_saves", "no_staging"], 2, "raise Tiers(staging=)"),
        (["tiers", "lost_saves", "no_room"], 2, "host_pages="),
        (["tiers", "unwritten"], 2, "2 writes since the start, none just now"),
        (["tiers", "truncated"], 2, "2 prefetches were cut"),
        (["tenants"], {"a": held(5, 1), "b": held(1, 1)}, "Tenant 'a' holds 5 of the 6 slots"),
        (["tenants"], {"a": held(1, 1), "b": held(1, 9)}, "Tenant 'b' holds 9 of the 10 KV pages"),
    ],
)  # fmt: skip
def test_advice_follows_from_one_figure(path: list[str], value: Any, says: str) -> None:
    of = quiet()
    inside = of
    for name in path[:-1]:
        inside = inside[name]
    inside[path[-1]] = value
    (line,) = advice(of)
    assert says in line


KEPT: dict[str, int] = {}  # the engine keeps KV, so there are no pages


@pytest.mark.parametrize(
    ("lost", "why", "pages", "says"),
    [
        ("evicted", "room", KEPT, "slots are short"),
        ("evicted", "pages", KEPT, "KV pages are short"),
        ("evicted", "limit", KEPT, "most_states"),
        ("evicted", "cleared", KEPT, "a call of `clear`"),
        ("no_sharing", "pages", {"used": 9}, "\"uses\" above 0, KV pages are short"),
        ("no_sharing", "cleared", {"used": 9}, "states went with their KV; a call of `clear`"),
        ("no_sharing", "room", KEPT, "\"uses\" above 0, slots are short"),
        ("no_sharing", "room", {"used": 9}, "were new: look at salts"),
    ],
)  # fmt: skip
def test_advice_names_why_states_went(lost: str, why: str, pages: dict[str, int], says: str) -> None:
    """States that went with their KV show as new tokens."""
    of = quiet() | {"pages": pages}
    of["prompts"]["lost"][lost] = of["prompts"]["tokens"]
    of["evictions"] |= {"superseded": 99, "taken": 99, why: 3}
    first, *others = advice(of)
    assert says in first and bool(others) == (lost == "evicted")


@pytest.mark.parametrize(("emptied", "refused", "lines"), [(0, 0, 0), (3, 0, 1), (0, 3, 2)])
def test_sessions_are_named_where_they_are_in_the_way(emptied: int, refused: int, lines: int) -> None:
    of = quiet()
    of["slots"]["session"], of["sessions"], of["refusals"]["slots"] = 9, {"open": 40, "emptied": emptied}, refused
    lines_of_advice = advice(of)
    assert len(lines_of_advice) == lines and ("40 are open" in lines_of_advice[-1] if lines else True)


def test_what_has_no_tenant_is_none() -> None:
    of = quiet() | {"tenants": {"unknown": held(9, 0), "a": held(1, 50)}}
    assert advice(of) == []
    of["tenants"]["b"] = held(1, 50)
    assert advice(of) == [], "none has most of either"


# -- the four troubles of the example --------------------------------------------------------------


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples" / "operate")
    monkeypatch.setattr(import_module("troubles"), "BACKEND", "reference")
    return import_module("troubles")


@pytest.mark.parametrize(
    ("trouble", "before", "during", "says", "event"),
    [
        ("hit-rate", 100, 140, "their state had been evicted; slots are short", "evicted"),
        ("leak", 10, 40, "held by published handles: a leak", "refused"),
        ("tenant", 1, 50, "Tenant 'greedy' holds", "evicted"),
        ("storage", 1, 110, "Storage does not keep up", "evicted"),
    ],
)  # fmt: skip
def test_a_trouble_is_found_from_two_scrapes_and_the_log(
    trouble: str, before: int, during: int, says: str, event: str, example: ModuleType,
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO, "memstate")
    written = Event()
    monkeypatch.setattr(example.SlowStore, "busy", staticmethod(written.wait))
    loop = example.TROUBLES[trouble]()
    mem = next(loop)
    registry = metrics.registry(mem, tenant=str)

    def scrape(turns: int) -> Any:
        for _ in islice(loop, turns):
            pass
        if trouble == "storage" and turns == during:  # until here, a file blocked the store's folder
            written.set()
            mem.tiers.flush()
        return parse(generate_latest(registry).decode(), "x", time.monotonic())

    first = scrape(before)
    if trouble == "hit-rate":
        assert summary(first)["managers"][0]["prompts"]["hit_rate"] > 0.7
    report = summary(scrape(during), first)
    assert any(says in line for line in report["managers"][0]["advice"]), report["managers"][0]["advice"]
    assert says.split()[0] in printed(report)
    assert event in {record.memstate["event"] for record in caplog.records if hasattr(record, "memstate")}
    loop.close()


def test_the_example_runs_as_it_is_called(
    example: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main, root = import_module("run").main, logging.getLogger("memstate")
    serve: Callable[..., metrics.FigureServer] = metrics.serve
    monkeypatch.setattr(metrics, "serve", lambda mem, **settings: serve(mem, 0, **settings))
    handlers, level = root.handlers[:], root.level
    try:
        main("leak", steps=40, pause=0.0)
    finally:
        root.handlers, root.level = handlers, level
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("memstate top http://127.0.0.1:") and json.loads(lines[-1])["event"] == "refused"


def test_a_missing_extra_is_named(served: tuple[ms.StateManager, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client.parser", None)
    done = run(served[1], "--once")
    assert (
        done.exit_code == 2 and "memstate top needs prometheus_client" in done.stderr and "[cli,metrics]" in done.stderr
    )
