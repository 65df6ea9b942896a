"""Compares records of int8 with float64: exact scales, values within half a step, and no other changed byte."""

from math import prod

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import ScaledMap
from tests.kernels.test_gather import GUARD, Poisoned, strided
from tests.support.decode_case import vast

LAYERS, SLOTS, RECORDS = 2, 5, 4  # slots include the null slot
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPS = ("pack_int8", "unpack_int8")
# (shape, axis that shares a scale): `head key value`, `head dim state`, `channel state`, a single number. Then columns
# longer than a block, contiguous and strided, and more columns than a block has.
SHAPES = [
    ((2, 3, 5), 2), ((2, 16, 32), 2), ((2, 7, 16), 1), ((6, 4), 1), ((3,), 0), ((3, 1), 1), ((1, 1100), 1),
    ((130, 3), 0), ((70, 70), 0), ((300, 16), 1),
]  # fmt: skip
HALF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # relative error of rounding
DENSE = {torch.float32: 2.0**-150, torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25}  # error of the smallest numbers

each_op = pytest.mark.parametrize("op", OPS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


class Memory:
    """A plane with gaps between its slots, records with gaps between them, and the expected bytes of both."""

    def __init__(
        self, backend: Backend, generator: torch.Generator, shape: tuple[int, ...] = (2, 3, 5), axis: int = 2,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        self.backend, self.shape, self.axis = backend, shape, axis
        self.size, self.columns = prod(shape), prod(shape) // shape[axis]
        slot = (-(-self.size * dtype.itemsize // 16) * 16 + GUARD) // dtype.itemsize
        strides = (SLOTS * slot, slot, *torch.empty(shape).stride())
        self.planes = strided(backend, generator, dtype, (LAYERS, SLOTS, *shape), strides)
        self.tensor = self.planes.tensor
        # Body of a record, per layer: 16 bytes of another plane, the values, 32 bytes of a third plane, the scales.
        self.scales = 16 + -(-self.size // 16) * 16 + 32
        self.layer_bytes = self.scales + -(-4 * self.columns // 16) * 16
        self.nbytes = LAYERS * self.layer_bytes
        self.records = strided(backend, generator, torch.uint8, (RECORDS, self.nbytes), (self.nbytes + GUARD, 1))
        self.held = self.records.tensor
        table = torch.tensor([(layer.data_ptr(), slot * dtype.itemsize) for layer in self.tensor], dtype=torch.int64)
        self.map = ScaledMap(
            table.to(backend.device), (self.tensor,), axis, 16, self.scales, self.layer_bytes, self.nbytes
        )
        for at in range(1, SLOTS):
            self.fill(at, self.random(generator))

    def random(self, generator: torch.Generator) -> Tensor:
        """Returns random values `layer ...`, whose columns have very different magnitudes."""
        each = [1 if axis == self.axis else size for axis, size in enumerate(self.shape)]
        x = torch.randn(LAYERS, *self.shape, generator=generator)
        return x * 10.0 ** (torch.rand(LAYERS, *each, generator=generator) * 6 - 4)

    def fill(self, slot: int, values: Tensor) -> None:
        """Sets the values of a slot. From then on, the bytes that the plane now has are the expected ones."""
        self.tensor[:, slot] = values.to(self.tensor)
        self.planes.expected = self.planes.whole.cpu().clone()

    def ints(self, values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.backend.device)

    def run(self, op: str, slots: Tensor | None, index: Tensor, places: Tensor) -> None:
        getattr(self.backend, op)(self.map, slots, index, places, self.held)

    def record(self, place: int, layer: int) -> tuple[Tensor, Tensor]:
        """Returns the bytes of the values and of the scales of a layer in a record."""
        body = self.held[place, layer * self.layer_bytes :]
        return body[16 : 16 + self.size], body[self.scales : self.scales + 4 * self.columns]

    def numbers(self, place: int, layer: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns values and scales of a layer in a record, in shapes that broadcast."""
        values, scales = (part.cpu().clone() for part in self.record(place, layer))
        shape = [1 if axis == self.axis else size for axis, size in enumerate(self.shape)]
        return values.view(torch.int8).double().view(self.shape).numpy(), scales.view(torch.float32).double().view(
            shape
        ).numpy()

    def plane(self, layer: int, slot: int) -> NDArray[np.float64]:
        return self.tensor[layer, slot].double().cpu().numpy()

    def check_packed(self, place: int, slot: int) -> None:
        """Checks that a record has the scales and values of a slot; from then on, the record's bytes are the expected
        ones.
        """
        for layer in range(LAYERS):
            x = self.plane(layer, slot) if slot else np.zeros(self.shape)
            values, scale = self.numbers(place, layer)
            stated = np.abs(x).max(self.axis, keepdims=True) / 127
            assert np.array_equal(scale, stated.astype(np.float32).astype(np.float64))
            exact = x / np.where(scale > 0, scale, 1)
            far = np.abs(exact - np.floor(exact) - 0.5) > 2**-16  # values near the middle may round either way
            assert np.array_equal(values[far], np.rint(exact)[far])
            assert (np.abs(x - values * scale) <= scale * (0.5 + 2**-17)).all()
            self._take(self.records, *self.record(place, layer))

    def check_unpacked(self, place: int, slot: int, was: Tensor | None = None) -> None:
        """Checks that a slot has exactly the values of a record. From then on, the slot's bytes are the expected ones.

        was: the slot that was packed into the record; its values must be within half a step of these.
        """
        for layer in range(LAYERS):
            values, scale = self.numbers(place, layer)
            stated = torch.from_numpy(values * scale).float().to(self.tensor.dtype)  # the product is exact in float64
            unpacked = self.tensor[layer, slot].cpu()
            assert torch.equal(unpacked, stated)
            if was is not None:
                x, y = was[layer].double().cpu().numpy(), unpacked.double().numpy()
                bound = scale * (0.5 + 2**-16) + np.abs(values * scale) * HALF[unpacked.dtype] + DENSE[unpacked.dtype]
                assert (np.abs(x - y) <= bound).all()
            self._take(self.planes, self.tensor[layer, slot])

    @staticmethod
    def _take(held: Poisoned, *parts: Tensor) -> None:
        """Makes the present bytes of these parts the expected ones."""
        for part in parts:
            start = part.data_ptr() - held.whole.data_ptr()
            held.expected[start : start + part.nbytes] = held.whole[start : start + part.nbytes].cpu()

    def expect_all(self, op: str, slot_of: dict[int, int]) -> None:
        """Checks a move between each place and its slot, and that no other byte changed.

        Slot 0 is read as zeros, and is never written.
        """
        for place, slot in slot_of.items():
            if op == "pack_int8":
                self.check_packed(place, slot)
            elif slot:
                self.check_unpacked(place, slot)
        self.check()

    def check(self) -> None:
        """Checks that all bytes are the expected ones."""
        self.planes.check()
        self.records.check()


def packed(backend: Backend, generator: torch.Generator) -> Memory:
    """Returns memory whose slots 1 to 4 are packed into records 0 to 3."""
    memory = Memory(backend, generator)
    memory.run("pack_int8", None, memory.ints([1, 2, 3, 4]), memory.ints([0, 1, 2, 3]))
    memory.expect_all("pack_int8", {0: 1, 1: 2, 2: 3, 3: 4})
    backend.counts.reset()
    return memory


@pytest.mark.parametrize(
    ("shape", "axis", "dtype"),
    [*((*SHAPES[i], DTYPES[i % 3]) for i in range(len(SHAPES))), *((*SHAPES[0], dtype) for dtype in DTYPES[1:])],
)
def test_b66_int8_is_within_half_a_step(
    backend: Backend, generator: torch.Generator, shape: tuple[int, ...], axis: int, dtype: torch.dtype
) -> None:
    memory = Memory(backend, generator, shape, axis, dtype)
    was = memory.tensor[:, 3].clone()
    memory.run("pack_int8", None, memory.ints([3, 1]), memory.ints([0, 2]))
    memory.expect_all("pack_int8", {0: 3, 2: 1})
    memory.run("unpack_int8", None, memory.ints([4, 1]), memory.ints([0, 2]))
    memory.check_unpacked(0, 4, was)
    memory.check_unpacked(2, 1)
    memory.check()
    assert backend.counts.launches == {"pack_int8": 1, "unpack_int8": 1}


@each_dtype
def test_b66_any_bytes_unpack_to_value_times_scale(
    backend: Backend, generator: torch.Generator, dtype: torch.dtype
) -> None:
    """The records have all values from -128 to 127, with a small and a large scale."""
    memory = Memory(backend, generator, (2, 256), 1, dtype)
    for layer in range(LAYERS):
        values, scales = memory.record(1, layer)
        values.copy_(torch.randperm(512, generator=generator).to(torch.uint8))
        scales.copy_((torch.rand(2, generator=generator) * 2.0 ** torch.tensor([-18.0, 8.0])).view(torch.uint8))
    memory.records.expected = memory.records.whole.cpu().clone()
    memory.run("unpack_int8", None, memory.ints([2]), memory.ints([1]))
    memory.check_unpacked(1, 2)
    memory.check()


def test_b66_halves_go_to_the_even_value(backend: Backend, generator: torch.Generator) -> None:
    memory = Memory(backend, generator, (1, 8), 1)
    memory.fill(2, torch.tensor([127, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -2.5]).expand(LAYERS, 1, 8))
    memory.run("pack_int8", None, memory.ints([2]), memory.ints([1]))
    values, scale = memory.numbers(1, 1)
    assert values.tolist() == [[127, 0, 2, 2, 0, -2, 126, -2]] and scale.tolist() == [[1]]


def test_b66_the_smallest_and_the_largest_numbers(backend: Backend, generator: torch.Generator) -> None:
    """Scales are normal numbers, and 127 times a scale is finite. Columns of zeros have scale 0 and come back as 0."""
    least, most = 2.0**-149, float(np.finfo(np.float32).max)
    x = torch.tensor(
        [[0.0, -0.0, 0.0], [least, 0, -least], [190 * least, -95 * least, 0], [2.0**-126, 2.0**-127, least],
         [2.0**-119, 2.0**-126, -(2.0**-127)], [most, -most, 1], [most / 2, 3.0, -most]], dtype=torch.float32,
    )  # fmt: skip
    memory = Memory(backend, generator, (7, 3), 1)
    memory.fill(1, x.expand(LAYERS, 7, 3))
    memory.run("pack_int8", None, memory.ints([1]), memory.ints([3]))
    values, scale = memory.numbers(3, 0)
    assert values[0].tolist() == [0, 0, 0]
    assert scale.flatten().tolist()[:4] == [0, 2.0**-126, 2.0**-126, 2.0**-126]
    assert scale[4, 0] == np.float32(2.0**-119) / np.float32(127)
    assert values[5].tolist() == [127, -127, 0]
    memory.run("unpack_int8", None, memory.ints([2]), memory.ints([3]))
    restored = memory.plane(0, 2)
    assert np.isfinite(restored).all() and (np.abs(restored - x.double().numpy()) <= scale * (0.5 + 2**-16)).all()
    assert not np.signbit(restored[0]).any()


@each_dtype
@pytest.mark.parametrize("axis", [0, 1])
def test_what_is_no_number_comes_back_as_none(
    backend: Backend, generator: torch.Generator, dtype: torch.dtype, axis: int
) -> None:
    """Exactly the values that share a scale with an infinity or a NaN come back as NaN."""
    memory = Memory(backend, generator, (4, 4), axis, dtype)
    x = memory.random(generator)
    clean = x.clone()
    columns = x if axis == 1 else x.transpose(1, 2)
    columns[0, 0, 1], columns[0, 2, 3], columns[1, 3, 0] = torch.inf, torch.nan, -torch.inf
    memory.fill(2, x)
    memory.fill(3, clean)
    memory.run("pack_int8", None, memory.ints([2, 3]), memory.ints([0, 1]))
    memory.run("unpack_int8", None, memory.ints([1, 4]), memory.ints([0, 1]))
    for layer, bad in ((0, [0, 2]), (1, [3])):
        values, scale = memory.numbers(0, layer)
        right, wrong = memory.plane(layer, 4), memory.plane(layer, 1)
        if axis == 0:
            values, scale, right, wrong = values.T, scale.T, right.T, wrong.T
        assert np.isnan(scale[bad]).all() and not values[bad].any() and np.isnan(wrong[bad]).all()
        rest = [column for column in range(4) if column not in bad]
        assert np.isfinite(wrong[rest]).all() and np.array_equal(wrong[rest], right[rest])


@each_op
def test_B38_slots_and_records_beyond_2_31_bytes(backend: Backend, op: str) -> None:
    stride = 2**32 + 16
    planes, records = vast(2 * stride + 16, backend.device), vast(stride + 32, backend.device)
    plane = planes.view(torch.float32).as_strided((1, 3, 1, 4), (4, stride // 4, 4, 1))
    held = records.as_strided((2, 32), (stride, 1))
    planes[:48], records[:48] = 0xFF, 0xFF
    plane[0, 2, 0] = torch.tensor([1.0, 2, 3, -127], device=backend.device)
    held[1] = 0
    held[1, :4] = 7
    held[1, 16:20] = torch.tensor([2.0]).view(torch.uint8).to(backend.device)
    table = torch.tensor([[planes.data_ptr(), stride]], dtype=torch.int64, device=backend.device)
    column = torch.tensor([1], device=backend.device)
    getattr(backend, op)(ScaledMap(table, (plane,), 1, 0, 16, 32, 32), None, column + 1, column, held)
    assert planes[:48].tolist() == records[:48].tolist() == [0xFF] * 48
    values, scale = held[1, :4].view(torch.int8).tolist(), held[1, 16:20].clone().view(torch.float32).tolist()
    if op == "pack_int8":
        assert values == [1, 2, 3, -127] and scale == [1.0]
    else:
        assert plane[0, 2, 0].tolist() == [14.0] * 4 and values == [7] * 4
