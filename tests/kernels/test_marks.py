"""Tests every byte that `scatter_states` stores: the states at marks, which an engine's own kernels have computed."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from memstate.kernels.dispatch import Backend
from tests.kernels.test_decode_marks import Mark, columns
from tests.support.decode_case import rubbish
from tests.support.op_case import first_of, starts_of

LAYERS, SLOTS, TAPS, CHANNELS = 2, 15, 3, 20
BLOCK = (2, 5, 7)  # head key value
LENGTHS = [8, 0, 1, 20]
CHUNK = 4
MARKS: list[Mark] = [
    (-1, 1, 5), (0, -4, 1), (0, 0, 1), (0, 2, 0), (0, 4, 6), (0, 8, 7), (0, 9, 8), (0, 12, 2), (1, 1, 2), (2, 1, 9),
    (3, 1, 13), (3, 2, 0), (3, 7, 14), (3, 8, 10), (3, 16, 11), (3, 20, 12), (3, 24, 2), (4, 1, 2), (2**31 - 1, 1, 2),
]  # fmt: skip
READ, WRITE = [1, 0, 0, 2], [1, 0, 3, 4]
Kept = dict[str, Any]


def strided(shape: Sequence[int], dtype: torch.dtype, backend: Backend, generator: torch.Generator) -> Tensor:
    """Returns a plane `layer slot ...` of random numbers, with rubbish between the slots."""
    block = int(np.prod(shape))
    stride = -(-block // 8) * 8 + 8
    held = rubbish(LAYERS * SLOTS * stride * dtype.itemsize, backend.device, generator).view(dtype)
    dense = torch.empty(tuple(shape)).stride()
    plane = held.as_strided((LAYERS, SLOTS, *shape), (SLOTS * stride, stride, *dense))
    plane.copy_(torch.randn(plane.shape, generator=generator).to(dtype))
    return plane


def arguments(
    backend: Backend, generator: torch.Generator, state: torch.dtype, given: torch.dtype, *, transposed: bool = False,
    channel_major: bool = False, flat: bool = False, wide: bool = False,
) -> Kept:  # fmt: skip
    """Returns arguments of four packed rows with all kinds of marks. Numbers are exact in every dtype."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16().to(given).to(backend.device)

    def whole(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64 if wide else torch.int32, device=backend.device)

    plane = strided(BLOCK, state, backend, generator)
    conv = strided((CHANNELS, TAPS), state, backend, generator).transpose(2, 3) if channel_major else strided(
        (TAPS, CHANNELS), state, backend, generator
    )  # fmt: skip
    pieces = -(-sum(LENGTHS) // CHUNK) if flat else first_of(LENGTHS, CHUNK)[-1]
    head, key, value = BLOCK
    return {
        "marks": columns(MARKS, plane), "starts": whole(starts_of(LENGTHS)), "read": whole(READ),
        "write": whole(WRITE), "plane": plane, "conv": conv, "chunk": CHUNK, "transposed": transposed,
        "h": normal(LAYERS, pieces, head, *((value, key) if transposed else (key, value))),
        "first": None if flat else whole(first_of(LENGTHS, CHUNK)), "inputs": normal(LAYERS, sum(LENGTHS), CHANNELS),
    }  # fmt: skip


def twin(given: Kept) -> Kept:
    """Returns the same arguments with copies of the planes."""

    def again(plane: Tensor) -> Tensor:
        held = torch.empty(0, dtype=plane.dtype, device=plane.device).set_(plane.untyped_storage()).clone()
        return held.as_strided(plane.shape, plane.stride())

    return given | {name: again(given[name]) for name in ("plane", "conv") if given[name] is not None}


def same(left: Kept, right: Kept) -> bool:
    """Returns whether `left` and `right` have equal bytes in both planes, also between the slots."""
    held = (
        torch.empty(0, dtype=torch.uint8, device=each.device).set_(each.untyped_storage())
        for name in ("plane", "conv") if left[name] is not None for each in (left[name], right[name])
    )  # fmt: skip
    return all(torch.equal(one, other) for one, other in zip(*[held] * 2, strict=True))


def stated(given: Kept, flat: bool, alone: frozenset[str]) -> None:
    """Stores the states and windows that the marks name, without the reference's arithmetic.

    flat: whether chunks are counted from the start of the batch, not from the start of each row. alone: names of the
    arguments that the launch does not get.
    """
    at = {(row, n): 0 for row, length in enumerate(LENGTHS) for n in range(1, length)}
    pieces = list(at) if not flat else [(row, n) for row, n in at if (starts_of(LENGTHS)[row] + n) % CHUNK == 0]
    for row, n in pieces:
        if flat:
            at[row, n] = (starts_of(LENGTHS)[row] + n) // CHUNK
        elif n % CHUNK == 0:
            at[row, n] = sum(-(-length // CHUNK) for length in LENGTHS[:row]) + n // CHUNK
    planes = {name: None if given[name] is None else given[name].clone() for name in ("plane", "conv")}
    for row, n, slot in MARKS:
        if not 0 < slot < SLOTS or row not in range(4) or not 0 < n <= LENGTHS[row]:
            continue
        if planes["plane"] is not None:
            if n == LENGTHS[row]:
                given["plane"][:, slot] = planes["plane"][:, WRITE[row]]
            elif at[row, n] and "h" not in alone:
                h = given["h"][:, at[row, n]]
                given["plane"][:, slot] = (h.mT if given["transposed"] else h).to(given["plane"])
        if planes["conv"] is not None and "inputs" not in alone:
            history = planes["conv"][:, READ[row]] if READ[row] else torch.zeros_like(planes["conv"][:, 0])
            new = given["inputs"][:, starts_of(LENGTHS)[row] :][:, :n].to(history)
            given["conv"][:, slot] = torch.cat([history, new], 1)[:, n:]
        elif planes["conv"] is not None and n == LENGTHS[row]:
            given["conv"][:, slot] = planes["conv"][:, WRITE[row]]


FORMS = {
    "fp32 from bf16": (torch.float32, torch.bfloat16, {}, ()),
    "bf16 from fp32, transposed": (torch.bfloat16, torch.float32, {"transposed": True, "channel_major": True}, ()),
    "fp16, flat": (torch.float16, torch.float16, {"flat": True, "wide": True}, ()),
    "bf16, flat, transposed": (torch.bfloat16, torch.bfloat16, {"flat": True, "transposed": True}, ()),
    "ends alone": (torch.float32, torch.float32, {"channel_major": True}, ("h", "inputs")),
    "states alone": (torch.float32, torch.float32, {}, ("conv", "inputs")),
    "windows alone": (torch.bfloat16, torch.bfloat16, {}, ("plane", "h")),
    "windows and ends of states": (torch.float32, torch.bfloat16, {}, ("h",)),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("form", FORMS)
def test_marks_get_their_states_and_no_other_byte_changes(
    backend: Backend, generator: torch.Generator, form: str
) -> None:
    state, source, options, without = FORMS[form]
    given = arguments(backend, generator, state, source, **options) | dict.fromkeys(without)
    expected = twin(given)
    backend.scatter_states(**given)
    stated(expected, options.get("flat", False), frozenset(without))
    assert same(given, expected)
    assert backend.counts.launches == {"scatter_states": 1}


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_a_piece_at_the_end_of_the_largest_batch_is_found(backend: Backend, kind: torch.dtype) -> None:
    """An entry of 2 tokens follows an entry of 2^31 - 3 tokens.

    A sum of two numbers below 2^31 may not fit an int32, so the kernel adds unsigned numbers.
    """
    last = 2**31 - 1
    plane, h = (torch.arange(1.0, size + 1, device=backend.device).view(1, size, 1) for size in (4, 3))
    wide = {"dtype": kind, "device": backend.device}
    starts, slots = torch.tensor([0, last - 2, last], **wide), torch.tensor([0, 0], **wide)
    given = {"starts": starts, "read": slots, "write": slots, "plane": plane, "h": h}
    backend.scatter_states(columns([(1, 1, 2)], plane), **given, chunk=last - 1)
    assert plane.flatten().tolist() == [1.0, 2.0, 2.0, 4.0]
    backend.scatter_states(columns([(1, 1, 3)], plane), **given, chunk=2**30)
    assert plane.flatten().tolist() == [1.0, 2.0, 2.0, 4.0], "the mark lies between two pieces"


def test_no_marks_and_no_rows_change_nothing(backend: Backend, generator: torch.Generator) -> None:
    given = arguments(backend, generator, torch.float32, torch.float32)
    before = twin(given)
    backend.scatter_states(**(given | {"marks": columns([], given["plane"])}))
    nobody = {"starts": given["starts"][:1], "first": given["first"][:1], "read": given["read"][:0]}
    backend.scatter_states(**(given | nobody | {"write": given["write"][:0]}))
    assert same(given, before)


def test_settings_and_sources_that_do_not_fit_are_named(backend: Backend, generator: torch.Generator) -> None:
    given = arguments(backend, generator, torch.float32, torch.float32)
    before, first = twin(given), given["first"]
    for changed, said in (
        ({"chunk": 0}, "^chunk"), ({"chunk": 2.0}, "^chunk"), ({"chunk": True}, "^chunk"), ({"transposed": 1}, "^tr"),
        ({"plane": given["plane"][:, :1].expand(-1, SLOTS, -1, -1, -1)}, "^plane"), ({"plane": None}, "expected"),
        ({"first": first[:-1]}, rf"`batch\+1` with the number of pieces last = \({len(given['starts'])},\)"),
        ({"conv": None}, "expected"), (dict.fromkeys(("plane", "conv", "h", "inputs")), "expected"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            backend.scatter_states(**(given | changed))
    assert same(given, before)
