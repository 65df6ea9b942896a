"""Tests decode steps on states of whole numbers, which they load and store as `memstate.kernels.reference.scaled` says.

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
from tests import COMPILED
from tests.kernels.test_decode_marks import columns
from tests.kernels.test_decode_steps import KINDS
from tests.kernels.test_tails import ROWS, STREAM, Run
from tests.support.decode_case import MIXED, Case, Memory, Row, check_chunks, check_rows_alone, same_bits

WIDTHS = {  # kind -> sizes of a step
    "gdn": (2, 1, 32, 40), "gdn, value key": (2, 1, 32, 40), "kda, gates": (2, 1, 48, 16),
    "mamba2": (4, 2, 24, 32), "mamba2, state dim": (4, 2, 24, 32), "mamba2, few": (2, 1, 5, 48),
}  # fmt: skip
BLOCKS: dict[str, list[Config]] = {  # op -> configurations that cut a state into other tiles
    "gated_delta_step": [DeltaConfig(block_value=value) for value in (32, 64)],
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


def check_alike(case: Case, expected: Case, out: Tensor, expected_out: Tensor, exact: bool = True) -> None:
    """Checks that two steps store the same bytes or, if sums in a state may have another order, nearly the same.

    Sums in outputs may have another order.
    """
    torch.testing.assert_close(out, expected_out, rtol=0.02, atol=0.02)
    if exact:
        assert same_bits(case.memory.whole, expected.memory.whole)
        return
    for row in case.rows:
        for slot in {row.write, row.snapshot} - {0}:
            torch.testing.assert_close(case.memory.scales[slot], expected.memory.scales[slot], rtol=1e-5, atol=0)
            apart = (case.memory.state[slot].int() - expected.memory.state[slot].int()).abs()
            assert apart.max() <= 1 and apart.float().mean() < 0.02


@pytest.mark.sample
@each_kind
@each_dtype
@each_rounding
def test_D34_a_step_stores_what_is_defined(
    backend: Backend, generator: torch.Generator, kind: str, dtype: str, chance: bool
) -> None:
    """Rows work in place, with a mark; write another slot, with a snapshot; read zeros; and copy a state.

    k has one key, so that no sum in a state depends on which keys a lane has.
    """
    rows = [row._replace(tokens=1) for row in MIXED[:4]] + [Row(6, 6, 0, 0)]
    case = build(kind, backend, generator, dtype, chance, [7, 2**31 - 3, 0, -3, 65_536], rows=rows, tokens=1)
    case.shared["marks"] = columns([(0, 1, 7)], case.memory.state)
    if "k" in case.inputs:
        case.inputs["k"][..., 1:] = 0
    floats, expected = in_floats(case), case.twin()
    out, states = floats.step(backend), states_of(expected)
    for slot, length in ((1, 8), (3, 2**31 - 2), (4, 2**31 - 2), (5, 1), (7, 8)):
        states.store([slot], states.rounded(floats.memory.state[slot], length))
    states.store([6], floats.memory.state[6])
    check_alike(case, expected, case.step(backend), out)


@pytest.mark.sample
@each_kind
@each_dtype
@each_rounding
@pytest.mark.parametrize("trees", [False, True], ids=["tail", "tree"])
def test_D34_T1_a_row_that_speculates_has_the_bytes_of_plain_decode(
    backend: Backend, generator: torch.Generator, kind: str, dtype: str, chance: bool, trees: bool
) -> None:
    rows = [Row(slot, slot, tokens=STREAM) for slot in (1, 2, 3)]
    case = build(kind, backend, generator, dtype, chance, [0] * ROWS, rows=rows, tokens=STREAM)
    Run(case, backend, generator, most=3, ring=8, trees=trees).speculate()


@pytest.mark.sample
@each_kind
@each_dtype
@each_rounding
def test_D34_neither_batch_nor_slot_nor_block_changes_a_byte(
    backend: Backend, generator: torch.Generator, kind: str, dtype: str, chance: bool
) -> None:
    rows = [row._replace(tokens=min(row.tokens, 1)) for row in MIXED]
    case = build(kind, backend, generator, dtype, chance, [7, 8, 9, 10, 11], rows=rows, tokens=1)
    check_rows_alone(case, backend)
    whole, moved = case.twin(), case.twin()
    out = whole.step(backend)
    moved.rows = [row._replace(write=row.read or row.write, snapshot=0) for row in moved.rows]
    assert same_bits(moved.step(backend), out)
    assert same_bits(moved.memory.bytes_of([1, 2, 5, 6]), whole.memory.bytes_of([1, 3, 5, 6]))
    for config in BLOCKS[case.op]:
        part = case.twin()
        with trying(config):
            part_out = part.step(backend)
        check_alike(part, whole, part_out, out, exact=COMPILED or case.op == "selective_step")


@pytest.mark.sample
@each_kind
@each_dtype
@each_rounding
def test_D34_no_cut_changes_a_byte(
    backend: Backend, generator: torch.Generator, kind: str, dtype: str, chance: bool
) -> None:
    rows = [Row(slot, slot, tokens=6) for slot in (1, 2, 3)]
    check_chunks(
        build(kind, backend, generator, dtype, chance, [4, 50, 600], rows=rows, tokens=6), backend, [0, 1, 4, 6]
    )


@pytest.mark.sample
@each_kind
@each_dtype
def test_D34_zero_bytes_are_zeros_and_a_row_of_nan_stays_alone(
    backend: Backend, generator: torch.Generator, kind: str, dtype: str
) -> None:
    case = build(kind, backend, generator, dtype, False, [], rows=[Row(1, 1), Row(0, 2), Row(3, 3)], tokens=3)
    for x in case.inputs.values():
        x[1:] = x[:1]
    numbers, scales = case.memory.state.movedim(case.memory.axis, -1), case.memory.scales
    for slot in (1, 3):
        numbers[slot], scales[slot] = 0, 0.0
    scales[3, 0, 2] = torch.nan
    out = case.step(backend)
    assert same_bits(case.memory.bytes_of(1), case.memory.bytes_of(2)) and same_bits(out[0], out[1])
    assert scales[3, 0, 2].isnan() and not numbers[3, 0, 2].any() and out[2].isnan().any()
    for slot in (1, 3):
        numbers[slot, 0, 2], scales[slot, 0, 2] = 0, 0.0
    assert same_bits(case.memory.bytes_of(1), case.memory.bytes_of(3))


def test_D34_slots_that_begin_anywhere_change_in_place(backend: Backend, generator: torch.Generator) -> None:
    """No two warps hold the same numbers: the machine of compiled kernels would call it a race."""
    distance = 32 * 64 + 4
    state = torch.zeros(3 * distance, dtype=torch.int8).as_strided((3, 1, 64, 32), (distance, 2048, 32, 1)).mT
    state[:2] = torch.randint(-127, 128, state[:2].shape, dtype=torch.int8, generator=generator)
    scales, one, k, v = torch.ones(3, 1, 64), torch.ones(1, 1, 1), torch.zeros(1, 1, 1, 32), torch.ones(1, 1, 1, 64)
    k[..., 0] = 1
    for write in (2, 1):
        slots = (torch.tensor([slot], device=backend.device) for slot in (1, write, 0, 1))
        moved = [each.to(backend.device) for each in (k, k, v, -one, one)]
        state, scales = state.to(backend.device), scales.to(backend.device)
        with trying(DeltaConfig(block_value=32)):
            backend.gated_delta_step(*moved, state, *slots, scales=scales)
    assert same_bits(state[1], state[2]) and same_bits(scales[1], scales[2])


LENGTHS = torch.zeros(5, dtype=torch.int32)
WRONG: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [  # kind, settings of a step, other arguments, error
    *(("mamba2", {}, changed, told) for changed, told in (
        ({"scales": None}, r"^state: expected one of .* without scales, got torch\.int8"),
        ({"seed": 1}, "^lengths, seed: expected both"),
        ({"lengths": LENGTHS}, "^lengths, seed: expected both"),
        ({"lengths": LENGTHS, "seed": True}, "^seed: expected a whole number .* got True"),
        ({"lengths": LENGTHS, "seed": 2**31}, "^seed: expected a whole number"),
        ({"layer": -1}, "^layer: expected a whole number"),
        ({"first_head": 1.0}, "^first_head: expected a whole number"),
    )),
    ("mamba2", {"dims": (2, 1, 16, 24)}, {}, "^state: expected rows of a multiple of 16 .* got 24"),
    ("mamba1", {"dims": (1, 1, 24, 16)}, {}, r"^scales: expected None .*Mamba1"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "settings", "changed", "told"), WRONG)
def test_G1_what_whole_numbers_do_not_take_is_named(
    backend: Backend, generator: torch.Generator, kind: str, settings: Any, changed: dict[str, Any], told: str
) -> None:
    given = {"state": torch.int8, "dims": WIDTHS.get(kind)} | settings
    case = KINDS[kind].make(backend, generator, **given)
    with pytest.raises(ValueError, match=told):
        getattr(backend, case.op)(**(case.arguments() | changed))
    case.memory.check_changed_only(set())
