"""Launches every operation with all arguments that may differ between two calls of one model, to see Triton's keys.

No test reads the results, so all entries of the batches, 1 to 256, are padding. Columns, inputs and outputs start
anywhere in their memory. Integers have all values that Triton may specialise on.
"""

from collections.abc import Callable, Iterator
from importlib import import_module
from math import prod
from typing import Any

import torch
from torch import Tensor

from memstate.kernels.dispatch import OPS
from memstate.kernels.levels import bitmap_ints
from memstate.kernels.tables import (
    HEADER_INTS,
    ConvTail,
    Cursor,
    DeltaTail,
    Mamba3State,
    PlaneMap,
    RecordMap,
    RecordPiece,
    Registers,
    RingMap,
    Rules,
    ScaledMap,
    SelectiveTail,
    StepMarks,
    StepRecord,
    Strategy,
    TailRecord,
)
from tests.support.launch_keys import VALUES, Keys, Recorder

SIZES = (*range(1, 18), *(2**k + near for k in range(5, 8) for near in (-1, 0, 1)), 255, 256)


def ints(n: int, start: int = 0) -> Tensor:
    """Returns a column of `n` zeros (padding) that begins `start` elements after the start of its memory."""
    return torch.zeros(start + n, dtype=torch.int32)[start:]


def shifted(*shape: int, start: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Returns a contiguous tensor that begins `start` elements after the start of its memory."""
    return torch.zeros(start + prod(shape), dtype=dtype)[start:].view(shape)


def registers(capacity: int) -> Registers:
    return Registers(*(ints(64) for _ in range(5)), ints(bitmap_ints(capacity)), ints(16), capacity)


def record(batch: int) -> StepRecord:
    """Returns the columns of a step. As in a manager, each begins at a multiple of 256 bytes."""
    return StepRecord(*(ints(256)[:batch] for _ in StepRecord._fields))


def marks(room: int = 64, start: int = 0) -> StepMarks:
    return StepMarks(*(ints(size, start) for size in (1, room, room, room)))


def packet(batch: int, columns: int) -> Tensor:
    """Returns a packet without entries. Behind its header it has room for the columns of a batch."""
    return ints(HEADER_INTS + columns * -(-batch // 4) * 4)


def planes(tiles: int, capacity: int) -> PlaneMap:
    blocks = (torch.zeros(1, capacity + 1, 16, dtype=torch.uint8),)
    return PlaneMap(torch.zeros(tiles, 3, dtype=torch.int64), blocks, unit=16)


def states(*slot: int, units: int, slots: int = 8) -> Tensor:
    """Returns fp32 states, `slot ...`. A slot begins `units` times 16 bytes after the one before it."""
    stride = 4 * units
    return torch.zeros(slots * stride).as_strided((slots, *slot), (stride, *torch.empty(slot).stride()))


def ring(*token: int, units: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the rings of two rows, each with `units` places, with a gap between the rows."""
    one = torch.zeros(units, *token, dtype=dtype)
    apart = -(-one.nbytes // 16) * 16 // dtype.itemsize + 8 * units
    return torch.zeros(2 * apart, dtype=dtype).as_strided((2, *one.shape), (apart, *one.stride()))


def cursor(batch: int, start: int) -> Cursor:
    return Cursor(*(ints(batch, start + i) for i in range(4)))


def claim(op: Callable[..., Any]) -> None:
    for n in SIZES:
        for words in VALUES[:4]:
            op(ints(bitmap_ints(32 * words - 1)), n, ints(16))


def release(op: Callable[..., Any]) -> None:
    for n in SIZES:
        for capacity in VALUES:
            op(ints(bitmap_ints(capacity)), ints(n), capacity, ints(16))
        op(ints(bitmap_ints(64)), ints(n, start=3), 64, ints(16))  # last ids of a group, not aligned


def ownership(op: Callable[..., Any]) -> None:
    for capacity in (1, 2, 16, 17, 512, 1000):
        for size in VALUES:
            op(registers(capacity), ints(HEADER_INTS + size))


def resolve(op: Callable[..., Any]) -> None:
    for n in (*SIZES, 4096):
        op(registers(64), ints(n), ints(n))


def audit(op: Callable[..., Any]) -> None:
    for capacity in VALUES:
        op(registers(capacity), ints(capacity + 1))


def plan(op: Callable[..., Any]) -> None:
    for batch in SIZES:
        for value in (*VALUES, 2**31 - 1):
            file = registers(min(value, 1000))
            op(file, packet(batch, 2), record(batch), marks(), Rules(Strategy.LAZY, 2, value, True))
    for room in VALUES[:6]:
        op(registers(9), packet(3, 2), record(3), marks(room), Rules(Strategy.LAZY, 2, 4, True))


def copy_slots(op: Callable[..., Any]) -> None:
    for n in SIZES:
        for value in VALUES:
            op(planes(value, 4096 // value), ints(n), ints(n))
        op(planes(1, 8), ints(n, start=1), ints(n, start=3))


def zero_slots(op: Callable[..., Any]) -> None:
    for n in SIZES:
        for value in VALUES:
            op(planes(value, 4096 // value), ints(n))
        op(planes(1, 8), ints(n, start=3))


def run_data(op: Callable[..., Any]) -> None:
    for value in VALUES:
        op(planes(value, 4096 // value), ints(100), ints(HEADER_INTS + value))


def run_rows(op: Callable[..., Any]) -> None:
    for value in VALUES:
        op(planes(value, 4096 // value), ints(HEADER_INTS + value))


def keep_path(op: Callable[..., Any]) -> None:
    for batch in SIZES:
        for depth in VALUES[:6]:
            blocks = (torch.zeros(1, depth + 1, 64, dtype=torch.uint8),)
            rings = RingMap(torch.zeros(2, 4, dtype=torch.int64), blocks, (4,))
            nodes = ints(batch * depth, batch % 4).view(batch, depth)
            op(rings, TailRecord(*(ints(256) for _ in TailRecord._fields)), nodes)


def trees(batch: int, units: int, start: int) -> Tensor:
    return ints(batch * units, start).view(batch, units)


def steps() -> Iterator[tuple[int, int, int, int]]:
    """Yields (batch, tokens, 16-byte units from slot to slot, elements of memory before the first input)."""
    yield from ((batch, 1, 17, batch % 8) for batch in SIZES)
    yield from ((3, tokens, 17, 0) for tokens in VALUES)
    yield from ((3, 2, units, 5) for units in VALUES)


def columns(batch: int, start: int) -> dict[str, Tensor]:
    return {name: ints(batch, start) for name in ("read", "write", "snapshot", "tokens")}


def conv_step(op: Callable[..., Any]) -> None:
    """Launches plain steps, and steps with marks, with a tail, and with trees.

    A token's inputs have 16 bytes. Those of real models have a multiple of 16, so each entry of a batch begins aligned.
    Other sizes would give other keys.
    """
    for batch, tokens, units, start in steps():
        x, weight, bias = shifted(batch, tokens, 8, start=8 * start), shifted(8, 2), shifted(8)
        out = shifted(batch, tokens, 8, start=8 * start + 8)
        step = columns(batch, start) | {"state": states(1, 8, units=units + 1)}
        op(x, weight, bias, **step, out=out)
        op(x, weight, bias, **step)
        op(x, weight, bias, **step, marks=marks(start=start))
        tail = {"tail": ConvTail(ring(8, units=units, dtype=x.dtype)), "cursor": cursor(batch, start)}
        op(x, weight, bias, **step, **tail)
        op(x, weight, bias, **step, **tail, parents=trees(batch, units, start))


def gated_delta_step(op: Callable[..., Any]) -> None:
    """Launches plain steps, and steps with marks, a tail, trees, sliced inputs, and gates computed in the kernel."""
    for batch, tokens, units, start in steps():
        q, k, v, out = (shifted(batch, tokens, 1, 2, start=start + i) for i in range(4))
        decay, beta = (shifted(batch, tokens, 1, start=start + i, dtype=torch.float32) for i in range(2))
        step = columns(batch, start) | {"state": states(1, 2, 2, units=units)}
        op(q, k, v, decay, beta, **step, scale=0.3, out=out)
        wide = shifted(batch, tokens, 6 + units, start=start)
        op(*(wide[..., 2 * i : 2 * i + 2].unflatten(2, (1, 2)) for i in range(3)), decay, beta, **step)
        op(q, k, v, decay, beta, **step)
        op(q, k, v, decay, beta, **step, marks=marks(start=start))
        kept = (ring(1, 2, units=units, dtype=x.dtype) for x in (k, v)), (ring(1, units=units) for _ in range(2))
        tail = {"tail": DeltaTail(*kept[0], *kept[1]), "cursor": cursor(batch, start)}
        op(q, k, v, decay, beta, **step, **tail)
        op(q, k, v, decay, beta, **step, **tail, parents=trees(batch, units, start))
        weight = shifted(1, 1, 1, start=start)[0, 0]
        op(q, k, v, decay, beta, **step, a_log=weight, dt_bias=weight, sigmoid=True, normalize=True)


def selective_step(op: Callable[..., Any]) -> None:
    """Launches plain steps, and steps with marks, with a tail, and with trees."""
    for batch, tokens, units, start in steps():
        x, b, c, z, out = (shifted(batch, tokens, 1, 2, start=start + i) for i in range(5))
        dt = shifted(batch, tokens, 1, start=start, dtype=torch.float32)
        step = columns(batch, start) | {"state": states(1, 2, 2, units=units)}
        model = {name: torch.zeros(1) for name in ("a", "d", "dt_bias")} | {"softplus": True}
        op(x=x, b=b, c=c, z=z, dt=dt, **model, **step, out=out)
        op(x=x, b=b, c=c, z=z, dt=dt, **model, **step, marks=marks(start=start))
        kept = SelectiveTail(*(ring(1, 2, units=units, dtype=x.dtype) for _ in range(2)), ring(1, units=units))
        tail = {"tail": kept, "cursor": cursor(batch, start)}
        op(x=x, b=b, c=c, z=z, dt=dt, **model, **step, **tail)
        op(x=x, b=b, c=c, z=z, dt=dt, **model, **step, **tail, parents=trees(batch, units, start))


def mamba3_step(op: Callable[..., Any]) -> None:
    """Launches plain steps, and steps with marks."""
    shapes = (1, 4), (1, 4, 8), (1, 8), (1, 4)
    for batch, tokens, units, start in steps():
        x, z, out = (shifted(batch, tokens, 1, 4, start=start + i) for i in range(3))
        b, c = (shifted(batch, tokens, 1, 8, start=8 * (start + i)) for i in range(2))
        dt, decay, trap = (shifted(batch, tokens, 1, start=start + i, dtype=torch.float32) for i in range(3))
        given = x, b, c, dt, decay, trap, shifted(batch, tokens, 4, start=start), *torch.zeros(2, 1, 8), torch.zeros(1)
        step = columns(batch, start) | {"state": Mamba3State(*(states(*shape, units=units + 7) for shape in shapes))}
        op(*given, **step, z=z, out=out)
        op(*given, **step, z=z, marks=marks(start=start))


def plane(*block: int, units: int, slots: int = 6) -> Tensor:
    """Returns fp32 states, `layer slot ...`. A slot begins `units` times 16 bytes after the one before it."""
    one = states(*block, units=units, slots=2 * slots)
    return one.as_strided((2, slots, *block), (slots * one.stride(0), *one.stride()))


def gather_slots(op: Callable[..., Any]) -> None:
    for batch, _, units, start in steps():
        op(plane(4, units=units), ints(batch, start), torch.zeros(2, batch, 4))
    for tiles in (1, 2, 17):  # tiles (pieces of 4096 elements) per slot
        op(plane(4096 * tiles, units=1024 * tiles, slots=2), ints(1), torch.zeros(2, 1, 4096 * tiles))


def scatter_slots(op: Callable[..., Any]) -> None:
    for batch, _, units, start in steps():
        op(plane(4, units=units), ints(batch, start), torch.zeros(2, batch, 4))


def nowhere(n: int, start: int = 0) -> Tensor:
    """Returns `n` places, all -1: no record."""
    return ints(n, start).sub_(1)


def scatter_states(op: Callable[..., Any]) -> None:
    """Launches with states and windows. Chunks begin anew with each row."""
    for batch, tokens, units, start in steps():
        rows = {"starts": ints(batch + 1, start), "read": ints(batch, start), "write": ints(batch, start + 1)}
        held = {"plane": plane(1, 2, 2, units=units), "conv": plane(2, 4, units=max(2, units))}
        given = {"h": torch.zeros(2, tokens, 1, 2, 2), "inputs": torch.zeros(2, tokens, 4)}
        op(marks(start=start), **rows, **held, **given, first=ints(batch + 1, start + 2), chunk=tokens)


def records(tiles: int, capacity: int) -> RecordMap:
    """Returns a map between planes and records, of `tiles` tiles without bytes."""
    blocks = (torch.zeros(1, capacity + 1, 16, dtype=torch.uint8),)
    pieces = tuple(RecordPiece(0, 0, 0, 0, 0) for _ in range(tiles))
    return RecordMap(torch.zeros(tiles, 4, dtype=torch.int64), blocks, pieces, 16)


def _move_records(op: Callable[..., Any]) -> None:
    """Launches with slots in registers and with slots by id. The stride of records varies."""
    for n in SIZES:
        for value in VALUES:
            held = torch.zeros(2, 16 * value, dtype=torch.uint8)[:, :16]
            slots = ints(value) if n % 2 else None
            op(records(value, 4096 // value), slots, ints(n, start=1), nowhere(n, start=3), held)
            op(records(2, 8), slots, ints(n), nowhere(n), held[:1])
            op(records(2, 8), slots, ints(n), nowhere(n), held[1:])


pack_slots = unpack_slots = _move_records


def _move_int8(op: Callable[..., Any]) -> None:
    """Launches with slots in registers and with slots by id. The strides of planes and records vary."""
    for batch, _, units, start in steps():
        one = plane(2, 4, units=max(2, units))
        map_of = ScaledMap(torch.zeros(2, 2, dtype=torch.int64), (one,), 1, 16 * units, 16 * units + 16, 48, 160, 16)
        held = torch.zeros(2, 16 * max(10, units), dtype=torch.uint8)[:, :160]
        slots = ints(units) if batch % 2 else None
        op(map_of, slots, ints(batch, start), nowhere(batch, start + 1), held)
        op(map_of, slots, ints(batch), nowhere(batch), held[1:])


pack_int8 = unpack_int8 = _move_int8


LAUNCHES = {op: globals()[op] for op in OPS if op in globals()}  # op -> the function of its name


def run_op(recorder: Recorder, op: str) -> Keys | str:
    """Returns the keys of all launches of an operation, or a line that says why there are none."""
    try:
        call = getattr(import_module(f"memstate.kernels.{OPS[op]}"), op)
        with recorder.recorded() as keys:
            LAUNCHES[op](call)
    except Exception as error:  # one broken operation must not hide the others
        return f"{op}: {type(error).__name__}: {error}"
    return keys
