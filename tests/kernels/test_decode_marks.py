"""Compares states that decode steps keep at marks, bit for bit, with states of steps that end at the mark.

The process of the tests interprets kernels and cannot compile them. Run as a program, this file compiles kernels of the
selective update, and writes as JSON the layout of each sum, which decides the order of its additions.
"""

import json
import math
import re
import sys
from collections.abc import Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import StepMarks
from tests.kernels.test_decode_steps import DTYPES, KINDS, each_kind, made
from tests.support.decode_case import SLOTS, Case, Row, same_bits
from tests.support.kernel_runs import not_interpreted
from tests.support.sampling import PROOF

Mark = tuple[int, int, int]  # entry of the batch, number of its tokens before the mark, slot for the state there
RUBBISH = 0x5A5A5A5A
# Three rows: one works in place; one is padding; one writes another slot and a snapshot.
ROWS = [Row(1, 1, 0, 5), Row(0, 0, 0, 5), Row(2, 3, 4, 3)]
KEPT: dict[str, list[Mark]] = {
    "none": [],
    "one": [(0, 2, 5)],
    "the first and the last token": [(0, 1, 5), (0, 5, 6), (2, 3, 7)],
    "one after the other": [(2, 1, 5), (2, 2, 6), (2, 3, 7)],
    "beyond the tokens": [(0, 6, 5), (2, 4, 6), (2, 9, 7)],
    "beyond the tokens of the last row": [(2, 4, 6), (2, 5, 7)],
    "before the first token": [(0, 0, 5), (0, 1, 6), (2, -1, 7)],
    "null slots": [(0, 1, 0), (0, 2, 5), (0, 3, -3), (0, 4, SLOTS), (2, 1, 2**31 - 1), (2, 2, 6)],
    "of padding": [(0, 2, 5), (1, 1, 6), (1, 2, 7)],
    "of no entry": [(-1, 1, 5), (3, 1, 6), (2**31 - 1, 2, 7)],
    "more than a block": [*((0, 6 + n, 0) for n in range(200)), (2, 2, 5)],
    "more than a block of the row": [*((0, 2, 0) for _ in range(130)), (0, 3, 5), (2, 1, 6)],
}


def columns(given: Sequence[Mark], like: Tensor) -> StepMarks:
    """Returns marks as a step has them, with rubbish after the last one."""
    rows = [*given, *[(RUBBISH,) * 3] * 5]
    made = (torch.tensor(column, dtype=torch.int32, device=like.device) for column in zip(*rows, strict=True))
    return StepMarks(torch.tensor([len(given)], dtype=torch.int32, device=like.device), *made)


def run(case: Case, backend: Backend, given: Sequence[Mark]) -> Tensor:
    """Runs the step with marks and a poisoned output, and returns the output."""
    out = torch.full_like(case.inputs[case.like], torch.nan)
    return getattr(backend, case.op)(**case.arguments(), out=out, marks=columns(given, case.memory.state))


@pytest.mark.sample(12)
@each_kind
@pytest.mark.parametrize("given", KEPT)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_state_at_a_mark_is_that_of_a_run_that_ends_there(
    backend: Backend, generator: torch.Generator, kind: str, given: str, dtype: str
) -> None:
    """Outputs, written slots and snapshots are those of the step without marks. All other bytes stay the same."""
    state, inputs = DTYPES[dtype]
    small = KINDS[kind].small
    case = made(kind, backend, generator, rows=ROWS, tokens=5, state=state, inputs=inputs, **small)
    plain, marked = case.twin(), case.twin()
    assert same_bits(run(marked, backend, KEPT[given]), plain.step(backend))
    kept = [
        (entry, offset, slot) for entry, offset, slot in KEPT[given]
        if entry in (0, 2) and 0 < offset <= ROWS[entry].tokens and 0 < slot < SLOTS
    ]  # fmt: skip
    for entry, offset, slot in kept:
        alone = case.twin().cut([entry], 0, offset)
        alone.rows = [Row(ROWS[entry].read, SLOTS - 1, 0, offset)]
        alone.step(backend)
        assert same_bits(marked.memory.state[slot], alone.memory.state[SLOTS - 1])
        plain.memory.state[slot] = alone.memory.state[SLOTS - 1]
    assert same_bits(marked.memory.whole, plain.memory.whole)


def test_G2_compiled_sums_have_one_order() -> None:
    """A kernel with marks adds up states in the same lanes as a kernel without marks, so outputs have the same bits on
    a GPU. The test compiles one kernel for one target, with MEMSTATE_PROOF=1 all of them.
    """
    layouts: dict[str, list[list[str]]] = not_interpreted(__file__)
    assert len(layouts) == (8 if PROOF else 2)
    for kernel, (plain, marks) in layouts.items():
        told = kernel, plain, marks
        assert plain == marks and len(plain) == 1 and "sizePerThread" in plain[0], told
    assert not PROOF or len({plain[0] for plain, _ in layouts.values()}) > 4  # kernels differ in their layouts


def main() -> None:
    """Writes the layouts of the sums with and without marks, for slots on 16 bytes and for any stride of slots."""
    from memstate_tools import arguments, calls

    layouts_of: dict[str, list[list[str]]] = {}
    many = 2 if PROOF else 1
    for (model, dtype), stores in product(
        (("mamba2", torch.float32), ("mamba1", torch.bfloat16))[:many], ("", "_marks")
    ):
        sizes, tied, *_ = calls.SELECTIVE[model]
        slot = math.prod((sizes[0][0], *sizes[1:]))
        for target, more in product(("sm_90", "gfx942")[:many], (0, 1)):
            step = arguments.Step(apart=slot + more)
            given = arguments.selective_step(*sizes, dtype, tied, stores=stores, step=step)
            call = calls.Call(model, lambda backend, given=given: backend.selective_step(**given))
            text = calls.launch_of(call, target).compiled.asm["ttgir"]
            layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
            sums = re.findall(r"tt\.reduce\"[\s\S]*?: \(tensor<[^#>]*(#\w+)>\)", text)
            # Only sums over two axes add up states. The sum that searches the marks has one axis, and is left out.
            of_tiles = [layouts[name] for name in sums if re.search(r"order = \[\d, \d\]", layouts[name])]
            layouts_of.setdefault(f"{model} {target} {more}", []).append(of_tiles)
    json.dump(layouts_of, sys.stdout)


if __name__ == "__main__":
    main()
