"""The tensors that kernels and references share, as plain tuples. Knows no kernel, no allocator and no Triton."""

from enum import IntEnum
from typing import NamedTuple

from torch import Tensor

if not __name__.startswith("memstate."):
    raise ImportError("import memstate.kernels.tables, not kernels.tables: a second copy would duplicate every kernel")

NULL_SLOT = 0
NULL_ROW = 0
REGISTERS_PER_ROW = 3  # live, lane 0, lane 1
TILE_BYTES = 32768  # one unit of work of the copy kernel
HEADER_INTS = 16
AUDIT_FREE = 1 << 30  # added to a slot's number of owners where its bit says free
ZERO_SOURCE = -1  # in the data section of a packet: zero the destination instead of copying


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
    """Header cells of a command packet: a count and the offset (in int32) where its section starts."""

    MOVES = 0
    RELEASES = 1
    CLAIMS = 2
    WRITES = 3
    DATA = 4
    BATCH = 5


class Strategy(IntEnum):
    """Tracking strategies as the kernels know them; the rules are in `memstate.requests.tracking`."""

    NONE = 0
    PING_PONG = 1
    LAZY = 2
    REDIRECT = 3
    WINDOW = 4  # plan of a speculative step, under any strategy: nothing changes until its tokens are accepted


class Rules(NamedTuple):
    """What plan and accept follow: a `Strategy`, the lanes of a row, tokens between boundaries, and whether the only
    lane is overwritten where no slot is left for another.
    """

    strategy: int
    lanes: int
    every: int
    in_place: bool


class Result(IntEnum):
    """What the results of a step say of one entry of its batch."""

    ALIVE = 0
    ENDED = 1  # by these results
    DEAD = 2  # ended before: the step meant nothing


class PlaneMap(NamedTuple):
    """Where the bytes of a slot lie.

    tiles: int64 `tile 3`: address of the tile inside slot 0, slot stride, length; bytes, multiples of `unit`.
    blocks: uint8 views `layer slot byte`, one per tensor that holds layers of a plane, for the reference.
    unit: bytes that one lane of a kernel moves: 16, or 8, 4, 2, 1 where foreign memory is laid out that way.
    """

    tiles: Tensor
    blocks: tuple[Tensor, ...]
    unit: int = 16


class RecordPiece(NamedTuple):
    """What one tile of a `RecordMap` stands for, without an address: bytes start .. start+length-1 of a layer of a
    block, and where they lie in the body of a record.
    """

    block: int
    layer: int
    start: int
    length: int
    offset: int


class RecordMap(NamedTuple):
    """Where the bytes of a slot lie, and where in the body of a record; layer by layer.

    tiles: int64 `tile 4`: address of the tile inside slot 0, slot stride, length, offset in the body; bytes, multiples
    of `unit`. blocks: uint8 `layer slot byte`, one per tensor that holds layers of a plane. pieces: the tiles, for the
    reference. nbytes: of the body. unit: bytes that one lane of a kernel moves, up to 16.
    """

    tiles: Tensor
    blocks: tuple[Tensor, ...]
    pieces: tuple[RecordPiece, ...]
    nbytes: int
    unit: int = 16


class ScaledMap(NamedTuple):
    """A plane of floats that records hold as int8: values `layer ...` and float32 scales, one for all values along an
    axis.

    layers: int64 `layer 2`: address of the layer inside slot 0, and slot stride; bytes, multiples of `unit`.
    tensors: `layer slot ...`, one per tensor that holds layers of the plane, in order. axis: of one layer of one slot.
    values, scales: where those of layer 0 lie in the body of a record; layer_bytes: from one layer to the next; nbytes:
    of the body.
    """

    layers: Tensor
    tensors: tuple[Tensor, ...]
    axis: int
    values: int
    scales: int
    layer_bytes: int
    nbytes: int
    unit: int = 16


class Registers(NamedTuple):
    """The register file and the columns of the request table: int32 views into `cells`, plus bitmap and counters.

    slots, labels: `register`; row r owns 3r (live), 3r+1 and 3r+2 (lanes); holder registers follow the rows.
    tracked, want, source, generation: `row`.
    """

    slots: Tensor
    labels: Tensor
    tracked: Tensor
    snapshot_at: Tensor
    source: Tensor
    generation: Tensor
    cells: Tensor
    bitmap: Tensor
    counters: Tensor
    capacity: int


class StepRecord(NamedTuple):
    """What plan decided for a batch: int32 `batch` each; row 0 marks padding."""

    rows: Tensor
    tokens: Tensor
    read: Tensor
    write: Tensor
    snapshot: Tensor
    after: Tensor
    generation: Tensor


class Accepted(NamedTuple):
    """What came of a speculative step: int32 `batch` each.

    accepted: tokens of the window that are real, 0 for padding. crossed: tokens up to the boundary inside whose state
    goes to `snapshot`, 0 where none does.
    """

    accepted: Tensor
    crossed: Tensor
