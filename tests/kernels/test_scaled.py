"""Tests decode steps on states of whole numbers: each loads and stores them as `memstate.kernels.reference.scaled` says.

What a step computes between load and store is tested with states of floats.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from memstate.kernels.configs import Config, DeltaConfig, SelectiveConfig
from memstate.kernels.dispatch import Backend
from memstate.kernels.reference.scaled import States
from memstate.kernels.tuned import trying
from tests.kernels.test_decode_marks import columns
from tests.kernels.test_decode_steps import KINDS
from tests.kernels.test_tails import ROWS, STREAM, Run
from tests.support.decode_case import MIXED, Case, Memory, Row, check_rows_alone, same_bits

WIDTHS = {  # kind -> sizes of a step
    "gdn": (2, 1, 32, 40), "gdn, value key": (2, 1, 32, 40), "kda, gates": (2, 1, 48, 16),
    "mamba2": (4, 2, 24, 32), "mamba2, state dim": (4, 2, 24, 32), "mamba2, few": (2, 1, 5, 48),
}  # fmt: skip
BLOCKS: dict[str, list[Config]] = {  # op -> configurations that cut a state into other tiles
    "gated_delta_step": [DeltaConfig(block_value=value) for value in (4, 32)],
    "selective_step": [SelectiveConfig(warp_elements=elements) for elements in (128, 512)],
}
DTYPES = {"int8": torch.int8, "int16": torch.int16}
CHANCE = {"seed": 2**31 - 1, "layer": 3, "first_head": 6}

each_kind = pytest.mark.parametrize("kind", WIDTHS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_rounding = pytest.mark.parametrize("chance", [False, True], ids=["nearest", "chance"])


def build(
    kind: str, backend: Backend, generator: torch.Generator, dtype: str, chance: bool, lengths: list[int],
    **settings: Any,
) -> Case:  # fmt: skip
    given = {"state": DTYPES[dtype], "inputs": torch.bfloat16, "dims": WIDTHS[kind]} | settings
    case = KINDS[kind.removesuffix(", few")].make(backend, generator, **given)
    if chance:
        case.shared |= CHANCE | {"lengths": torch.tensor(lengths, device=backend.device)}
    return case


def in_floats(case: Case) -> Case:
    """Returns the step on fp32 states, as they are loaded."""
    memory, twin = case.memory, case.twin()
    turned = memory.state.stride(-1) != 1
    twin.memory = Memory(tuple(memory.state.shape[1:]), torch.float32, memory.state.device, torch.Generator(), turned)
    states = states_of(case)
    for slot in range(1, len(memory.state)):
        twin.memory.fill(slot, states.load(slot))
    twin.shared = {name: value for name, value in case.shared.items() if name not in (*CHANCE, "lengths")}
    return twin


def states_of(case: Case) -> States:
    seed, layer, first_head = (case.shared.get(name, 0) for name in CHANCE)
    return States(case.memory.state, case.memory.scales, case.memory.axis % 3, seed or None, layer, first_head)


@each_kind
@each_dtype
@each_rounding
def test_A_a_step_stores_what_is_defined(
    backend: Backend, generator: torch.Generator, kind: str, dtype: str, chance: bool
) -> None:
    """Rows work in place; write another slot, with a snapshot and two marks; read zeros; and have no tokens."""
    lengths = [7, 2**31 - 5, 0, -3, 65_536]
    case = build(kind, backend, generator, dtype, chance, lengths, rows=[*MIXED[:4], Row(6, 6, 0, 0)], tokens=3)
    case.shared["marks"] = columns([(0, 2, 7)], case.memory.state)
    floats, twin = in_floats(case), case.twin()
    assert same_bits(case.step(backend), floats.step(backend))
    states = states_of(twin)
    for slot, length in ((1, 10), (3, 2**31 - 3), (4, 2**31 - 3), (5, 1), (6, None), (7, 9)):
        states.store([slot], floats.memory.state[slot], length)
    assert same_bits(case.memory.whole, twin.memory.whole)
