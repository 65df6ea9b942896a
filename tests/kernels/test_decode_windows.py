"""Decode steps that store no slot: a window gets bit for bit what slots would, and every other byte stays.

Kernels are interpreted in the process of the tests and cannot be compiled there: run as a program, this file compiles
those of the selective update and writes as JSON in which order each adds up a sum.
"""

import json
import re
import sys
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from memstate.kernels.blocks import is_transposed
from memstate.kernels.dispatch import Backend
from tests.kernels import test_gated_delta
from tests.kernels.test_decode_steps import DTYPES, KINDS, ODD, each_dtype, each_kind, made
from tests.support.decode_case import GUARD, SLOTS, Case, Row, far_apart, rubbish, same_bits
from tests.support.kernel_runs import not_interpreted
from tests.support.sampling import PROOF

LAST = SLOTS - 1  # no row of these tests reads it


def windowed(case: Case, generator: torch.Generator) -> tuple[Case, Tensor]:
    """The same step with a window in rubbish, and all the bytes around that: a guard before it and one behind."""
    state, (batch, tokens) = case.memory.state, case.inputs[case.like].shape[:2]
    conv = case.op == "conv_step"
    shape = (batch, state.shape[1] + tokens, *state.shape[2:]) if conv else (batch, tokens, *state.shape[1:])
    swapped = not conv and is_transposed(state)
    nbytes = torch.empty(shape, dtype=state.dtype, device="meta").nbytes
    around = rubbish(GUARD + nbytes + GUARD, state.device, generator)
    window = around[GUARD : GUARD + nbytes].view(state.dtype)
    window = window.view(*shape[:-2], shape[-1], shape[-2]).mT if swapped else window.view(shape)
    return replace(case.twin(), shared=case.shared | {"window": window}), around


def check(case: Case, backend: Backend, generator: torch.Generator) -> None:
    """Output and window have the bits of steps that store a slot, one for every row and token; nothing else changes.

    A window of a convolution has every input once: the old ones, and those of the step.
    """
    step, around = windowed(case, generator)
    window, state = step.shared["window"], case.memory.state
    expected, before = window.clone(), around.clone()
    out = step.step(backend)
    step.memory.check_changed_only(set())
    assert same_bits(around[:GUARD], before[:GUARD]) and same_bits(around[-GUARD:], before[-GUARD:])
    for i, row in enumerate(case.rows):
        real = min(max(row.tokens, 0), out.shape[1]) if row.write > 0 else 0
        assert not out[i, real:].any()
        if case.op == "conv_step" and row.write > 0:
            old = state.shape[1]
            expected[i, :old] = state[row.read] if row.read > 0 else 0
            expected[i, old : old + real] = case.inputs["x"][i, :real].to(state.dtype)
        for t in [real - 1] * (real > 0) if case.op == "conv_step" else range(real):
            alone = case.twin().cut([i], 0, t + 1)
            alone.rows = [Row(row.read, LAST, 0, t + 1)]
            assert same_bits(alone.step(backend)[0], out[i, : t + 1])
            if case.op != "conv_step":
                expected[i, t] = alone.memory.state[LAST]
    assert same_bits(window, expected)


@pytest.mark.sample
@each_kind
@each_dtype
def test_G2_window_holds_what_slots_would(backend: Backend, generator: torch.Generator, kind: str, dtype: str) -> None:
    """Read in place, with a snapshot, from nothing, padding, without a token: and slots keep all their bytes."""
    state, inputs = DTYPES[dtype]
    check(made(kind, backend, generator, state=state, inputs=inputs, **KINDS[kind].small), backend, generator)


@pytest.mark.sample(7)
@pytest.mark.parametrize(("kind", "sizes"), ODD)
def test_G2_odd_sizes(backend: Backend, generator: torch.Generator, kind: str, sizes: dict[str, object]) -> None:
    """Of a convolution: channels that fill no block, and more taps than tokens, or fewer."""
    check(made(kind, backend, generator, rows=[Row(1, 2, tokens=3), Row(0, 3, tokens=2)], **sizes), backend, generator)


ROWS = {
    "padding": [Row(1, 0, 2), Row(-1, -1), Row(3, -4, 3, 1), Row(0, 0)],  # whatever its other columns say
    "null": [Row(0, 1), Row(-3, 2), Row(1, 2, 3, 0)],  # slot 0, NaN here, reads as zeros
    "write says only that a row is real": [Row(1, 1), Row(1, 1, 1, 2), Row(2, 2**31 - 1, 2**31 - 1), Row(1, 2, 1)],
    "counts beyond the step": [Row(1, 2, tokens=2), Row(1, 3, tokens=2), Row(1, 4, tokens=2), Row(1, 5, tokens=2)],
}


@pytest.mark.sample
@each_kind
@pytest.mark.parametrize("rows", ROWS)
def test_B14_B16_windows_of_all_sorts_of_rows(
    backend: Backend, generator: torch.Generator, kind: str, rows: str
) -> None:
    case = made(kind, backend, generator, rows=ROWS[rows], **KINDS[kind].small)
    if rows == "counts beyond the step":
        case = case.cut([0, 1, 2, 3], 0, 2)
        case.rows = [row._replace(tokens=n) for row, n in zip(case.rows, (9, 0, -3, 1), strict=True)]
    check(case, backend, generator)


def test_B38_windows_beyond_2_31_elements(backend: Backend, generator: torch.Generator) -> None:
    """A row whose window begins behind 2^31 elements, in a batch of addresses of which it alone is computed."""
    dims = (32, 16, 128, 128) if backend.device.type == "cuda" else (1, 1, 2**16, 16)  # one program a row
    near = test_gated_delta.build(backend, generator, [Row(1, 1, tokens=1)], tokens=1, state=torch.float16, dims=dims)
    tokens = 2**31 // near.memory.state[1].numel() + 1

    def spread(like: Tensor) -> Tensor:
        return far_apart(2 * tokens, like, like.numel()).view(2, tokens, *like.shape)

    inputs = {name: spread(tensor[0, 0]) for name, tensor in near.inputs.items()}
    for name, tensor in near.inputs.items():
        inputs[name][1, 0] = tensor[0, 0]
    window = spread(near.memory.state[1])
    far = replace(near.twin(), rows=[Row(1, 0), Row(1, 1, tokens=1)], inputs=inputs, shared={"window": window})
    out = far.step(backend)
    assert same_bits(out[1, 0], near.step(backend)[0, 0]) and not out[0].any()
    assert same_bits(window[1, 0], near.memory.state[1])
    far.memory.check_changed_only(set())


def test_G2_compiled_sums_have_one_order() -> None:
    """No window and no mark changes which lanes add up which states; on a GPU the bits of the output hang on that.

    Of one kernel for one target, or of all with MEMSTATE_PROOF=1.
    """
    found: dict[str, list[list[str]]] = not_interpreted(__file__)
    assert len(found) == (8 if PROOF else 2)
    for kernel, (plain, window, marks) in found.items():
        told = kernel, plain, window, marks
        assert plain == window == marks and len(plain) == 1 and "sizePerThread" in plain[0], told
    assert not PROOF or len({plain[0] for plain, *_ in found.values()}) > 4  # layouts are told apart


def main() -> None:
    """Writes the layouts of the sums with slots alone, a window, or marks: slots on 16 bytes, and any stride apart.

    All that a launch may compile in besides is what one model's layers have in common.
    """
    from memstate.cli.compile.build import compile_case
    from memstate.kernels.selective import compile_cases

    found: dict[str, list[list[str]]] = {}
    for case in compile_cases():
        kernel = case.name.removesuffix("_window").removesuffix("_marks")
        if kernel not in ("selective_step_mamba2_fp32", "selective_step_mamba1_bf16")[: 2 if PROOF else 1]:
            continue
        for target, unit in product(("sm_90", "gfx942")[: 2 if PROOF else 1], (case.constexprs["UNIT"], 1)):
            text = compile_case(case._replace(constexprs=case.constexprs | {"UNIT": unit}), target).asm["ttgir"]
            layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
            sums = re.findall(r"tt\.reduce\"[\s\S]*?: \(tensor<[^#>]*(#\w+)>\)", text)
            of_tiles = [layouts[name] for name in sums if re.search(r"order = \[\d, \d\]", layouts[name])]
            found.setdefault(f"{kernel} {target} {unit}", []).append(of_tiles)  # the sum that finds a mark has one axis
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
