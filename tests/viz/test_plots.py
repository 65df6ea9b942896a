"""Tests that lines and stacked bars have the given numbers, and figures of layouts side by side against arithmetic."""

import math
from dataclasses import replace

import pytest
import torch

from memstate import Plane, StateLayout, presets, viz
from memstate.errors import InvalidArgument
from tests.support.refusals import refusals

PLAN = {"small": {"states": 1.0, "KV": 3.0}, "large": {"states": 0.0, "KV": 12_345.0}}


def test_parts_lie_one_behind_the_other() -> None:
    (axes,) = viz.stacked(PLAN, "GiB").axes
    bars = [(round(bar.get_y() + bar.get_height() / 2), bar.get_x(), bar.get_width()) for bar in axes.patches]
    assert bars == [(0, 0, 1), (0, 1, 3), (1, 0, 0), (1, 0, 12_345)]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["small", "large"]
    assert axes.get_xlabel() == "GiB" and axes.get_xlim() == (0, 12_345)
    assert [text.get_text() for text in axes.texts] == ["12,345"], "a part that is too narrow has no number in it"
    assert [text.get_text() for text in axes.figure.legends[0].get_texts()] == ["states", "KV"]


def test_bars_that_are_all_empty_are_drawn() -> None:
    (axes,) = viz.stacked({"a": {"x": 0}}, "GiB").axes
    assert axes.get_xlim() == (0, 1) and not axes.texts


def test_lines_go_through_their_points_in_order() -> None:
    drawn = viz.lines({"lru": {64: 0.5, 8: 0.25}, "best $": {8: 0.75}}, "states", "rate", limits={"all": 0.9})
    (axes,) = drawn.axes
    lru, best, limit = axes.lines
    assert (list(lru.get_xdata()), list(lru.get_ydata())) == ([8, 64], [0.25, 0.5])
    assert (list(best.get_xdata()), list(best.get_ydata())) == ([8], [0.75])
    assert lru.get_linewidth() > best.get_linewidth(), "a line under another is wider"
    assert list(limit.get_ydata()) == [0.9, 0.9] and [text.get_text() for text in axes.texts] == ["all"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["8", "64"]
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_xscale(), axes.get_yscale()) == (
        "states", "rate", "log", "linear",
    )  # fmt: skip
    assert axes.get_ylim()[0] == 0
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["lru", r"best \$"]


def test_lines_can_be_logarithmic_and_below_zero() -> None:
    assert viz.lines({"a": {1: 10.0, 2: 1000.0}}, "n", "bytes", log=True).axes[0].get_yscale() == "log"
    assert viz.lines({"a": {1: -2.0, 2: 3.0}}, "n", "gain").axes[0].get_ylim()[0] == -2


# -- layouts side by side -------------------------------------------------------------------------


CONFIG = presets.CHECKPOINTS["qwen3_next"]
MIB = 2**20
ODD = StateLayout((Plane("conv", (37, 3), torch.bfloat16), Plane("ssm", (3, 7, 5), torch.float32)), 2, alignment=256)
EMPTY = StateLayout((Plane("none", (0,), torch.int8),), 1)


def pages(layout: StateLayout, slots: range, layers: int, padded: bool) -> int:
    """Returns the number of 2 MiB pages under some slots in the first layers, block by block."""
    found = set()
    for plane, place in zip(layout.planes, layout.placements(64), strict=True):
        for layer in range(min(layers, layout.layers_of(plane))):
            for slot in slots:
                first = place.offset + layer * place.layer_stride + slot * place.slot_stride
                last = first + (layout.block_bytes(plane) if padded else plane.nbytes) - 1
                found |= {(place.arena, page) for page in range(first // (2 * MIB), last // (2 * MIB) + 1)}
    return len(found)


@pytest.mark.parametrize("order", ["layer_major", "slot_major"])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_figures_of_a_model_are_those_of_one_of_its_ranks(ranks: int, itemsize: int, order: str) -> None:
    """Qwen3-Next: 36 layers with 16 heads of keys and 32 of values, 12 with two heads of KV, which 4 ranks copy."""
    dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
    layout = presets.qwen3_next(ranks=ranks, order=order, ssm_dtype=dtype)
    slot = 36 * (3 * 2 * (16 + 16 + 32) * 128 + itemsize * 32 * 128 * 128) // ranks
    token = 12 * 2 * max(1, 2 // ranks) * 256 * 2
    for size in (1, 16):
        kv = {"one": presets.kv_from_config(CONFIG, page_size=size, ranks=ranks)}
        (row,) = viz.compare_layouts({"one": layout}, kv)
        assert list(row.items())[:7] == [
            ("layout", "one"), ("slot", slot), ("padding", 0), ("slots a GiB", 1024 * MIB / slot),
            ("in 80GB", 80 * 10**9 // slot - 1), ("in 141GB", 141 * 10**9 // slot - 1), ("as KV of", slot // token),
        ]  # fmt: skip
    assert row["runs"] == (1 if order == "slot_major" else 72)
    assert row["pages of a copy"] == pages(layout, range(5, 6), 36, padded=True)
    assert row["pages of a layer"] == pages(layout, range(1, 17), 1, padded=False)


@pytest.mark.parametrize("order", ["layer_major", "slot_major"])
def test_padding_and_the_null_slot_count(order: str) -> None:
    (row,) = viz.compare_layouts(replace(ODD, order=order), memory=["1MiB", "2KiB", "5000B"])
    assert list(row) == [
        "layout", "slot", "padding", "slots a GiB", "in 1MiB", "in 2KiB", "in 5000B", "runs", "pages of a copy",
        "pages of a layer",
    ]  # fmt: skip
    assert (row["layout"], row["slot"], row["padding"]) == (order, 2 * (256 + 512), 1 - 2 * (222 + 420) / 1536)
    assert (row["in 1MiB"], row["in 2KiB"], row["in 5000B"]) == (MIB // 1536 - 1, 0, 2)
    assert sum(ODD.arena_bytes(row["in 1MiB"])) <= MIB < sum(ODD.arena_bytes(row["in 1MiB"] + 1))
    assert row["pages of a copy"] == row["pages of a layer"] == (1 if order == "slot_major" else 2)


def test_layouts_stand_side_by_side_in_one_table() -> None:
    whole, part = presets.qwen3_next(), presets.qwen3_next(ranks=4)
    kv = {"4 ranks": presets.kv_from_config(CONFIG, page_size=1, ranks=4), "whole": None}
    made = viz.compare_layouts({"whole": whole, "4 ranks": part, "odd": ODD}, kv)
    assert [row["as KV of"] for row in made] == [None, 1572, None]
    page, text = made._repr_html_(), str(made)
    for cell in ("73.69 MiB", "18.42 MiB", "16.4%", "13.9", "4,140", "1,572 tokens"):
        assert f"<td>{cell}</td>" in page and cell in text


test_bad_input_is_refused = refusals(
    InvalidArgument,
    (lambda: viz.stacked({"a": {"x": -1}}, "m"), "a, x is -1, expected a number from 0 on"),
    (lambda: viz.lines({"a": {}}, "n", "m"), "expected a dict of groups, each a dict of values by name"),
    (lambda: viz.lines({"a": {0: 1.0}}, "n", "m"), "a at 0, expected a whole number from 1 on"),
    (lambda: viz.lines({"a": {1: math.inf}}, "n", "m"), "a at 1 is inf, expected a number"),
    (lambda: viz.lines({"a": {1: 0.0}}, "n", "m", log=True), "a at 1 is 0.0, expected a number above 0"),
    (lambda: viz.lines({"a": {1: 1.0}}, "n", "m", limits=[1]), r"limits: \[1\], expected a dict"),
    (lambda: viz.lines({"a": {1: 1.0}}, "n", "m", limits={"b": "1"}), "limits: b is '1', expected a number"),
    (lambda: viz.compare_layouts({}), "no layout"),
    (
        lambda: viz.compare_layouts({"a": ODD}, {"b": ODD}),
        r"kv=.*: expected layouts of KV pages for names of \['a'",
    ),
    (lambda: viz.compare_layouts({"a": ODD}, ODD), "kv=StateLayout.*: expected layouts of KV pages"),
    (lambda: viz.compare_layouts({"a": EMPTY}), "layout a: its slots have no bytes"),
    (lambda: viz.compare_layouts({"a": ODD}, memory=["80"]), "memory='80': a number without a unit"),
)
