"""Runs the tests of kernels, and random programs, on what several versions of Triton compile, without a GPU.

    python -m tests.proof.compiled_run                   with the oldest supported version, the installed and the newest
    python -m tests.proof.compiled_run installed         with the installed one; the same as `make compiled`

All tests of tests/kernels run with all warps in step, then random programs of a manager in four orders of warps. With
--whole, as in `make proof`, sums of all kinds of delta steps are compared as well. Bounds and races are checked at
every access. Ends with 1 if a run fails, or if the tests never launch an operation. Versions
that are not installed are first installed into build/triton/<version>.
"""

import argparse
import resource
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat

from tests.proof.compile_matrix import VERSIONS, folder_of, versions_of
from tests.support.compiled import ROOT, environment

ORDERS = ("together", "warps", "backwards", "1")  # 1: a seed of a random order
TESTS = ("pytest", "-q", "-p", "no:cacheprovider", "tests/kernels")
PROGRAMS = (
    "tests.proof.stateful",
    "--backend",
    "interpreter",
    "--workers",
    "1",
    "--length",
    "50",
    "--operations",
    "500",
)
RUNS = (("together", TESTS), *((order, PROGRAMS) for order in ORDERS))
ONE_ORDER = "tests/kernels/test_one_order.py::test_tiles_of_any_number_of_values_give_the_same_bits"  # named: all cases
WHOLE = (*RUNS, ("together", (*TESTS[:-1], ONE_ORDER)))


def run(folder: str, order: str, command: Sequence[str]) -> tuple[bool, str]:
    """Runs a module of Python on compiled kernels.

    Args:
        folder: folder of Triton, "" for the installed one.
        order: order of warps.
        command: the module and its arguments.

    Returns:
        Whether it passed, and its output.
    """
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env=environment(order, folder), text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    missing = "never launched" in done.stdout and ONE_ORDER not in command
    return done.returncode == 0 and not missing, done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what each run says. Returns 1 if one of them fails, otherwise 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.proof.compiled_run", description=__doc__.splitlines()[0])
    parser.add_argument(
        "versions", nargs="*", default=VERSIONS, metavar="VERSION",
        help=f"a version of Triton, `installed` or `newest`; without any: {' '.join(VERSIONS)}",
    )  # fmt: skip
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    parser.add_argument("--whole", action="store_true", help="also compare the sums of all kinds of delta steps")
    given = parser.parse_args(arguments)
    runs = WHOLE if given.whole else RUNS

    bad, before = 0, 0.0
    for version in versions_of(given.versions):
        folder = str(folder_of(version) or "")
        with ThreadPoolExecutor(given.workers) as pool:
            told = pool.map(run, repeat(folder), *zip(*runs, strict=True))
            for (order, (module, *_)), (passed, output) in zip(runs, told, strict=True):
                print(
                    f"{output.rstrip()}\nTriton {version}: {order}: {module}: {'passed' if passed else 'FAILED'}",
                    flush=True,
                )
                bad += not passed
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(f"Triton {version}: {used.ru_utime + used.ru_stime - before:.0f} CPU s", flush=True)
        before = used.ru_utime + used.ru_stime
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
