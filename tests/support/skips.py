"""Prints at the end of a test run the number of skipped tests per reason, because -q prints only their sum."""

from collections import Counter

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints a count for each first line of a reason. A file that was skipped as a whole counts once."""
    reasons = [str(report.longrepr[2]) for report in terminalreporter.getreports("skipped")]
    for why, times in Counter(why.splitlines()[0].removeprefix("Skipped: ") for why in reasons).most_common():
        terminalreporter.write_line(f"skipped {times}: {why}")
