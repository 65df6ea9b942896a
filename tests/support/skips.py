"""Prints at the end of a test run how many tests were skipped for each reason, because -q prints only one number."""

from collections import Counter

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the counts by the first line of the reason. A file that was skipped as a whole counts once."""
    reasons = [str(report.longrepr[2]) for report in terminalreporter.getreports("skipped")]
    for why, times in Counter(why.splitlines()[0].removeprefix("Skipped: ") for why in reasons).most_common():
        terminalreporter.write_line(f"skipped {times}: {why}")
