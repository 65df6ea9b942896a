"""Refuses sizes that a manager cannot allocate, before anything is allocated."""

import torch

from memstate import sizes
from memstate.checks import INT32_MAX
from memstate.engine.settings import Pages
from memstate.errors import ConfigurationError
from memstate.kernels.levels import bitmap_ints
from memstate.kernels.tables import COUNTERS
from memstate.requests.steps import record_bytes
from memstate.sizes import MemoryPart
from memstate.slots.commands import step_ints
from memstate.slots.registers import cell_starts, register_count
from memstate.slots.upload import INTS, RING
from memstate.state.layout import StateLayout
from memstate.state.memory import ring_table_bytes, table_bytes

# Arguments that errors tell the caller to lower.
CELLS = "max_requests, preallocated, snapshots (default: slots) or Pages(per_row=)"
BATCH = "max_batch (default: max_requests + preallocated)"

# Bytes on the host for each register, snapshot, row and page, in Python lists and numpy arrays, and what needs them.
PER_REGISTER = 8  # held, label, fence, and two marks of a packet
PER_SNAPSHOT = 44  # generation, and an entry in the queue of free holders
PER_ROW = 138  # mirrors of columns, and the lists of the request table and of the row's pages
PER_PAGE = 48  # an entry in the list of free pages, and the number of holders


def require_fit(
    layout: StateLayout, *, given: bool, slots: int, max_requests: int, preallocated: int, snapshots: int, pages: Pages,
    max_batch: int, device: torch.device, tails: bool = False,
) -> None:  # fmt: skip
    """Refuses sizes that int32 cannot number, or that the memory of the device or the host cannot hold.

    Args:
        layout: what one state is made of.
        given: whether the caller gives the planes of slots, so that only the planes of rows are allocated.
        slots: number of slots.
        max_requests: number of requests that can run at a time.
        preallocated: number of additional rows.
        snapshots: number of holders.
        pages: KV pages of requests.
        max_batch: entries of the largest batch.
        device: device of the states. On the CPU, device and host share their memory.
        tails: whether rows have tails.

    Raises:
        ConfigurationError: a size cannot fit. The error says how many bytes each part needs, and what to lower.
    """
    # plain integers, because numpy's would overflow
    slots, rows, snapshots = int(slots), int(max_requests) + int(preallocated), int(snapshots)
    max_batch, per_row = int(max_batch), int(pages.per_row)
    asked = (
        f"slots={slots}, max_requests={max_requests}, preallocated={preallocated}, snapshots={snapshots}, "
        f"max_batch={max_batch}, pages={pages}"
    )
    on_device = device_parts(
        layout, given=given, slots=slots, rows=rows, snapshots=snapshots, per_row=per_row, max_batch=max_batch,
        tails=tails,
    )  # fmt: skip
    on_host = host_parts(rows=rows, snapshots=snapshots, pages=int(pages.count))
    cells = cell_starts(rows, snapshots, per_row, tails)[-1]
    for count, what, most, lower in (
        (slots, "slots", sizes.MOST_SLOTS, "slots"),
        (cells, "cells of registers, columns and page table", INT32_MAX, CELLS),
        (max_batch, "entries of a batch", INT32_MAX, BATCH),
    ):
        if count > most:
            needs = sizes.describe(on_device, device)
            raise ConfigurationError(
                f"{asked}: {count} {what}, and int32 numbers at most {most}: lower {lower}; {needs}"
            )
    if device.type == "cpu":
        sizes.require_memory(asked, [*on_device, *on_host], device, ConfigurationError)
    else:
        sizes.require_memory(asked, on_device, device, ConfigurationError)
        sizes.require_memory(asked, on_host, torch.device("cpu"), ConfigurationError, "the host")


def device_parts(
    layout: StateLayout, *, slots: int, rows: int, snapshots: int, per_row: int, max_batch: int,
    given: bool = False, tails: bool = False,
) -> list[MemoryPart]:  # fmt: skip
    """Returns each part that a manager allocates on the device when it is built.

    The upload buffer can grow later, for a large packet. If the caller gives the planes, they are left out, and so is
    their tile table, whose size depends on their strides.
    """
    own = [] if given else [layout]
    of_rows = [] if layout.rows is None else [layout.rows]
    return [
        MemoryPart("planes", sum(sum(each.arena_bytes(slots)) for each in own), "slots, or the sizes of the layout"),
        *(MemoryPart("planes of rows", sum(one.arena_bytes(rows)), "max_requests or preallocated") for one in of_rows),
        MemoryPart("registers, columns and page table", 4 * cell_starts(rows, snapshots, per_row, tails)[-1], CELLS),
        MemoryPart(
            "tile table", sum(map(table_bytes, (*own, *of_rows))) + ring_table_bytes(layout), "the sizes of the layout"
        ),
        MemoryPart("bitmap", 4 * bitmap_ints(slots), "slots"),
        MemoryPart("counters", 4 * COUNTERS, "slots"),
        MemoryPart("step records", record_bytes(max_batch, snapshots, tails), f"{BATCH} or snapshots"),
        MemoryPart("packet of a step", 4 * step_ints(max_batch), BATCH),
        MemoryPart("upload buffer", 4 * INTS, BATCH),
    ]  # fmt: skip


def host_parts(*, rows: int, snapshots: int, pages: int) -> list[MemoryPart]:
    """Returns each part that a manager allocates on the host, without the overhead of Python's lists."""
    return [
        MemoryPart("mirrors of registers", PER_REGISTER * register_count(rows, snapshots), "max_requests or snapshots"),
        MemoryPart("lists of published snapshots", PER_SNAPSHOT * snapshots, "snapshots (default: slots)"),
        MemoryPart("request table", PER_ROW * (rows + 1), "max_requests or preallocated"),
        MemoryPart("page lists", PER_PAGE * pages, "Pages(count=)"),
        MemoryPart("upload ring", 4 * INTS * RING, "slots"),
    ]
