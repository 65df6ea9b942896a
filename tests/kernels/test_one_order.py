"""Tests that a compiled delta step has the same bits for tiles of any number of values, so the batch may choose it."""

import pytest
import torch

from memstate.kernels.dispatch import Backend
from tests import COMPILED
from tests.support.one_order import OFTEN, REST, Step, differing, name_of

CUDA = torch.cuda.is_available()
if not (COMPILED or CUDA):
    pytest.skip("an interpreter adds in an order of its own", allow_module_level=True)


@pytest.mark.parametrize(
    "step", [pytest.param(step, id=name_of(step), marks=[pytest.mark.proof] * (step in REST)) for step in OFTEN + REST]
)
def test_tiles_of_any_number_of_values_give_the_same_bits(step: Step, generator: torch.Generator) -> None:
    assert differing(Backend("auto", "cuda" if CUDA else "cpu"), step, generator.initial_seed()) == ""
