"""Tests planes that start with a fill, planes without a fill, and planes with their own number of layers."""

import pytest
import torch

from memstate.errors import InvalidArgument
from memstate.kernels.dispatch import Backend
from memstate.state.layout import Plane, StateLayout
from memstate.state.memory import TILE_ROW, table_bytes
from memstate.state.planes import Planes
from memstate.tiers.host.packing import Packing

INF = float("inf")
FILLED = (
    Plane("score", (3, 5), torch.float32, fill=-INF),
    Plane("ids", (3,), torch.int64, layers=1, fill=2**40 + 7),
    Plane("half", (4,), torch.bfloat16, layers=3, fill=1.5),
    Plane("flag", (7,), torch.bool, fill=True),
    Plane("ssm", (2, 3), torch.float32),
)


def filled(backend: Backend, order: str) -> Planes:
    planes = Planes(StateLayout(FILLED, 2, order), 4, backend)
    for arena in planes.arenas:
        arena.random_(0, 256)
    planes.scrub_null()
    return planes


@pytest.mark.parametrize("order", ["layer_major", "slot_major"])
def test_B78_the_null_slot_and_fresh_slots_read_as_the_fill(backend: Backend, order: str) -> None:
    planes = filled(backend, order)
    before = dict(backend.counts.launches)
    planes.zero(torch.tensor([3, 1], dtype=torch.int32, device=backend.device))
    assert backend.counts.launches["zero_slots"] - before.get("zero_slots", 0) == 1  # all planes share one launch
    for plane in FILLED:
        fresh = torch.full(plane.shape, plane.fill, dtype=plane.dtype, device=backend.device)
        for layer in planes[plane.name]:
            assert all(torch.equal(layer[slot], fresh) for slot in (0, 1, 3))
        ids = torch.tensor([0, 3, -1, 5, 2], dtype=torch.int32, device=backend.device)
        batch = planes.gather(plane.name, ids)
        assert batch.shape == (plane.layers or 2, 5, *plane.shape)
        bits = torch.uint8
        assert all(torch.equal(batch[:, at], fresh.expand_as(batch[:, at])) for at in (0, 1, 2, 3))
        held = planes[plane.name][:, 2].contiguous()
        assert torch.equal(batch[:, 4].contiguous().view(bits), held.view(bits))


@pytest.mark.parametrize("order", ["layer_major", "slot_major"])
def test_B78_sleep_brings_fills_back(backend: Backend, order: str) -> None:
    planes = filled(backend, order)
    saved = planes.save(torch.tensor([1, 4], device=backend.device))
    planes.sleep(keep=False)
    planes.wake()
    for plane in FILLED:
        assert (planes[plane.name][:, 0] == plane.fill).all()
    planes.load(saved, torch.tensor([2, 3], device=backend.device))
    again = planes.save(torch.tensor([2, 3], device=backend.device))
    assert all(torch.equal(saved[name].view(torch.uint8), again[name].view(torch.uint8)) for name in saved)


@pytest.mark.sample(interpreter=1)
@pytest.mark.parametrize("order", ["layer_major", "slot_major"])
@pytest.mark.parametrize("others", [FILLED, FILLED[-1:], ()], ids=["fills", "zeros", "alone"])
def test_T23_a_plane_without_a_fill_is_copied_and_never_made_fresh(
    backend: Backend, order: str, others: tuple[Plane, ...]
) -> None:
    """The plane without a fill lies between other planes. It is larger than the piece (tile) that a program copies."""
    ring = Plane("ring", (9, 1000), torch.float32, fill=None)
    layout = StateLayout((*others[:2], ring, *others[2:]), 2, order)
    planes = Planes(layout, 3, backend)
    for arena in planes.arenas:
        arena.random_(0, 256)
    before = [region.blocks.clone() for region in planes.regions]
    planes.scrub_null()
    planes.zero(torch.tensor([3, 1], dtype=torch.int32, device=backend.device))
    for region, old in zip(planes.regions, before, strict=True):
        fresh = region.plane is not ring
        assert torch.equal(region.blocks[:, 2], old[:, 2])
        assert all(torch.equal(region.blocks[:, slot], old[:, slot]) != fresh for slot in (0, 1, 3))
    planes.copy(*(torch.tensor([slot], dtype=torch.int32, device=backend.device) for slot in (1, 2)))
    for region, old in zip(planes.regions, before, strict=True):
        assert torch.equal(region.blocks[:, 1], old[:, 2])
    made = planes.plane_map
    fills = 0 if made.fills is None else made.fills.nbytes
    assert table_bytes(layout) == made.tiles.nbytes + fills
    moved = made.tiles[:, 2].tolist()
    assert sum(map(abs, moved)) == layout.bytes_per_slot
    assert sum(max(nbytes, 0) for nbytes in moved) == layout.bytes_per_slot - 2 * layout.block_bytes(ring)


def test_the_table_of_tiles_has_the_size_that_was_foreseen(backend: Backend) -> None:
    for order in ("layer_major", "slot_major"):
        for planes in (FILLED, FILLED[-1:]):
            layout = StateLayout(planes, 2, order)
            made = Planes(layout, 3, backend).plane_map
            fills = 0 if made.fills is None else made.fills.nbytes
            assert table_bytes(layout) == made.tiles.nbytes + fills == len(made.tiles) * TILE_ROW + fills
            assert (fills > 0) == (len(planes) > 1)


def test_int8_records_refuse_a_fill_that_has_no_scale(backend: Backend) -> None:
    with pytest.raises(InvalidArgument, match=r"int8: Plane\(score.*a scale of -inf says nothing"):
        Packing(filled(backend, "layer_major"), int8={"score": 0})
    assert "half.scale" in repr(Packing(filled(backend, "layer_major"), int8={"half": 0}))
