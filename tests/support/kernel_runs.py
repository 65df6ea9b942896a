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


def check_words_compile(module: str, cases: str) -> None:
    """Kernels that move narrow words compile as wide as they may be, without spills.

    `memstate compile` asks for 16 bytes and leaves narrow words out; where kernels are interpreted, none compiles.
    """
    program = (
        "import json\n"
        "from memstate.cli.compile.build import build\n"
        f"from memstate.kernels.{module} import compile_cases\n"
        f"cases = [(unit, case) for unit in (16, 8, 4, 2, 1) for case in compile_cases(unit)[{cases}]]\n"
        "made = [(unit, build(case, target)) for unit, case in cases for target in ('sm_90', 'gfx942')]\n"
        "print(json.dumps([(unit, one.narrowest_bulk_access_bits, one.spill_bytes) for unit, one in made]))\n"
    )
    made = not_interpreted("-c", program)
    assert made == [[unit, 8 * unit, 0] for unit in (16, 8, 4, 2, 1) for _ in range(len(made) // 5)] and made
