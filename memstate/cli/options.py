"""Options that several commands have. The module imports no torch."""

import os
from pathlib import Path
from typing import Annotated

import typer


def writable(path: str | None) -> str | None:
    """Returns a path unchanged; raises `BadParameter`, before the work starts, if the path cannot be written."""
    if path is None or path == "-":
        return path
    target = Path(path)
    try:
        at_fault = (
            (not path, "expected a path, or - for stdout"),
            (target.is_dir(), "is a directory"),
            (not target.parent.is_dir(), f"{target.parent} is no directory"),
            (not os.access(target if target.exists() else target.parent, os.W_OK), "cannot be written to"),
        )
        why = next((why for fault, why in at_fault if fault), None)
    except (OSError, ValueError) as error:  # no file can have this name
        why = str(error)
    if why:
        raise typer.BadParameter(f"{path!r}: {why}")
    return path


Json = Annotated[
    str | None,
    typer.Option("--json", metavar="PATH", callback=writable, help="Write JSON to this file; - writes it to stdout."),
]


def split_names(text: str) -> list[str]:
    """Splits a comma-separated list, and removes duplicates."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
