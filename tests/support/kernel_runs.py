"""How kernels are run: what they allocate, how many programs a launch has, and what is compiled in another process."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


@contextmanager
def nothing_allocated() -> Iterator[None]:
    """Meanwhile torch makes no tensor."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("allocated")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_like", "zeros", "zeros_like", "tensor"):
            patch.setattr(torch, name, refuse)
        yield


def grids_of(patch: pytest.MonkeyPatch, module: ModuleType, kernel: str) -> list[tuple[int, ...]]:
    """The grids with which a kernel is launched from here on."""
    grids, launched = [], getattr(module, kernel)

    class Watched:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return launched[grid]

    patch.setattr(module, kernel, Watched())
    return grids


def not_interpreted(*program: str) -> Any:
    """What a program of Python writes as JSON in a process without Triton's interpreter, where kernels compile."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, *program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
