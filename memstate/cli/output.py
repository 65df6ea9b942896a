"""Prints what commands report: JSON or a table on stdout, progress and one-line errors on stderr."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from time import monotonic
from typing import Any, NoReturn

import typer

from memstate.cli.units import duration
from memstate.tables import table, width

Progress = Callable[[int, int | None], None]  # (units done, units in all or None if unknown)
PAUSE = 10.0  # seconds of long work before its next line


def complain(line: str) -> None:
    """Prints one line in red to stderr."""
    from rich.console import Console

    Console(stderr=True).print(line, style="red", highlight=False, soft_wrap=True, markup=False)


def printable(text: str) -> str:
    """Returns a text in which characters that control a terminal, such as escape sequences, are replaced."""
    return "".join(each if each.isprintable() else "\ufffd" for each in text)


def fail(line: str, status: int = 2) -> NoReturn:
    """Prints one line to stderr and ends the command."""
    complain(printable(" ".join(line.split())))  # the line may quote a server or a file
    raise typer.Exit(status)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns errors of bad input into one line and exit status 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        fail(str(error))


@contextmanager
def progress(title: str, what: str) -> Iterator[Progress]:
    """Shows the progress of long work: as a bar on a terminal, elsewhere as lines on stderr.

    The first line comes after `PAUSE` seconds. The pause before each later line is `PAUSE`, or a tenth of the time so
    far if that is longer: about 50 lines in an hour. Short work prints nothing.

    Args:
        title: Name of the work.
        what: Name of the units that are counted, such as "requests".

    Returns:
        A function that takes (done, total).
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console, begin = Console(stderr=True), monotonic()
    due, first = begin + PAUSE, (0, 0.0)  # first report: (units done, its time)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TextColumn("{task.fields[text]}"))
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(title, total=None, text="")

        def report(done: int, total: int | None) -> None:
            nonlocal due, first
            now = monotonic()
            first = first if first[1] else (done, now)
            text = far(done, total, what, now - begin, done - first[0], now - first[1])
            bar.update(task, completed=done, total=total, text=text)
            if now >= due and not console.is_terminal:
                due = now + max(PAUSE, (now - begin) / 10)
                sys.stderr.write(f"{title}: {text}\n")

        yield report


def far(done: int, total: int | None, what: str, seconds: float, lately: int, took: float) -> str:
    """Returns how much of the work is done, and how long the rest takes at the latest speed.

    Args:
        done: Units done.
        total: Units in all; None if unknown.
        what: Name of the units.
        seconds: Seconds since the start.
        lately: Units done since the first report.
        took: Seconds since the first report.

    Example:
        >>> far(41000, 100000, "requests", 9.0, 40000, 8.0), far(12, None, "measurements", 60.0, 11, 58.0)
        ('41,000 of 100,000 requests, 41%, 11.8 s left', '12 measurements in 1 min')
    """
    if total is None:
        return f"{done:,} {what} in {duration(seconds)}"
    left = f", {duration(took * (total - done) / lately)} left" if lately else ""
    return f"{done:,} of {total:,} {what}, {done / max(1, total):.0%}{left}"


def emit(path: str | None, data: Any, title: str, rows: Sequence[Mapping[str, Any]], *, grouped: bool = False) -> None:
    """Writes JSON to `path` and prints rows as a table; "-" prints the JSON instead of the table.

    Args:
        path: File for the JSON. None: the JSON is not written.
        data: Data of the JSON.
        title: Title above the table.
        rows: Rows of the table, see `table`; at least one.
        grouped: Whether rows with the same first value form a group, see `table`.
    """
    columns = width()
    emit_text(
        path, data, "\n".join([fill(title, columns), "", *(table(rows, columns, grouped=grouped) if rows else ())])
    )


def emit_text(path: str | None, data: Any, text: str) -> None:
    """Writes JSON to `path` and prints a text; "-" prints the JSON instead of the text."""
    if _write_json(path, data):
        write_stdout(lambda: sys.stdout.write(text + "\n"))


def _write_json(path: str | None, data: Any) -> bool:
    """Writes JSON to `path`. Returns whether the caller may print to stdout."""
    text = json.dumps(data, indent=2)
    if path == "-":
        write_stdout(lambda: sys.stdout.write(text + "\n"))
        return False
    if path is not None:
        try:
            Path(path).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            fail(f"--json {path}: {error.strerror}")
    return True


def write_stdout(write: Callable[[], object]) -> None:
    """Calls `write` and flushes stdout. A closed pipe or a full disk ends the command with one line on stderr."""
    try:
        write()
        sys.stdout.flush()
    except OSError as error:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (nothing more can be written at exit)
        fail(f"standard output: {error.strerror}")
