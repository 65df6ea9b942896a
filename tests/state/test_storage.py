"""Tests planes in memstate's own memory: sizes, copies, zeroing, refused arguments, and no temporary tensors."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memstate.errors import InvalidArgument, LayoutMismatch
from memstate.kernels.tables import HEADER_INTS, TILE_BYTES, Section
from memstate.state.layout import Plane, StateLayout
from memstate.state.planes import Planes

ORDERS = ("layer_major", "slot_major")


def hybrid(order: str, layers: int = 2) -> StateLayout:
    conv, ssm = Plane("conv", (3, 5), torch.bfloat16), Plane("ssm", (2, 3, 3), torch.float32)
    return StateLayout((conv, ssm, Plane("none", (0, 4), torch.float32)), layers, order)


def ids(backend, *slots: int) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int32, device=backend.device)


def random_bytes(storage: Planes, generator: torch.Generator) -> None:
    for arena in storage.arenas:
        arena.copy_(torch.randint(1, 256, arena.shape, dtype=torch.uint8, generator=generator))


class Allocations(TorchDispatchMode):
    """Collects the bytes of each new storage that torch operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self._kept: list[torch.Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs, self._kept))}
        for tensor in _tensors(result):
            if tensor.untyped_storage().data_ptr() not in known:
                self._kept.append(tensor)
                self.sizes.append(tensor.untyped_storage().nbytes())
        return result


def _tensors(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("order", ORDERS)
def test_nbytes_is_what_was_allocated(backend, order):
    layout = hybrid(order)
    with Allocations() as allocations:
        storage = Planes(layout, 9, backend)
    assert storage.nbytes == 10 * layout.bytes_per_slot
    assert storage.nbytes == sum(arena.untyped_storage().nbytes() for arena in storage.arenas)
    assert storage.plane_map.tiles.nbytes == storage.plane_map.tiles.untyped_storage().nbytes()
    seen = sum(allocations.sizes) - storage.nbytes
    assert seen == (
        0 if backend.device.type == "cpu" else storage.plane_map.tiles.nbytes
    )  # torch.tensor on the host is not dispatched


@pytest.mark.parametrize("order", ORDERS)
def test_tiles_are_multiples_of_16_and_at_most_one_unit_of_work(backend, order):
    planes = [Plane("ssm", (TILE_BYTES // 2 + 5,), torch.float32), Plane("conv", (3,), torch.int8)]
    layout = StateLayout(planes, 2, order)
    storage = Planes(layout, 2, backend)
    table = storage.plane_map.tiles.tolist()
    assert all(value % 16 == 0 for tile in table for value in tile)
    assert all(0 < length <= TILE_BYTES for _, _, length in table)
    assert sum(length for _, _, length in table) == layout.bytes_per_slot


@pytest.mark.parametrize("order", ORDERS)
def test_B16_the_null_slot_starts_zero_and_is_scrubbed_alone(backend, order):
    storage = Planes(hybrid(order), 3, backend)
    assert not any(bool(plane[:, 0].view(torch.uint8).any()) for plane in storage.values())
    for arena in storage.arenas:
        arena.fill_(7)
    storage.scrub_null()
    for plane in storage.values():
        assert not bool(plane[:, 0].view(torch.uint8).any())
        assert bool((plane[:, 1:].view(torch.uint8) == 7).all())


def test_B40_operations_are_one_launch_each_and_none_for_nothing(backend):
    storage = Planes(hybrid("layer_major", layers=3), 9, backend)
    backend.counts.reset()
    storage.copy(ids(backend, 1, 2, 3), ids(backend, 4, 5, 6))
    storage.zero(ids(backend, 1, 2))
    storage.copy(ids(backend), ids(backend))
    storage.zero(ids(backend))
    assert backend.counts.launches == {"copy_slots": 1, "zero_slots": 1} and backend.counts.syncs == 0


def test_traffic_counts_the_bytes_that_the_host_knows(backend):
    storage = Planes(hybrid("slot_major"), 5, backend)
    size = storage.layout.bytes_per_slot
    storage.copy(ids(backend, 1, 0), ids(backend, 2, 3), due=1)
    storage.copy(ids(backend, 1), ids(backend, 2))
    storage.zero(ids(backend, 1, 2, 3), due=3)
    empty = torch.zeros(HEADER_INTS, dtype=torch.int32, device=backend.device)
    empty[8 + Section.DATA] = HEADER_INTS
    storage.run_data(ids(backend, 0), empty, copied=0, zeroed=0)
    traffic = storage.traffic
    assert (traffic.copied, traffic.zeroed) == (size, 3 * size)


def test_what_does_not_fit_a_plane_is_refused_with_its_name_shape_and_dtype(backend):
    storage = Planes(hybrid("layer_major"), 4, backend)
    storage["ssm"][:] = 1
    before, two = storage["ssm"].clone(), ids(backend, 1, 2)
    good = torch.zeros(2, 2, 2, 3, 3, device=backend.device)
    refused = {
        r"gather .* slots: torch.float32 \(2,\)": lambda: storage.gather("ssm", two.float()),
        r"gather .* out: \(1, 2, 2, 3, 3\), expected 2 layers first": lambda: storage.gather("ssm", two, good[:1]),
        r"gather .* out: expected `layer batch ...` = \(2, 1, 2, 3, 3\), got \(2, 2, 2, 3, 3\)": lambda: storage.gather(
            "ssm", two[:1], good
        ),
        r"gather .* out: list, expected a tensor": lambda: storage.gather("ssm", two, [1]),
        r"scatter .* slots: torch.int16": lambda: storage.scatter("ssm", two.to(torch.int16), good),
        r"scatter .* batch: expected torch.float32 as the plane, got torch.float64": lambda: storage.scatter(
            "ssm", two, good.double()
        ),
    }
    for named, call in refused.items():
        with pytest.raises(InvalidArgument, match=named) as raised:
            call()
        assert " of Plane(ssm[2,3,3] float32, " in str(raised.value)
    assert not good.any() and torch.equal(storage["ssm"], before)


@pytest.mark.parametrize(
    ("dst", "src", "named"),
    [
        ((1, 2), (2, 1), r"\[1, 2\] are source and destination"),
        ((3, 4), (2, 3), r"\[3\] are source and destination"),
        ((5, 6, 5), (1, 2, 3), r"\[5\] are destinations more than once"),
        ((1, 8), (2, 3), r"\[8\] name no slot"),
        ((1, 2), (9, 3), r"\[9\] name no slot"),
    ],
)
def test_B40_a_copy_that_depends_on_order_is_refused_and_moves_nothing(backend, dst, src, named):
    storage = Planes(hybrid("layer_major"), 7, backend)
    before = [arena.clone() for arena in storage.arenas]
    with pytest.raises(InvalidArgument, match=named):
        storage.copy(ids(backend, *dst), ids(backend, *src), checked=True)
    assert all(torch.equal(arena, old) for arena, old in zip(storage.arenas, before, strict=True))
    assert backend.counts.launches == {}


def test_B7_ids_that_a_kernel_cannot_take_are_refused(backend):
    storage = Planes(hybrid("layer_major"), 7, backend)
    good = ids(backend, 1, 2)
    apart = torch.stack([good, good], 1)[:, 0]
    for bad in (good.float(), good.to(torch.int16), good.view(2, 1), apart, good.to("meta")):
        with pytest.raises(InvalidArgument, match="src"):
            storage.copy(good, bad)
        with pytest.raises(InvalidArgument, match="ids"):
            storage.zero(bad)
    with pytest.raises(InvalidArgument, match="2 destinations for 1 sources"):
        storage.copy(good, good[:1])
    assert backend.counts.launches == {}


def test_arenas_that_do_not_fit_are_refused(backend):
    layout = StateLayout([Plane("ssm", (4,), torch.float32)], 1)
    whole = torch.empty(1024, dtype=torch.uint8, device=backend.device)
    for bad in (whole[:64].view(torch.int8), whole[:80], whole[8:72], whole[:128:2]):
        with pytest.raises(LayoutMismatch, match="arena"):
            Planes(layout, 3, backend, allocate=lambda n, bad=bad: bad)
    with pytest.raises(InvalidArgument, match="slots=0"):
        Planes(layout, 0, backend)


@pytest.mark.parametrize("order", ORDERS)
def test_copy_and_zero_allocate_nothing_of_state_size(backend, order):
    layout = StateLayout([Plane("ssm", (1024,), torch.float32)], 2, order)
    storage = Planes(layout, 5, backend)
    dst, src = ids(backend, 1, 2), ids(backend, 3, 4)
    with Allocations() as allocations:
        storage.copy(dst, src)
        storage.zero(src)
        storage.scrub_null()
    assert sum(allocations.sizes) < 256 < layout.bytes_per_slot


@pytest.mark.parametrize("per_layer", [False, True])
def test_slots_on_the_host_and_back(backend, per_layer):
    """The memory is memstate's own. With `per_layer` it is an engine's, which has one tensor per layer."""
    planes = Planes(hybrid("layer_major"), 4, backend)
    random_bytes(planes, torch.Generator().manual_seed(3))
    planes.scrub_null()
    if per_layer:
        given = {name: list(plane) for name, plane in planes.items()}
        planes = Planes.from_tensors(planes.layout, given, backend)
    saved = planes.save(ids(backend, 3, 1, -1))
    for name in planes:
        for layer, batch in enumerate(saved[name]):
            assert torch.equal(batch[:2].view(torch.uint8), planes[name][layer][[3, 1]].cpu().view(torch.uint8))
            assert not batch[2].any()
    planes.load(saved, ids(backend, 2, 4, 0))
    again = planes.save(ids(backend, 2, 4, 0))
    for name, batch in saved.items():
        assert torch.equal(batch.view(torch.uint8), again[name].view(torch.uint8))
        assert not torch.stack(list(planes[name]))[:, 0].any()


def test_what_is_loaded_must_fit(backend):
    planes = Planes(hybrid("layer_major"), 2, backend)
    saved = planes.save(ids(backend, 1))
    before = [arena.clone() for arena in planes.arenas]
    ssm = saved["ssm"]
    for given in ({}, saved | {"other": ssm}, saved | {"ssm": ssm[:1]}, saved | {"ssm": ssm.half()}):
        with pytest.raises(InvalidArgument, match="saved plane"):
            planes.load(given, ids(backend, 2))
    with pytest.raises(InvalidArgument, match="saved plane 'conv'"):
        planes.load(saved, ids(backend, 1, 2))
    assert all(torch.equal(old, new) for old, new in zip(before, planes.arenas, strict=True))
