"""Makes small random launches of the operations on planes. Their entries include padding and slots out of range.

A tile is a range of bytes of one layer in each slot, or in each record.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from memstate.kernels.configs import CopyConfig
from memstate.kernels.tables import (
    ConvTail,
    Cursor,
    DeltaTail,
    Mamba3State,
    PlaneMap,
    RecordMap,
    RecordPiece,
    RingMap,
    ScaledMap,
    SelectiveTail,
    StepMarks,
    Tail,
    TailRecord,
)
from memstate_tools.arguments import in_order
from tests.support.addresses import Limits
from tests.support.decode_case import SLOTS, Memory, Row
from tests.support.op_case import CPU, Case, Maker, first_of, starts_of
from tests.support.packets import Packet

TOKENS = 2
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ANYTHING = (*DTYPES, torch.int8, torch.complex64)


def planes(make: Maker) -> PlaneMap:
    """Returns a large and a small plane of two layers. The copy kernel moves some of their tiles in several steps."""
    unit = make.one(16, 8, 4, 2, 1)
    blocks = tuple(make.plane(nbytes, dtype=torch.uint8, gap=make.one(0, 16)) for nbytes in (560 + 48, 32))
    tiles = [
        (block[layer, 0].data_ptr() + at, block.stride(1), min(560, block.shape[2] - at))
        for block in blocks
        for layer in range(2)
        for at in range(0, block.shape[2], 560)
    ]
    return PlaneMap(make.empty(len(tiles), 3, dtype=torch.int64).copy_(torch.tensor(tiles)), blocks, unit)


def moving(make: Maker, op: str, plane_map: PlaneMap, dst: Sequence[int], arguments: dict[str, Any]) -> Case:
    """Returns a launch of the copy kernel on 16 entries at a time. It may store only to the slots `dst`."""
    blocks = plane_map.blocks
    limits = Limits(
        reach=blocks,
        null=[block[:, 0] for block in blocks],
        changes=[block[:, slot] for block in blocks for slot in dst if 0 < slot < SLOTS],
    )
    config = CopyConfig(entries=16, lanes=128, programs_per_sm=make.one(2, 3))
    return Case(op, {"planes": plane_map, **arguments}, limits, copying=config)


def pairs(make: Maker) -> tuple[list[int], list[int]]:
    """Returns destinations and sources of up to 20 entries, padding first.

    A slot is a destination and a source only if an entry copies it to itself.
    """
    dst, src = make.slots(3), make.slots(7)
    src = [slot if slot not in dst else make.one(0, -1, SLOTS) for slot in src][: len(dst)]
    idle = make.one(0, 15)
    return [0] * idle + dst + [dst[0]], [make.one(0, 1)] * idle + src + [dst[0]]


def copy_slots(make: Maker) -> Case:
    dst, src = pairs(make)
    arguments = {"dst": make.ints(dst, make.one(True, False)), "src": make.ints(src, make.one(True, False))}
    return moving(make, "copy_slots", planes(make), dst, arguments)


def zero_slots(make: Maker) -> Case:
    dst, _ = pairs(make)
    return moving(make, "zero_slots", planes(make), dst, {"ids": make.ints(dst[:-1], make.one(True, False))})


def run_data(make: Maker) -> Case:
    """Returns a launch on slots in registers 1, 2, 3 .. A source may be -1, for zeros; a target may be register 0."""
    dst, src = pairs(make)
    held = [0, *(max(slot, 0) for slot in (*dst[:-1], *src[:-1]))]  # a register never holds a negative slot
    n = len(dst) - 1
    data = [(1 + i, make.one(1 + n + i, 1 + n + i, -1)) for i in range(n)] + [(0, 1), (-4, -1), (1, 1)]
    packet = Packet(moves=[(1, 2)], data=data)
    arguments = {"slots": make.ints(held), "packet": make.ints(packet.pack(CPU).tolist())}
    return moving(make, "run_data", planes(make), dst, arguments)


def run_rows(make: Maker) -> Case:
    """Returns a launch of `run_rows`. Its packet names rows, which the kernel copies, and registers, which it skips."""
    dst, src = pairs(make)
    data = [(-1 - to, -1 - of) for to, of in zip(dst, src, strict=True)] + [(3, -1), (2, 1), (0, 0)]
    packet = Packet(moves=[(1, 2)], data=data)
    return moving(make, "run_rows", planes(make), dst, {"packet": make.ints(packet.pack(CPU).tolist())})


def keep_path(make: Maker) -> Case:
    """Returns a launch on rings of four rows with four places each.

    The record and the paths are random numbers, so a path may have gaps or leave its ring.
    """
    batch, depth = make.one(1, 3), make.one(1, 3)
    blocks = tuple(make.plane(4 * size, dtype=torch.uint8, gap=make.one(0, 16))[:, :4] for size in (48, 4))
    table = [
        (block[layer, 0].data_ptr(), block.stride(1), block.shape[2] // 4, block.shape[2])
        for block in blocks
        for layer in range(2)
    ]
    unit = make.one(4, 2, 1)
    rings = RingMap(make.empty(len(table), 4, dtype=torch.int64).copy_(torch.tensor(table)), blocks, (4, 4), unit)
    rows = [make.one(row, row, 0, -1, 4) for row in make.rng.sample(range(1, 4), batch)]
    columns = [rows, *([make.rng.randint(-1, 5) for _ in rows] for _ in TailRecord._fields[1:])]
    nodes = make.ints([make.rng.randint(-1, 3) for _ in range(batch * depth)], make.one(True, False))
    limits = Limits(
        reach=blocks,
        null=[block[:, 0] for block in blocks],
        changes=[block[:, row] for block in blocks for row in rows if 0 < row < 4],
    )
    arguments = {"rings": rings, "record": TailRecord(*map(make.ints, columns)), "nodes": nodes.view(batch, depth)}
    return Case("keep_path", arguments, limits)


def steps(make: Maker, batch: int) -> list[Row]:
    """Returns rows, of which no two share a slot.

    A row writes to the slot that it reads, to another slot, or to none (padding). Some rows have a snapshot.
    """
    free = make.rng.sample(range(1, SLOTS), SLOTS - 1)
    rows = []
    for _ in range(batch):
        read, write, snapshot = (free.pop() for _ in Row._fields[:3])
        null = [make.one(0, -1, SLOTS, 2**31 - 1) for _ in Row._fields[:3]]
        rows.append(
            Row(
                make.one(read, read, write, null[0]),
                make.one(write, write, write, null[1]),
                make.one(snapshot, snapshot, read, write, null[2]),
                make.rng.randint(-1, TOKENS + 1),
            )
        )
    return rows


def step_marks(make: Maker, rows: list[Row]) -> StepMarks:
    """Returns up to four marks, sorted by entry and offset. Each stores to a slot that no row names, or to none."""
    named = {slot for row in rows for slot in row[:3]}
    free = [slot for slot in range(1, SLOTS) if slot not in named]
    places = sorted((make.rng.randrange(len(rows)), make.rng.randint(1, TOKENS)) for _ in range(make.one(0, 1, 4)))
    given = [(*place, make.one(free.pop() if free else 0, 0)) for place in places]
    entry, offset, slot = (make.ints([mark[i] for mark in given] or [0]) for i in range(3))
    return StepMarks(make.ints([len(given)]), entry, offset, slot)


def decode(
    make: Maker, op: str, inputs: dict[str, Any], state: Tensor | Mamba3State, rows: list[Row], tail: Tail | None = None
) -> Case:
    """Returns a launch of a decode kernel. Its output is like the input `v`, or like `x` if there is no `v`."""
    wide = make.one(True, False)
    columns = {name: make.ints([getattr(row, name) for row in rows], wide) for name in Row._fields}
    like = inputs["v" if "v" in inputs else "x"]
    out = make.empty(*like.shape, dtype=like.dtype)
    planes = [state] if isinstance(state, Tensor) else [*state]
    planes += [] if inputs.get("scales") is None else [inputs["scales"]]
    stored = [plane[slot] for plane in planes for row in rows for slot in row[1:3] if 0 < slot < SLOTS]
    marks = make.one(None, step_marks(make, rows))
    kept = [] if marks is None else marks.slot.tolist()
    stored += [plane[slot] for plane in planes for slot in kept if 0 < slot < SLOTS]
    changes = [out, *stored]
    arguments = inputs | columns | {"state": state, "out": out, "marks": marks}
    null = [plane[0] for plane in planes]
    if op != "mamba3_step":
        arguments |= {"tail": tail, "cursor": cursor(make, len(rows)) if tail else None}
        nodes = make.rng.randint(1, TOKENS + 1)
        tree = [make.rng.randint(-2, TOKENS) for _ in range(len(rows) * nodes)]
        parents = make.ints(tree, make.one(True, False)).view(len(rows), nodes) if tail else None
        arguments["parents"] = make.one(None, parents)
        rings = [ring for ring in tail or () if ring is not None]
        null += [ring[0] for ring in rings]
        changes += [ring[1:] for ring in rings]
    return Case(op, arguments, Limits(null=null, changes=changes), exact=False)


def cursor(make: Maker, batch: int) -> Cursor:
    """Returns a cursor in rings of 4 tokens. Some entries have no row; up to 2 tokens of a row are pending."""
    rows = [make.one(row, row, row, make.one(0, -1, 4)) for row in make.rng.sample(range(1, 4), batch)]
    columns = [rows, *([make.rng.randint(-1, most) for _ in range(batch)] for most in (9, 2, 5))]
    return Cursor(*(make.ints(column, make.one(True, False)) for column in columns))


def ring(make: Maker, *token: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns a ring of random tokens: four rows of four tokens."""
    rows = make.plane(4, *token, dtype=dtype, layers=1)[0, :4]
    return rows.copy_(torch.randn(rows.shape, generator=make.generator))


def memory(make: Maker, *shape: int, whole: torch.dtype | None = None) -> tuple[Tensor, list[Row]]:
    """Returns random states of one layer in all slots but the null slot, and rows that use them.

    whole: dtype of whole numbers; None for a dtype of floats.
    """
    state = Memory(shape, whole or make.one(*DTYPES), CPU, make.generator).state
    state[1:] = (torch.randn(state[1:].shape, generator=make.generator) * (30 if whole else 1)).to(state)
    return state, steps(make, make.one(1, 2, 2))


def scaled(make: Maker, state: Tensor, batch: int, *rows: int) -> dict[str, Any]:
    """Returns scales, and often lengths and a seed, if the state has whole numbers. rows: heads, rows of a head."""
    whole = not state.is_floating_point()
    lengths = make.one(None, make.ints([make.rng.randint(-1, 99) for _ in range(batch)])) if whole else None
    scales = make.plane(*rows, dtype=torch.float32, layers=1)[0] if whole else None
    if scales is not None:
        scales[1:] = torch.rand(scales[1:].shape, generator=make.generator)
    return {
        "scales": scales, "lengths": lengths, "seed": None if lengths is None else make.one(0, 2**31 - 1),
        "layer": make.one(0, 3), "first_head": make.one(0, 7),
    }  # fmt: skip


def conv_step(make: Maker) -> Case:
    """Returns a launch on one or two blocks of channels. In the states either taps or channels are contiguous."""
    channels, taps = make.one(5, 8, 600), make.one(2, 4)
    if make.one(True, False):
        state, rows = memory(make, taps - 1, channels)
    else:
        state, rows = memory(make, channels, taps - 1)
        state = state.transpose(1, 2)
    dtype = make.one(*DTYPES)
    inputs = {
        "x": make.normal(len(rows), TOKENS, channels, dtype=dtype),
        "weight": make.normal(channels, taps, dtype=dtype),
        "bias": make.one(None, make.normal(channels, dtype=dtype)),
    }
    tail = make.one(None, ConvTail(ring(make, channels, dtype=dtype)))
    return decode(make, "conv_step", inputs, state, rows, tail)


def gated_delta_step(make: Maker) -> Case:
    """Returns a launch on two heads with two blocks of values each. Decays are per head or per key channel."""
    turned, by_key, rates = make.one(True, False), make.one(True, False), make.one(True, False)
    whole = make.one(None, None, torch.int8, torch.int16)
    key = 16 if whole else 4
    state, rows = memory(make, 2, *((34, key) if turned else (key, 34)), whole=whole)
    state = state.mT if turned else state
    head, dtype, keys = (len(rows), TOKENS), make.one(*DTYPES), 2 if by_key else 1
    owner = (2, key) if by_key else (2,)
    inputs = {
        "q": make.normal(*head, keys, key, dtype=dtype), "k": make.normal(*head, keys, key, dtype=dtype),
        "v": make.normal(*head, 2, 34, dtype=dtype),
        "decay": make.normal(*head, *owner).abs_().neg_(), "beta": make.normal(*head, 2),
        "a_log": make.normal(2) if rates else None, "sigmoid": make.one(True, False),
        "dt_bias": make.one(None, make.normal(*owner)) if rates else None, "normalize": make.one(True, False),
    }  # fmt: skip
    inputs |= scaled(make, state, len(rows), 2, 34)
    kept = ring(make, keys, key, dtype=dtype), ring(make, 2, 34, dtype=dtype), ring(make, *owner), ring(make, 2)
    tail = make.one(None, DeltaTail(*kept))
    return decode(make, "gated_delta_step", inputs, state, rows, tail)


def conv_delta_step(make: Maker) -> Case:
    """Returns a gated delta step whose q, k and v are slices of what a convolution step writes to a wider tensor."""
    delta = gated_delta_step(make)
    given = delta.arguments
    parts = {name: given[name][0, 0].numel() for name in "qkv"}
    channels, (batch, _, *_), dtype = sum(parts.values()), given["q"].shape, given["q"].dtype
    x = make.normal(batch, TOKENS, channels, dtype=dtype)
    out = make.empty(batch, TOKENS, -(-channels // 8) * 8, dtype=dtype)[..., :channels]
    for name, part in zip(parts, out.split(list(parts.values()), -1), strict=True):
        given[name] = part.unflatten(-1, given[name].shape[2:])
    windows = Memory((3, channels), make.one(*DTYPES), CPU, make.generator).state
    windows[1:] = torch.randn(windows[1:].shape, generator=make.generator).to(windows)
    tail = ConvTail(ring(make, channels, dtype=dtype)) if given["tail"] else None
    weights = {"weight": make.normal(channels, 4, dtype=dtype), "state": windows, "out": out, "tail": tail}
    conv = given | {"x": x, "bias": make.one(None, make.normal(channels, dtype=dtype)), **weights}
    limits, marks = delta.limits, given["marks"]
    slots = [*given["write"].tolist(), *given["snapshot"].tolist(), *(() if marks is None else marks.slot.tolist())]
    null = [*limits.null, windows[0], *(kept[0] for kept in tail or ())]
    changes = [out, *(windows[slot] for slot in slots if 0 < slot < SLOTS), *(kept[1:] for kept in tail or ())]
    arguments = {"conv": in_order("conv_step", conv), "delta": in_order("gated_delta_step", given)}
    return Case(
        "conv_delta_step", arguments, Limits(null=null, changes=[*(limits.changes or ()), *changes]), exact=False
    )


def selective_step(make: Maker) -> Case:
    """Returns a launch on two heads, with one `a` per head or one per element of the state."""
    tied, turned = make.one((True, False), (True, True), (False, False))
    dim, states = (40, 64) if tied else (5, 128)
    whole = make.one(None, None, torch.int8, torch.int16) if tied else None
    shape = (states, dim) if turned else (dim, states)
    state, rows = memory(make, 2, *shape, whole=whole)
    state = state.mT if turned else state
    head, dtype, owner = (len(rows), TOKENS), make.one(*DTYPES), (2,) if tied else (2, dim)
    inputs = {
        "x": make.normal(*head, 2, dim, dtype=dtype), "dt": make.normal(*head, *owner).abs_(),
        "a": make.normal(*owner, *(() if tied else (states,))).abs_().neg_(),
        "b": make.normal(*head, 1, states, dtype=dtype), "c": make.normal(*head, 1, states, dtype=dtype),
        "d": make.one(None, make.normal(*owner)), "z": make.one(None, make.normal(*head, 2, dim, dtype=dtype)),
        "dt_bias": make.one(None, make.normal(*owner)), "softplus": make.one(True, False),
        "dt_min": make.one(None, 0.1), "dt_max": make.one(None, 0.8),
    }  # fmt: skip
    inputs |= scaled(make, state, len(rows), 2, dim)
    kept = ring(make, 2, dim, dtype=dtype), ring(make, 1, states, dtype=dtype), ring(make, *owner)
    tail = make.one(None, SelectiveTail(*kept))
    return decode(make, "selective_step", inputs, state, rows, tail)


def mamba3_step(make: Maker) -> Case:
    """Returns a launch on two heads of one group. Each of the four planes has its own memory."""
    dtype, angles, (dim, states) = make.one(*DTYPES), make.one(4, 8), make.one((8, 16), (16, 128))
    shapes = {"angle": (2, angles), "ssm": (2, dim, states), "k": (2, states), "v": (2, dim)}
    dtypes = {"angle": torch.float32} | {name: make.one(*DTYPES) for name in ("ssm", "k", "v")}
    rows = steps(make, make.one(1, 2, 2))
    head = len(rows), TOKENS
    state = Mamba3State(**{name: make.plane(*shape, dtype=dtypes[name], layers=1)[0] for name, shape in shapes.items()})
    for plane in state:
        plane[1:] = torch.randn(plane[1:].shape, generator=make.generator).to(plane)
    inputs = {
        "x": make.normal(*head, 2, dim, dtype=dtype),
        **{name: make.normal(*head, 1, states, dtype=dtype) for name in ("b", "c")},
        "dt": make.normal(*head, 2).abs_(), "decay": make.normal(*head, 2).abs_().neg_(), "trap": make.normal(*head, 2),
        "rotation": make.normal(*head, angles, dtype=dtype), "b_bias": make.normal(2, states),
        "c_bias": make.normal(2, states), "d": make.normal(2), "z": make.one(None, make.normal(*head, 2, dim)),
    }  # fmt: skip
    return decode(make, "mamba3_step", inputs, state, rows)


def gather_slots(make: Maker) -> Case:
    """Returns a launch on slots of an odd size, of a multiple of 16 bytes, or of more than 4096 elements."""
    dtype, slots = make.one(*ANYTHING), make.slots(3)
    plane = make.plane(*make.one((5,), (3, 4), (16,), (4100,)), dtype=dtype)
    out = make.empty(2, len(slots), *plane.shape[2:], dtype=dtype)
    arguments = {"plane": plane, "slots": make.ints(slots, make.one(True, False)), "out": out}
    return Case("gather_slots", arguments, Limits(null=[plane[:, 0]], changes=[out]))


def scatter_slots(make: Maker) -> Case:
    dtype, slots = make.one(*ANYTHING), make.slots(3)
    plane = make.plane(*make.one((5,), (3, 4), (16,), (4100,)), dtype=dtype)
    batch = make.empty(2, len(slots), *plane.shape[2:], dtype=dtype)
    arguments = {"plane": plane, "slots": make.ints(slots, make.one(True, False)), "batch": batch}
    stored = [plane[:, slot] for slot in slots if 0 < slot < SLOTS]
    return Case("scatter_slots", arguments, Limits(null=[plane[:, 0]], changes=stored))


def scatter_states(make: Maker) -> Case:
    """Returns a launch on three rows, one of them without tokens.

    Chunks begin anew with each row or run through the packed batch. The memory order of states and windows varies.
    """
    lengths, chunk, flat, transposed = [4, 0, make.one(3, 5)], 2, make.one(True, False), make.one(True, False)
    dtype, given = make.one(*DTYPES), make.one(*DTYPES)
    plane, conv = make.plane(2, 3, 5, dtype=dtype), make.plane(3, 8, dtype=dtype)
    if make.one(True, False):
        conv = make.plane(8, 3, dtype=dtype).transpose(2, 3)
    for held in (plane, conv):
        held.copy_(torch.randn(held.shape, generator=make.generator))
    slots = make.rng.sample(range(1, SLOTS), SLOTS - 1)
    read, write = slots[:3], slots[3:6]
    some = make.one(0, 2, 2, 3, -1), make.one(1, 2, 4, lengths[2], 9), make.one(0, -1, SLOTS)
    entries, offsets, kept = zip(*sorted([(0, 2, slots[6]), some]), strict=True)
    marks = StepMarks(make.ints([2]), make.ints(list(entries)), make.ints(list(offsets)), make.ints(list(kept)))
    starts, first = starts_of(lengths), first_of(lengths, chunk)
    pieces = -(-sum(lengths) // chunk) if flat else first[-1]
    h = make.normal(2, pieces, 2, *((5, 3) if transposed else (3, 5)), dtype=given)
    arguments = {
        "marks": marks, "starts": make.ints(starts, make.one(True, False)), "read": make.ints(read),
        "write": make.ints(write), "plane": plane, "h": make.one(None, h), "first": None if flat else make.ints(first),
        "chunk": chunk, "transposed": transposed, "conv": conv,
        "inputs": make.one(None, make.normal(2, sum(lengths), 8, dtype=given)),
    }  # fmt: skip
    changes = [held[:, slot] for held in (plane, conv) for slot in kept if 0 < slot < SLOTS]
    return Case("scatter_states", arguments, Limits(null=[plane[:, 0], conv[:, 0]], changes=changes), exact=False)


def records(make: Maker) -> RecordMap:
    """Returns records of a large and a small plane, with padding. The kernel moves some tiles in several steps."""
    unit, body = make.one(16, 8, 4, 2, 1), 0
    sizes = (560 + 32 + unit, 16 + unit)
    blocks = tuple(make.plane(nbytes, dtype=torch.uint8, gap=make.one(0, 16)) for nbytes in sizes)
    pieces = []
    for layer in range(2):
        for block, nbytes in enumerate(sizes):
            pieces += [RecordPiece(block, layer, at, min(560, nbytes - at), body + at) for at in range(0, nbytes, 560)]
            body += -(-nbytes // 16) * 16
    tiles = [(blocks[p.block][p.layer, 0].data_ptr() + p.start, blocks[p.block].stride(1), *p[3:]) for p in pieces]
    table = make.empty(len(tiles), 4, dtype=torch.int64).copy_(torch.tensor(tiles))
    return RecordMap(table, blocks, tuple(pieces), body, unit)


def entries(make: Maker) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """Returns the arguments for up to 23 entries on 7 records, and (place, slot) of each entry with a valid place.

    A place is the number of a record; a slot is 0 if the entry names no valid one.
    """
    slots, idle = [max(slot, -1) for slot in make.slots(5)], make.one(0, 15)
    places = make.rng.sample([-1, 0, 1, 2, 3, 4, 5, 6, 7, 2**31 - 1], 8)[: len(slots) + 3]
    places += [-1] * (len(slots) + 3 - len(places))
    wide, held = make.one(True, False), None
    named = [*slots, 0, -1, SLOTS]
    if make.one(True, False):
        order = make.rng.sample(range(1, len(slots) + 1), len(slots))
        held = make.ints([make.one(0, 2), *(slots[order.index(at)] for at in range(1, len(slots) + 1))])
        named = [*order, 0, -1, len(slots) + 1]
    arguments = {
        "slots": held,
        "index": make.ints([0] * idle + named, wide),
        "places": make.ints([-1] * idle + places, make.one(True, False)),
    }
    valid_slots = [*(slot if 0 < slot < SLOTS else 0 for slot in slots), 0, 0, 0]
    return arguments, [(place, slot) for place, slot in zip(places, valid_slots, strict=True) if 0 <= place < 7]


def _move_records(make: Maker, op: str, name: str) -> Case:
    """Returns a launch of `op` on all tiles of the records. name: the argument of `op` that takes the records."""
    record_map, (arguments, due) = records(make), entries(make)
    held = make.empty(7, record_map.nbytes + make.one(0, 16), dtype=torch.uint8)[:, : record_map.nbytes]
    moved, blocks = record_map.pieces, record_map.blocks
    if op == "pack_slots":
        changes = [held[place, p.offset : p.offset + p.length] for place, _ in due for p in moved]
    else:
        changes = [
            blocks[p.block][p.layer, slot, p.start : p.start + p.length] for _, slot in due if slot for p in moved
        ]
    limits = Limits(reach=blocks, null=[block[:, 0] for block in blocks], changes=changes)
    arguments = {"records": record_map, **arguments, name: held}
    return Case(op, arguments, limits, copying=CopyConfig(entries=16, lanes=128, programs_per_sm=make.one(2, 3)))


def pack_slots(make: Maker) -> Case:
    return _move_records(make, "pack_slots", "out")


def unpack_slots(make: Maker) -> Case:
    return _move_records(make, "unpack_slots", "source")


def _move_int8(make: Maker, op: str, name: str) -> Case:
    """Returns a launch of `op`, on a plane of two layers.

    A column is all elements that share a scale. Columns are contiguous or strided; some are longer than a block of the
    kernel.
    """
    dtype, (shape, axis) = make.one(*DTYPES), make.one(((2, 3, 5), 2), ((2, 3, 8), 1), ((2, 1030), 1), ((70, 70), 0))
    plane = make.plane(*shape, dtype=dtype)
    plane.copy_(torch.randn(plane.shape, generator=make.generator))
    values, scales = prod(shape), prod(shape) // shape[axis]
    at = -(-values // 16) * 16 + 32
    layer_bytes = at + -(-4 * scales // 16) * 16
    table = make.empty(2, 2, dtype=torch.int64)
    table.copy_(torch.tensor([(layer.data_ptr(), layer.stride(0) * dtype.itemsize) for layer in plane]))
    record_map = ScaledMap(table, (plane,), axis, 16, 16 + at, layer_bytes, 16 + 2 * layer_bytes, 16)
    arguments, due = entries(make)
    held = make.empty(7, record_map.nbytes + make.one(0, 16), dtype=torch.uint8)[:, : record_map.nbytes]
    stored = []
    for layer in range(2):
        start = 16 + layer * layer_bytes
        numbers = torch.randn(7, scales, generator=make.generator)
        held[:, start + at : start + at + 4 * scales] = numbers.view(torch.uint8).view(7, -1)
        stored += [held[:, start : start + values], held[:, start + at : start + at + 4 * scales]]
    if op == "pack_int8":
        changes = [part[place] for place, _ in due for part in stored]
    else:
        changes = [plane[layer, slot] for _, slot in due if slot for layer in range(2)]
    arguments = {"planes": record_map, **arguments, name: held}
    return Case(op, arguments, Limits(reach=[plane], null=[plane[:, 0]], changes=changes))


def pack_int8(make: Maker) -> Case:
    return _move_int8(make, "pack_int8", "out")


def unpack_int8(make: Maker) -> Case:
    return _move_int8(make, "unpack_int8", "source")
