"""Runs programs in processes where kernels are compiled, not interpreted, and makes allocations by torch fail."""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from runpy import run_module, run_path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from memstate.kernels.dispatch import OPS

ROOT = Path(__file__).parents[2]
INTERPRET = "TRITON_INTERPRET"


@contextmanager
def nothing_allocated() -> Iterator[None]:
    """Makes torch refuse to allocate a tensor during the block."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("allocated")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_like", "zeros", "zeros_like", "tensor"):
            patch.setattr(torch, name, refuse)
        yield


def not_interpreted(*program: str) -> Any:
    """Runs a Python program in a process without Triton's interpreter. It must print JSON; returns the parsed output.

    Args:
        program: arguments of Python: a file, "-c" and text, or "-m" and a module.
    """
    warm = _warm()
    with TemporaryDirectory() as folder:
        said = {name: str(Path(folder, name)) for name in ("stdout", "stderr")}
        assert warm.stdin and warm.stdout
        warm.stdin.write(json.dumps([program, dict(os.environ), said]) + "\n")
        warm.stdin.flush()
        status = json.loads(warm.stdout.readline())
        assert status == 0, Path(said["stderr"]).read_text()
        return json.loads(Path(said["stdout"]).read_text())


@cache
def _warm() -> "subprocess.Popen[str]":
    """Starts a process that imports the slow modules, then runs programs in forks. It ends with this process."""
    environment = {name: value for name, value in os.environ.items() if name != INTERPRET}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.kernel_runs"], cwd=ROOT, env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


def main() -> None:
    """Reads a program from each line of the input, runs it in a child, and prints its exit status."""
    import_module("memstate_tools.compile.build")
    for module in OPS.values():
        import_module(f"memstate.kernels.{module}")
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        program, environment, said = json.loads(line)
        child = os.fork()
        if child == 0:
            os.environ.update(environment)
            os.environ.pop(INTERPRET, None)
            os._exit(_run(program, said))
        answers.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        answers.flush()


def _run(program: list[str], said: dict[str, str]) -> int:
    """Runs a program in this process as Python would. Its output goes to files. Returns the exit status."""
    for at, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(said[name], os.O_WRONLY | os.O_CREAT, 0o600), at)
    first, *rest = program
    sys.argv = rest if first in ("-c", "-m") else program
    try:
        if first == "-c":
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        elif first == "-m":
            run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            run_path(first, run_name="__main__")
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    main()
