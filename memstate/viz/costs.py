"""Compares layouts by what a slot of each costs: memory, pieces, and the pages under a copy and under a step."""

from collections.abc import Mapping, Sequence
from typing import Any

from memstate.errors import InvalidArgument
from memstate.sheet import Table
from memstate.sizes import byte_count, format_bytes
from memstate.state.layout import StateLayout
from memstate.viz import inputs
from memstate.viz.inputs import Layouts
from memstate.viz.touch import blocks, runs, touched

SLOTS, PAGE = 64, 2**21
TITLE = "layouts side by side; pages of 2 MiB, of a copy of one slot, and of one layer of 16 rows"
TEXTS = {
    "slot": format_bytes, "padding": "{:.1%}".format, "slots a GiB": "{:,.1f}".format, "as KV of": "{:,} tokens".format,
}  # fmt: skip


def compare_layouts(
    layouts: Layouts, kv: Mapping[str, StateLayout | None] | None = None, memory: Sequence[str] = ("80GB", "141GB")
) -> Table[dict[str, Any]]:
    """Returns a table with a row of figures for each layout.

    slot         bytes of a slot
    padding      part of them that is padding, 0..1
    slots a GiB  slots in 2**30 bytes
    in 80GB      slots, beside the null slot, in so much memory for states alone
    as KV of     tokens whose KV has as many bytes as a slot, with `kv`
    runs         contiguous pieces of a slot
    pages of     2 MiB pages under a copy of slot 5 of 64, and under one layer of 16 rows in slots 1..16

    Args:
        layouts: Layouts by name, or one layout.
        kv: For names of layouts, what `kv_from_config` returns for the same model and the same ranks.
        memory: Sizes, such as "80GB" (10**9 bytes) or "80GiB" (2**30 bytes).

    Raises:
        InvalidArgument: A slot has no bytes, a name in `kv` is not that of a layout, or `memory` has no size.

    Example:
        >>> from memstate import presets
        >>> table = compare_layouts({order: presets.qwen3_next(order=order) for order in ("layer_major", "slot_major")})
        >>> [row["runs"] for row in table]
        [72, 1]

    Syncs: no.
    """
    layouts, kv = inputs.layouts(layouts), {} if kv is None else kv
    if not isinstance(kv, Mapping) or kv.keys() - layouts.keys():
        raise InvalidArgument(f"kv={kv!r}: expected layouts of KV pages for names of {list(layouts)}")
    rows = []
    for name, layout in layouts.items():
        if not (size := layout.bytes_per_slot):
            raise InvalidArgument(f"layout {name}: its slots have no bytes")
        page = kv.get(name)
        fits = {f"in {each}": max(0, byte_count("memory", each) // size - 1) for each in memory}
        tokens = {"as KV of": page and size * page.planes[0].shape[0] // page.bytes_per_slot} if kv else {}
        copied, read = runs(layout, SLOTS, [5]), blocks(layout, SLOTS, range(1, 17), [0])
        rows.append({
            "layout": name, "slot": size, "padding": 1 - layout.payload_bytes_per_slot / size,
            "slots a GiB": 2**30 / size, **fits, **tokens, "runs": len(layout.runs(SLOTS)),
            "pages of a copy": touched(copied, PAGE), "pages of a layer": touched(read, PAGE),
        })  # fmt: skip
    return Table(rows, TITLE, TEXTS)
