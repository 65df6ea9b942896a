"""Tests the arithmetic of layouts: blocks are disjoint, tables cover all bytes, and impossible layouts are refused."""

import dataclasses

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from memstate.errors import InvalidArgument
from memstate.sizes import format_bytes
from memstate.state.layout import Plane, StateLayout
from memstate.state.sharding import Part
from tests.support.refusals import refusals

A = Plane("a", (1,), torch.int8)
SMALL = StateLayout([A], 1)
DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.complex128, torch.bool)

planes = st.builds(
    lambda shape, dtype: (tuple(shape), dtype), st.lists(st.integers(0, 5), max_size=3), st.sampled_from(DTYPES)
)
layouts = st.builds(
    lambda kinds, layers, order, alignment: StateLayout(
        [Plane(f"p{i}", shape, dtype, layers=own) for i, ((shape, dtype), own) in enumerate(kinds)],
        layers,
        order,
        alignment,
    ),
    st.lists(st.tuples(planes, st.sampled_from([None, None, 1, 2])), min_size=1, max_size=4),
    st.integers(1, 3),
    st.sampled_from(["layer_major", "slot_major"]),
    st.sampled_from([16, 48, 64]),
)


@given(layouts, st.integers(1, 4))
def test_B37_blocks_are_aligned_disjoint_and_inside_their_arena(layout, slots):
    sizes = layout.arena_bytes(slots)
    assert sum(sizes) == (slots + 1) * layout.bytes_per_slot
    owners = [bytearray(size) for size in sizes]
    for plane, place in zip(layout.planes, layout.placements(slots), strict=True):
        block = layout.block_bytes(plane)
        assert plane.nbytes <= block < plane.nbytes + layout.alignment
        for layer in range(layout.layers_of(plane)):
            for slot in range(slots + 1):
                start = place.offset + layer * place.layer_stride + slot * place.slot_stride
                assert start % layout.alignment == 0 and start + block <= sizes[place.arena]
                for byte in range(start, start + block):
                    owners[place.arena][byte] += 1
    assert all(byte == 1 for arena in owners for byte in arena)


@given(layouts, st.integers(1, 4))
def test_the_table_accounts_for_every_byte_of_a_slot(layout, slots):
    rows = layout.table(slots)
    for plane, place, row in zip(layout.planes, layout.placements(slots), rows, strict=True):
        assert row[:4] == (plane.name, plane.shape, plane.dtype, torch.empty(plane.shape, dtype=plane.dtype).nbytes)
        assert 0 <= row.padding < layout.alignment and row[5:] == place
    counted = [(layout.layers_of(plane), row) for plane, row in zip(layout.planes, rows, strict=True)]
    assert sum(layers * row.payload for layers, row in counted) == layout.payload_bytes_per_slot
    assert sum(layers * (row.payload + row.padding) for layers, row in counted) == layout.bytes_per_slot
    if layout.order == "slot_major":
        end = 0
        for start, size in sorted(
            (row.offset + layer * row.layer_stride, row.payload + row.padding)
            for layers, row in counted
            for layer in range(layers)
        ):
            assert start == end
            end += size
        assert end == layout.bytes_per_slot


def test_numbers_of_numpy_become_ints():
    plane = Plane(
        "ssm", np.array([2, 4]), torch.float32, parts=[Part("head", np.int32(4), np.int64(1))], axis=np.int8(1)
    )
    layout = StateLayout([plane], np.int64(2), alignment=np.int32(32))
    plain = Plane("ssm", (2, 4), torch.float32, parts=[Part("head", 4)], axis=1)
    assert layout == StateLayout([plain], 2, alignment=32) and plane.owned(np.int64(2), np.int8(1)) == plain.owned(2, 1)
    assert repr(layout) == repr(StateLayout([plain], 2, alignment=32))
    sizes = (*plane.shape, plane.axis, plane.parts[0].units, plane.parts[0].size, layout.layers, layout.alignment)
    assert {type(size) for size in (*sizes, *layout.arena_bytes(np.int16(300)))} == {int}
    assert layout.arena_bytes(np.int16(300)) == (2 * 301 * 32,)


def test_reprs_are_one_line_with_units():
    conv = Plane("conv", (3, 5), torch.bfloat16)
    ssm = Plane("ssm", (32, 128, 128), torch.float32)
    assert repr(conv) == "Plane(conv[3,5] bfloat16, 30 B per layer)"
    assert repr(ssm) == "Plane(ssm[32,128,128] float32, 2.00 MiB per layer)"
    cut = Plane("conv", (3, 44), torch.bfloat16, parts=[Part("x", 8, 4), Part("B", 4, 3)], axis=1)
    assert repr(cut) == "Plane(conv[3,44] bfloat16, x 8*4 | B 4*3, 264 B per layer)"
    whole = "StateLayout(conv, ssm x 2 layers, layer_major, 4.00 MiB per slot with 4 B padding)"
    assert repr(StateLayout([conv, ssm], 2)) == whole
    assert format_bytes(3 * 1024**5) == "3072.00 TiB"
    score = Plane("score", (8,), torch.float32, fill=-float("inf"), grid=4, layers=1)
    assert repr(score) == "Plane(score[8] float32, 1 layers, filled with -inf, whole every 4 tokens, 32 B per layer)"
    assert repr(dataclasses.replace(score, fill=0, grid=None, layers=None)) == (
        "Plane(score[8] float32, never whole, 32 B per layer)"
    )
    mixed = StateLayout([ssm, score], 2, rows=StateLayout([conv], 3))
    whole = "ssm, score (1 layers) x 2 layers, layer_major, 4.00 MiB per slot with 0 B padding, 96 B per row"
    assert repr(mixed) == f"StateLayout({whole})"


test_impossible_layouts_are_refused_by_name = refusals(
    InvalidArgument,
    (lambda: Plane("", (1,), torch.float32), "name"),
    (lambda: Plane("ssm", (1, -2), torch.float32), "shape"),
    (lambda: Plane("ssm", (1,), "float32"), "dtype"),
    (lambda: StateLayout([], 1), "planes"),
    (lambda: StateLayout([A] * 2, 1), "once"),
    (lambda: StateLayout([A], 0), "layers"),
    (lambda: StateLayout([A], 1, "row_major"), "order"),
    (lambda: StateLayout([A], 1, alignment=24), "alignment"),
    (lambda: StateLayout([A], 1, alignment="16"), "alignment '16'"),
    (lambda: StateLayout([A], True), "layers True"),
    (lambda: StateLayout(A, 1), "planes Plane.*: expected a sequence of Plane"),
    (lambda: StateLayout("ab", 1), "planes 'ab': expected a sequence"),
    (lambda: StateLayout([("a", (1,))], 1), "expected a sequence of Plane"),
    (lambda: Plane(5, (1,), torch.int8), "a plane needs a name, a text; got 5"),
    (lambda: Plane("a", 5, torch.int8), "plane a: shape 5"),
    (lambda: Plane("a", (True,), torch.int8), "shape"),
    (lambda: Plane("a", (1,), torch.int8, layers=0), "plane a: layers 0: expected 1 or more"),
    (lambda: Plane("a", (1,), torch.int8, grid=0), "plane a: grid 0: expected 1 or more"),
    (lambda: Plane("a", (1,), torch.int8, fill=300), "plane a: fill 300"),
    (lambda: Plane("a", (1,), torch.int8, fill=-float("inf")), "plane a: fill -inf"),
    (lambda: Plane("a", (1,), torch.bfloat16, fill=0.1), r"plane a: fill 0.1 is 0.1000\d+ in torch.bfloat16"),
    (lambda: Plane("a", (1,), torch.float32, fill=float("nan")), "plane a: fill nan"),
    (lambda: Plane("a", (1,), torch.float32, fill="x"), "plane a: fill 'x', expected a number"),
    (lambda: Plane("a", (1,), torch.int64, fill=10**30), "plane a: fill 1000000000.*, expected a number"),
    (lambda: Plane("a", (1,), torch.int8, fill=np.array([1, 2])), "plane a: fill array.*, expected a number"),
    (lambda: Plane("a", (1,), torch.complex128, fill=1), "plane a: fill .*: only elements of up to 8 bytes"),
    (lambda: StateLayout([A], 1, rows=A), "rows=Plane.*: expected a StateLayout without rows"),
    (lambda: StateLayout([A], 1, rows=StateLayout([A], 1, rows=SMALL)), "rows=.*: expected a StateLayout without"),
    (lambda: dataclasses.replace(A, parts=Part("x", 1)), "plane a: parts Part.*: expected a sequence of Part"),
    (lambda: Plane("a", (1,), torch.int8, parts=("x",)), "plane a: parts .*: expected a sequence of Part"),
    *(
        (lambda layout=layout, ask=ask, slots=slots: getattr(layout, ask)(slots), f"slots {slots!r}: expected 0 or")
        for layout in (SMALL, dataclasses.replace(SMALL, order="slot_major"))
        for ask in ("arena_bytes", "placements", "table", "runs")
        for slots in (-5, 1.5, True, None)
    ),
)
