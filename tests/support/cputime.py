"""Measures the CPU seconds of each case: its own, those of its threads, and those of processes for which it waits.

A run that takes long ends with the seconds by folder, its dearest cases, and what collection took. With
MEMSTATE_DEAR=1, as in `make proof`, a run fails if a case takes more than 3 s and tests/dear.txt does not say why.
"""

import os
from collections import Counter

import pytest

from tests.support.sources import ROOT

FILE = ROOT / "tests" / "dear.txt"
DEAR = 3.0  # CPU seconds above which a case needs a line that says why
LONG = 30.0  # CPU seconds of tests above which a run ends with the table
MOST = 10  # cases in the table
NAME = "cpu"


def used() -> float:
    """Returns the CPU seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


def reasons(text: str) -> dict[str, str]:
    """Returns why cases are dear, by their names. A line has a name, two spaces, and the reason."""
    known: dict[str, str] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        case, _, why = line.partition("  ")
        assert case and why.strip(), f"expected `case  why` in dear.txt, got {line!r}"
        assert case not in known, f"{case} stands in dear.txt twice"
        known[case] = why.strip()
    return known


class Meter:
    """A plugin of pytest. Workers of xdist tell their process what they have measured."""

    def __init__(self) -> None:
        self.start = 0.0
        self.cases: Counter[str] = Counter()
        self.collected: list[float] = []  # of each process that collects

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Notes what imports and collection took."""
        self.collected.append(used())
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output[NAME] = used()

    @pytest.hookimpl(optionalhook=True)  # of xdist
    def pytest_testnodedown(self, node: object) -> None:
        """Takes what a worker noted."""
        self.collected.append(getattr(node, "workeroutput", {}).get(NAME, 0.0))

    def pytest_runtest_logstart(self) -> None:
        """Starts a case."""
        self.start = used()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        """Gives the last report of a case its seconds."""
        if call.when == "teardown":
            item.user_properties.append((NAME, used() - self.start))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Takes the seconds of a case, in its own process or from a worker."""
        if report.when == "teardown":
            self.cases[report.nodeid] += dict(report.user_properties).get(NAME, 0.0)  # type: ignore[assignment]

    def unexplained(self, known: dict[str, str]) -> list[str]:
        """Returns a line for each case that is dear and has no reason."""
        return [f"{case}: {seconds:.1f} CPU s" for case, seconds in self.cases.most_common()
                if seconds > DEAR and case not in known]  # fmt: skip

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fails a run whose dear cases are not all explained."""
        if os.environ.get("MEMSTATE_DEAR") and self.unexplained(reasons(FILE.read_text("utf-8"))):
            session.exitstatus = max(session.exitstatus, pytest.ExitCode.TESTS_FAILED)

    def table(self) -> list[str]:
        """Returns the lines at the end of a run."""
        folders: Counter[str] = Counter()
        for case, seconds in self.cases.items():
            folders[folder(case)] += seconds
        tests, collected = sum(folders.values()), sum(self.collected)
        lines = [f"{seconds:7.1f} {name}" for name, seconds in folders.most_common()]
        lines.append(f"{collected:7.1f} collection, of {len(self.collected)} processes")
        lines.append(f"{tests + collected:7.1f} CPU s together; the dearest cases:")
        return lines + [f"{seconds:7.1f} {case}" for case, seconds in self.cases.most_common(MOST)]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Writes the table, and what no line explains."""
        if terminalreporter.config.pluginmanager.hasplugin("dsession"):
            self.collected.append(sum(os.times()[:2]))  # this process imports tests/conftest.py, and collects nothing
        if sum(self.cases.values()) > LONG:
            terminalreporter.section("CPU seconds")
            for line in self.table():
                terminalreporter.write_line(line)
        if os.environ.get("MEMSTATE_DEAR"):
            for line in self.unexplained(reasons(FILE.read_text("utf-8"))):
                terminalreporter.write_line(f"tests/dear.txt does not say why {line}", red=True)


def folder(case: str) -> str:
    """Returns the folder of a case below tests/, or `tests` itself."""
    return "/".join(case.partition("::")[0].split("/")[:-1][:2])
