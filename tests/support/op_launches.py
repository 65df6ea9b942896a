"""Launches every operation with all arguments that may differ between two calls of one model, to see Triton's keys.

No test reads the results, so all entries of the batches, 1 to 256, are padding. Columns, inputs and outputs start
anywhere in their memory. Integers have all values that Triton may specialise on.
"""

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch

from memstate.kernels.dispatch import OPS
from memstate.kernels.levels import bitmap_ints
from memstate.kernels.tables import HEADER_INTS, Rules, Strategy
from memstate_tools import arguments
from memstate_tools.arguments import STORES, Step, entries, ints, moved, plane_map, planes, registers, shifted
from tests.support.launch_keys import VALUES, Keys, Recorder

SIZES = (*range(1, 18), *(2**k + near for k in range(5, 8) for near in (-1, 0, 1)), 255, 256)


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
            op(**arguments.plan(batch, Rules(Strategy.LAZY, 2, value, True), capacity=min(value, 1000)))
    for room in VALUES[:6]:
        op(**arguments.plan(3, Rules(Strategy.LAZY, 2, 4, True), capacity=9, room=room))


def copy_slots(op: Callable[..., Any]) -> None:
    for n in SIZES:
        for value in VALUES:
            op(plane_map(value, 4096 // value), ints(n), ints(n))
        op(plane_map(), ints(n, start=1), ints(n, start=3))


def zero_slots(op: Callable[..., Any]) -> None:
    for n in SIZES:
        for value in VALUES:
            op(plane_map(value, 4096 // value), ints(n))
        op(plane_map(), ints(n, start=3))


def run_data(op: Callable[..., Any]) -> None:
    for value in VALUES:
        op(plane_map(value, 4096 // value), ints(100), ints(HEADER_INTS + value))


def run_rows(op: Callable[..., Any]) -> None:
    for value in VALUES:
        op(plane_map(value, 4096 // value), ints(HEADER_INTS + value))


def keep_path(op: Callable[..., Any]) -> None:
    for batch in SIZES:
        for depth in VALUES[:6]:
            op(**arguments.keep_path(batch, depth))


def steps(width: int = 4, more: int = 0) -> Iterator[Step]:
    """Yields steps of pools of a few slots, `width` elements from slot to slot, or a multiple; `more`: of the least."""
    units = [(Step(batch, 1, start=batch % 8), 17) for batch in SIZES]
    units += [(Step(3, tokens), 17) for tokens in VALUES]
    units += [(Step(3, 2, start=5), units) for units in VALUES]
    yield from (step._replace(apart=width * (many + more), places=many, slots=6) for step, many in units)


def conv_step(op: Callable[..., Any]) -> None:
    """Launches plain steps, and steps with marks, with a tail, and with trees.

    A token's inputs have 16 bytes. Those of real models have a multiple of 16, so each entry of a batch begins aligned.
    Other sizes would give other keys.
    """
    for step in steps(more=1):
        op(**arguments.conv_step(8, 2, step=step) | {"out": None})
        for stores in STORES:
            op(**arguments.conv_step(8, 2, stores=stores, step=step))


def gated_delta_step(op: Callable[..., Any]) -> None:
    """Launches plain steps, and steps with marks, a tail, trees, sliced inputs, and gates computed in the kernel."""
    for step in steps():
        given = arguments.gated_delta_step((1, 1), 2, 2, step=step)
        wide = shifted(step.batch, step.tokens, 6 + step.places, start=step.start)
        sliced = {name: wide[..., 2 * i : 2 * i + 2].unflatten(2, (1, 2)) for i, name in enumerate("qkv")}
        op(**given | sliced | {"out": None, "scale": 0.3})
        for stores in STORES:
            op(**arguments.gated_delta_step((1, 1), 2, 2, stores=stores, step=step))
        op(**arguments.gated_delta_step((1, 1), 2, 2, gates=True, step=step))


def conv_delta_step(op: Callable[..., Any]) -> None:
    """Launches plain steps, and steps with marks, with a tail, and with trees."""
    for step in steps(width=8):
        for stores in STORES:
            op(**arguments.conv_delta_step((2, 1), 2, 2, taps=2, stores=stores, step=step))


def selective_step(op: Callable[..., Any]) -> None:
    """Launches plain steps, and steps with marks, with a tail, and with trees."""
    for step in steps():
        for stores in STORES:
            op(**arguments.selective_step((1, 1), 2, 2, stores=stores, step=step))


def mamba3_step(op: Callable[..., Any]) -> None:
    """Launches plain steps, and steps with marks."""
    for step in steps(width=8, more=7):
        for stores in STORES[:2]:
            op(**arguments.mamba3_step(1, 8, 8, 4, stores=stores, step=step))


def gather_slots(op: Callable[..., Any]) -> None:
    for step in steps():
        op(**moved(planes(4, slots=6, apart=step.apart), "out", step.batch, step.start))
    for tiles in (1, 2, 17):  # tiles (pieces of 4096 elements) per slot
        op(**moved(planes(4096 * tiles, slots=2), "out"))


def scatter_slots(op: Callable[..., Any]) -> None:
    for step in steps():
        op(**moved(planes(4, slots=6, apart=step.apart), "batch", step.batch, step.start))


def scatter_states(op: Callable[..., Any]) -> None:
    """Launches with states and windows. Chunks begin anew with each row."""
    for step in steps(width=8):
        op(**arguments.scatter_states((1, 2, 2), (2, 4), step=step))


def _move_records(op: Callable[..., Any]) -> None:
    """Launches with slots in registers and with slots by id. The stride of records varies."""
    for n in SIZES:
        for value in VALUES:
            held = shifted(2, 16 * value, dtype=torch.uint8)[:, :16]
            given = (value if n % 2 else 0), n
            op(arguments.record_map(value, 4096 // value), *entries(held, *given, start=1))
            op(arguments.record_map(), *entries(held[:1], *given))
            op(arguments.record_map(), *entries(held[1:], *given))


pack_slots = unpack_slots = _move_records


def _move_int8(op: Callable[..., Any]) -> None:
    """Launches with slots in registers and with slots by id. The strides of planes and records vary."""
    for step in steps():
        units, one = step.places, planes(2, 4, slots=6, apart=max(8, step.apart))
        offsets = {"values": 16 * units, "scales": 16 * units + 16, "layer_bytes": 48, "nbytes": 160}
        scaled = arguments.scaled_map(one)._replace(**offsets)
        held = shifted(2, 16 * max(10, units), dtype=torch.uint8)[:, :160]
        given = (units if step.batch % 2 else 0), step.batch
        op(scaled, *entries(held, *given, step.start))
        op(scaled, *entries(held[1:], *given))


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
