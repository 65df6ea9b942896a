"""Says at the end of a run how often tests were skipped, for each reason: -q shows one number only."""

from collections import Counter

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Counts tests, and files of them that were skipped as a whole, by the first line of the reason."""
    reasons = [str(report.longrepr[2]) for report in terminalreporter.getreports("skipped")]
    for why, times in Counter(why.splitlines()[0].removeprefix("Skipped: ") for why in reasons).most_common():
        terminalreporter.write_line(f"skipped {times}: {why}")
