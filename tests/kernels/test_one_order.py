"""Tests that a compiled delta step gives the same bits for tiles of any number of values, so the batch may choose it.

The order of a sum follows from the layout that the compiler chooses for a tile. An interpreter has no such layout.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from memstate.kernels.configs import DeltaConfig
from memstate.kernels.dispatch import Backend
from memstate.kernels.tuned import trying
from tests import COMPILED
from tests.kernels.test_gated_delta import build
from tests.kernels.test_tails import with_tail
from tests.support.decode_case import Row, same_bits

if not COMPILED:
    pytest.skip("an interpreter adds in an order of its own", allow_module_level=True)

FULL, BRAIN, HALF = torch.float32, torch.bfloat16, torch.float16
KINDS: dict[str, dict[str, Any]] = {
    "delta": {}, "gates": {"gates": True}, "kda": {"gates": True, "per_key": True},
    "rwkv7": {"low_rank": True, "per_key": True},
}  # fmt: skip
TOKENS = {"plain": 2, "tail": 3, "tree": 4}
TREE = [[-1, 0, 0, 1], [-1, 0, 1, 0]]  # the parent of each token, of two rows
RING = 12
OFTEN = [  # kind, dtype of the state, whether keys are fastest, form, keys, values
    ("gates", FULL, False, "plain", 64, 64),
    ("kda", BRAIN, False, "plain", 32, 128),
    ("gates", HALF, True, "plain", 32, 64),
    ("gates", BRAIN, False, "tail", 64, 64),
    ("rwkv7", FULL, False, "tree", 32, 64),
    ("kda", FULL, True, "tail", 32, 64),
]
REST = [
    ("rwkv7", FULL, False, "plain", 64, 64), ("gates", FULL, False, "plain", 128, 128),
    ("kda", FULL, False, "plain", 128, 128), ("rwkv7", FULL, False, "tail", 64, 64),
    ("gates", FULL, False, "plain", 96, 96), ("gates", BRAIN, False, "plain", 128, 80),
    ("delta", FULL, False, "plain", 128, 24), ("gates", HALF, False, "plain", 128, 128),
    ("gates", FULL, False, "plain", 256, 128), ("gates", BRAIN, False, "tree", 128, 128),
    ("kda", FULL, False, "tail", 128, 128), ("gates", BRAIN, True, "tail", 128, 128),
    ("kda", FULL, True, "plain", 128, 128), ("gates", BRAIN, False, "plain", 64, 64),
    ("gates", FULL, False, "plain", 32, 128), ("rwkv7", BRAIN, False, "plain", 64, 64),
    ("rwkv7", HALF, True, "tree", 64, 64), ("gates", FULL, False, "plain", 512, 64),
]  # fmt: skip


def results(block_value: int, kind: str, state: torch.dtype, key_fastest: bool, form: str, *size: int) -> list[Tensor]:
    """Returns what a step writes with tiles of so many values: its output, the memory of all states, and the rings."""
    backend, generator = Backend("interpreter"), torch.Generator().manual_seed(7)
    tokens = TOKENS[form]
    rows = [Row(1, 2, 3, tokens), Row(4, 4, 0, tokens)]
    case = build(
        backend, generator, rows, tokens, state, BRAIN, dims=(2, 1, *size), value_key=key_fastest, **KINDS[kind],
    )  # fmt: skip
    rings = [] if form == "plain" else with_tail(case, generator, RING, [1, 2], [5, 9], [2, 3], [2, 1])
    if form == "tree":
        case.shared["parents"] = torch.tensor(TREE, dtype=torch.int32)
    with trying(DeltaConfig(block_value=block_value)):
        return [case.step(backend), case.memory.whole, *rings]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id="-".join(map(str, case)), marks=() if case in OFTEN else pytest.mark.proof)
     for case in OFTEN + REST],
)  # fmt: skip
def test_tiles_of_any_number_of_values_give_the_same_bits(case: tuple[Any, ...]) -> None:
    expected = results(16, *case)
    for block in (32, 64):
        assert all(map(same_bits, results(block, *case), expected)), f"{block} values"
