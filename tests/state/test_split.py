"""Tests tensor-parallel cuts: the shards of all ranks rebuild the whole exactly, and heads stay with their groups."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memstate.errors import InvalidArgument
from memstate.state.layout import Plane, StateLayout
from memstate.state.sharding import Owned, Part
from tests.support.refusals import refusals

LAYERS, SLOTS = 2, 3


def mixed() -> StateLayout:
    """Returns a layout of 2 groups: windows in both orders, planes cut by heads and by channels, and uncut planes."""
    groups = (Part("B", 2, 3), Part("C", 2, 3))
    planes = (
        Plane("conv", (44, 3), torch.bfloat16, parts=(Part("x", 8, 4), *groups)),
        Plane("turned", (3, 44), torch.float32, parts=(Part("x", 8, 4), *groups), axis=1),
        Plane("ssm", (8, 4, 5), torch.float32, parts=(Part("head", 8),)),
        Plane("inner", (2, 16, 3), torch.int8, parts=(Part("channel", 16),), axis=1),
        Plane("whole", (7, 2), torch.float32),
        Plane("one", (), torch.float32),
        Plane("none", (0,), torch.float32),
    )
    return StateLayout(planes, LAYERS)


def random_bits(plane: Plane, generator: torch.Generator) -> torch.Tensor:
    """Returns a plane of random bits, `layer slot ...`, so that a wrong slice shows."""
    shape = (LAYERS, SLOTS, *plane.shape, plane.dtype.itemsize)
    bits = torch.randint(1, 127, shape, dtype=torch.uint8, generator=generator)
    return bits.view(plane.dtype).squeeze(-1)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("plane", mixed().planes, ids=lambda plane: plane.name)
def test_the_shards_of_all_ranks_rebuild_the_whole_plane(plane, ranks, generator):
    whole = random_bits(plane, generator)
    shard = plane.shard(ranks)
    rebuilt, written = torch.full_like(whole, 127), torch.zeros(whole.shape, dtype=torch.int32)
    for rank in range(ranks):
        local = torch.full((LAYERS, SLOTS, *shard.shape), 127, dtype=plane.dtype)
        holes = torch.ones(local.shape, dtype=torch.bool)
        for held in plane.owned(ranks, rank):
            assert bool(holes[shard.index(held.local)].all())
            local[shard.index(held.local)] = whole[plane.index(held.whole)]
            holes[shard.index(held.local)] = False
        assert not bool(holes.any())
        for held in plane.owned(ranks, rank):
            place, earlier = plane.index(held.whole), written[plane.index(held.whole)] > 0
            assert torch.equal(rebuilt[place][earlier], local[shard.index(held.local)][earlier])  # copies are equal
            rebuilt[place] = local[shard.index(held.local)]
            written[place] += 1
    assert torch.equal(rebuilt.view(torch.uint8), whole.view(torch.uint8))
    replicas = {part.name: max(1, ranks // part.units) for part in plane.parts} or {plane.name: ranks}
    for name, copies in replicas.items():
        along = plane.slices().get(name, slice(None))
        assert bool((written[plane.index(along)] == copies).all())


def test_the_slices_of_a_rank_by_hand():
    plane = Plane("conv", (44, 3), torch.bfloat16, parts=(Part("x", 8, 4), Part("B", 2, 3), Part("C", 2, 3)))
    assert plane.slices() == {"x": slice(0, 32), "B": slice(32, 38), "C": slice(38, 44)}
    assert plane.owned(4, 2) == [
        Owned("x", slice(16, 24), slice(0, 8)),
        Owned("B", slice(35, 38), slice(8, 11)),
        Owned("C", slice(41, 44), slice(11, 14)),
    ]
    assert plane.shard(4).shape == (14, 3)
    assert Plane("one", (), torch.int8).owned(4, 3) == [Owned("one", slice(None), slice(None))]
    layout = StateLayout([plane], 2)
    assert (layout.planes[0].slices()["C"], plane.shard(4).slices()["C"]) == (slice(38, 44), slice(11, 14))


@given(st.sampled_from([1, 2, 4, 6]), st.integers(1, 4), st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
def test_every_head_finds_its_group_on_its_own_rank(groups, heads_per_group, ranks):
    heads = groups * heads_per_group
    plane = Plane("conv", (heads + groups,), torch.int8, parts=(Part("x", heads), Part("B", groups)))
    if any(units % ranks and ranks % units for units in (heads, groups)):
        with pytest.raises(InvalidArgument, match=f"plane conv: part .* units of 1 for {ranks} ranks"):
            plane.shard(ranks)
        return
    for rank in range(ranks):
        x, b = plane.owned(ranks, rank)
        needed = {heads + head // heads_per_group for head in range(x.whole.start, x.whole.stop)}
        assert needed == set(range(b.whole.start, b.whole.stop))


test_impossible_cuts_are_refused_with_their_numbers = refusals(
    InvalidArgument,
    (lambda: Part("", 1), "name"),
    (lambda: Part(5, 1), "a part needs a name, a text; got 5"),
    (lambda: mixed().shard(2.0), "ranks 2.0"),
    (lambda: Part("x", 0), "part x: units 0"),
    (lambda: Part("x", True), "part x: units True"),
    (lambda: Part("x", 2, 1.5), "part x: size 1.5"),
    (lambda: Plane("conv", (9,), torch.int8, parts=(Part("x", 2, 4),)), r"conv: parts x 2 \* 4 = 8, .* 9 elements"),
    (lambda: Plane("conv", (4, 8), torch.int8, parts=(Part("x", 2, 4),)), r"axis 0 of shape \(4, 8\) has 4"),
    (lambda: Plane("conv", (8,), torch.int8, parts=(Part("x", 2, 4),), axis=1), "conv: axis 1"),
    (lambda: Plane("conv", (8,), torch.int8, parts=(Part("x", 2, 4),), axis=-1), "conv: axis -1"),
    (lambda: Plane("conv", (8,), torch.int8, axis=1), "conv: axis 1"),
    (lambda: Plane("conv", (), torch.int8, parts=(Part("x", 1),)), r"conv: axis 0 of shape \(\)"),
    (lambda: Plane("conv", (2,), torch.int8, parts=(Part("x", 1), Part("x", 1))), "each name once"),
    (lambda: mixed().shard(3), "plane conv: part x has 8 units of 4 for 3 ranks"),
    (lambda: mixed().shard(0), "ranks 0"),
    (lambda: mixed().planes[0].owned(3, 0), "plane conv: part x has 8 units of 4 for 3 ranks"),
    (lambda: mixed().planes[0].owned(4, 4), "plane conv: rank 4, expected 0 to 3"),
    (lambda: mixed().planes[4].owned(2, -1), "plane whole: rank -1"),
)
