"""States from a forward with kernels of its own: those of runs that end at the marks, and no other byte changes."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from memstate.kernels.dispatch import Backend
from tests.kernels.test_decode_marks import Mark, columns
from tests.support.chunked import before_pieces, first_of, gated_delta_piece, selective_piece, starts_of
from tests.support.decode_case import rubbish
from tests.support.kernel_runs import nothing_allocated
from tests.support.recurrences import float64, gated_delta

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
    """A plane `layer slot ...` in rubbish, with room between slots, whose states are numbers."""
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
    """A step of four packed rows with marks of all kinds; what `h` and the inputs hold fits the plane exactly."""

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
    """The same with planes of its own."""

    def again(plane: Tensor) -> Tensor:
        held = torch.empty(0, dtype=plane.dtype, device=plane.device).set_(plane.untyped_storage()).clone()
        return held.as_strided(plane.shape, plane.stride())

    return given | {name: again(given[name]) for name in ("plane", "conv") if given[name] is not None}


def same(left: Kept, right: Kept) -> bool:
    """Whether all bytes of both planes, and between their slots, are the same."""
    held = (
        torch.empty(0, dtype=torch.uint8, device=each.device).set_(each.untyped_storage())
        for name in ("plane", "conv") if left[name] is not None for each in (left[name], right[name])
    )  # fmt: skip
    return all(torch.equal(one, other) for one, other in zip(*[held] * 2, strict=True))


def stated(given: Kept, flat: bool, alone: frozenset[str]) -> None:
    """Stores what the marks name, told once more and without the reference's arithmetic."""
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
    """One entry of two tokens and one of 2^31 - 3 before: a sum of two numbers below 2^31 is counted without a sign."""
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


def test_nothing_is_allocated(backend: Backend, generator: torch.Generator) -> None:
    if backend.name != "reference":
        given = arguments(backend, generator, torch.float32, torch.bfloat16)
        few = columns(MARKS[4:6], given["plane"])
        with nothing_allocated():
            backend.scatter_states(**(given | {"marks": few}))


MISFITS = {
    "marks": [lambda t: tuple(t), lambda t: t._replace(offset=t.offset.long())],
    "starts": [lambda t: t[:-1], lambda t: t.float()], "read": [lambda t: t[:1]], "first": [lambda t: t[:-1]],
    "plane": [lambda t: t[:, :, ::2], lambda t: t.int(), lambda t: t[:, :1].expand(-1, 3, -1, -1, -1)],
    "h": [lambda t: t[:, :, :1], lambda t: t.mT, lambda t: t[:1], lambda t: t.double(), lambda t: t.to("meta")],
    "chunk": [lambda _: 0, lambda _: 2.0, lambda _: True], "transposed": [lambda _: 1],
    "conv": [lambda t: t[0], lambda t: t[..., ::2], lambda t: t[:, :4].clone()],
    "inputs": [lambda t: t[:, :, :4].contiguous(), lambda t: t[:, ::2], lambda t: t.int()],
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_arguments_that_do_not_fit_are_named(backend: Backend, generator: torch.Generator, name: str) -> None:
    given = arguments(backend, generator, torch.float32, torch.float32)
    before = twin(given)
    for change in MISFITS[name]:
        with pytest.raises(ValueError, match=rf"^(?:{name}|offset|conv|plane|h)\b"):
            backend.scatter_states(**(given | {name: change(given[name])}))
        if name == "first":
            with pytest.raises(
                ValueError, match=rf"`batch\+1` with the number of pieces last = \({len(given['starts'])},\)"
            ):
                backend.scatter_states(**(given | {name: change(given[name])}))
    for absent in ({"plane": None}, {"conv": None}, {"plane": None, "conv": None, "h": None, "inputs": None}):
        with pytest.raises(ValueError, match="expected"):
            backend.scatter_states(**(given | absent))
    assert same(given, before)


# -- chunked forwards ----------------------------------------------------------------------------------------------

# How far the fp32 states of a chunked forward may be from the float64 recurrence, as a part of the largest number in
# the state: 2^-24 for each rounding, and a few hundred of these behind each other. A chunked forward also takes the
# exponential of sums of log decays over a piece: a sum of size x is off by up to 3 roundings of x, and its exponential
# by as large a part (4 allowed).
CHUNKED = 2.0**-16
SUMMED = 2.0**-22
HEADS, KEY, VALUE = 1, 8, 6


class Forward:
    """A forward over packed rows from random states, by the gated delta rule or as Mamba-2, in fp32."""

    def __init__(self, kind: str, lengths: Sequence[int], generator: torch.Generator) -> None:
        self.kind, self.lengths = kind, lengths
        tokens = sum(lengths)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        if kind == "gdn":
            self.initial = normal(len(lengths), HEADS, KEY, VALUE)
            self.k = torch.nn.functional.normalize(normal(tokens, HEADS, KEY), dim=-1)
            self.v, self.decay = normal(tokens, HEADS, VALUE), -0.1 * normal(tokens, HEADS).abs()
            self.beta = normal(tokens, HEADS).sigmoid()
            self.advance = gated_delta_piece(self.k, self.v, self.decay, self.beta)
        else:
            self.initial = normal(len(lengths), HEADS, VALUE, KEY)
            self.x, self.b = normal(tokens, HEADS, VALUE), normal(tokens, HEADS, KEY)
            self.dt, self.a = normal(tokens, HEADS).abs(), -normal(HEADS).abs() - 0.01
            self.advance = selective_piece(self.x, self.dt, self.a, self.b)

    def bound(self, chunk: int) -> float:
        """How far states may be from `exact`, as a part of the largest number in the state."""
        log_decay = self.decay if self.kind == "gdn" else self.dt * self.a
        total, chunk = torch.nn.functional.pad(log_decay[:, 0].double().cumsum(0), (1, 0)), min(chunk, len(log_decay))
        return CHUNKED + SUMMED * float((total[chunk:] - total[: len(total) - chunk]).abs().max())

    def exact(self, row: int, length: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The state of a row after so many tokens, token by token in float64."""
        at = slice(starts_of(self.lengths)[row], starts_of(self.lengths)[row] + length)
        state = float64(self.initial[row, 0])
        if self.kind == "gdn":
            k, v, decay, beta = (float64(t[at, 0]) for t in (self.k, self.v, self.decay, self.beta))
            return gated_delta(k, k, v, decay, beta, state, 1.0)[1]
        x, dt, b = (float64(t[at, 0]) for t in (self.x, self.dt, self.b))
        for t in range(length):
            state = np.exp(dt[t] * float(self.a[0])) * state + dt[t] * np.outer(x[t], b[t])
        return state


def kept(
    backend: Backend, forward: Forward, given: Sequence[Mark], chunk: int, flat: bool, dtype: torch.dtype
) -> Tensor:
    """The slots of a plane `slot ...` of fp32 behind the forward, NaN where nothing was stored; rows write 1, 2 .."""
    rows, device = len(forward.lengths), backend.device
    h, last = before_pieces(forward.advance, forward.initial, forward.lengths, chunk, flat)
    plane = torch.full((1, 1 + rows + len(given), *last.shape[1:]), torch.nan)
    plane[0, 1 : 1 + rows] = last
    plane = plane.to(device)
    slots = torch.arange(1, 1 + rows, dtype=torch.int32, device=device)
    first = None if flat else torch.tensor(first_of(forward.lengths, chunk), dtype=torch.int32, device=device)
    starts = torch.tensor(starts_of(forward.lengths), dtype=torch.int32, device=device)
    backend.scatter_states(
        columns(given, plane), starts, slots, slots, plane, h[None].to(dtype).to(device), first, chunk
    )  # fmt: skip
    return plane[0].cpu()


def assert_near(found: Tensor, exact: Any, bound: float, dtype: torch.dtype = torch.float32) -> None:
    bound = (bound + (2.0**-8 if dtype == torch.bfloat16 else 0)) * np.abs(exact).max()
    assert (np.abs(float64(found[0]) - exact) <= bound).all()


@pytest.mark.sample(12)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("flat", [False, True], ids=["of rows", "of the batch"])
@pytest.mark.parametrize("kind", ["gdn", "mamba2"])
@pytest.mark.parametrize("seed", range(3))
def test_a_state_of_a_chunked_forward_is_that_of_a_run_that_ends_there(
    backend: Backend, generator: torch.Generator, seed: int, kind: str, flat: bool, dtype: torch.dtype
) -> None:
    """Random packed lengths, decode rows among them; every length on the grid, and the ends."""
    rng, chunk = random.Random(seed), (16, 64)[seed % 2]
    lengths = [rng.choice((0, 1, 1, chunk - 1, chunk, chunk + 1, rng.randint(2, 150))) for _ in range(4)]
    forward = Forward(kind, lengths, generator)
    places = [
        (row, n) for row, length in enumerate(lengths) for n in range(1, length + 1)
        if n == length or (n + flat * starts_of(lengths)[row]) % chunk == 0
    ]  # fmt: skip
    given = [(row, n, 5 + at) for at, (row, n) in enumerate(places)]
    plane = kept(backend, forward, given, chunk, flat, dtype)
    for row, n, slot in given:
        assert_near(
            plane[slot], forward.exact(row, n), forward.bound(chunk), torch.float32 if n == lengths[row] else dtype
        )


def test_the_cases_that_went_wrong_elsewhere(backend: Backend, generator: torch.Generator) -> None:
    """300 tokens on a grid of 64 have 256; 63 have none; a packed row has its own states, whatever lies before it."""
    forward = Forward("gdn", [300, 63, 200], generator)
    plane = kept(backend, forward, [(0, 256, 4), (0, 300, 5), (1, 60, 6), (2, 128, 7)], 64, False, torch.float32)
    assert plane[6].isnan().all()
    for row, n, slot in ((0, 256, 4), (0, 300, 5), (2, 128, 7)):
        assert_near(plane[slot], forward.exact(row, n), forward.bound(64))
    forward = Forward("mamba2", [100, 600], generator)
    plane = kept(backend, forward, [(0, 64, 3), (1, 156, 4), (1, 412, 5), (1, 512, 6)], 256, True, torch.float32)
    assert plane[3].isnan().all() and plane[6].isnan().all()  # the packed batch has its own grid
    for row, n, slot in ((1, 156, 4), (1, 412, 5)):
        assert_near(plane[slot], forward.exact(row, n), forward.bound(256))
