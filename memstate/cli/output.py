"""What commands print: JSON or a table on stdout; progress, and one line for an error, on stderr."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import typer

from memstate.cli.names import Backend

Progress = Callable[[int, int], None]
WIDTH = 160  # of tables that go to a file or a pipe


def complain(line: str) -> None:
    """Prints one line in red to stderr."""
    from rich.console import Console

    Console(stderr=True).print(line, style="red", highlight=False, soft_wrap=True, markup=False)


def printable(text: str) -> str:
    """Returns a text without what steers a terminal, such as escape sequences in names from elsewhere."""
    return "".join(each if each.isprintable() else "\ufffd" for each in text)


def fail(line: str, status: int = 2) -> NoReturn:
    """Prints one line to stderr and ends the command."""
    complain(printable(" ".join(line.split())))  # it can quote what a server or a file says
    raise typer.Exit(status)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns errors of bad input into one line and exit status 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        fail(str(error))


@contextmanager
def progress(title: str) -> Iterator[Progress]:
    """Shows a progress bar on a terminal, nothing elsewhere. Yields a function that takes (done, total)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def device_of(backend: Backend) -> str:
    """Returns "cuda" or "cpu" for a backend; ends the command where the backend cannot run."""
    import torch

    if backend == "cuda" and not torch.cuda.is_available():
        fail("backend 'cuda': no CUDA device here; use --backend reference or interpreter")
    return "cuda" if torch.cuda.is_available() and backend in ("cuda", "auto") else "cpu"


def emit(path: str | None, data: Any, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes JSON to `path` and prints rows as a table, at least one; "-" prints the JSON instead of the table."""
    if not _write_json(path, data):
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for at, column in enumerate(rows[0] if rows else ()):
        table.add_column(column.replace("_", " "), no_wrap=at == 0)  # a name that is cut short is no name
    for row in rows:
        table.add_row(*(escape(_text_of(value)) for value in row.values()))  # a name such as plan[lazy] is no markup
    write_stdout(lambda: Console(width=None if sys.stdout.isatty() else WIDTH).print(table))


def _text_of(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def emit_text(path: str | None, data: Any, text: str) -> None:
    """Writes JSON to `path` and prints a text; "-" prints the JSON instead of the text."""
    if _write_json(path, data):
        write_stdout(lambda: sys.stdout.write(text + "\n"))


def _write_json(path: str | None, data: Any) -> bool:
    """Writes JSON to `path`. Returns whether stdout is free for more."""
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
    """Calls `write` and flushes stdout; a closed pipe or a full disk is one line on stderr."""
    try:
        write()
        sys.stdout.flush()
    except OSError as error:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (nothing more can be written at exit)
        fail(f"standard output: {error.strerror}")
