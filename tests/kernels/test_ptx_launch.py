"""Tests that a launch of a compiled kernel on a CPU keeps what its specialisation was promised."""

import pytest
import torch
import triton
import triton.language as tl

from tests import COMPILED


@triton.jit
def _first(source, target):
    tl.store(target, tl.load(source))


@pytest.mark.skipif(not COMPILED, reason="launches compiled kernels")
def test_a_wrong_promise_of_alignment_is_a_fault() -> None:
    from tests.support.ptx.program import Fault

    x, out = torch.arange(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    compiled = _first[(1,)](x, out)  # both begin at a multiple of 16 bytes
    compiled[(1, 1, 1)](x[4:], out)
    assert out[0] == 4
    with pytest.raises(Fault, match=r"source is .* multiple of 16"):
        compiled[(1, 1, 1)](x[1:], out)
