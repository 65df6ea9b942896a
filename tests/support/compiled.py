"""Tests on compiled kernels that run on the CPU: which take part, and which operations they have launched.

`tests/conftest.py` calls this if MEMSTATE_COMPILED is set, see `tests.support.ptx`.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CALLS: Counter[str] = Counter()  # operation -> calls that launched a compiled kernel


def environment(order: str, *path: str) -> dict[str, str]:
    """Returns the environment of a process that compiles kernels and runs them on the CPU.

    order: order of warps, for MEMSTATE_COMPILED. path: folders in front of PYTHONPATH.
    """
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    folders = os.pathsep.join(filter(None, (*path, plain.get("PYTHONPATH"))))
    return plain | {
        "MEMSTATE_COMPILED": order,
        "PYTHONPATH": folders,
        "OMP_NUM_THREADS": "1",
    }


def others(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Yields the tests that launch no compiled kernel: those on the reference, and those without a backend.

    Tests of modules that know COMPILED take part.
    """
    for item in items:
        backend = item.callspec.params.get("backend") if hasattr(item, "callspec") else None
        if backend != "interpreter" and not hasattr(item.module, "COMPILED"):  # type: ignore[attr-defined]
            yield item


def count_calls() -> None:
    """Counts from now on the calls of each operation that launch a compiled kernel."""
    from memstate.kernels.dispatch import OPS
    from tests.support.ptx.device import LAUNCHED

    def counted(call: Callable[..., Any], op: str) -> Callable[..., Any]:
        @wraps(call)
        def launch(*args: Any, **given: Any) -> Any:
            before = LAUNCHED.total()
            result = call(*args, **given)
            CALLS[op] += LAUNCHED.total() > before
            return result

        return launch

    for op, name in OPS.items():
        module = import_module(f"memstate.kernels.{name}")
        setattr(module, op, counted(getattr(module, op), op))


def summary() -> str:
    """Returns a line on what this process has launched."""
    from memstate.kernels.dispatch import OPS
    from tests.support.ptx.device import LAUNCHED

    missing = [op for op in OPS if not CALLS[op]]
    launched = f"{LAUNCHED.total()} launches of {len(LAUNCHED)} compiled kernels"
    return f"{launched}; never launched: {', '.join(missing)}" if missing else f"{launched}; all {len(OPS)} operations"
