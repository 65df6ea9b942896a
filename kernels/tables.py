"""The tensors that kernels and references share, as plain tuples. Knows no kernel, no allocator and no Triton."""

from enum import IntEnum
from typing import NamedTuple

from torch import Tensor

NULL_SLOT = 0
NULL_ROW = 0
REGISTERS_PER_ROW = 3  # live, lane 0, lane 1
ACCESS_BYTES = 16  # the widest load or store of one lane
RECORD_ALIGNMENT = 16  # bytes of which addresses of records and their distance are multiples
TILE_BYTES = 32768  # one unit of work of the copy kernel
HEADER_INTS = 16
LIMIT_CELL = 7  # of the header of a packet: the optional claims that a plan may make
DEFER_CELL = 15  # and the tokens below which tails are not folded
AUDIT_FREE = 1 << 30  # added to a slot's number of owners where its bit says free
ZERO_SOURCE = -1  # in the data section of a packet: make the destination fresh instead of copying
ROW_CODE = -1  # and ROW_CODE - r is the memory of row r
LEVELS = 127  # of int8, on either side of 0
SMALLEST_SCALE = 2.0**-126  # of smaller ones float32 has fewer digits
LARGEST_SCALE = float.fromhex("0x1.0204060000000p+121")  # the largest of which LEVELS times are finite


class Count(IntEnum):
    """Cells of the device counters; everything after RESERVE only grows."""

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
    OFFENDER_KIND = 11  # the Count of that fault


COUNTERS = 16


class Section(IntEnum):
    """Sections of a command packet: cell s of the header counts its entries, cell 8 + s says where it starts.

    The batch always starts behind the header. A plan sets the counts of the other sections to 0, because their changes
    are made and its marks are resolved.
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
        in_place: whether the only lane is overwritten where no slot is left for another.
        pad: what a plan stores as read, write and snapshot slot where there is none: 0, or a negative number.
        tail: tokens of a row that one step may keep in its tail; 0: rows have no tail.
    """

    strategy: int
    lanes: int
    every: int
    in_place: bool
    pad: int = 0
    tail: int = 0


class PlaneMap(NamedTuple):
    """Where the bytes of a slot lie.

    Args:
        tiles: int64 `tile 3`: address of the tile inside slot 0, slot stride and length; bytes, multiples of `unit`. A
            negative length: the tile is copied, but never made fresh.
        blocks: uint8 views `layer slot byte`, one per tensor that holds layers of a plane, for the reference.
        unit: bytes that one lane of a kernel moves: 16, or 8, 4, 2, 1 where foreign memory is laid out that way.
        patterns: 64 bits for each of `blocks`, which a fresh slot repeats; 0 for zeros, None where none is made fresh.
        fills: int64 `tile`, the pattern of each tile; None where all are zeros.
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
    """Where the bytes of a slot lie, and where in the body of a record; layer by layer.

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
        """The highest slot, 0 where no plane has bytes."""
        return self.blocks[0].shape[1] - 1 if self.blocks else 0


class ScaledMap(NamedTuple):
    """A plane of floats that records hold as int8: values `layer ...`, and one float32 scale for all along an axis.

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
        slots: int32 `register`, the slot each holds, 0 for none. Row r owns 3r (live), 3r+1 and 3r+2 (lanes); the
            registers of snapshots follow the rows.
        labels: int32 `register`, tokens that each state stands for.
        tracked: int32 `row`, the length up to which no boundary is due any more: that of the row's newest snapshot
            (Redirect), or where its own boundaries begin, such as the end of its prompt.
        source: int32 `row`, the register that the next step reads instead of the live one, 0 for none.
        cells: int32, the memory of the columns above.
        bitmap: int32 `word`, a set bit for each free slot, and its summary; see `memstate.kernels.levels`.
        counters: int32 `COUNTERS`, see `Count`.
        capacity: the highest slot.
        trusted: whether the columns that are passed beside this file are the library's own, and are not checked again.
        pending: int32 `row`, tokens behind the row's state that are in its tail and real. None where rows have no tail,
            as for `newest`.
        newest: int32 `row`, tokens that the row's newest step put in the tail behind those. The next plan asks how many
            of them were accepted, once.
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
    """What plan decided for a batch: int32 `batch` each; row 0 marks padding."""

    rows: Tensor
    tokens: Tensor
    read: Tensor
    write: Tensor
    snapshot: Tensor


class Marks(NamedTuple):
    """Where the states inside a step go that are kept besides its last ones: lengths of prompts, known beforehand.

    A row may have several. They ascend by entry, and by offset within an entry. What lies behind the first `count` is
    undefined.

    Args:
        count: the number of marks, int32 `1`.
        entry: entry of the batch, int32 `mark`.
        offset: tokens of the step up to the mark, from 1 on, int32 `mark`.
        slot: slot that keeps the state, 0 for none, int32 `mark`.
    """

    count: Tensor  # type: ignore[assignment]  # a method of tuples, which nobody calls here
    entry: Tensor
    offset: Tensor
    slot: Tensor


class Mamba3State(NamedTuple):
    """What a layer of Mamba-3 keeps, each `slot ..`.

    Args:
        angle: how far keys and queries are turned, from -pi to pi, fp32 `head angle`.
        ssm: `head dim state`.
        k: the key of the last token, turned, `head state`.
        v: its value, `head dim`.
    """

    angle: Tensor
    ssm: Tensor
    k: Tensor
    v: Tensor


class TailRecord(NamedTuple):
    """What plan decided about the tails of a batch: int32, as long as the largest batch, and the size of the batch.

    Args:
        rows: the column that `StepRecord.rows` is the start of.
        label: tokens that the state which the step reads stands for.
        pending: tokens behind it that are in the tail and real.
        store: as `Cursor.store`.
        length: tokens of the row before the step, `label + pending`.
        accepted: tokens of the step that are real. A plan sets it to those that are certain; who knows better writes it
            before the next plan.
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
        label: tokens that the state which the step reads stands for. What is kept of token n, counted from 0, lies at
            n % ring.
        pending: kept tokens behind the label that are real.
        store: the state is stored behind so many tokens, pending ones first. The tokens behind it stay in the tail, or
            go there. 0 stores what was read, a negative number nothing.
    """

    row: Tensor
    label: Tensor
    pending: Tensor
    store: Tensor


class RingMap(NamedTuple):
    """Where the rings of all tails lie.

    Args:
        table: int64 `ring 4`: address of the ring of row 0, bytes from row to row, of a place, and of all places;
            multiples of `unit`.
        blocks: uint8 `layer row byte`, one per plane of rings, for the reference.
        places: tokens of a ring, one number per plane.
        unit: bytes that one lane of a kernel moves, up to 16.
    """

    table: Tensor
    blocks: tuple[Tensor, ...]
    places: tuple[int, ...]
    unit: int = 16


class DeltaTail(NamedTuple):
    """What a layer of the gated delta rule keeps of tokens that are not in the state yet, `row ring ...`.

    Args:
        k: keys as the op gets them, `row ring key_head key`.
        v: values, `row ring head value`.
        gate: exp of the log decay, fp32 `row ring head` or `row ring head key`.
        beta: the rate that the rule takes, fp32 `row ring head`; None beside `a` and `b`.
        a: as the op gets it, `row ring key_head key`, or None.
        b: as `a`.
    """

    k: Tensor
    v: Tensor
    gate: Tensor
    beta: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None


class ConvTail(NamedTuple):
    """What a convolution keeps of tokens that are not in the window yet.

    Args:
        x: inputs as the op gets them, `row ring channel`.
    """

    x: Tensor


class SelectiveTail(NamedTuple):
    """What a layer of Mamba-1 or Mamba-2 keeps of tokens that are not in the state yet, `row ring ...`.

    Args:
        x: inputs as the op gets them, `row ring head dim`.
        b: as the op gets it, `row ring group state`.
        dt: the step that the rule takes, behind bias and softplus, fp32 `row ring head` or `row ring head dim`.
    """

    x: Tensor
    b: Tensor
    dt: Tensor


Tail = ConvTail | DeltaTail | SelectiveTail
