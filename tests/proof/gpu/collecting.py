"""A plugin of pytest that skips test files whose packages are missing, and chooses among the tests marked `gpu`.

It also writes the result of every test when it is known, and ends the session early enough for the reports.

Environment variables: PROOF_RESULTS, the file for the results, as JSON lines; PROOF_SECONDS, the time of the session;
PROOF_CHOOSE, if set, makes it choose among the tests.
"""

import gc
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from tests.proof.gpu.proved import newest_files
from tests.support.sampling import covering

RULE = (
    "of a test in tests/kernels as many cases as show every value of every parameter: each kernel, its dtypes and "
    "shapes; in tests/requests up to four cases of a test: each strategy; elsewhere one case of each test"
)
MOST = {"tests/kernels/": None, "tests/requests/": 4}  # None: so many that each value of each parameter occurs
# Packages that every machine of the proof has. If a name is missing in one of them, the test fails and is not skipped.
NEEDED = ("memstate", "memstate_tools", "tests", "torch", "triton", "numpy", "einops", "pytest", "hypothesis")
LARGE = "B38"  # part of the names of tests that need most of a GPU's memory, so they run alone
BEGUN = time.monotonic()


def lacking(error: BaseException | None) -> str:
    """Returns the text of the error if it means that a package is missing; "" if the error is a failure of the file."""
    errors: list[ImportError] = []
    while error:
        errors += [error] if isinstance(error, ImportError) else []
        error = error.__cause__
    ours = any((each.name or "").partition(".")[0] in NEEDED for each in errors)
    return str(errors[0]) if errors and not ours else ""


def note(**line: object) -> None:
    """Appends a line to the results."""
    if path := os.environ.get("PROOF_RESULTS"):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class File(pytest.Module):
    """A test file that is skipped if a package, or a version of a package, is missing."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        """Collects the tests, or notes why the file is left out. All processes note the same text."""
        try:
            return super().collect()
        except pytest.skip.Exception as skipped:
            why = str(skipped)
        except (self.CollectError, SystemExit) as error:
            why = lacking(error)
            if not why:
                raise
        note(left_out=self.nodeid, why=why)
        pytest.skip(why, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> File:
    """Returns a `File` for a test file."""
    return File.from_parent(parent, path=module_path)


def chosen(items: list[pytest.Item]) -> list[pytest.Item]:
    """Chooses tests marked `gpu` according to RULE. Returns the chosen tests, first those of the newest kernels."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("gpu"):
            groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = []
    for name, cases in groups.items():
        plain = not hasattr(cases[0], "callspec")
        most = next((most for folder, most in MOST.items() if name.startswith(folder)), 1)
        kept += cases if plain else covering(cases, most)
    new = newest_files()
    return sorted(kept, key=lambda item: -(item.nodeid.startswith("tests/kernels/") + item.nodeid.startswith(new)))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the chosen tests. One process notes their number, and the number of all tests marked `gpu`."""
    if not os.environ.get("PROOF_CHOOSE"):
        return
    kept = chosen(items)
    marked = sum(item.get_closest_marker("gpu") is not None for item in items)
    if getattr(config, "workerinput", {"workerid": "gw0"})["workerid"] == "gw0":
        note(chosen=len(kept), marked=marked)
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept
    for item in items:
        if LARGE in item.name:
            item.add_marker(pytest.mark.xdist_group("large"))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Frees the GPU memory of a large test, so that other processes can use it."""
    if LARGE in item.name:
        gc.collect()
        torch.cuda.empty_cache()


class Reporter:
    """Notes the outcomes of tests, and stops the session when its time is up."""

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
    """Registers the reporter in the process that gets the results of all tests."""
    if not hasattr(config, "workerinput"):  # otherwise it runs tests for another process, which reports them
        config.pluginmanager.register(Reporter(config), "proof-reporter")
