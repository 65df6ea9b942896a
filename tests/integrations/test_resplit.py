"""Tests records across tensor-parallel splits: a record made from another split equals the cut whole tensors."""

import itertools
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memstate.errors import InvalidArgument, LayoutMismatch
from memstate.integrations.handover.resplit import Resplit
from memstate.kernels.dispatch import Backend
from memstate.state.layout import Plane, StateLayout
from memstate.state.planes import Planes
from memstate.state.sharding import Part
from memstate.tiers.host.packing import Packing
from memstate.tiers.keys import fingerprint
from memstate.tiers.stores.base import Bytes
from tests.support.splits import HEAD, KV, LAYERS, MIXED, PRESETS, WIDE, cut, shard, toy, whole

RANKS, CANARY = (1, 2, 4, 8), 48
# layouts for which `fewest` checks the set of source ranks
BY_TRYING = ("mixed", "2 heads", "latent", "nemotron_h", "granite_hybrid")
LAYOUTS = {name: toy(name) for name in PRESETS} | {"mixed": MIXED} | KV
LAYOUTS |= {"int8": toy("qwen3_next", ssm_dtype=torch.int8)}


def legal(layout: StateLayout, ranks: int) -> bool:
    units = [part.units for plane in layout.planes for part in plane.parts]
    return all(count % ranks == 0 or ranks % count == 0 for count in units)


def resplit(form: Resplit, rank: int, bodies: dict[int, Bytes], size: int) -> Bytes:
    """Writes the body of a rank into random memory and returns it; checks that the memory around it does not change."""
    memory = np.random.default_rng(rank).integers(0, 256, size + 2 * CANARY, dtype=np.uint8)
    before, inside = memory.copy(), slice(CANARY, CANARY + size)
    form.body(rank, bodies, memory[inside])
    after, memory[inside] = memory[inside].copy(), before[inside]
    assert (memory == before).all()
    return after


def held(layout: StateLayout, ranks: int, rank: int) -> set[int]:
    """Returns the numbers of the elements that a rank holds. Elements are numbered through all planes."""
    numbers, first = set(), 0
    for plane in layout.planes:
        full = torch.arange(first, first + plane.elements).view(1, *plane.shape)
        numbers |= set(cut(plane, full, ranks, rank).flatten().tolist())
        first += plane.elements
    return numbers


def fewest(layout: StateLayout, ranks: int, wanted: set[int]) -> list[int]:
    """Returns the smallest set of ranks that holds the wanted elements; of several, the one with the lowest ranks."""
    of = [held(layout, ranks, rank) for rank in range(ranks)]
    sets = (chosen for n in range(1, ranks + 1) for chosen in itertools.combinations(range(ranks), n))
    return list(next(chosen for chosen in sets if wanted <= set().union(*(of[rank] for rank in chosen))))


@pytest.mark.parametrize("name", LAYOUTS)
def test_B79_every_split_is_made_of_every_other_bit_for_bit(name: str, generator: torch.Generator) -> None:
    """A record also survives a change of the split from m to n and back. It is made from the smallest set of ranks."""
    layout, full = LAYOUTS[name], whole(LAYOUTS[name], generator.initial_seed())
    assert all(legal(layout, ranks) for ranks in RANKS)
    shards = {ranks: [shard(layout, full, ranks, rank) for rank in range(ranks)] for ranks in RANKS}
    dirty = {ranks: [shard(layout, full, ranks, rank, 0xA5) for rank in range(ranks)] for ranks in RANKS}
    for ranks, to_ranks in itertools.product(RANKS, RANKS):
        form, there = Resplit(layout, ranks, to_ranks), []
        for rank in range(to_ranks):
            sources = form.sources(rank)
            if name in BY_TRYING:
                assert sources == fewest(layout, ranks, held(layout, to_ranks, rank))
            needed = {source: dirty[ranks][source] for source in sources}  # the body is made without the other ranks
            there.append(resplit(form, rank, needed, shards[to_ranks][rank].size))
            assert there[-1].tobytes() == shards[to_ranks][rank].tobytes(), f"rank {rank}, {ranks} -> {to_ranks}"
        back = Resplit(layout, to_ranks, ranks)
        for rank in range(ranks):
            body = resplit(back, rank, {of: there[of] for of in back.sources(rank)}, shards[ranks][rank].size)
            assert body.tobytes() == shards[ranks][rank].tobytes()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([1, 2, 3, 4, 6, 12]), max_size=3), min_size=1, max_size=3),
    st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([1, 2, 3, 4, 6, 12]), st.integers(0, 2**31),
)  # fmt: skip
def test_splits_that_do_not_divide_each_other(units: list[list[int]], ranks: int, to_ranks: int, seed: int) -> None:
    """For example, six heads on two ranks and on three. A plane can have several parts with different units."""
    planes = []
    for number, counts in enumerate(units):
        parts = tuple(Part(f"p{place}", count, 1 + place) for place, count in enumerate(counts))
        shape = (2, sum(part.length for part in parts), 3) if parts else (5,)
        planes.append(Plane(f"plane{number}", shape, torch.int16, parts=parts, axis=1 if parts else 0))
    layout = StateLayout(tuple(planes), 2)
    if not (legal(layout, ranks) and legal(layout, to_ranks)):
        with pytest.raises(InvalidArgument, match="one of the two numbers must divide the other"):
            Resplit(layout, ranks, to_ranks)
        return
    form, full = Resplit(layout, ranks, to_ranks), whole(layout, seed)
    for rank in range(to_ranks):
        sources, expected = form.sources(rank), shard(layout, full, to_ranks, rank)
        assert sources == fewest(layout, ranks, held(layout, to_ranks, rank))
        bodies = {of: shard(layout, full, ranks, of) for of in sources}
        assert resplit(form, rank, bodies, expected.size).tobytes() == expected.tobytes()


def test_the_order_on_the_device_does_not_matter() -> None:
    full = whole(MIXED, 1)
    bodies, expected = {of: shard(MIXED, full, 4, of) for of in range(4)}, shard(MIXED, full, 2, 1)
    for order, alignment in itertools.product(("layer_major", "slot_major"), (16, 256)):
        layout = StateLayout(MIXED.planes, LAYERS, order, alignment)  # type: ignore[arg-type]
        assert resplit(Resplit(layout, 4, 2), 1, bodies, expected.size).tobytes() == expected.tobytes()


def test_nothing_but_empty_planes_is_a_body_too() -> None:
    layout = StateLayout((Plane("none", (4, 0), torch.float32, parts=(Part("head", 4),)),), 3)
    form, nothing = Resplit(layout, 2, 4), np.zeros(0, np.uint8)
    assert form.sources(3) == [1]
    form.body(3, {1: nothing}, nothing.copy())


SMALL = StateLayout((Plane("ssm", (4, 5), torch.float32, parts=(Part("head", 4),)), Plane("w", (3,), torch.int8)), 1)


def body(ranks: int) -> Bytes:
    return np.zeros(SMALL.shard(ranks).bytes_per_slot, np.uint8)


@pytest.mark.parametrize(
    ("rank", "bodies", "out", "message"),
    [(2, {0: body(4), 1: body(4)}, body(2), "rank 2: expected 0 to 1"), (-1, {}, body(2), "rank -1"),
     (True, {}, body(2), "rank True"), (1, {2: body(4)}, body(2), r"ranks \[2\]: rank 1 also needs that of 3"),
     (0, {}, body(2), r"also needs that of 0"),
     (0, {0: body(4), 1: body(2)}, body(2), f"body of rank 1: .* expected {body(4).size} contiguous bytes"),
     (0, {0: body(4), 1: body(4)}, body(4), f"out: .* expected {body(2).size} contiguous bytes"),
     (0, {0: body(4), 1: body(4).view(np.int8)}, body(2), "body of rank 1: int8"),
     (0, {0: np.zeros(2 * body(4).size, np.uint8)[::2], 1: body(4)}, body(2), "body of rank 0"),
     (0, {0: body(4), 1: body(4)}, np.frombuffer(bytes(body(2).size), np.uint8), "out is read-only")],
)  # fmt: skip
def test_bodies_that_do_not_fit_are_refused(rank: int, bodies: Any, out: Bytes, message: str) -> None:
    if out.flags.writeable:
        out[:] = 7
    before = out.copy()
    with pytest.raises(InvalidArgument, match=message):
        Resplit(SMALL, 4, 2).body(rank, bodies, out)
    assert (out == before).all()


def test_a_body_is_not_made_in_the_memory_of_its_sources() -> None:
    memory = np.arange(2 * body(4).size + body(2).size, dtype=np.uint8)
    size, before = body(4).size, memory.copy()
    with pytest.raises(InvalidArgument, match="out shares memory with the body of rank 1"):
        form, bodies = Resplit(SMALL, 4, 2), {0: memory[:size], 1: memory[size : 2 * size]}
        form.body(0, bodies, memory[2 * size - 1 :][: body(2).size])
    assert (memory == before).all()
    read_only = {of: np.frombuffer(bytes(size), np.uint8) for of in (0, 1)}  # read-only, as mapped files are
    form.body(0, read_only, memory[: body(2).size])
    assert not memory[: body(2).size].any()


@pytest.mark.parametrize(
    ("ranks", "to_ranks", "message"),
    [(3, 2, "plane ssm: part head has 4 units of 1 for 3 ranks"), (2, 6, "part head has 4 units of 1 for 6 ranks"),
     (0, 2, "ranks 0: expected 1 or more"), (2, 2.0, "to_ranks 2.0"), (True, 2, "ranks True")],
)  # fmt: skip
def test_impossible_splits_are_refused(ranks: Any, to_ranks: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Resplit(SMALL, ranks, to_ranks)


@pytest.mark.parametrize("shared", [1, 2])
def test_int8_records_go_with_their_scales(shared: int, generator: torch.Generator) -> None:
    """Each rank's record of int8 values has one scale for the values along an axis of a head."""
    plane = Plane("ssm", (4, 5, 6), torch.float32, parts=HEAD)
    model = StateLayout((MIXED.planes[3], plane), LAYERS)
    rest = (*plane.shape[:shared], 1, *plane.shape[shared + 1 :])
    values, scales = (
        Plane("ssm", plane.shape, torch.int8, parts=HEAD),
        Plane("ssm.scale", rest, torch.float32, parts=HEAD),
    )
    layout = StateLayout((MIXED.planes[3], values, scales), LAYERS)
    full = whole(model, generator.initial_seed())
    full["ssm"] = torch.randn((LAYERS, *plane.shape, 1), generator=generator).view(torch.uint8)

    def record(ranks: int, rank: int) -> Bytes:
        storage = Planes(model.shard(ranks), 1, Backend("reference"))
        for each in model.planes:
            bits = cut(each, full[each.name], ranks, rank)
            storage[each.name][:, 1] = bits.view(each.dtype).squeeze(-1)
        packing = Packing(storage, int8={"ssm": shared})
        own = [layout.shard(ranks), packing.layout]
        assert len({fingerprint("toy", each, None, 4, rank, ranks) for each in own}) == 1
        out = torch.zeros((1, packing.nbytes), dtype=torch.uint8)
        packing.pack(None, torch.tensor([1], dtype=torch.int32), torch.tensor([0], dtype=torch.int32), out)
        return out[0].numpy()

    records = {ranks: [record(ranks, rank) for rank in range(ranks)] for ranks in (1, 2, 4)}
    for ranks, to_ranks in itertools.product(records, records):
        form = Resplit(layout, ranks, to_ranks)
        for rank, expected in enumerate(records[to_ranks]):
            bodies = {of: records[ranks][of] for of in form.sources(rank)}
            assert resplit(form, rank, bodies, expected.size).tobytes() == expected.tobytes()


def scaled(
    shape: tuple[int, ...], scale: tuple[int, ...], x: Any = HEAD, parts: Any = HEAD, *,
    axes: tuple[int, int] = (0, 0), dtype: Any = torch.int8, of: str = "x",
) -> StateLayout:  # fmt: skip
    """Returns a layout of an int8 plane x and a plane of scales.

    Args:
        shape: shape of plane x.
        scale: shape of the scales.
        x: how ranks divide plane x.
        parts: how ranks divide the scales.
        axes: the axis along which ranks cut x, and that along which they cut the scales.
        dtype: dtype of plane x.
        of: name of the plane to which the scales belong.
    """
    scales = Plane(f"{of}.scale", scale, torch.float32, parts=parts, axis=axes[1])
    return StateLayout((Plane("x", shape, dtype, parts=x, axis=axes[0]), scales), LAYERS)


SCALES = [
    (scaled((4, 5, 6), (4, 1, 6)), True), (scaled((3, 8), (1, 8), WIDE, WIDE, axes=(1, 1)), True),
    # the second layout of this line: ranks hold values and scales whole
    (scaled((8, 8), (1, 8), WIDE, WIDE, axes=(1, 1)), True), (scaled((4, 5), (1, 5), (), ()), True),
    (scaled((4, 5), (7,), HEAD, (), dtype=torch.float16), True), (scaled((4, 5), (7,), HEAD, (), of="y"), True),
    # ranks hold the scales whole, but cut the values
    (scaled((4, 5), (1, 5), HEAD, ()), False), (scaled((4, 5, 6), (4, 5, 1), HEAD, ()), False),
    (scaled((4, 5), (4, 1), ()), False), (scaled((4, 5, 6), (4, 1, 7)), False), (scaled((4, 5), (4, 5)), False),
    (scaled((4, 4, 4), (4, 4, 1), axes=(0, 1)), False),  # ranks cut another axis of equal size
]  # fmt: skip


@pytest.mark.parametrize(("layout", "fits"), SCALES)
def test_scales_that_ranks_would_not_hold_with_their_values_are_refused(layout: StateLayout, fits: bool) -> None:
    refused = pytest.raises(LayoutMismatch, match=r"Plane\(x\[.*Plane\(x.scale\[.*give both the same parts")
    with nullcontext() if fits else refused:
        Resplit(layout, 2, 4)
