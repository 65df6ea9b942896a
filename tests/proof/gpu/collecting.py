"""A plugin of pytest for machines that lack packages: leaves out test files whose imports are not there, by name.

It also chooses among the tests marked `gpu`, writes the result of every test as it comes, and ends the session when its
time is up, so that reports are still written.

Read from the environment: PROOF_RESULTS, a file of JSON lines; PROOF_SECONDS; PROOF_CHOOSE, if tests are chosen.
"""

import ast
import json
import os
import time
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.sampling import covering

RULE = (
    "of a test in tests/kernels as many cases as show every value of every parameter: each kernel, its dtypes and "
    "shapes; in tests/requests up to four cases of a test: each strategy; elsewhere one case of each test"
)
MOST = {"tests/kernels/": None, "tests/requests/": 4}
ALSO_NEEDS = {"memstate.cli.app": ("typer", "rich")}  # which ends the process where one is missing
BEGUN = time.monotonic()


@cache
def missing(package: str) -> bool:
    """Whether a top-level package cannot be imported."""
    try:
        return find_spec(package) is None
    except (ImportError, ValueError):
        return True


def lacking(source: str) -> list[str]:
    """Packages that a test file imports at its top and that are not there."""
    names = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    packages = {name.split(".")[0] for name in names} | {
        package for name in names for package in ALSO_NEEDS.get(name, ())
    }
    return sorted(package for package in packages if missing(package))


def note(**line: object) -> None:
    """Appends a line to the results."""
    if path := os.environ.get("PROOF_RESULTS"):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def is_worker(config: pytest.Config) -> bool:
    """Whether this process only runs tests for another one, which reports them."""
    return hasattr(config, "workerinput")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves a file out, and says why."""
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    found = lacking(collection_path.read_text(encoding="utf-8"))
    if found:  # by every process that collects; the lines are the same
        note(left_out=collection_path.name, needs=found)
    return True if found else None


def most_of(name: str) -> int | None:
    """How many cases of a test are chosen; None for as many as show every value of every parameter."""
    return next((most for folder, most in MOST.items() if name.startswith(folder)), 1)


def chosen(items: list[pytest.Item]) -> list[pytest.Item]:
    """A set of the tests marked `gpu` that fits the time, those of the kernels first; see RULE."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("gpu"):
            groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    found = []
    for name, cases in groups.items():
        plain = not hasattr(cases[0], "callspec")
        found += cases if plain else covering(cases, most_of(name))
    return sorted(found, key=lambda item: not item.nodeid.startswith("tests/kernels/"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the chosen tests; the process that collects first says how many of how many."""
    if not os.environ.get("PROOF_CHOOSE"):
        return
    kept = chosen(items)
    marked = sum(item.get_closest_marker("gpu") is not None for item in items)
    if getattr(config, "workerinput", {"workerid": "gw0"})["workerid"] == "gw0":
        note(chosen=len(kept), marked=marked)
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


class Reporter:
    """Notes outcomes where tests are reported, and stops in time."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._seconds = float(os.environ.get("PROOF_SECONDS", "1e9"))
        self._session: pytest.Session | None = None
        self._over = False

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            note(test=report.nodeid, outcome="error", why=str(report.longrepr)[-2000:])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            why = str(report.longrepr)[-2000:] if report.failed else ""
            note(test=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 3), why=why)
        if time.monotonic() - BEGUN > self._seconds:
            for runner in (self._session, self._config.pluginmanager.getplugin("dsession")):
                if runner is not None:
                    runner.shouldstop = "time is up"
            if not self._over:
                self._over = True
                note(time_is_up=True)


def pytest_configure(config: pytest.Config) -> None:
    """Reports in the process that has the results of all tests."""
    if not is_worker(config):
        config.pluginmanager.register(Reporter(config), "proof-reporter")
