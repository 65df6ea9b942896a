"""Runs a module of the tools in a second process, and reads the JSON lines that it writes.

A process either interprets kernels or compiles them. Work of the other kind needs a second process.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Final

import memstate

# folders from which this process imports the library and the tools
PLACES: Final = [str(Path(file).parents[1]) for file in (memstate.__file__, __file__)]


class WorkerFailed(Exception):
    """Says that the second process failed. The message is the last line that it wrote."""


def run_module(module: str, *arguments: str, interpret: bool, path: Path | None = None) -> Iterator[Any]:
    """Runs `python -m module`, and yields the value of each JSON line when it comes.

    Args:
        module: Name of the module.
        *arguments: Command-line arguments of the module.
        interpret: Whether Triton interprets kernels there.
        path: A folder that comes first on the module search path.

    Raises:
        WorkerFailed: The process ended with an error.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    places = [str(path or ""), *PLACES, environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    command = [sys.executable, "-m", module, *arguments]
    with (
        tempfile.TemporaryFile("w+") as complaints,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, text=True, env=environment) as child,
    ):
        assert child.stdout is not None  # tells the type checker that stdout is a pipe
        yield from map(json.loads, child.stdout)
        if child.wait():
            complaints.seek(0)
            raise WorkerFailed(complaints.read().strip().rpartition("\n")[2] or f"exit status {child.returncode}")


def serve(work: Callable[[], Iterator[Any]]) -> None:
    """Writes the values of `work` to stdout as JSON lines. Output of Triton goes to stderr."""
    lines = sys.stdout
    with redirect_stdout(sys.stderr):
        for value in work():
            lines.write(json.dumps(value) + "\n")
            lines.flush()
