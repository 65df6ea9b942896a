"""Tests that a launch of a compiled kernel on a CPU keeps what its specialisation was promised."""

import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl

from tests import COMPILED
from tests.support.compiled import ROOT, environment
from tests.support.ptx.device import install


@triton.jit
def _first(source, target, n):
    tl.store(target, tl.load(source) * n)


@triton.jit
def _swap(cells):
    tl.store(cells + tl.program_id(0), tl.load(cells + 1 - tl.program_id(0)))


@pytest.mark.skipif(not COMPILED, reason="launches compiled kernels")
def test_a_race_of_a_launch_is_a_fault() -> None:
    from tests.support.ptx.program import Fault

    with pytest.raises(Fault, match=r"_swap: race: test_ptx_launch.py:\d+: .* programs"):
        _swap[(2,)](torch.arange(2))


@pytest.mark.skipif(not COMPILED, reason="launches compiled kernels")
def test_a_wrong_promise_is_a_fault() -> None:
    from tests.support.ptx.program import Fault

    x, out = torch.arange(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    compiled = _first[(1,)](x, out, 1)  # both tensors begin at a multiple of 16 bytes
    compiled[(1, 1, 1)](x[4:], out, 1)
    assert out[0] == 4
    for given, words in (((x[1:], out, 1), "source is .* multiple of 16"), ((x, out, 5), "n is 5, .* compiled as 1")):
        with pytest.raises(Fault, match=words):
            compiled[(1, 1, 1)](*given)


@pytest.mark.proof
def test_a_process_touches_no_gpu_and_no_kernels_of_one() -> None:
    told = "import tests, triton, os; print(triton.knobs.cache.dir, repr(os.environ['CUDA_VISIBLE_DEVICES']))"
    given = environment("together") | {"TRITON_CACHE_DIR": "/of/a/gpu", "CUDA_VISIBLE_DEVICES": "0"}
    done = subprocess.run([sys.executable, "-c", told], cwd=ROOT, env=given, check=True, text=True, capture_output=True)
    assert done.stdout == f"{ROOT}/build/ptx/{triton.__version__} ''\n"


def test_nonsense_is_no_order() -> None:
    with pytest.raises(ValueError, match=r"'sideways'.*together"):
        install("sideways")
