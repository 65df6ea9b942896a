"""Runs the test files whose kernels are compiled in a process of its own, because this one interprets kernels.

`make test` runs one that goes through all of a sweep, `make compiled` and `make proof` run all of them.
"""

import sys
from pathlib import Path

import pytest

from tests.support.processes import ran
from tests.support.sampling import PROOF
from tests.tuning.conftest import COMPILING

FOLDER = Path(__file__).parent

pytest.importorskip("triton", reason="without Triton there are no kernels")


def test_files_pass_in_a_process_that_compiles_kernels() -> None:
    command = [sys.executable, "-m", "pytest", "--noconftest", "-q", "-p", "no:cacheprovider"]
    files = (FOLDER / name for name in COMPILING if PROOF or name == "test_tune.py")
    unset = ("TRITON_INTERPRET", "MEMSTATE_TUNED")
    done = ran(*command, *files, without=unset, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS=1)
    assert done.returncode == 0, done.stdout + done.stderr
