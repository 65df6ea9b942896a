"""Options that several commands have. Imports no torch."""

import os
from pathlib import Path
from typing import Annotated

import typer

from memstate.cli import names


def writable(path: str | None) -> str | None:
    """Checks that a path can be written; raises `BadParameter` before the work starts."""
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
    except (OSError, ValueError) as error:  # a name that no file can have
        why = str(error)
    if why:
        raise typer.BadParameter(f"{path!r}: {why}")
    return path


def output_file(path: str | None) -> str | None:
    """Checks like `writable`, and refuses stdout."""
    if path == "-":
        raise typer.BadParameter("'-': expected a path; stdout is for --json")
    return writable(path)


Json = Annotated[
    str | None,
    typer.Option("--json", metavar="PATH", callback=writable, help="Write JSON to this file; - writes it to stdout."),
]
BackendOption = Annotated[names.Backend, typer.Option(help="Implementation that executes the kernels.")]


def choose_backend(backend: names.Backend) -> None:
    """Sets TRITON_INTERPRET for a backend. Triton reads it when kernels are imported, so call this first."""
    if backend == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"
    elif backend == "cuda":
        os.environ.pop("TRITON_INTERPRET", None)


def split_names(text: str) -> list[str]:
    """Splits a comma separated list and removes duplicates."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
