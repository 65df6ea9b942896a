"""Options that several tools have. The module imports no torch before a command runs."""

import os
from typing import Annotated

import typer

from memstate.cli.options import split_names, writable
from memstate.cli.output import fail
from memstate_tools.names import Backend

BackendOption = Annotated[Backend, typer.Option(help="Implementation that executes the kernels.")]


def choose_backend(backend: Backend) -> None:
    """Sets TRITON_INTERPRET for a backend. Triton reads it when kernels are imported, so call this first."""
    if backend == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"
    elif backend == "cuda":
        os.environ.pop("TRITON_INTERPRET", None)


def device_of(backend: Backend) -> str:
    """Returns "cuda" or "cpu" for a backend. Ends the command if the backend cannot run."""
    import torch

    if backend == "cuda" and not torch.cuda.is_available():
        fail("backend 'cuda': no CUDA device here; use --backend reference or interpreter")
    return "cuda" if torch.cuda.is_available() and backend in ("cuda", "auto") else "cpu"


def output_file(path: str | None) -> str | None:
    """Returns a path unchanged, if it is writable (see `writable`) and not stdout."""
    if path == "-":
        raise typer.BadParameter("'-': expected a path; stdout is for --json")
    return writable(path)


def whole_numbers(text: str) -> str:
    """Returns a comma-separated list unchanged, if it has whole numbers only."""
    if not all(number.isdecimal() for number in split_names(text)):
        raise typer.BadParameter(f"{text!r}: expected whole numbers, such as 1,8,64")
    return text
