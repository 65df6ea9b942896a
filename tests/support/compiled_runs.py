"""Runs tests or random programs on compiled kernels, and counts what was launched.

MEMSTATE_COMPILED, which gives the order of warps, must be set before this process starts. Writes JSON to a file.

    MEMSTATE_COMPILED=warps python -m tests.support.compiled_runs OUT programs 500
    MEMSTATE_COMPILED=warps python -m tests.support.compiled_runs OUT tests tests/kernels -k copy
"""

import json
import os
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from memstate.kernels.dispatch import OPS, Backend

ROOT = Path(__file__).parents[2]
STRATEGIES = ("none", "ping-pong", "lazy", "redirect")
# settings of each random program
DRAWN: list[dict[str, Any]] = [{"strategy": name, "tail": tail} for tail in (False, True) for name in STRATEGIES]


@dataclass
class Told:
    """What a run on compiled kernels tells.

    passed: number of tests or operations. failed: a line for each failed test or different program. skipped: number of
    tests. kernels: kernel -> launches. ops: op -> calls that launched a compiled kernel. seconds: CPU time.
    """

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: int = 0
    kernels: dict[str, int] = field(default_factory=dict)
    ops: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


def run(order: str, *arguments: str, variables: Mapping[str, str] = {}) -> Told:
    """Runs this file as a program, and prints its output once it has ended.

    Args:
        order: the order of warps, for MEMSTATE_COMPILED.
        arguments: those of the program, without the file.
        variables: environment variables besides those of this process.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MEMSTATE_COMPILED": order, **variables}
    with TemporaryDirectory() as folder:
        out = Path(folder, "told.json")
        command = [sys.executable, "-m", "tests.support.compiled_runs", str(out), *arguments]
        ended = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        print(ended.stdout, flush=True)
        if not out.exists():
            return Told(failed=[f"the process ended with status {ended.returncode} before it told anything"])
        told = json.loads(out.read_text())
    return Told(**told | {"ops": Counter(told["ops"])})


class Tests:
    """A plugin of pytest: runs the tests on the kernel backend, and no others, and notes how each ends."""

    def __init__(self, told: Told) -> None:
        self.told = told

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leaves out tests on the reference, and tests that launch no kernel of this process.

        Tests without a backend stay if their module knows COMPILED.
        """
        others = [item for item in items if _backend_of(item) != "interpreter" and not hasattr(item.module, "COMPILED")]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.told.failed.append(f"{report.nodeid} ({report.when})")
        elif report.skipped:
            self.told.skipped += 1
        elif report.when == "call":
            self.told.passed += 1


def _backend_of(item: pytest.Item) -> object:
    return item.callspec.params.get("backend") if hasattr(item, "callspec") else None


def count_ops(ops: Counter[str], launched: Mapping[str, int]) -> None:
    """Lets `ops` count the calls of each operation that launch a kernel, on every backend but the reference.

    Args:
        ops: gets the counts.
        launched: kernel -> launches so far.
    """

    def counted(call: Callable[..., Any], op: str) -> Callable[..., Any]:
        @wraps(call)
        def launch(*args: Any, **given: Any) -> Any:
            before = sum(launched.values())
            try:
                return call(*args, **given)
            finally:
                ops[op] += sum(launched.values()) > before

        return launch

    for op, name in OPS.items():
        module = import_module(f"memstate.kernels.{name}")
        setattr(module, op, counted(getattr(module, op), op))


def run_tests(told: Told, arguments: Sequence[str]) -> None:
    """Runs pytest in this process."""
    status = pytest.main(["-q", "-p", "no:cacheprovider", *arguments], plugins=[Tests(told)])
    if status and not told.failed:
        told.failed.append(f"pytest ended with status {int(status)}")


def run_programs(told: Told, operations: int) -> None:
    """Runs random programs of a manager beside its model, in this process: one for each of DRAWN."""
    from tests.proof.stateful.program import Difference, Program, run

    length = -(-operations // len(DRAWN))
    for seed, given in enumerate(DRAWN, 1):
        try:
            run(Program.random(seed, length, **given), Backend("interpreter"))
            told.passed += length
        except Difference as difference:  # whose text begins with a line of all operations
            why = str(difference).partition("\n")[2]
            told.failed.append(f"Program.random({seed}, {length}, **{given})\n{why}")


def main(arguments: Sequence[str]) -> None:
    """Runs what the arguments say: the file to write, then `programs` and a number, or `tests` and pytest's options."""
    from tests.support.ptx.device import LAUNCHED

    out, what, *rest = arguments
    told = Told()
    count_ops(told.ops, LAUNCHED)
    if what == "programs":
        run_programs(told, int(rest[0]))
    else:
        run_tests(told, rest)
    told.kernels = dict(LAUNCHED)
    used = resource.getrusage(resource.RUSAGE_SELF)
    told.seconds = used.ru_utime + used.ru_stime
    Path(out).write_text(json.dumps(vars(told)))


if __name__ == "__main__":
    main(sys.argv[1:])
