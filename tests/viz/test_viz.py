"""Tests pictures of layouts and slots: their arithmetic against counted bytes and real addresses, and their parts."""

import re
import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memstate import viz
from memstate.errors import InvalidArgument
from memstate.kernels.dispatch import Backend
from memstate.slots.inspect import Inspection
from memstate.state.layout import Plane, StateLayout
from memstate.state.planes import Planes
from memstate.viz import ByteRange, figure
from tests.support.processes import python
from tests.support.refusals import refusals

ROOT = Path(__file__).parents[2]
PLANES = (Plane("conv", (3, 5), torch.bfloat16), Plane("ssm", (2, 3), torch.float32), Plane("none", (0,), torch.int8))
LAYOUT = StateLayout(PLANES, 3)
ORDERS = {"layer_major": LAYOUT, "slot_major": replace(LAYOUT, order="slot_major", alignment=64)}

accesses = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 200), st.integers(0, 60)), max_size=12).map(
    lambda pieces: [ByteRange(*piece) for piece in pieces]
)


def bytes_of(pieces: list[ByteRange]) -> set[tuple[int, int]]:
    """Returns (arena, address) of every byte of the pieces."""
    return {(piece.arena, byte) for piece in pieces for byte in range(piece.start, piece.start + piece.nbytes)}


@given(accesses, st.integers(1, 70))
def test_pages_are_counted_once_and_exactly(pieces: list[ByteRange], page: int) -> None:
    expected = bytes_of(pieces)
    assert viz.touched(pieces, page) == len({(arena, byte // page) for arena, byte in expected})
    together = [piece for piece in viz.joined(pieces) if piece.nbytes]
    assert bytes_of(together) == expected and sum(piece.nbytes for piece in together) == len(expected)
    for one, other in pairwise(together):
        assert one.arena < other.arena or one.start + one.nbytes < other.start


@given(accesses, st.integers(1, 70))
def test_shares_of_pages_add_up(pieces: list[ByteRange], page: int) -> None:
    expected = bytes_of(pieces)
    for arena, parts in enumerate(viz.shares(pieces, page, (260, 300))):
        size = (260, 300)[arena]
        assert len(parts) == -(-size // page)
        for number, part in enumerate(parts.tolist()):
            room = range(number * page, min((number + 1) * page, size))
            assert part == pytest.approx(sum((arena, byte) in expected for byte in room) / len(room))


@pytest.mark.parametrize("order", ORDERS)
def test_blocks_and_runs_lie_where_the_storage_has_them(order: str) -> None:
    """Blocks have the addresses of real tensors, counted from the first byte of their arena."""
    layout, slots, ids = ORDERS[order], 5, [4, 2]
    storage = Planes(layout, slots, Backend("reference"))
    bases = [arena.data_ptr() for arena in storage.arenas]
    places = {plane.name: place.arena for plane, place in zip(layout.planes, layout.placements(slots), strict=True)}
    expected = [
        ByteRange(places[name], tensor[layer, slot].data_ptr() - bases[places[name]], tensor[layer, slot].nbytes)
        for name, tensor in storage.items()
        for layer in (2, 0)
        for slot in ids
        if tensor[layer, slot].nbytes
    ]
    assert viz.blocks(layout, slots, ids, [2, 0]) == expected
    assert len(viz.blocks(layout, slots, ids)) == 2 * len(ids) * layout.layers
    whole = viz.runs(layout, slots, ids)
    assert (
        len(whole) == len(ids) * len(layout.runs(slots)) and sum(p.nbytes for p in whole) == 2 * layout.bytes_per_slot
    )
    assert bytes_of(viz.blocks(layout, slots, ids)) < bytes_of(whole)  # a copy moves padding, too


test_bad_input_is_refused_with_the_numbers = refusals(
    InvalidArgument,
    (lambda: viz.blocks(LAYOUT, 4, [0]), r"slots \[0\]: expected 1..4"),
    (lambda: viz.blocks(LAYOUT, 4, [1], [3]), r"layers \[3\]: expected 0..2"),
    (lambda: viz.touched([], 0), "page_bytes 0: expected 1 or more"),
    (lambda: viz.slot({}), "no layout"),
    (lambda: viz.arena({"big": LAYOUT}, 500), "4509 blocks"),
    (lambda: viz.bars({"a": {"x": 1.0}, "b": {"y": 1.0}}, "MiB"), "names"),
    (lambda: viz.blocks(LAYOUT, 4, 1), "slots 1: expected a list of 1..4"),
    (lambda: viz.runs(LAYOUT, 4.0, [1]), "slots 4.0: expected 1 or more"),
    (lambda: viz.arena({"a": LAYOUT}, -3), "slots -3: expected 1 or more"),
    (lambda: viz.arena([LAYOUT], 3), "expected a StateLayout, or a dict of them by name"),
    (lambda: viz.pages(LAYOUT, 2, [1], 1.5), "page_bytes 1.5: expected 1 or more"),
    (lambda: viz.pages(LAYOUT, 10**6, [1], 16), r"pages: \d+ pages of 16 bytes cannot be told apart"),
    (lambda: viz.bars([1], "MiB"), r"bars: \[1\], expected a dict of groups"),
    (lambda: viz.bars({"a": {"x": float("nan")}}, "MiB"), "a, x is nan, expected a number"),
    (lambda: viz.bars({"a": {"x": -1}}, "MiB", log=True), "a, x is -1, expected a number from 0 on"),
    (lambda: viz.occupancy(["picture"]), r"\['picture'\]: expected what `StateManager.inspect`"),
    (lambda: viz.occupancy([picture(capacity=5000)] * 5), "5 pictures of 5000 slots cannot be told apart"),
    (lambda: viz.occupancy([picture()] * 2, "ab"), "2 labels"),
)


def extents(axes, line: int) -> list[tuple[int, int]]:
    """Returns (start, width) of the bars on a line, in the order in which they were drawn."""
    bars = [patch for patch in axes.patches if round(patch.get_y() + patch.get_height() / 2) == line]
    return [(round(bar.get_x()), round(bar.get_width())) for bar in bars]


def test_a_drawn_slot_has_the_bytes_of_the_layout() -> None:
    layouts = {"tight": LAYOUT, "loose": replace(LAYOUT, alignment=64)}
    left, right = viz.slot(layouts).axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["tight", "loose"]
    assert left.get_xlabel() == "one layer of one slot, bytes" and right.get_xlabel() == "one slot, all layers, bytes"
    assert extents(left, 0) == [(0, 30), (30, 2), (32, 24), (56, 8), (64, 0)]
    assert extents(left, 1) == [(0, 30), (30, 34), (64, 24), (88, 40), (128, 0)]
    assert extents(right, 1) == [(3 * start, 3 * width) for start, width in extents(left, 1)]
    hatched = [(round(bar.get_x()), round(bar.get_width())) for bar in left.patches if bar.get_hatch()]
    assert hatched == [(30, 2), (56, 8), (30, 34), (88, 40)]


def test_a_drawn_arena_has_every_block_and_marks_the_slots_asked_for() -> None:
    slots, ids = 3, [2]
    (axes,) = viz.arena(ORDERS, slots, ids).axes
    for line, (layout, number) in enumerate([(LAYOUT, 0), (LAYOUT, 1), (LAYOUT, 2), (ORDERS["slot_major"], 0)]):
        drawn = extents(axes, line)
        everything = viz.blocks(layout, slots, range(1, slots + 1))
        starts = {piece.start for piece in everything if piece.arena == number}
        assert starts <= {start for start, _ in drawn} and len(set(drawn)) == len(drawn)
        assert sum(width for _, width in drawn) == layout.arena_bytes(slots)[number]  # with null slot and padding
    marked = {
        round(bar.get_x()) for bar in axes.patches if bar.get_linewidth() == 1.0 and round(bar.get_y() + 0.35) == 3
    }
    assert marked == {piece.start for piece in viz.blocks(ORDERS["slot_major"], slots, ids)}


def test_drawn_pages_are_those_that_are_touched() -> None:
    layouts = {order: replace(layout, planes=PLANES[:1]) for order, layout in ORDERS.items()}
    drawn = viz.pages(layouts, 6, [1, 4], 64, layers=[1])
    for axes, (name, layout) in zip(drawn.axes, layouts.items(), strict=True):
        pieces = viz.blocks(layout, 6, [1, 4], [1])
        frame, *bars = extents(axes, 0)
        assert frame == (0, -(-layout.arena_bytes(6)[0] // 64))
        pages = {start + at for start, width in bars for at in range(width)}
        assert pages == {page for arena, byte in bytes_of(pieces) for page in [byte // 64]}
        assert axes.get_title(loc="left") == f"{name}: {len(pages)} pages of 64 B for 60 B"


def test_bars_have_their_lengths_and_values() -> None:
    (axes,) = viz.bars({"a": {"x": 1.5, "y": 2048}, "b": {"x": 3, "y": 4}}, "MiB").axes
    assert [bar.get_width() for bar in axes.patches] == [1.5, 3, 2048, 4] and axes.get_xlabel() == "MiB"
    assert [text.get_text().strip() for text in axes.texts] == ["1.5", "3", "2,048", "4"]


def picture(**changes) -> Inspection:
    """Returns an inspection of seven slots: two of row a, one owned but marked free, one in hand, one leaked, one owned
    twice, and one free.
    """
    return replace(
        Inspection(
            capacity=7,
            owners=[0, 1, 1, 1, 0, 0, 2, 0],
            free=[False, False, False, True, False, False, False, True],
            slots=[1, 2, 0, 3, 6, 6, 99],
            labels=[0] * 7,
            names={0: "a", 1: "a", 3: "b", 4: "c", 5: "a long name", 6: "elsewhere"},
            kinds={0: "live", 1: "lane", 3: "live", 4: "live", 5: "snapshot", 6: "live"},
            by_id=[4],
        ),
        **changes,
    )


def test_holdings_name_every_slot_once() -> None:
    assert viz.holdings(picture()) == [
        ("live", "a"), ("lane", "a"), ("contested", ""), ("by id", ""),
        ("leaked", ""), ("contested", ""), ("free", ""),
    ]  # fmt: skip


def test_a_drawn_occupancy_has_a_cell_for_every_slot_that_is_not_free() -> None:
    (axes,) = viz.occupancy([picture(), picture(by_id=[])], ["before", "after"]).axes
    cells = {(round(bar.get_x()), round(bar.get_y() + 0.5)): bar.get_facecolor()[:3] for bar in axes.patches}
    assert set(cells) == {(step, slot) for step in range(2) for slot in range(1, 7)}
    assert cells[0, 1] == cells[1, 1] != cells[0, 2] and cells[0, 5] == cells[1, 5] == cells[1, 4] != cells[0, 4]
    assert [text.get_text() for text in axes.texts if text.get_text()] == ["a", "a"] * 2
    assert [label.get_text() for label in axes.get_xticklabels()] == ["before", "after"]


def test_a_drawing_shows_itself_as_the_same_svg_every_time() -> None:
    once, again = (viz.arena(ORDERS, 2, [1])._repr_svg_() for _ in range(2))
    assert once == again and "matplotlib.org" not in once.split("<svg")[1]
    assert ElementTree.fromstring(once).tag.endswith("svg")
    assert ">ssm<" in once.replace("\n", "").replace(" ", "")  # the SVG keeps texts as texts, not as paths
    dark = once.split("(prefers-color-scheme:dark){")[1].split("</style>")[0]
    style, drawn = {colour for colour in figure.DARK if f'"fill: {colour}"' in dark}, once.split("</style>")[-1]
    assert {"fill: #ffffff", "stroke: #000000", "stroke: #444444"} <= set(re.findall(r"(?:fill|stroke): #\w+", drawn))
    assert style == set(figure.DARK)


def words(drawn) -> set[str]:
    """Returns the texts in the SVG of a picture; fails on a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        root = ElementTree.fromstring(drawn._repr_svg_())
    return {"".join(text.itertext()).strip() for text in root.iter() if text.tag.endswith("}text")}


@pytest.mark.parametrize(
    ("name", "shown"),
    [("a$^$b", "a$^$b"), (r"$\frac{$", r"$\frac{$"), (r"\$x", r"\$x"), ("a\x00\x1b\ud800b", "a\ufffd\ufffd\ufffdb")],
    ids=["formula", "no formula", "escaped", "controls"],
)
def test_names_are_shown_as_they_are(name: str, shown: str) -> None:
    layout = StateLayout((Plane(name, (8,), torch.float32),), 2)
    assert words(viz.slot({name: layout})) >= {shown}
    assert words(viz.arena({name: layout}, 2)) >= {shown, "arena 0"}
    assert any(word.startswith(f"{shown}: 1 pages") for word in words(viz.pages({name: layout}, 2, [1], 4096)))
    assert words(viz.bars({name: {f"{name}2": 1}}, f"{name}3")) >= {shown, f"{shown}2", f"{shown}3"}
    owner, label = picture(names=picture().names | {0: name[:4]}), f"{name}4"
    assert words(viz.occupancy([owner], [label])) >= {f"{shown}4", shown[:4]}


def test_a_name_that_the_font_lacks_is_text_without_a_warning() -> None:
    fox = "\N{FOX FACE}"
    assert words(viz.occupancy([picture(names=picture().names | {0: fox})], [fox])) >= {fox}


@pytest.mark.parametrize(
    "labels",
    [
        ["start"] * 3,
        ["prompt of turn 1"] * 14,
        ["W" * 300, "y"],
        ["WWW"] * 12,
        ["", "\u200b"],
        [str(at) for at in range(40)],
    ],
)
def test_labels_of_moments_do_not_overlap(labels: list[str]) -> None:
    drawn = viz.occupancy([picture()] * len(labels), labels)
    drawn.draw_without_rendering()
    (axes,) = drawn.axes
    boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert all(one.x1 <= other.x0 for one, other in pairwise(boxes))
    assert min(box.y0 for box in boxes) >= 0 and axes.get_window_extent().height > 6 * 12


def test_planes_never_share_a_colour() -> None:
    layout = StateLayout([Plane(f"p{at}", (4,), torch.float32) for at in range(40)], 1)
    drawn = viz.slot(layout)
    colours = [tuple(round(255 * part) for part in patch.get_facecolor()) for patch in drawn.axes[0].patches]
    assert len(set(colours)) == len(colours) == 40
    assert [tuple(round(255 * part) for part in p.get_facecolor()) for p in drawn.legends[0].get_patches()] == colours


def test_zero_has_no_bar_on_a_logarithmic_axis() -> None:
    assert words(viz.bars({"a": {"x": 0, "y": 200}}, "MiB", log=True)) >= {"0", "200"}
    (axes,) = viz.bars({"a": {"x": 0}}, "MiB", log=True).axes
    assert axes.get_xscale() == "linear" and words(axes.figure) >= {"0"}


def test_many_slots_are_drawn_without_names_on_a_page_of_limited_height() -> None:
    """Of 5000 slots every hundredth is free and the others are live; a run of live slots is one bar."""
    capacity = 5000
    free = [False, *(slot % 100 == 0 for slot in range(1, capacity + 1))]
    held = [slot for slot in range(1, capacity + 1) if slot % 100]
    many = Inspection(
        capacity=capacity, owners=[0] * (capacity + 1), free=free, slots=held, labels=[1] * len(held),
        names=dict.fromkeys(range(len(held)), "a"), kinds=dict.fromkeys(range(len(held)), "live"),
    )  # fmt: skip
    drawn = viz.occupancy([many, many])
    (axes,) = drawn.axes
    assert drawn.get_size_inches()[1] <= 26 and not axes.texts and len(axes.get_yticks()) <= 100
    bars = {(round(bar.get_x()), bar.get_y() + 0.5, bar.get_height()) for bar in axes.patches}
    assert bars == {(at, 1 + 100 * run, 99) for at in range(2) for run in range(50)}
    wide = viz.occupancy([picture()] * 60, [f"moment {at}" for at in range(60)]).axes[0]
    assert [label.get_text() for label in wide.get_xticklabels()] == [f"moment {at}" for at in range(0, 60, 3)]


def test_pictures_name_the_missing_extra_and_arithmetic_and_notebooks_need_none() -> None:
    code = """import sys; sys.modules["rich"] = sys.modules["matplotlib"] = None
import torch, memstate as ms
from memstate import viz
layout = ms.StateLayout((ms.Plane("ssm", (4,), torch.float32),), 2)
print(viz.touched(viz.runs(layout, 2, [1]), 16), "<table>" in layout._repr_html_(), repr(layout).count("\\n"))
for show in (layout.__rich__, lambda: viz.slot({"toy": layout})):
    try:
        show()
    except ImportError as error:
        print(error)"""
    first, terminal, picture = python("-c", code).splitlines()
    assert first == "2 True 0"
    assert "pip install '.[cli]' in a checkout" in terminal and "pip install '.[viz]' in a checkout" in picture
