"""A plugin of pytest for machines that lack packages: leaves out test files whose imports are not there, by name.

It also writes the result of every test as it comes, and ends the session when its time is up, so that reports are still
written.

Read from the environment: PROOF_RESULTS, a file of JSON lines; PROOF_SECONDS.
"""

import ast
import json
import os
import time
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

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


class Reporter:
    """Notes outcomes where tests are reported, and stops in time."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._seconds = float(os.environ.get("PROOF_SECONDS", "1e9"))
        self._session: pytest.Session | None = None

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


def pytest_configure(config: pytest.Config) -> None:
    """Reports in the process that has the results of all tests."""
    if not is_worker(config):
        config.pluginmanager.register(Reporter(config), "proof-reporter")
