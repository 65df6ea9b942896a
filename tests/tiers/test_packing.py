"""States packed into records and back: bit for bit, in every layout, and no other byte changes."""

import pytest
import torch

from memstate.errors import Asleep, LayoutMismatch
from memstate.kernels.dispatch import Backend
from memstate.state.layout import Order, Plane, StateLayout
from memstate.state.planes import Planes
from memstate.tiers.host.packing import Packing
from tests.kernels.test_copy import LAYOUTS, ORDERS, SMALL
from tests.support import inside
from tests.support.given import FORMS, Engine
from tests.support.packed import PRESETS, Records, body, filled, ids, toy

each_order = pytest.mark.parametrize("order", ORDERS)
each_form = pytest.mark.parametrize("form", FORMS)


def round_trip(storage: Planes, generator: torch.Generator) -> None:
    """Packs slots 1 and 3 into records 2 and 0, and unpacks these into slots 4 and 2; nothing else changes."""
    packing = Packing(storage)
    records, before = Records(packing, generator), [body(storage, slot) for slot in range(5)]
    packing.pack(None, ids(storage, 1, 3), ids(storage, 2, 0), records.bodies)
    records.expected_bodies[2], records.expected_bodies[0] = before[1], before[3]
    records.check()
    packing.unpack(None, ids(storage, 4, 2), ids(storage, 2, 0), records.bodies)
    records.check()
    after = [body(storage, slot) for slot in range(5)]
    assert all(torch.equal(after[slot], before[was]) for slot, was in enumerate((0, 1, 3, 3, 1)))
    assert torch.equal(records.bodies.cpu(), records.expected_bodies)


@each_order
@pytest.mark.parametrize("name", PRESETS)
def test_B66_round_trip_of_every_preset(backend: Backend, generator: torch.Generator, name: str, order: Order) -> None:
    round_trip(filled(toy(name, order), 4, backend, generator), generator)


@each_order
@pytest.mark.parametrize("planes", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_B66_round_trip_of_every_layout(
    backend: Backend, generator: torch.Generator, planes: list[Plane], order: Order
) -> None:
    """Covers empty planes, odd sizes, and states that the kernel moves in several tiles, which are pieces of a state.

    The bytes of a record do not depend on the alignment of the arenas.
    """
    storage = filled(StateLayout(planes, 2, order, alignment=64), 4, backend, generator)
    round_trip(storage, generator)
    assert Packing(storage).layout == StateLayout(planes, 2, "slot_major", alignment=16)


@each_form
@pytest.mark.parametrize("unit", [16, 4, 1])
def test_B66_round_trip_in_given_memory(backend: Backend, generator: torch.Generator, form: str, unit: int) -> None:
    """Packs planes in an engine's memory: one tensor per plane or per layer, with foreign bytes around every block."""
    planes = [Plane("a", (3 * unit,), torch.int8), Plane("b", (unit, 5), torch.uint8), Plane("no", (0,), torch.int8)]
    engine = Engine(StateLayout(planes, 3), 4, backend, generator, form, unit=unit)
    storage = engine.storage()
    round_trip(storage, generator)
    engine.expect(4, 1)
    engine.expect(2, 3)
    engine.check()


def test_every_call_is_one_launch(backend: Backend, generator: torch.Generator) -> None:
    storage = filled(StateLayout(SMALL, 9), 4, backend, generator)
    packing = Packing(storage)
    records = Records(packing, generator)
    packing.pack(None, ids(storage, 1, 2, 3), ids(storage, 0, 1, 2), records.bodies)
    packing.unpack(None, ids(storage, 4), ids(storage, 1), records.bodies)
    assert backend.counts.launches == {"pack_slots": 1, "unpack_slots": 1} and backend.counts.syncs == 0


def test_misfits_are_named(backend: Backend, generator: torch.Generator) -> None:
    storage = filled(StateLayout(SMALL, 2), 4, backend, generator)
    packing = Packing(storage)
    records, column = Records(packing, generator), ids(storage, 1)
    with pytest.raises(ValueError, match=rf"^out: expected uint8 `record byte` = \(records, {packing.nbytes}\)"):
        packing.pack(None, column, column, records.whole)
    with pytest.raises(ValueError, match=r"^source: expected records of contiguous bytes, at multiples of 16"):
        packing.unpack(None, column, column, records.whole[:, 8 : 8 + packing.nbytes])
    with pytest.raises(ValueError, match=r"^places: expected contiguous"):
        packing.pack(None, column, ids(storage, 1, 2), records.bodies)
    inside = storage.arenas[0][: packing.nbytes].view(1, -1)
    with pytest.raises(ValueError, match=r"^source: record 0 shares bytes with a plane"):
        packing.unpack(None, column, column - 1, inside)
    records.check()


# -- sleep -------------------------------------------------------------------------------------------------------------


@each_order
def test_tables_follow_addresses(backend: Backend, generator: torch.Generator, order: Order) -> None:
    """Calls are refused while asleep; after waking, the same table holds the new addresses."""
    storage = filled(StateLayout(SMALL, 2, order), 4, backend, generator)
    packing = Packing(storage)
    records, table = Records(packing, generator), inside.record_table(packing).map.tiles
    column, rows = ids(storage, 1), table.clone()
    storage.sleep()
    for move in (packing.pack, packing.unpack):
        with pytest.raises(Asleep):
            move(None, column, column, records.bodies)
    with pytest.raises(Asleep):
        Packing(storage)
    records.check()
    table.zero_()  # as if the addresses had changed
    storage.wake()
    assert inside.record_table(packing).map.tiles is table and torch.equal(table[:, 1:], rows[:, 1:])
    round_trip(storage, generator)
    packing.pack(None, column, column, records.bodies)
    records.expected_bodies[1] = body(storage, 1)
    records.check()


def test_memory_that_comes_back_less_aligned_is_refused(backend: Backend) -> None:
    """The new alignment is half of the bytes that packing moves at a time.

    Copies still work: they move 4 bytes at a time.
    """
    big = torch.zeros(400, dtype=torch.uint8, device=backend.device)
    tensor = torch.empty(0, dtype=torch.uint8, device=backend.device)
    tensor.set_(big.untyped_storage(), 0, (1, 3, 16), (48, 16, 1))
    storage = Planes.from_tensors(StateLayout([Plane("a", (16,), torch.uint8)], 1), {"a": tensor}, backend)
    packing = Packing(storage)
    storage.sleep(keep=False)
    region = storage.regions[0]
    for view in (region.blocks, region.tensor):
        view.set_(big.untyped_storage(), 8, (1, 3, 16), (48, 16, 1))
    with pytest.raises(LayoutMismatch, match="expected a multiple of 16 bytes"):
        inside.record_table(packing).require_alignment()
    with pytest.raises(LayoutMismatch, match="expected a multiple of 16 bytes"):
        storage.wake()
    assert storage.asleep
