"""Checks every byte of memory of random bytes after gathers from slots and scatters to slots, for all planes."""

from itertools import product
from math import prod

import pytest
import torch
from torch import Tensor

from memstate.kernels import blocks
from memstate.kernels.dispatch import Backend
from memstate.kernels.reference import scatter
from memstate.state.layout import Order, Plane, StateLayout
from memstate.state.planes import Planes
from tests.support.decode_case import far_apart

GUARD = 48  # bytes before and after a tensor; a multiple of 16 that is no power of two
LAYERS, SLOTS = 2, 6  # slots include the null slot
ORDERS: tuple[Order, ...] = ("layer_major", "slot_major")
KINDS = [
    (torch.float32, (2, 4, 2)),
    (torch.float32, (3, 5)),
    (torch.bfloat16, (3, 8)),
    (torch.float16, (3, 5)),
    (torch.float8_e4m3fn, (16,)),
    (torch.float8_e5m2, (3, 3)),
    (torch.int8, (7,)),
    (torch.bool, (1,)),
    (torch.int64, ()),
    (torch.complex64, (3,)),
    (torch.complex128, (2,)),
    (torch.float32, (blocks.LANES + 8,)),  # two tiles of 16-byte lanes
    (torch.int8, (2 * blocks.LANES + 1,)),  # three tiles of bytes
]
# Tensors of engines, `layer slot 4`: strides of layer and slot, and offset of the first slot, all in elements.
STRIDES = [(400, 16, 4), (16, 40, 0), (43, 7, 1), (7, 15, 3), (400, 18, 2)]
each_op = pytest.mark.parametrize("op", ["gather_slots", "scatter_slots"])
# dtype, stride in elements: two strides exceed 2^31 words of 4 bytes (moved 16 bytes at a time), or 2^31 bytes.
FAR = [(torch.float32, 2**30 + 4), (torch.int8, 2**30 + 3)]


def random_bytes(nbytes: int, generator: torch.Generator) -> Tensor:
    """Returns random bytes in which every second word is a quiet or signalling NaN as fp32, bf16 and fp16."""
    whole = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    whole[3::8] = 0x7F
    whole[2::8] |= 0x80
    return whole


class Poisoned:
    """A tensor inside memory of random bytes, and the expected values of all these bytes."""

    def __init__(self, whole: Tensor, tensor: Tensor, generator: torch.Generator) -> None:
        whole.copy_(random_bytes(whole.numel(), generator))
        self.whole, self.tensor = whole, tensor
        self.expected = whole.cpu().clone()

    def block(self, *index: int) -> slice:
        """Returns the places of the bytes of tensor[index] in the memory; its elements must lie without gaps."""
        at = sum(i * stride for i, stride in zip(index, self.tensor.stride(), strict=False))
        size = self.tensor.element_size()
        start = self.tensor.data_ptr() - self.whole.data_ptr() + at * size
        return slice(start, start + prod(self.tensor.shape[len(index) :]) * size)

    def check(self) -> None:
        different = torch.nonzero(self.whole.cpu() != self.expected).flatten()
        assert not different.numel(), f"{different.numel()} bytes differ, the first at {different[:8].tolist()}"


def stored(
    backend: Backend, generator: torch.Generator, kind: tuple[torch.dtype, tuple[int, ...]], order: Order
) -> Poisoned:
    """Returns a plane in memstate's own memory, where another plane lies beside it."""
    dtype, shape = kind
    memory: list[Tensor] = []

    def allocate(nbytes: int) -> Tensor:
        memory.append(torch.empty(nbytes + 2 * GUARD, dtype=torch.uint8, device=backend.device))
        return memory[-1][GUARD : GUARD + nbytes]

    layout = StateLayout((Plane("state", shape, dtype), Plane("other", (5,), torch.int8)), LAYERS, order)
    plane = Planes(layout, SLOTS - 1, backend, allocate)["state"]
    return Poisoned(memory[0], plane, generator)


def strided(
    backend: Backend, generator: torch.Generator, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...],
    offset: int = 0,
) -> Poisoned:  # fmt: skip
    """Returns a tensor with these strides, in elements."""
    size = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    nbytes = 2 * GUARD + -(-(offset + size) * dtype.itemsize // 16) * 16
    whole = torch.empty(nbytes, dtype=torch.uint8, device=backend.device)
    tensor = whole[GUARD:].view(dtype).as_strided(shape, strides, GUARD // dtype.itemsize + offset)
    return Poisoned(whole, tensor, generator)


def dense(
    backend: Backend, generator: torch.Generator, dtype: torch.dtype, shape: tuple[int, ...], offset: int = 0
) -> Poisoned:
    """Returns a contiguous tensor."""
    strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return strided(backend, generator, dtype, shape, strides, offset)


def ids(backend: Backend, slots: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    """Returns slots as a column of a larger tensor. All other cells have slot 1, so that a wrong read shows."""
    whole = torch.tensor([1] * 300 + slots + [1] * 300, dtype=dtype, device=backend.device)
    return whole[300 : 300 + len(slots)]


def run(
    backend: Backend, generator: torch.Generator, op: str, plane: Poisoned, slots: list[int],
    dtype: torch.dtype = torch.int32, offset: int = 0,
) -> None:  # fmt: skip
    """Gathers or scatters slots, with a batch that starts `offset` elements into its memory, and checks every byte."""
    layers, count, *inner = plane.tensor.shape
    batch = dense(backend, generator, plane.tensor.dtype, (layers, len(slots), *inner), offset)
    getattr(backend, op)(plane.tensor, ids(backend, slots, dtype), batch.tensor)
    for layer, (entry, slot) in product(range(layers), enumerate(slots)):
        there, mine, theirs = 0 < slot < count, batch.block(layer, entry), plane.block(layer, slot)
        if op == "gather_slots":
            batch.expected[mine] = plane.expected[theirs] if there else 0
        elif there:
            plane.expected[theirs] = batch.expected[mine]
    batch.check()
    plane.check()
    assert backend.counts.launches == {op: 1}


@pytest.mark.sample
@each_op
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_B37_slots_are_moved_bit_for_bit(
    backend: Backend, generator: torch.Generator, op: str, kind: tuple[torch.dtype, tuple[int, ...]], order: Order
) -> None:
    run(backend, generator, op, stored(backend, generator, kind, order), [3, 0, 5, -1, SLOTS])


@each_op
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
def test_B37_planes_of_any_strides(
    backend: Backend, generator: torch.Generator, op: str, dtype: torch.dtype, strides: tuple[int, int, int]
) -> None:
    *outer, offset = strides
    plane = strided(backend, generator, dtype, (LAYERS, SLOTS, 4), (*outer, 1), offset)
    run(backend, generator, op, plane, [5, 0, 1], offset=offset)  # batches start at any address as well


@pytest.mark.parametrize(
    ("dtype", "shape", "strides", "offset", "words"),
    [
        (torch.float32, (2, 3, 4), (12, 4, 1), 0, (4, 4)),
        (torch.bool, (2, 3, 16), (48, 16, 1), 0, (4, 4)),
        (torch.complex128, (2, 3, 1), (3, 1, 1), 0, (4, 4)),
        (torch.bfloat16, (2, 3, 4), (12, 4, 1), 0, (4, 2)),
        (torch.float32, (2, 3, 4), (12, 4, 1), 2, (4, 2)),
        (torch.float32, (2, 3, 4), (13, 4, 1), 0, (4, 1)),
        (torch.float16, (2, 3, 3), (24, 8, 1), 0, (2, 1)),
        (torch.int8, (2, 3, 16), (48, 16, 1), 5, (1, 1)),
        (torch.float32, (1, 3, 4), (7, 4, 1), 0, (4, 4)),  # the stride of an axis of length 1 does not matter
        (torch.float32, (3, 1, 4), (4, 7, 1), 0, (4, 4)),
    ],
)
def test_B37_words_are_the_widest_that_fit(
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, words: tuple[int, int]
) -> None:
    plane = strided(Backend("reference"), torch.Generator(), dtype, shape, strides, offset)
    cut = blocks.cut(plane.tensor)
    assert (cut.word_bytes, cut.unit_words) == words and cut.word.itemsize == cut.word_bytes


@each_op
@pytest.mark.parametrize("far", ["slots", "layers"])
@pytest.mark.parametrize(("dtype", "stride"), FAR)
def test_B38_offsets_beyond_2_31_elements(
    backend: Backend, generator: torch.Generator, op: str, far: str, dtype: torch.dtype, stride: int
) -> None:
    """Two strides exceed 2^31 elements or words. 32-bit arithmetic would find a place near the start instead."""
    plane = far_apart(3, torch.zeros(3, 4, dtype=dtype, device=backend.device), stride)
    plane = plane.transpose(0, 1) if far == "slots" else plane
    plane[:] = 7
    plane[:, 2] = torch.randint(8, 99, (3, 4), generator=generator).to(plane)
    batch = torch.randint(8, 99, (3, 2, 4), generator=generator).to(plane)
    expected = torch.stack([plane[:, 1], plane[:, 2]], 1) if op == "gather_slots" else batch.clone()
    getattr(backend, op)(plane, ids(backend, [1, 2]), batch)
    assert torch.equal(batch, expected) and torch.equal(plane[:, 1:], expected) and bool((plane[:, 0] == 7).all())


@pytest.mark.parametrize(
    ("op", "slots"),
    [
        ("gather_slots", [0]),
        ("gather_slots", [0, -1, SLOTS, 2**31 - 1] * 5),
        ("gather_slots", [4]),
        ("gather_slots", [1, 2, 3, 4, 5, 0, 5, 4, 3, 2, 1, 1, 1, -7, 6, 2, 5]),
        ("gather_slots", [2**32 + 1, 2, 2**40, -(2**32) + 3]),
        ("scatter_slots", [0, -1, SLOTS, 2**32 + 1, -(2**32) + 1, 2**40] * 3),
        ("scatter_slots", [0] + [4] + [0] * 254 + [2, 5] + [0] * 341 + [3]),
        ("scatter_slots", [5, 2, 1, 4, 3]),
    ],
    ids=["null", "nulls", "one", "many", "ids of 64 bits", "scattered nulls", "few among many", "all"],
)
def test_B39_batches_of_any_size_and_padding(
    backend: Backend, generator: torch.Generator, op: str, slots: list[int]
) -> None:
    """Padding gathers zeros and scatters nowhere. Ids of 64 bits are not cut to 32 bits."""
    dtype = torch.int64 if max(slots) >= 2**31 else torch.int32
    run(backend, generator, op, stored(backend, generator, (torch.bfloat16, (3, 5)), "slot_major"), slots, dtype)


@each_op
@pytest.mark.parametrize(
    ("shape", "batch"), [((2, 6, 3, 0), 2), ((2, 6, 0, 4), 2), ((0, 6, 3, 4), 2), ((2, 6, 3, 4), 0)]
)
def test_B39_nothing_to_move_launches_nothing(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], batch: int, op: str
) -> None:
    if backend.name != "reference":
        monkeypatch.setattr("memstate.kernels.scatter._scatter_slots", None)
        monkeypatch.setattr("memstate.kernels.gather._gather_slots", None)
    plane = torch.zeros(shape, device=backend.device)
    getattr(backend, op)(plane, ids(backend, [0] * batch), plane.new_ones(shape[0], batch, *shape[2:]))
    assert not plane.any()


def test_what_gather_has_returned_is_not_checked_again_and_all_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = StateLayout((Plane("ssm", (2,), torch.float32),), layers=3)
    planes, slots, checked = Planes(layout, 4, Backend("reference")), torch.tensor([2, 0, 1]), list[Tensor]()
    planes["ssm"][:] = torch.arange(3 * 5 * 2.0).view(3, 5, 2)
    check = scatter.check_scatter
    monkeypatch.setattr(scatter, "check_scatter", lambda *given: [checked.append(given[2]), check(*given)])
    batch, expected = planes.gather("ssm", slots), planes["ssm"].clone()
    expected[:, 1:3] = -expected[:, 1:3]
    planes.scatter("ssm", slots, batch.neg_())
    assert torch.equal(planes["ssm"], expected) and not checked
    planes.scatter("ssm", slots, other := batch.clone())
    assert checked == [other]
    with pytest.raises(ValueError, match="batch"):
        planes.scatter("ssm", slots[:2], batch)
    planes.gather("ssm", slots)
    with pytest.raises(ValueError, match="batch"):
        planes.scatter("ssm", slots, batch[:, :, :1])
