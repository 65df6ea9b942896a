"""The selective state update into a speculative window: the states that slots would get, and no slot touched.

Kernels are interpreted in the process of the tests and cannot be compiled there: run as a program, this file compiles
the library's own and writes as JSON in which order each adds up a sum.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from memstate.kernels.dispatch import Backend
from tests.kernels.test_selective import KINDS, build
from tests.support.decode_case import MIXED, Case, Row, check_misfit, rubbish, same_bits

ROOT = Path(__file__).parents[2]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GUARD = 64  # bytes before and behind the window, a multiple of 16

each_kind = pytest.mark.parametrize("kind", KINDS)


def with_window(case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Gives the case a window in rubbish; returns the window and all bytes around it."""
    state = case.memory.state
    shape = (*case.inputs["x"].shape[:2], *state.shape[1:])
    size = shape[0] * shape[1] * state[0].numel() * state.element_size()
    whole = rubbish(size + 2 * GUARD, state.device, generator)
    window = whole[GUARD : GUARD + size].view(state.dtype).view(shape)
    case.shared = case.shared | {"window": window}
    return window, whole


def check(case: Case, backend: Backend, generator: torch.Generator) -> None:
    """Each row as it is alone without a window: its outputs, and what its slot holds after each token; every other
    byte as it was."""
    plain = case.twin()
    window, whole = with_window(case, generator)
    before, expected = whole.clone(), window.clone()
    out = case.step(backend)
    case.memory.check_changed_only(set())
    for i, row in enumerate(case.rows):
        assert same_bits(plain.cut([i], 0, out.shape[1]).twin().step(backend)[0], out[i])
        for t in range(row.tokens if row.write > 0 else 0):
            one = plain.cut([i], 0, t + 1).twin()
            one.step(backend)
            expected[i, t] = one.memory.state[row.write]
    assert same_bits(window, expected)
    assert same_bits(whole[:GUARD], before[:GUARD]) and same_bits(whole[-GUARD:], before[-GUARD:])


@each_kind
@pytest.mark.parametrize("state", DTYPES)
def test_G2_window_holds_what_slots_would(
    backend: Backend, generator: torch.Generator, kind: str, state: torch.dtype
) -> None:
    inputs = torch.float32 if state == torch.float32 else torch.bfloat16
    check(build(backend, generator, kind, MIXED, state=state, inputs=inputs), backend, generator)


@pytest.mark.parametrize(
    ("kind", "dims"), [("mamba2", (3, 3, 12, 20)), ("mamba2", (1, 1, 20, 100)), ("mamba1", (1, 1, 7, 5))]
)
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_G2_window_of_odd_sizes(
    backend: Backend, generator: torch.Generator, kind: str, dims: tuple[int, int, int, int], state: torch.dtype
) -> None:
    check(build(backend, generator, kind, [Row(1, 2), Row(0, 3, tokens=1)], 3, state, dims=dims), backend, generator)


@each_kind
def test_B16_window_of_rows_that_read_nothing(backend: Backend, generator: torch.Generator, kind: str) -> None:
    """Slot 0 is NaN here."""
    case = build(backend, generator, kind, [Row(0, 1), Row(-3, 2), Row(0, 0), Row(1, -1)])
    window, _ = with_window(case, generator)
    case.step(backend)
    assert bool(window[:2].isfinite().all()) and bool(window[2:].isnan().all())


def test_B14_window_and_slots_of_padded_rows_stay(backend: Backend, generator: torch.Generator) -> None:
    case = build(backend, generator, rows=[Row(0, 0), Row(1, 0, 2), Row(1, -4, 3), Row(1, 2, 3, 0)])
    _, whole = with_window(case, generator)
    before = whole.clone()
    assert not case.step(backend).any()
    assert same_bits(whole, before)
    case.memory.check_changed_only(set())


def test_window_lets_rows_share_slots(backend: Backend, generator: torch.Generator) -> None:
    """Drafts of one request verified side by side: no slot is stored, so `read` and `write` may be those of others."""
    case = build(backend, generator, rows=[Row(1, 1), Row(1, 1, 1), Row(1, 2, 1)])
    check(case, backend, generator)


@pytest.mark.parametrize(("tokens", "meant"), [(9, 2), (-3, 0)])
def test_token_counts_beyond_the_window(backend: Backend, generator: torch.Generator, tokens: int, meant: int) -> None:
    case = build(backend, generator, rows=[Row(1, 2, tokens=2), Row(3, 4, tokens=2)], tokens=2)
    strange, plain = case.twin(), case.twin()
    strange.rows = [row._replace(tokens=tokens) for row in case.rows]
    plain.rows = [row._replace(tokens=meant) for row in case.rows]
    _, strange_whole = with_window(strange, generator)
    _, plain_whole = with_window(plain, generator)
    plain_whole.copy_(strange_whole)
    assert same_bits(strange.step(backend), plain.step(backend))
    assert same_bits(strange_whole, plain_whole)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda t: t[:, :2].contiguous(),
        lambda t: t[:, :, :1].contiguous(),
        lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        lambda t: t.half(),
        lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
    ],
)
def test_G1_misfits_of_the_window_are_named(
    backend: Backend, generator: torch.Generator, spoil: Callable[[Tensor], Tensor]
) -> None:
    case = build(backend, generator, rows=[Row(1, 1), Row(2, 2)])
    window, whole = with_window(case, generator)
    before = whole.clone()
    check_misfit(case, backend, "window", spoil(window))
    assert same_bits(whole, before)


def test_G2_compiled_sums_have_one_order() -> None:
    """A window does not change which lanes add up which states; on a GPU the bits of the output hang on that."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[list[str]]] = json.loads(done.stdout)
    assert len(found) == 8
    for kernel, (plain, window) in found.items():
        assert plain == window and len(plain) == 1 and "sizePerThread" in plain[0], (kernel, plain, window)
    assert len({plain[0] for plain, _ in found.values()}) > 4  # layouts are told apart


def main() -> None:
    """Writes the layouts of the sums without and with a window, for slots on 16 bytes and for slots any stride apart.

    All that a launch may compile in besides is what one model's layers have in common.
    """
    from memstate.cli.compile.build import compile_case
    from memstate.kernels.selective import compile_cases

    found: dict[str, list[list[str]]] = {}
    for case in compile_cases():
        kernel = case.name.removesuffix("_window")
        if kernel not in ("selective_step_mamba2_fp32", "selective_step_mamba1_bf16"):
            continue
        for target, unit in product(("sm_90", "gfx942"), (case.constexprs["UNIT"], 1)):
            text = compile_case(case._replace(constexprs=case.constexprs | {"UNIT": unit}), target).asm["ttgir"]
            layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
            sums = re.findall(r"tt\.reduce\"[\s\S]*?: \(tensor<[^#>]*(#\w+)>\)", text)
            found.setdefault(f"{kernel} {target} {unit}", []).append([layouts[name] for name in sums])
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
