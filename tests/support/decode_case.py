"""Runs steps of decode kernels in poisoned memory, and checks what a step returns, stores and leaves unchanged."""

import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from memstate.kernels.dispatch import Backend
from memstate.kernels.reference.scaled import TOP, stored
from tests.support.recurrences import Array, Rounded, float64

SLOTS = 8
GUARD = 48  # bytes before, between and after the slots; a multiple of 16 that is no power of two


class Row(NamedTuple):
    """An entry of the batch: its slots, and how many of its tokens are real."""

    read: int
    write: int
    snapshot: int = 0
    tokens: int = 3


# In order: writes where it reads; writes elsewhere, with a snapshot; reads zeros; padding; no tokens, but a snapshot.
MIXED = [Row(1, 1), Row(2, 3, 4, 2), Row(0, 5, 0, 1), Row(0, 0), Row(6, 6, 7, 0)]
# All ways in which a row can use one slot twice, and rows that use no slot twice.
COINCIDING = [Row(1, 1), Row(1, 2), Row(1, 1, 2), Row(1, 2, 1), Row(1, 2, 3), Row(1, 2, 2), Row(1, 1, 1), Row(1, 2, -4)]


def racing(rows: Sequence[Row]) -> set[int]:
    """Returns the slots that one row writes and another row reads or writes. Padding does not count."""
    real = [row for row in rows if row.write > 0]
    written = [{slot for slot in (row.write, row.snapshot) if slot > 0} for row in real]
    named = [slots | {row.read} - {0} for slots, row in zip(written, real, strict=True)]
    return {
        slot for i, slots in enumerate(written) for k, others in enumerate(named) if i != k for slot in slots & others
    }


def rubbish(nbytes: int, device: torch.device, generator: torch.Generator) -> Tensor:
    """Returns bytes that are NaN as fp32, bf16 and fp16. The NaNs differ, so a test notices if a NaN is overwritten."""
    whole = torch.randint(0xC0, 0x100, (nbytes,), dtype=torch.uint8, generator=generator)
    whole[1::2] = 0xFF
    return whole.to(device)


def same_bits(a: Tensor, b: Tensor) -> bool:
    a, b = (tensor.flatten().contiguous().view(torch.uint8) for tensor in (a, b))
    return torch.equal(a, b)


class Memory:
    """The states of one layer, `slot ...`. Rubbish is around all slots, and in each slot until `fill`.

    Behind the whole numbers of a state are their scales, in the same slot.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator,
        transposed: bool = False, axis: int = -1,
    ) -> None:  # fmt: skip
        """transposed: whether the second last axis is contiguous in memory, not the last one. axis: axis of keys, -1 or
        -2, whose whole numbers share a scale.
        """
        swapped = (*shape[:-2], shape[-1], shape[-2])
        layout = torch.empty(swapped if transposed else shape, dtype=dtype, device="meta")
        layout = layout.mT if transposed else layout
        self.axis, self.rows = axis, [size for at, size in enumerate(shape) if at != len(shape) + axis]
        self.numbers = layout.nbytes
        self.payload = self.numbers + (4 * math.prod(self.rows) if dtype in TOP else 0)
        self.stride = -(-self.payload // 16) * 16 + GUARD
        strides = (self.stride // dtype.itemsize, *layout.stride())
        self.state = torch.empty(0, dtype=dtype).as_strided((0, *shape), strides)
        self._lie_in(rubbish(GUARD + SLOTS * self.stride, device, generator))
        self.before = self.whole.clone()

    def _lie_in(self, whole: Tensor) -> None:
        """Sets the bytes of all slots, and the views of them."""
        self.whole = whole
        shape, strides = (SLOTS, *self.state.shape[1:]), self.state.stride()
        self.state = whole[GUARD:].view(self.state.dtype).as_strided(shape, strides)
        self.scales = None
        if self.state.dtype in TOP:
            inner = torch.empty(self.rows, device="meta").stride()
            behind = whole[GUARD + self.numbers :].view(torch.float32)
            self.scales = behind.as_strided((SLOTS, *self.rows), (self.stride // 4, *inner))

    def bytes_of(self, slots: int | list[int]) -> Tensor:
        """Returns a copy of the bytes of slots."""
        return self.whole[GUARD:].view(SLOTS, self.stride)[slots, ..., : self.payload].clone()

    def spoil(self, slot: int) -> None:
        """Sets the state of a slot to NaN."""
        (self.state if self.scales is None else self.scales)[slot] = torch.nan

    def twin(self) -> "Memory":
        """Returns a copy of this memory."""
        twin = copy(self)
        twin._lie_in(self.whole.clone())
        return twin

    def fill(self, slot: int, values: Tensor) -> None:
        """Sets the state of a slot. `check_changed_only` compares with the memory after the last `fill`."""
        if self.scales is None:
            self.state[slot] = values.to(self.state)
        else:
            self.state[slot], self.scales[slot] = stored(values.float(), self.state.dtype, self.axis)
        self.before = self.whole.clone()

    def check_changed_only(self, slots: set[int]) -> None:
        """Checks that no byte has changed outside the payload of these slots."""
        same = self.whole == self.before
        for slot in slots:
            start = GUARD + slot * self.stride
            same[start : start + self.payload] = True
        assert bool(same.all()), f"changed at bytes {torch.nonzero(~same).flatten()[:8].tolist()}, stride {self.stride}"


def vast(nbytes: int, device: torch.device) -> Tensor:
    """Returns `nbytes` zeros. On a CPU only the pages that are touched take memory."""
    if device.type != "cpu":
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    no_reserve = 0x4000  # MAP_NORESERVE of Linux, for which Python 3.11 has no name
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return torch.frombuffer(pages, dtype=torch.uint8)


def far_apart(slots: int, slot: Tensor, stride: int) -> Tensor:
    """Returns `slots` states of zeros, like `slot`, one every `stride` elements."""
    elements = vast(((slots - 1) * stride + slot.numel()) * slot.element_size(), slot.device).view(slot.dtype)
    return elements.as_strided((slots, *slot.shape), (stride, *slot.stride()))


@dataclass
class Case:
    """A step of a decode kernel and the memory it runs on.

    inputs: `batch token ...`, NaN where a token is not real. shared: arguments that all rows share. like: name of the
    input that has the shape and dtype of the output. planes: for an op of several planes, splits the states into them.
    """

    op: str
    rows: list[Row]
    inputs: dict[str, Tensor]
    shared: dict[str, Any]
    memory: Memory
    like: str
    planes: Callable[[Tensor], Any] | None = None

    def arguments(self) -> dict[str, Any]:
        """Returns all arguments except `out`. Checks first that no row uses a slot that another row writes."""
        assert not (shared := racing(self.rows)), f"rows of one launch race for slots {sorted(shared)}: {self.rows}"
        device = self.memory.state.device
        columns = {
            name: torch.tensor([getattr(row, name) for row in self.rows], dtype=torch.int32, device=device)
            for name in Row._fields
        }
        given = self.inputs | self.shared | columns | {"state": self.memory.state}
        given |= {} if self.memory.scales is None else {"scales": self.memory.scales}
        if self.planes is not None:
            given["state"] = self.planes(given["state"])
        return given

    def step(self, backend: Backend) -> Tensor:
        """Runs the op with a poisoned output, and returns the output."""
        out = torch.full_like(self.inputs[self.like], torch.nan)
        assert getattr(backend, self.op)(**self.arguments(), out=out) is out
        return out

    def twin(self) -> "Case":
        """Returns the same step on a copy of the memory."""
        return replace(self, memory=self.memory.twin())

    def cut(self, rows: list[int], start: int, stop: int) -> "Case":
        """Returns a step with some of the rows and tokens of this one, on the same memory."""
        inputs = {name: tensor[rows][:, start:stop].contiguous() for name, tensor in self.inputs.items()}
        chosen = [self.rows[i] for i in rows]
        real = [row._replace(tokens=min(max(row.tokens - start, 0), stop - start)) for row in chosen]
        shared = dict(self.shared)
        if "lengths" in shared:
            shared["lengths"] = shared["lengths"][rows] + start
        return replace(self, rows=real, inputs=inputs, shared=shared)


def fill_rows(
    memory: Memory, rows: list[Row], tokens: int, shapes: dict[str, tuple[tuple[int, ...], torch.dtype]],
    generator: torch.Generator, value: Callable[[str, Tensor], Tensor] = lambda _, normal: normal,
) -> dict[str, Tensor]:  # fmt: skip
    """Fills the slots that rows read with random states. Returns inputs of random numbers for real tokens.

    All other bytes are rubbish. shapes: input -> its shape after `batch token`, and its dtype. value: computes the
    values of an input from its name and normal random numbers.
    """
    made = {}
    for name, (shape, dtype) in shapes.items():
        whole = torch.empty((len(rows), tokens, *shape), dtype=dtype)
        made[name] = whole = rubbish(whole.nbytes, memory.state.device, generator).view(dtype).view(whole.shape)
        for i, row in enumerate(rows):
            if row.write > 0:
                whole[i, : row.tokens] = value(name, torch.randn((row.tokens, *shape), generator=generator)).to(whole)
    for slot in {row.read for row in rows if row.write > 0 and row.read > 0}:
        memory.fill(slot, torch.randn(memory.state.shape[1:], generator=generator))
    return made


Pairs = Iterator[tuple[Tensor, Array, Rounded | None]]


def check_step(case: Case, backend: Backend, stated: Callable[[Case, int, int, Array, Tensor], Pairs]) -> Tensor:
    """Runs a step. Checks numbers against bounds, snapshots against states, and that nothing else has changed.

    stated: a function of a case, a row, its number of real tokens, the state that it read, and the output. For each
    tensor to check, it yields (computed, exact, bound of the difference). Without a bound all bits must be equal.
    """
    state, before = case.memory.state, case.memory.state.clone()
    out = case.step(backend)
    changed: set[int] = set()
    for i, row in enumerate(case.rows):
        real = row.tokens if row.write > 0 else 0
        assert not out[i, real:].any()
        if row.write <= 0:
            continue
        changed |= {slot for slot in (row.write, row.snapshot) if slot > 0}
        old = float64(before[row.read]) if row.read > 0 else np.zeros(state.shape[1:])
        for got, exact, bound in stated(case, i, real, old, out):
            if bound is None:
                assert same_bits(got.cpu(), torch.from_numpy(exact.copy()).to(got.dtype))
            else:
                assert (np.abs(float64(got) - exact) <= bound.stored(got.dtype, backend.name).error).all()
        if row.snapshot > 0:
            assert same_bits(state[row.snapshot], state[row.write])
    case.memory.check_changed_only(changed)
    return out


def check_rows_alone(case: Case, backend: Backend) -> None:
    """Checks that each row gives the same bits alone, in a smaller batch, and in a batch in reverse order."""
    together = case.twin()
    out = together.step(backend)
    for order in ([0], [1], [2], [3], [4], [4, 3, 2, 1, 0], [2, 0]):
        part = case.cut(order, 0, out.shape[1]).twin()
        assert same_bits(part.step(backend), out[order])
        for slot in {slot for i in order for slot in case.rows[i][1:3] if slot > 0}:
            assert same_bits(part.memory.bytes_of(slot), together.memory.bytes_of(slot))


def check_chunks(case: Case, backend: Backend, cuts: list[int]) -> None:
    """Checks that one step and the same tokens in several steps give the same bits. cuts: borders of the steps."""
    whole = case.twin()
    out = whole.step(backend)
    chunks = []
    for start, stop in pairwise(cuts):
        chunks.append(case.cut(list(range(len(case.rows))), start, stop).step(backend))
        case.rows = [row._replace(read=row.write) for row in case.rows]
    assert same_bits(torch.cat(chunks, dim=1), out)
    assert same_bits(case.memory.whole, whole.memory.whole)
