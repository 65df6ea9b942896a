"""States in fewer bits, against a statement in float64: the least scales, the nearest steps or both sides of them."""

from math import prod

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from memstate.kernels.dispatch import Backend
from memstate.kernels.reference import bits as reference
from tests.kernels.test_gather import Poisoned, ids, random_bytes, strided
from tests.support.decode_case import vast

Array = NDArray[np.float64]
SLOTS, SHAPE = 5, (2, 3, 64)  # slots with the null slot
LARGEST = {torch.int16: 32767.0, torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
KINDS = [
    pytest.param((torch.int16, False), id="int16"), pytest.param((torch.int8, False), id="int8"),
    pytest.param((torch.float8_e4m3fn, False), id="e4m3"), pytest.param((torch.int8, True), id="int8+residual"),
]  # fmt: skip
Kind = tuple[torch.dtype, bool]
each_kind = pytest.mark.parametrize("kind", KINDS)


class Held:
    """Slots in fewer bits that lie apart in poisoned memory."""

    def __init__(
        self,
        backend: Backend,
        generator: torch.Generator,
        kind: Kind,
        shape: tuple[int, ...] = SHAPE,
        slots: int = SLOTS,
    ) -> None:
        self.backend, self.kind, self.shape = backend, kind, shape
        dtype, residual = kind
        self.planes: dict[str, Poisoned] = {}
        for name, each, held in (("values", dtype, 1), ("scales", torch.uint8, 32), ("residual", torch.uint8, 2)):
            if name != "residual" or residual:
                inner = (*shape[:-1], shape[-1] // held)
                apart = -(-prod(inner) * each.itemsize // 16) * 16 + 32
                strides = (apart // each.itemsize, *torch.empty(inner).stride())
                self.planes[name] = strided(backend, generator, each, (slots, *inner), strides)

    def tensors(self, index: object = slice(None)) -> dict[str, Tensor]:
        return {name: plane.tensor[index] for name, plane in self.planes.items()}

    def store(self, slots: list[int], batch: Tensor, numbers: list[int] | None = None, **draws: int) -> None:
        column = None if numbers is None else torch.tensor(numbers, device=self.backend.device)
        batch = batch.to(self.backend.device)
        self.backend.store_bits(**self.tensors(), slots=ids(self.backend, slots), batch=batch, numbers=column, **draws)

    def load(self, slots: list[int]) -> Tensor:
        out = torch.full((len(slots), *self.shape), torch.nan, device=self.backend.device)
        self.backend.load_bits(**self.tensors(), slots=ids(self.backend, slots), out=out)
        return out.cpu()

    def bytes(self, slot: int) -> list[Tensor]:
        return [tensor.cpu().contiguous().view(torch.uint8) for tensor in self.tensors(slot).values()]

    def check(self, *changed: int) -> None:
        """No byte has changed besides those of slots."""
        for plane in self.planes.values():
            for slot in changed:
                block = plane.block(slot)
                plane.expected[block] = plane.whole[block].cpu()
            plane.check()


def states(generator: torch.Generator, rows: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    """Blocks of very different sizes, of which one is zeros and one holds its largest number exactly."""
    x = torch.randn(rows, *shape, generator=generator)
    x = x * 10.0 ** (torch.rand(rows, *shape[:-1], 1, generator=generator) * 30 - 20)
    x[0, 0, 0, :32] = 0
    x[-1, 0, 1, :32] = torch.arange(32) * 2.0**-9
    x[-1, 0, 1, 5] = 127 * 2.0**-7
    return x


def stated(x: Tensor, kind: Kind) -> tuple[Array, Array]:
    """Exponents of the least scales, `.. block 1`, and the step at each element, `.. block 32`."""
    dtype, residual = kind
    exact = x.double().numpy().reshape(-1, 32)
    peak, largest = np.abs(exact).max(1, keepdims=True), LARGEST[dtype]
    scale = np.ceil(np.log2(np.where(peak > 0, peak, 1) / largest))
    scale += 1.0 * (peak > largest * 2.0**scale) - (peak <= largest * 2.0 ** (scale - 1))  # log2 rounds
    scale = np.where(peak > 0, np.maximum(scale, -126), -126)
    step = 2.0**scale / (16 if residual else 1)
    if dtype == torch.float8_e4m3fn:
        step = step * 2.0 ** (np.maximum(np.frexp(exact * 2.0**-scale)[1] - 1, -6) - 3)
    return scale, np.broadcast_to(step, exact.shape)


@each_kind
def test_elements_are_the_nearest_steps_of_the_least_scale(
    backend: Backend, generator: torch.Generator, kind: Kind
) -> None:
    held, x = Held(backend, generator, kind), states(generator, 4)
    held.store([3, 0, SLOTS, 1], x)
    held.check(3, 1)
    found, x = held.load([3, 1]), x[[0, 3]]
    scale, step = stated(x, kind)
    assert torch.equal(held.tensors([3, 1])["scales"].cpu().flatten(), torch.from_numpy(scale + 127).byte().flatten())
    exact, got = x.double().numpy().reshape(-1, 32), found.double().numpy().reshape(-1, 32)
    assert np.array_equal(got, np.rint(exact / step) * step)  # halves to even; at most half a step away
    assert held.load([0, -1, SLOTS, 2**31 - 1]).eq(0).all() and held.load([1, 1])[0].equal(held.load([1])[0])
    held.check(3, 1)
    assert set(backend.counts.launches) == {"store_bits", "load_bits"}


@pytest.mark.sample(2)
@each_kind
def test_rounding_by_chance_takes_both_sides_and_its_mean_is_the_number(
    backend: Backend, generator: torch.Generator, kind: Kind
) -> None:
    """The mean of n distances to below a step, each of variance 1/4 at most, is within 5 / (2 sqrt n): 1 in 10^6."""
    held, (x,) = Held(backend, generator, kind), states(generator, 1)
    exact, (_, step) = x.double().numpy().reshape(-1, 32), stated(x, kind)
    far, seeds = [], range(24)
    for seed in seeds:
        held.store([1, 2], x.repeat(2, 1, 1, 1), [seed, 2**40 + seed], seed=seed)
        far += [(row.double().numpy().reshape(-1, 32) - exact) / step for row in held.load([1, 2])]
    distance = np.stack(far)
    below = exact / step - np.floor(exact / step)
    assert (np.isclose(distance, -below, atol=1e-9) | np.isclose(distance, 1 - below, atol=1e-9)).all()
    moving = below > 0
    assert abs(distance[:, moving].mean()) <= 2.5 / np.sqrt(moving.sum() * len(far))
    assert (np.abs(distance.mean(0)) <= 3.5 / np.sqrt(len(far)) + 1e-9).all()  # of each: by Hoeffding's inequality


@each_kind
def test_draws_depend_on_row_seed_and_place_alone(backend: Backend, generator: torch.Generator, kind: Kind) -> None:
    """Not on slots, the batch, or how heads are dealt out to ranks; and what is stored again stays as it is."""
    held, x = Held(backend, generator, kind), states(generator, 3)
    held.store([1, 2], x[:2], [7, 8], seed=3, first=2**31 - 12)
    first, again = held.bytes(1), held.load([1])
    held.store([4, 3], x[[2, 0]], [9, 7], seed=3, first=2**31 - 12)
    assert all(map(torch.equal, first, held.bytes(3)))
    for other in ({"seed": 4, "first": 2**31 - 12}, {"seed": 3, "first": 5}):
        held.store([4], x[:1], [7], **other)
        assert not torch.equal(held.load([4]), again)
    rank = Held(backend, generator, kind, (1, *SHAPE[1:]))
    rank.store([2], x[:1, 1:], [7], seed=3, first=2**31 - 12 + 6)  # blocks of the first head
    assert torch.equal(rank.load([2])[0, 0], again[0, 1])
    held.store([2], again, [1], seed=9)
    assert torch.equal(held.load([2]), again)


@each_kind
@pytest.mark.filterwarnings("ignore:(invalid|overflow)")  # of numpy, in the interpreter
def test_kernel_and_reference_agree_on_every_bit(generator: torch.Generator, backend: Backend, kind: Kind) -> None:
    """More blocks than a program has; any bytes; infinities, NaN and numbers that are too small for a scale."""
    shape, rows = (3, 50, 32), {"slots": [2, 4], "numbers": [5, 2**33], "first": 2**31 - 1}
    x = states(generator, 2, shape)
    x[0, 1, 0, 3], x[0, 1, 1, 4], x[0, 1, 2, 5] = torch.inf, -torch.inf, torch.nan
    x[1, 1, :40] *= 10.0 ** -torch.arange(0, 40)[:, None]
    mine, other = (Held(one, generator, kind, shape) for one in (backend, Backend("reference")))
    mine.store(batch=x, **rows)  # type: ignore[arg-type]
    other.store(batch=x, **rows)  # type: ignore[arg-type]
    assert all(
        torch.equal(a, b) for slot in rows["slots"] for a, b in zip(mine.bytes(slot), other.bytes(slot), strict=True)
    )
    assert mine.load([2])[0, 1, :3].isnan().all() and mine.load([2])[0, 1, 3:].isfinite().all()
    for name, plane in other.planes.items():
        plane.whole.copy_(random_bytes(plane.whole.numel(), generator))
        mine.planes[name].whole.copy_(plane.whole)
    assert torch.equal(mine.load([1, 2, 3, 4]).nan_to_num(3.0), other.load([1, 2, 3, 4]).nan_to_num(3.0))


def test_slots_beyond_2_31_elements(backend: Backend) -> None:
    apart = 2**31 + 16
    values = vast(2 * apart + 64, backend.device).view(torch.int16).as_strided((3, 32), (apart // 2, 1)).zero_()
    scales = vast(2 * apart + 16, backend.device).as_strided((3, 1), (apart, 1)).zero_()
    x = torch.arange(32.0, device=backend.device)[None]
    backend.store_bits(values, scales, ids(backend, [2]), x)
    assert values.tolist() == [[0] * 32, [0] * 32, [i << 10 for i in range(32)]] and scales.tolist() == [
        [0],
        [0],
        [117],
    ]
    backend.load_bits(values, scales, ids(backend, [2]), out := torch.empty_like(x))
    assert torch.equal(out, x)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)  # fmt: skip
def test_philox_has_the_words_of_its_authors(counter: tuple[int, ...], key: int, words: tuple[int, ...]) -> None:
    """The known answers of Random123, which came with the paper."""
    assert tuple(map(int, reference.philox(tuple(map(torch.tensor, counter)), key))) == words
