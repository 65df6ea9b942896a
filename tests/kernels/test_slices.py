"""Tests decode steps on slices of wider tensors: the same bits as with contiguous inputs, without a copy.

Run as a program, this file compiles some kernels and writes as JSON the width of each access to their inputs.
"""

import json
import random
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from memstate.kernels.dispatch import Backend
from tests.kernels.test_decode_steps import DTYPES, KINDS, ODD, each_dtype, each_kind, made
from tests.kernels.test_layers import operations
from tests.support.decode_case import Case, Row, racing, rubbish, same_bits
from tests.support.kernel_runs import not_interpreted

TWO = [Row(1, 1), Row(2, 3, 4, 2)]


def sliced(tensor: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns a slice, with the values of `tensor`, of a wider tensor of rubbish, and all bytes of the wider tensor.

    The amount of rubbish before and after each token differs from call to call. If the width of a token is a multiple
    of 16 bytes, each token begins at a multiple of 16 bytes.
    """
    rng = random.Random(int(torch.randint(2**31, (1,), generator=generator)))
    size, width = tensor.element_size(), tensor[0, 0].numel() if tensor.numel() else 1
    step = 16 // size if width * size % 16 == 0 else 1
    before, behind = (step * rng.randint(1, 3) for _ in range(2))
    batch, token = tensor.shape[:2]
    whole = rubbish(batch * token * (before + width + behind) * size, tensor.device, generator)
    wide = whole.view(tensor.dtype).view(batch, token, before + width + behind)
    part = wide[..., before : before + width].unflatten(-1, tensor.shape[2:])
    part.copy_(tensor)
    return part, whole


def packed(shapes: dict[str, tuple[int, ...]], like: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Returns adjacent slices of one tensor, `batch token ..`, as a projection makes them, with rubbish at the end.

    Args:
        shapes: Name -> shape of a slice after `batch token`.
        like: A tensor with the batch, tokens and dtype of the slices.
        generator: Generator of the rubbish.
    """
    total = sum(map(prod, shapes.values())) + 16 // like.element_size()
    batch, token = like.shape[:2]
    whole = rubbish(batch * token * total * like.element_size(), like.device, generator).view(like.dtype)
    parts = whole.view(batch, token, total).split([*map(prod, shapes.values()), 16 // like.element_size()], -1)
    return {name: part.unflatten(-1, shape) for (name, shape), part in zip(shapes.items(), parts, strict=False)}


def apart(case: Case, generator: torch.Generator) -> Case:
    """Returns the same step, with each input a slice of a wider tensor of rubbish."""
    return replace(case.twin(), inputs={name: sliced(x, generator)[0] for name, x in case.inputs.items()})


def whole(tensor: Tensor) -> Tensor:
    """Returns all bytes of the memory that contains a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def run(case: Case, backend: Backend, **given: Any) -> Tensor:
    out: Tensor = getattr(backend, case.op)(**case.arguments(), **given)
    return out


@pytest.mark.sample
@each_kind
@each_dtype
def test_D2_D10_slices_of_a_projection_have_the_bits_of_contiguous_inputs(
    backend: Backend, generator: torch.Generator, kind: str, dtype: str
) -> None:
    """In the wide tensor, there is rubbish between the tokens. The inputs of padding are NaN."""
    state, inputs = DTYPES[dtype]
    case = made(kind, backend, generator, state=state, inputs=inputs, **KINDS[kind].small)
    step = apart(case, generator)
    assert not any(x.is_contiguous() for x in step.inputs.values())
    around = [whole(x).clone() for x in step.inputs.values()]
    assert same_bits(step.step(backend), case.step(backend)) and same_bits(step.memory.whole, case.memory.whole)
    assert all(torch.equal(was, whole(x)) for was, x in zip(around, step.inputs.values(), strict=True))


@pytest.mark.sample(7)
@pytest.mark.parametrize(("kind", "sizes"), ODD)
def test_D2_D10_slices_of_odd_sizes(
    backend: Backend, generator: torch.Generator, kind: str, sizes: dict[str, Any]
) -> None:
    """The steps have several rows and tokens, one token per row, or one row."""
    for rows, tokens in ((TWO, 3), ([Row(1, 2, tokens=1), Row(3, 4, tokens=1)], 1), ([Row(1, 2)], 3)):
        case = made(kind, backend, generator, rows=rows, tokens=tokens, **sizes)
        step = apart(case, generator)
        assert same_bits(step.step(backend), case.step(backend)) and same_bits(step.memory.whole, case.memory.whole)


@pytest.mark.parametrize(
    ("rows", "slots"),
    [
        ([Row(1, 2), Row(2, 3)], {2}), ([Row(1, 2), Row(3, 2)], {2}), ([Row(1, 1, 4), Row(4, 3, 1)], {1, 4}),
        ([Row(1, 2), Row(1, 3), Row(0, 0, 2)], set()), ([Row(1, 1, 1), Row(2, 3, 2), Row(2, -1, 3)], set()),
    ],
)  # fmt: skip
def test_rows_that_race_for_a_slot_are_not_launched(
    generator: torch.Generator, rows: list[Row], slots: set[int]
) -> None:
    """A GPU runs rows in any order. Two rows may read one slot, and padding names no slot."""
    case = made("conv", Backend("reference"), generator, rows=rows, channels=8)
    assert racing(rows) == slots
    with pytest.raises(AssertionError, match="race") if slots else nullcontext():
        case.arguments()


@each_kind
def test_D3_nothing_is_made_or_copied_around_slices(
    backend: Backend, generator: torch.Generator, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step allocates nothing except its output, and this only if `out` is not given."""
    if backend.name == "reference":
        return  # the reference makes tensors of its own
    step = apart(made(kind, backend, generator, rows=TWO, **KINDS[kind].small), generator)
    out, arguments = torch.empty_like(step.step(backend)), step.arguments()
    if backend.name == "interpreter":
        monkeypatch.setattr("triton.runtime.interpreter.GridExecutor.__call__", lambda *_, **__: None)
    with operations() as made_:
        getattr(backend, step.op)(**arguments, out=out)
        assert made_ == []
        getattr(backend, step.op)(**arguments)
        assert made_ in (["new_empty"], ["empty"])


@pytest.mark.parametrize("kind", ["conv", "conv, channel major"])
@pytest.mark.parametrize("channels", [24, 5])
def test_D11_the_output_of_a_convolution_may_be_a_slice(
    backend: Backend, generator: torch.Generator, kind: str, channels: int
) -> None:
    """Input and output may be slices of the same tensor. No byte between the tokens changes."""
    case = made(kind, backend, generator, channels=channels)
    step, expected = apart(case, generator), case.step(backend)
    x = step.inputs["x"]
    out, around = sliced(torch.full_like(expected, torch.nan), generator)
    kept = around.clone()
    assert run(step, backend, out=out) is out and same_bits(out, expected)
    out.fill_(torch.nan)
    kept.view(x.dtype).as_strided(out.shape, out.stride(), out.storage_offset()).fill_(torch.nan)
    assert same_bits(around, kept) and same_bits(step.memory.whole, case.memory.whole)
    beside = packed({"x": x.shape[2:], "out": x.shape[2:]} if channels == 24 else {"x": (5,)}, x, generator)
    if channels == 24:
        again = made(kind, backend, generator, channels=channels)
        beside["x"].copy_(again.inputs["x"])
        other = replace(again.twin(), inputs={"x": beside["x"]})
        assert same_bits(run(other, backend, out=beside["out"]), again.step(backend))
        assert same_bits(beside["x"], again.inputs["x"])


@each_kind
def test_D4_D12_slices_that_do_not_fit_are_named(backend: Backend, generator: torch.Generator, kind: str) -> None:
    """Refused: tokens with unequal strides, with gaps inside, that overlap, or whose starts are not multiples of 16
    bytes although their widths are.
    """
    case = made(kind, backend, generator, rows=TWO, **KINDS[kind].small)
    given, device = case.arguments(), case.memory.state.device
    for name in (*case.inputs, *(("out",) if case.op == "conv_step" else ())):
        like = given["x" if name == "out" else name]
        width = like[0, 0].numel()
        wide = rubbish(4 * 2 * 4 * (3 * width + 4), device, generator).view(like.dtype)
        inner = torch.empty(like.shape[2:], device="meta").stride()
        spoilt = {
            "unequal": wide.as_strided(like.shape, (3 * width + 4, width, *inner)),
            "overlapping": wide.as_strided(like.shape, (2 * width, 0, *inner)),
        }
        if width > 1:
            spread = (6 * width, 2 * width, *(2 * stride for stride in inner))
            spoilt["spread"] = wide.as_strided(like.shape, spread)
        if width % 4 == 0:
            spoilt["shifted"] = wide[1:].as_strided(like.shape, (3 * width, width, *inner))
            spoilt["uneven"] = wide.as_strided(like.shape, (3 * (width + 1), width + 1, *inner))
        for how, value in spoilt.items():
            with pytest.raises(ValueError, match=rf"^{name}: ") as error:
                getattr(backend, case.op)(**(given | {name: value}))
            assert ("16 bytes" in str(error.value)) == (how in ("shifted", "uneven")), (name, how)
    case.memory.check_changed_only(set())


def test_D12_slices_that_share_bytes_with_what_is_written_are_named(
    backend: Backend, generator: torch.Generator
) -> None:
    """Tokens of two slices of one projection alternate in memory, but share no byte."""
    case = made("conv", backend, generator, rows=TWO, channels=8)
    wide = torch.zeros(2, 3, 32, device=backend.device)
    x = wide[..., :8].copy_(case.inputs["x"])
    given = case.arguments() | {"x": x}
    for at in (0, 4):
        with pytest.raises(ValueError, match=r"^out: bytes 0x.* shared with x"):
            backend.conv_step(**given, out=wide[..., at : at + 8])
    state = wide.new_zeros(9 * 32).as_strided((9, 3, 8), (32, 8, 1))
    slices = state.as_strided((2, 3, 8), (96, 32, 1), 24)  # the slice lies in the gap after each slot
    with pytest.raises(ValueError, match=r"^out: bytes 0x.* shared with state"):
        backend.conv_step(**(given | {"state": state}), out=state.as_strided((2, 3, 8), (96, 32, 1), 20))
    assert not wide[..., 8:].any()
    backend.conv_step(**(given | {"state": state}), out=slices)
    assert bool(slices[0, 0].any())


def test_D14_inputs_move_in_wide_pieces() -> None:
    """For each input: bits of an access -> number of accesses. Each lane that uses b and c loads them itself."""
    once = {"128": 1}
    assert not_interpreted(__file__) == {
        "conv_step_bf16": {"x_ptr": once, "out_ptr": {"128": 2}},
        "selective_step_mamba2_fp32": {"x_ptr": {"16": 2}, "z_ptr": {"16": 2}, "b_ptr": {"64": 8}, "c_ptr": {"64": 8}},
        "selective_step_mamba1_bf16": {"x_ptr": {"16": 1}, "z_ptr": {"16": 1}, "b_ptr": once, "c_ptr": once},
    }


def main() -> None:
    """Writes the accesses of kernels for sm_90 to their inputs, and of the convolution also to its output."""
    from memstate_tools.calls import all_calls, launch_of
    from memstate_tools.compile.accesses import accesses

    inputs = {"conv_step_bf16": ("x_ptr", "out_ptr")}
    inputs |= dict.fromkeys(
        ("selective_step_mamba2_fp32", "selective_step_mamba1_bf16"), ("x_ptr", "z_ptr", "b_ptr", "c_ptr")
    )
    counts_of: dict[str, dict[str, Counter[int]]] = {}
    for call in all_calls():
        if call.name in inputs:
            launch = launch_of(call, "sm_90")
            made_ = accesses(launch.compiled.asm["llir"], list(launch.types))
            counts_of[call.name] = {
                name: Counter(access.bits for access in made_ if name in {at.argument for at in access.origins})
                for name in inputs[call.name]
            }
    json.dump(counts_of, sys.stdout)


if __name__ == "__main__":
    main()
