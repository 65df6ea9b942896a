"""Tests layouts side by side: each figure against arithmetic, with ranks, orders and padding."""

from dataclasses import replace

import pytest
import torch

from memstate import Plane, StateLayout, presets, viz
from memstate.errors import InvalidArgument

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


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: viz.compare_layouts({}), "no layout"),
        (
            lambda: viz.compare_layouts({"a": ODD}, {"b": ODD}),
            r"kv=.*: expected layouts of KV pages for names of \['a'",
        ),
        (lambda: viz.compare_layouts({"a": ODD}, ODD), "kv=StateLayout.*: expected layouts of KV pages"),
        (lambda: viz.compare_layouts({"a": EMPTY}), "layout a: its slots have no bytes"),
        (lambda: viz.compare_layouts({"a": ODD}, memory=["80"]), "memory='80': a number without a unit"),
    ],
)
def test_wrong_questions_are_refused(ask, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        ask()
