"""A pytest plugin that runs a test of others with memstate inside, and writes what became of it.

The plugin of a suite puts memstate in while `INSIDE.on`, and counts there what memstate did. A test that fails is run
once more without memstate, with the same random numbers: it is lost if it then passes.

The folder of this file is on the path by itself: a suite may have a package `tests` of its own.
"""

import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

NOTES = Path(os.environ["PEER_NOTES"])
for hidden in os.environ.get("PEER_HIDDEN", "").split():  # packages that the other side would prefer
    sys.modules[hidden] = None  # type: ignore[assignment]


class Inside:
    """What memstate did in the test that runs.

    Attributes:
        on: whether the suite's plugin puts memstate in.
        alone: whether the tests cannot run without memstate here; then a test that fails is lost.
        used: how often it was put in.
        compared: how many results were compared with those without memstate.
        refused: what memstate refused by a named error.
        faults: what is wrong although the test may pass, such as other tokens.
        last: functions that are called behind each test; each returns what it found wrong.
    """

    def __init__(self) -> None:
        self.on, self.alone = True, False
        self.last: list[Callable[[], list[str]]] = []
        self.clear()

    def clear(self) -> None:
        """Forgets the test before."""
        self.used = self.compared = 0
        self.refused: list[str] = []
        self.faults: list[str] = []


INSIDE = Inside()


def _seed() -> None:
    random.seed(0)
    for name, seed in (("torch", lambda each: each.manual_seed(0)), ("numpy", lambda each: each.random.seed(0))):
        if module := sys.modules.get(name):
            seed(module)


def _run(item: Any, nextitem: Any, on: bool) -> tuple[str, str]:
    """Runs a test. Returns its outcome, and why it has this outcome."""
    INSIDE.on = on
    _seed()
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            return "failed", f"{crash.path}:{crash.lineno}: {crash.message}" if crash else str(report.longrepr)
        if report.skipped:
            return "skipped", str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr)
    return "passed", ""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: Any, nextitem: Any) -> bool:
    """Runs a test with memstate, and if it fails without; notes both outcomes."""
    INSIDE.clear()
    outcome, why = _run(item, nextitem, on=True)
    for check in INSIDE.last:
        INSIDE.faults += check()
    line = {
        "test": item.nodeid, "outcome": outcome, "why": why[:600], "used": INSIDE.used, "compared": INSIDE.compared,
        "refused": INSIDE.refused, "faults": INSIDE.faults,
    }  # fmt: skip
    if outcome == "failed" and INSIDE.alone:
        line["without"] = "passed"
    elif outcome == "failed":
        line["without"], line["why_without"] = _run(item, nextitem, on=False)
        for check in INSIDE.last:
            check()
    with NOTES.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print({"passed": ".", "skipped": "s", "failed": "F"}[outcome], end="", flush=True)
    return True


def pytest_collectreport(report: Any) -> None:
    """Notes a file that cannot be collected: all of its tests are lost."""
    if report.failed:
        with NOTES.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"test": report.nodeid, "uncollected": str(report.longrepr)[-600:]}) + "\n")
