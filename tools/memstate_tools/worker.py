"""Runs a module of the tools in a second process and reads the JSON lines that it writes.

Kernels are either interpreted or compiled in a process, never both; work of the other kind goes to a second one.
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

# Where this process has the library and the tools from.
PLACES: Final = [str(Path(file).parents[1]) for file in (memstate.__file__, __file__)]


class WorkerFailed(Exception):
    """The second process ended with an error; the message is the last line that it wrote."""


def run_module(module: str, *arguments: str, interpret: bool, path: Path | None = None) -> Iterator[Any]:
    """Runs `python -m module` and yields the values of its JSON lines as they come.

    Args:
        module: Name of the module.
        *arguments: Its command-line arguments.
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
        assert child.stdout is not None  # for the type checker: it is a pipe
        yield from map(json.loads, child.stdout)
        if child.wait():
            complaints.seek(0)
            raise WorkerFailed(complaints.read().strip().rpartition("\n")[2] or f"exit status {child.returncode}")


def serve(work: Callable[[], Iterator[Any]]) -> None:
    """Writes what `work` yields to stdout as JSON lines; what Triton prints goes to stderr."""
    lines = sys.stdout
    with redirect_stdout(sys.stderr):
        for value in work():
            lines.write(json.dumps(value) + "\n")
            lines.flush()
