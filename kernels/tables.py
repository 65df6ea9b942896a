"""Defines the tuples of tensors that kernels and references share. Knows no kernel, no allocator and no Triton."""

from enum import IntEnum
from typing import NamedTuple

from torch import Tensor

NULL_SLOT = 0
NULL_ROW = 0
REGISTERS_PER_ROW = 3  # live, lane 0, lane 1
ACCESS_BYTES = 16  # the widest load or store of one lane
RECORD_ALIGNMENT = 16  # bytes; addresses of records, and distances between them, are multiples of it
TILE_BYTES = 32768  # bytes of a tile: one item of work of the copy kernel
HEADER_INTS = 16
LIMIT_CELL = 7  # cell of a packet's header: limit of the optional claims of a plan
DEFER_CELL = 15  # cell of a packet's header: `defer` of `rules.fold`
AUDIT_FREE = 1 << 30  # added to the number of owners of a slot if the slot is free in the bitmap
ZERO_SOURCE = -1  # source of an entry of DATA: fill the destination with initial values
ROW_CODE = -1  # in an entry of DATA, ROW_CODE - r stands for the memory of row r
LEVELS = 127  # levels of int8 on either side of 0
SMALLEST_SCALE = 2.0**-126  # below this, float32 numbers have fewer digits
LARGEST_SCALE = float.fromhex("0x1.0204060000000p+121")  # the largest float32 whose product with LEVELS is finite


class Count(IntEnum):
    """Cells of the device counters; those from CLAIMED to MOVE_FULL only grow."""

    FREE = 0
    RESERVE = 1
    CLAIMED = 2
    RELEASED = 3
    DEGRADED = 4
    DOUBLE_RELEASE = 5
    OUT_OF_RANGE = 6
    CLAIM_FULL = 7
    CLAIM_SHORT = 8
    MOVE_FULL = 9
    OFFENDER = 10  # first slot or register of the first fault, 0 = none
    OFFENDER_KIND = 11  # `Count` of the first fault


COUNTERS = 16


class Section(IntEnum):
    """Sections of a command packet: cell s of the header counts its entries, cell 8 + s says where it starts.

    The batch always starts behind the header. A move to a register runs in front of the releases. A move to the
    negative number of a register runs behind them, with the claims. A plan sets the counts of all other sections to 0,
    because their changes are made and the marks are resolved.
    """

    MOVES = 0
    RELEASES = 1
    CLAIMS = 2
    WRITES = 3
    DATA = 4
    BATCH = 5
    MARKS = 6


class Strategy(IntEnum):
    """Tracking strategies as the kernels know them; the rules are in `memstate.requests.tracking`."""

    NONE = 0
    PING_PONG = 1
    LAZY = 2
    REDIRECT = 3


class Rules(NamedTuple):
    """The rules that plans follow.

    Args:
        strategy: a `Strategy`.
        lanes: lanes of a row.
        every: tokens between boundaries.
        in_place: whether the snapshot overwrites the only lane with a slot if no other slot is left.
        pad: number that a plan stores as read, write and snapshot slot if there is none: 0, or a negative number.
        tail: tokens of a row that one step may keep in its tail; 0: rows have no tail.
    """

    strategy: int
    lanes: int
    every: int
    in_place: bool
    pad: int = 0
    tail: int = 0


class PlaneMap(NamedTuple):
    """The bytes of a slot in memory.

    Args:
        tiles: one row for each tile, a range of bytes of one layer of a plane, int64 `tile 3`: address in slot 0,
            distance from slot to slot, length. All are in bytes, and multiples of `unit`. A negative length: the tile
            is copied, but never filled with an initial pattern.
        blocks: uint8 views `layer slot byte`, one per tensor that holds layers of a plane, for the reference.
        unit: bytes that one lane of a kernel moves: 16, or 8, 4, 2 or 1 if the layout of foreign memory needs it.
        patterns: for each of `blocks`, 64 bits that are repeated to fill a new slot; 0 for zeros, None if nothing fills
            it.
        fills: int64 `tile`, the pattern of each tile; None if all are zeros.
    """

    tiles: Tensor
    blocks: tuple[Tensor, ...]
    unit: int = 16
    patterns: tuple[int | None, ...] = ()
    fills: Tensor | None = None


class RecordPiece(NamedTuple):
    """One tile of a `RecordMap` without an address: a range of bytes of one layer, and its place in a record.

    Args:
        block: index of the tensor in `RecordMap.blocks`.
        layer: layer of that tensor.
        start: first byte of the tile in the layer of a slot.
        length: bytes of the tile.
        offset: bytes from the start of the body of a record.
    """

    block: int
    layer: int
    start: int
    length: int
    offset: int


class RecordMap(NamedTuple):
    """The bytes of a slot in memory, and in the body of a record, layer by layer.

    Args:
        tiles: int64 `tile 4`: address of the tile inside slot 0, slot stride, length, and offset in the body; bytes,
            multiples of `unit`.
        blocks: uint8 `layer slot byte`, one per tensor that holds layers of a plane.
        pieces: the tiles, for the reference.
        nbytes: bytes of the body.
        unit: bytes that one lane of a kernel moves, up to 16.
    """

    tiles: Tensor
    blocks: tuple[Tensor, ...]
    pieces: tuple[RecordPiece, ...]
    nbytes: int
    unit: int = 16

    @property
    def capacity(self) -> int:
        """The highest slot; 0 if no plane has bytes."""
        return self.blocks[0].shape[1] - 1 if self.blocks else 0


class ScaledMap(NamedTuple):
    """A plane of floats that records hold as int8, with one float32 scale for all values along one axis.

    Args:
        layers: int64 `layer 2`: address of the layer inside slot 0, and slot stride; bytes, multiples of `unit`.
        tensors: `layer slot ...`, one per tensor that holds layers of the plane, in order.
        axis: axis of one layer of one slot whose values share a scale.
        values: bytes from the start of the body to the values of layer 0.
        scales: bytes from the start of the body to the scales of layer 0.
        layer_bytes: bytes from one layer to the next.
        nbytes: bytes of the body.
        unit: bytes that one lane of a kernel moves, up to 16.
    """

    layers: Tensor
    tensors: tuple[Tensor, ...]
    axis: int
    values: int
    scales: int
    layer_bytes: int
    nbytes: int
    unit: int = 16

    @property
    def capacity(self) -> int:
        """The highest slot."""
        return self.tensors[0].shape[1] - 1


class Registers(NamedTuple):
    """The register file and the columns of the request table: int32 views into `cells`, plus bitmap and counters.

    Args:
        slots: int32 `register`, the slot of each register, 0 for none. Row r owns 3r (live), 3r+1 and 3r+2 (lanes); the
            registers of snapshots follow the rows.
        labels: int32 `register`, tokens that the state of each register stands for.
        tracked: int32 `row`, length up to which no boundary is due any more: that of the row's newest snapshot under
            Redirect, or the length at which its boundaries begin, such as the end of its prompt.
        source: int32 `row`, the register that the next step reads instead of the live one, 0 for none.
        cells: int32, the memory of the columns above.
        bitmap: int32 `word`, a set bit for each free slot, and its summary; see `memstate.kernels.levels`.
        counters: int32 `COUNTERS`, see `Count`.
        capacity: the highest slot.
        trusted: whether all columns that come with this tuple belong to the library, so that they are not checked.
        pending: int32 `row`, real tokens in the row's tail, behind its state. None if rows have no tail.
        newest: int32 `row`, tokens that the row's newest step put in the tail behind the pending ones. The next plan
            counts, once, how many of them were accepted. None if rows have no tail.
    """

    slots: Tensor
    labels: Tensor
    tracked: Tensor
    source: Tensor
    cells: Tensor
    bitmap: Tensor
    counters: Tensor
    capacity: int
    trusted: bool = False
    pending: Tensor | None = None
    newest: Tensor | None = None


class StepRecord(NamedTuple):
    """The decisions of a plan for a batch, each int32 `batch`; row 0 is padding."""

    rows: Tensor
    tokens: Tensor
    read: Tensor
    write: Tensor
    snapshot: Tensor


class StepMarks(NamedTuple):
    """The marks of a step: offsets inside the step at which states are kept, and the slots that keep them.

    A row may have several marks. Marks ascend by entry, and by offset within an entry. Elements behind the first
    `count` are undefined.

    Args:
        count: the number of marks, int32 `1`.
        entry: entry of the batch that has the mark, int32 `mark`.
        offset: tokens of the step up to the mark, from 1 on, int32 `mark`.
        slot: slot that keeps the state, 0 for none, int32 `mark`.
    """

    count: Tensor  # type: ignore[assignment]  # hides `tuple.count`, which nobody calls
    entry: Tensor
    offset: Tensor
    slot: Tensor


class Mamba3State(NamedTuple):
    """The planes of a layer of Mamba-3, each `slot ..`.

    Args:
        angle: rotation of keys and queries, from -pi to pi, fp32 `head angle`.
        ssm: `head dim state`.
        k: the key of the last token, turned, `head state`.
        v: the value of the last token, `head dim`.
    """

    angle: Tensor
    ssm: Tensor
    k: Tensor
    v: Tensor


class TailRecord(NamedTuple):
    """The decisions of a plan about the tails of a batch; each column is int32, as long as the largest batch.

    Args:
        rows: rows of the batch; `StepRecord.rows` is the start of this column.
        label: label of the state that the step reads.
        pending: real tokens in the tail, behind the label.
        store: see `Cursor.store`.
        length: tokens of the row before the step, `label + pending`.
        accepted: real tokens of the step. A plan sets those that are certain; the sampler, or `accept`, may write
            another number before the next plan.
        batch: entries of the newest plan, int32 `1`.
    """

    rows: Tensor
    label: Tensor
    pending: Tensor
    store: Tensor
    length: Tensor
    accepted: Tensor
    batch: Tensor


class Cursor(NamedTuple):
    """How far the tails of a step's rows are folded into their states: int32 `batch` each.

    Args:
        row: row whose memory has the tail; 0 for none.
        label: label of the state that the step reads. Token n, counted from 0, has place n % ring in the tail.
        pending: real tokens in the tail, behind the label.
        store: number of tokens, first pending ones, then those of the step, after which the state is stored. Later
            tokens stay in the tail, or go there. 0 stores the state that was read, a negative number stores nothing.
    """

    row: Tensor
    label: Tensor
    pending: Tensor
    store: Tensor


class RingMap(NamedTuple):
    """The rings of all tails in memory.

    Args:
        table: int64 `ring 4`: address of the ring of row 0, bytes from row to row, bytes of a place, and bytes of all
            places; multiples of `unit`.
        blocks: uint8 `layer row byte`, one per plane of rings, for the reference.
        places: places of a ring, one number per plane.
        unit: bytes that one lane of a kernel moves, up to 16.
    """

    table: Tensor
    blocks: tuple[Tensor, ...]
    places: tuple[int, ...]
    unit: int = 16


class DeltaTail(NamedTuple):
    """The rings of a layer of the gated delta rule, for tokens that are not in the state yet, each `row ring ...`.

    Args:
        k: input `k` of the op, `row ring key_head key`.
        v: input `v` of the op, `row ring head value`.
        gate: exp of the log decay, fp32 `row ring head` or `row ring head key`.
        beta: beta after its sigmoid, if it has one, fp32 `row ring head`; None if `a` and `b` are given.
        a: input `a` of the op, `row ring key_head key`, or None.
        b: input `b` of the op, `row ring key_head key`, or None.
    """

    k: Tensor
    v: Tensor
    gate: Tensor
    beta: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None


class ConvTail(NamedTuple):
    """The ring of a convolution, for tokens that are not in the window yet.

    Args:
        x: input `x` of the op, `row ring channel`.
    """

    x: Tensor


class SelectiveTail(NamedTuple):
    """The rings of a layer of Mamba-1 or Mamba-2, for tokens that are not in the state yet, each `row ring ...`.

    Args:
        x: input `x` of the op, `row ring head dim`.
        b: input `b` of the op, `row ring group state`.
        dt: dt after bias and softplus, fp32 `row ring head` or `row ring head dim`.
    """

    x: Tensor
    b: Tensor
    dt: Tensor


Tail = ConvTail | DeltaTail | SelectiveTail
