"""Runs the test files whose kernels are compiled in a process of its own, because this one interprets kernels.

`make test` runs one that goes through all of a sweep, `make compiled` and `make proof` run all of them.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.sampling import PROOF
from tests.tuning.conftest import COMPILING

FOLDER = Path(__file__).parent

pytest.importorskip("triton", reason="without Triton there are no kernels")


def test_files_pass_in_a_process_that_compiles_kernels() -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "MEMSTATE_TUNED")}
    command = [sys.executable, "-m", "pytest", "--noconftest", "-q", "-p", "no:cacheprovider"]
    command += [str(FOLDER / name) for name in COMPILING if PROOF or name == "test_tune.py"]
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=FOLDER.parents[1], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
