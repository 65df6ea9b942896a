"""Runs compiled kernels of one program with so many warps that several hold the same lanes.

Real launches have fewer warps (see test_warps.py), because a lane in two warps is loaded twice: a late warp may decide
by a word that another warp has already changed. The barriers of the kernels would be enough even then.
"""

import pytest
import torch

from tests import COMPILED

if not COMPILED:
    pytest.skip("warps of a program are seen where compiled kernels run on a CPU", allow_module_level=True)

from memstate.kernels import bitmap, registers, tracking
from memstate.kernels.bitmap import chunk_words
from memstate.kernels.warps import warps_for
from tests.kernels.test_plan_kernel import VARIANTS
from tests.support.op_case import Maker
from tests.support.op_cases import MAKERS, ONE_PROGRAM

LAUNCHED = sorted(ONE_PROGRAM - {"audit"})  # an audit already has the most warps
OPS = [(op, variant) for op in LAUNCHED for variant in (VARIANTS if op == "plan" else [""])]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("op", "variant"), OPS)
def test_warps_may_hold_the_same_lanes(op: str, variant: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = MAKERS[op](Maker(seed), *filter(None, [variant]))
    expected = case.run(case.module("memstate.kernels.reference"))
    for module in (bitmap, registers, tracking):
        monkeypatch.setattr(module, "warps_for", lambda lanes: 4 * warps_for(lanes))
        monkeypatch.setattr(module, "chunk_words", lambda warps: chunk_words(warps // 4))
    assert all(map(torch.equal, case.run(case.module()), expected))
