"""Lists the calls of every op whose launches are compiled ahead: a launch that was seen is the compile case.

A launch has the types, constants and options with which Triton compiles it. So nothing here repeats them, and there is
no case of a launch that no call makes. Each constant that changes the code has a call of its own.
"""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memstate.kernels.configs import ConvConfig
from memstate.kernels.dispatch import Backend
from memstate.kernels.levels import bitmap_ints
from memstate.kernels.tables import ACCESS_BYTES, COUNTERS, HEADER_INTS, Rules, Strategy
from memstate_tools import arguments
from memstate_tools.arguments import STORES, Step, ints
from memstate_tools.launches import Launch, compiling, kernels


class Call(NamedTuple):
    """A call of an op, and one of the launches that it makes.

    Attributes:
        name: Name of the kernel in reports and records.
        call: Makes the launch, through the op of a backend.
        planes: Memory through which the bytes of planes move, or tables of its addresses. int8 if only those arguments
            are meant that take the memory as int8.
        rare: Whether it is a less common shape of an op that has other calls.
        number: Number of the launch; most calls make one.
    """

    name: str
    call: Callable[[Backend], object]
    planes: tuple[Tensor, ...] = ()
    rare: bool = False
    number: int = 0


def launch_of(call: Call, target: str) -> Launch:
    """Returns the launch of a call. Nothing runs.

    Args:
        call: The call.
        target: Name in `launches.TARGETS`.

    Raises:
        ConfigurationError: This process interprets kernels.
    """
    with compiling(target) as seen:
        call.call(kernels())
    return seen[call.number]


def all_calls(every_shape: bool = False) -> list[Call]:
    """Returns the calls of every op, in the order of the ops.

    Args:
        every_shape: Whether to include rare calls: all other lanes, warps, units and tiles that can be launched.
    """
    return [call for calls in CALLS.values() for call in calls() if every_shape or not call.rare]


def _call(name: str, op: str, *args: Any, planes: tuple[Tensor, ...] = (), rare: bool = False, **given: Any) -> Call:
    return Call(name, lambda backend: getattr(backend, op)(*args, **given), planes, rare)


# -- ownership and plans ---------------------------------------------------------------------------------------------

LANES = (32, 64, 128, 256, 512, 1024)  # a program that runs alone has a lane for each entry, up to 1024
PLANS = {  # name of a plan -> (rules, lanes that are not rare)
    "none": (Rules(Strategy.NONE, 0, 1, False), (32, 256)),
    "ping-pong": (Rules(Strategy.PING_PONG, 2, 1, False), (32, 256)),
    "ping-pong of one lane": (Rules(Strategy.PING_PONG, 1, 1, False), ()),
    "lazy": (Rules(Strategy.LAZY, 2, 1, True), (32, 256, 512)),
    "lazy without overwriting": (Rules(Strategy.LAZY, 2, 1, False), ()),
    "redirect": (Rules(Strategy.REDIRECT, 1, 1, False), (32, 256)),
}


def _sized(name: str, lanes: int) -> str:
    return name if lanes == 256 else f"{name} {lanes}"


def _of_bitmaps(op: str) -> Iterator[Call]:
    for lanes in LANES:
        slots = (lanes,) if op == "claim" else (ints(lanes), 1000)
        given = ints(bitmap_ints(1000)), *slots, ints(COUNTERS)
        yield _call(_sized(op, lanes), op, *given, rare=lanes not in (32, 256, 1024))


def _of_registers(op: str, *columns: int) -> Iterator[Call]:
    yield _call(op, op, arguments.registers(1000), *map(ints, columns))


def _plans() -> Iterator[Call]:
    for tails, (kind, (rules, common)), lanes in product((False, True), PLANS.items(), LANES):
        name = _sized(f"plan{'_tails' * tails}[{kind}]", lanes)
        yield _call(name, "plan", **arguments.plan(lanes, rules, tails), rare=lanes not in common)


# -- decode steps ----------------------------------------------------------------------------------------------------

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WHOLE = {"int16": torch.int16, "int8": torch.int8}
STATES = DTYPES | WHOLE | {f"{name}_chance": dtype for name, dtype in WHOLE.items()}
# dtype of whole numbers -> name endings of the calls that are not rare, with gates
WHOLE_COMMON = {
    "int8": ("", "_value_key", "_tail", "_tree"), "int8_chance": ("",), "int16": ("",), "int16_chance": ("",),
}  # fmt: skip
# kind -> name endings of the calls that are not rare, for states of fp32 and bf16
DELTA_COMMON = {
    "": ("", "_marks", "_value_key", "_value_key_marks", "_tail", "_tree"),
    "_kda": ("",),
    "_gates": ("", "_value_key", "_tail", "_value_key_tail", "_tree", "_value_key_tree"),
    "_kda_gates": ("_value_key", "_tail", "_tree"),
    "_rwkv7": ("", "_value_key_marks", "_tail"),
}  # fmt: skip
Selective = tuple[tuple[tuple[int, int], int, int], bool, bool, tuple[str, ...]]
EVERY = tuple(DTYPES)
SELECTIVE: dict[str, Selective] = {  # model -> (heads and groups, dims, states), tied, dims fastest, dtypes of states
    "mamba2": (((128, 8), 64, 128), True, False, tuple(STATES)),
    "mamba2_state_dim": (((128, 8), 64, 128), True, True, (*EVERY[:2], "int8")),
    "mamba2_256": (((128, 8), 64, 256), True, False, EVERY[:1]),
    "mamba1": (((1, 1), 8192, 16), False, False, EVERY),
}
OTHERS: dict[str, Selective] = {  # rare: every number of states, and too few dims to fill a tile
    f"{model}, {size}": (sizes, model != "mamba1", swapped, dtypes)
    for model, swapped, least in (("mamba2", False, 1), ("mamba2_state_dim", True, 8), ("mamba1", False, 0))
    for size, sizes, dtypes in (
        *((f"{n} states", ((8, 1), 64, n), EVERY) for n in (8, 16, 32, 64, 128, 256, 512) if least),
        *((f"{n} dims", ((8, 1), n, 16), EVERY[:1]) for n in (1, 8, 16, 32) if 0 < least <= n),
        *((f"{n} states", ((1, 1), 8192, n), EVERY) for n in (4, 8, 16, 32, 64, 128) if not least),
    )
}
MAMBA3 = {"": (64, 128, 32), "_whole": (64, 128, 64), "_wide": (32, 256, 128), "_half": (32, 64, 16)}  # dim state angle
MAMBA3_COMMON = ("_fp32", "_fp32_marks", "_bf16")


def _convolutions() -> Iterator[Call]:
    """Yields steps of 8192 channels and 4 taps, and rare ones of other taps and of all blocks of channels."""
    shapes = [(8192, 4), *((2**power, taps) for taps in (2, 3, 4, 5, 8) for power in range(12))]
    for (channels, taps), (name, dtype) in product(shapes, DTYPES.items()):
        common = (channels, taps) == shapes[0]
        if not common and ConvConfig().blocks(channels, taps, dtype.itemsize, threads=64)[0] < channels:
            continue  # another call, with fewer channels, has the same block
        for swapped, stores in product((False, True), STORES):
            rare = not common or (stores != "" and name == "fp16")
            if (rare and stores == "_tree") or (swapped and (channels == 1 or taps == 2)):
                continue  # a window of one tap or one channel has only one order
            given = arguments.conv_step(channels, taps, dtype, swapped, stores)
            moved = (given["x"], given["out"], given["state"])[2 * (name == "fp32") :]
            full = (
                f"conv_step_{name}{'_channel_major' * swapped}{stores}" + rare * f", {channels} channels, {taps} taps"
            )
            yield _call(full, "conv_step", **given, planes=() if rare else moved, rare=rare)


def _deltas() -> Iterator[Call]:
    """Yields steps of 32 heads of 128 x 128, with one decay per head or key, and of RWKV-7 with heads of 64 x 64.

    Their gates are given, or computed from projections. Rare ones have tiles of other sizes, or slots that begin at any
    element.
    """
    for (name, dtype), kind, swapped, stores in product(STATES.items(), DELTA_COMMON, (False, True), STORES):
        if name not in DTYPES and kind != "_gates":
            continue
        low_rank, unit = kind == "_rwkv7", ACCESS_BYTES // dtype.itemsize
        per_key, size = low_rank or "kda" in kind, 64 if low_rank else 128
        whole = 4 * unit  # values of a whole tile
        tiles = [*((2**power, whole) for power in range(4, 10)), *((128, 2**n) for n in range(whole.bit_length() - 1))]
        sizes = [
            (size, size, unit),
            (128, 128, unit),
            (128, 128, 1),
            *((*tile, unit) for tile in tiles if not low_rank),
        ]
        ending = f"{'_value_key' * swapped}{stores}"
        for key, value, own in dict.fromkeys(sizes if name in DTYPES else sizes[:1]):
            usual = WHOLE_COMMON.get(name, DELTA_COMMON[kind])
            common = (key, value, own) == sizes[0] and name != "fp16" and ending in usual
            if (stores == "_tree" and not common) or (swapped and value == 1):
                continue  # a matrix of one value has only one order
            given = arguments.gated_delta_step(
                (32, 32 if per_key else 16), key, value, dtype, swapped, per_key, "gates" in kind, low_rank, stores,
                "chance" in name, Step(apart=32 * key * value + own % unit),
            )  # fmt: skip
            full = f"gated_delta_step_{name}{kind}{ending}" + (not common) * f", {key} x {value}, unit {own}"
            planes = (given["state"],) if common and dtype != torch.int8 else ()  # of int8, lanes may move 8 bytes
            yield _call(full, "gated_delta_step", **given, planes=planes, rare=not common)


def _pairs() -> Iterator[Call]:
    """Yields both launches of a convolution and a gated delta step that overlap, of 32 heads of 128 x 128."""
    for name, stores, number in product(EVERY[:2], STORES, (0, 1)):
        given = arguments.conv_delta_step((32, 16), 128, 128, DTYPES[name], stores=stores)
        (x, _, _, windows, *_, out), states = given["conv"][:10], given["delta"][5]
        planes, rare = ((x, out, windows), (states,))[number], stores != "" and (name, stores) != ("fp32", "_tail")
        full = f"conv_delta_step_{name}{stores}, {('conv', 'delta')[number]}"
        yield _call(full, "conv_delta_step", **given, planes=planes, rare=rare)._replace(number=number)


def _selective_steps() -> Iterator[Call]:
    """Yields steps of Mamba-1 and Mamba-2."""
    for model, (sizes, tied, swapped, dtypes) in (SELECTIVE | OTHERS).items():
        for name, stores in product(dtypes, STORES):
            whole = model in ("mamba1", "mamba2") and name != "fp16" and stores in WHOLE_COMMON.get(name, STORES)
            rare = not whole and (model in OTHERS or stores != "")
            if stores == "_tree" and not whole:
                continue
            given = arguments.selective_step(*sizes, STATES[name], tied, swapped, stores, "chance" in name)
            moved: tuple[Tensor, ...] = (given["state"],) if tied else (given["state"], given["a"])
            moved = moved if name in DTYPES or not swapped else ()  # of whole numbers, lanes move 4 or 8 bytes
            full = f"selective_step_{model}_{name}{stores}"
            yield _call(full, "selective_step", **given, planes=() if rare else moved, rare=rare)
    given = arguments.selective_step(*SELECTIVE["mamba2"][0]) | {"dt_min": 0.001, "dt_max": 0.1}
    yield _call("selective_step_mamba2_limits", "selective_step", **given, planes=(), rare=True)


def _mamba3_steps() -> Iterator[Call]:
    for (model, (dim, state, angles)), name, stores in product(MAMBA3.items(), EVERY[:2], STORES[:2]):
        given = arguments.mamba3_step(64, dim, state, angles, DTYPES[name], stores)
        ending = f"{model}_{name}{stores}"
        planes = (given["state"].ssm,)  # this plane has 98 % of the bytes of a state
        yield _call(f"mamba3_step{ending}", "mamba3_step", **given, planes=planes, rare=ending not in MAMBA3_COMMON)


# -- moves -----------------------------------------------------------------------------------------------------------

UNITS = {"": 16, ", 8 bytes": 8, ", 4 bytes": 4, ", 2 bytes": 2, ", 1 bytes": 1}  # name ending -> bytes of a lane
WORDS = {4: torch.int32, 2: torch.int16, 1: torch.int8}  # bytes -> the type as which planes are moved
COLUMNS = {  # planes as int8 -> (columns, values of each, elements from value to value)
    "delta": (32 * 128, 128, 1),
    "mamba2": (128 * 128, 64, 128),
    **{f"of {values}, rare": (4096, values, 1) for values in (1, 8, 16, 32, 64, 256, 512, 1024, 3000)},
    **{f"of {values} apart, rare": (4096, values, 128) for values in (1, 8, 16, 32, 100, 128, 256)},
}


def _copies(op: str, *columns: int) -> Iterator[Call]:
    """Yields moves of slots in words of all sizes, and rare ones that fill slots with a pattern."""
    for filled, (ending, unit) in product((False, True)[: 1 if op == "copy_slots" else 2], UNITS.items()):
        moved, rare = arguments.plane_map(unit=unit, filled=filled), filled or bool(ending)
        planes = () if ending else (moved.tiles,)
        yield _call(f"{op}{', fills' * filled}{ending}", op, moved, *map(ints, columns), planes=planes, rare=rare)


def _paths() -> Iterator[Call]:
    for ending, unit in UNITS.items():
        given = arguments.keep_path(unit=unit)
        planes = () if ending else (given["rings"].table,)
        yield _call(f"keep_path{ending}", "keep_path", **given, planes=planes, rare=bool(ending))


def _plane_moves(op: str, entries: str) -> Iterator[Call]:
    """Yields moves of a plane of any dtype whose slots begin at multiples of each number of bytes."""
    for ending, unit in UNITS.items():
        word = min(unit, 4)
        given = arguments.moved(arguments.planes((1 << 16 | unit) // word, dtype=WORDS[word]), entries)
        planes = () if ending else (given["plane"], given[entries])
        yield _call(f"{op}{ending.replace('1 bytes', '1 byte')}", op, **given, planes=planes, rare=bool(ending))


def _marked_states() -> Iterator[Call]:
    """Yields moves of 32 heads of 128 x 128 and of windows of 3 x 8192, and rare ones without some of the arguments."""
    for name, (transposed, swapped, without) in product(
        EVERY[:2],
        (
            (False, False, ()), (True, True, ()), (False, False, ("first",)), (False, False, ("h", "first")),
            (False, False, ("conv", "inputs")), (False, True, ("plane", "h", "first")),
            (False, False, ("h", "first", "inputs")),
        ),
    ):  # fmt: skip
        block, window = (32, 128, 128), (3, 8192)
        given = arguments.scatter_states(block, window, DTYPES[name], transposed, swapped, without)
        moved = tuple(given[each] for each in ("plane", "h", "conv", "inputs") if each not in without)
        ending = "".join(f", no {each}" for each in without)
        full = f"scatter_states_{name}{'_transposed' * transposed}{ending}"
        yield _call(full, "scatter_states", **given, planes=() if without else moved, rare=bool(without))


def _packs(op: str) -> Iterator[Call]:
    """Yields moves of slots that registers hold, and of slots or pages that are named directly."""
    for (ending, unit), registers in product(UNITS.items(), (64, 0)):
        records, held = arguments.record_map(unit=unit), arguments.shifted(2, 16, dtype=torch.uint8)
        name, planes = f"{op}{'' if registers else '_direct'}{ending}", () if ending else (records.tiles,)
        yield _call(name, op, records, *arguments.entries(held, registers), planes=planes, rare=bool(ending))


def _int8_packs(op: str) -> Iterator[Call]:
    """Yields moves of all values of a key (delta) or of a state (mamba2), and rare ones of columns of other lengths.

    Lanes move 16 bytes of values at a time, but one scale: scales are 1 % of the bytes.
    """
    for (kind, (columns, values, inner)), (name, dtype) in product(COLUMNS.items(), DTYPES.items()):
        scaled = arguments.scaled_map(arguments.planes(columns // inner, values, inner, dtype=dtype))
        held, rare = arguments.shifted(1, scaled.nbytes, dtype=torch.uint8), "rare" in kind
        planes = () if rare else (scaled.layers, held.view(torch.int8))
        yield _call(f"{op}_{kind}_{name}", op, scaled, *arguments.entries(held, 64), planes=planes, rare=rare)


CALLS: dict[str, Callable[[], Iterator[Call]]] = {  # op -> its calls, in the order of the ops
    "claim": lambda: _of_bitmaps("claim"),
    "release": lambda: _of_bitmaps("release"),
    "ownership": lambda: _of_registers("ownership", HEADER_INTS),
    "resolve": lambda: _of_registers("resolve", 64, 64),
    "audit": lambda: _of_registers("audit", 1001),
    "plan": _plans,
    "copy_slots": lambda: _copies("copy_slots", 64, 64),
    "zero_slots": lambda: _copies("zero_slots", 64),
    "run_data": lambda: _copies("run_data", 64, HEADER_INTS),
    "run_rows": lambda: _copies("run_rows", HEADER_INTS),
    "conv_step": _convolutions,
    "gated_delta_step": _deltas,
    "conv_delta_step": _pairs,
    "selective_step": _selective_steps,
    "mamba3_step": _mamba3_steps,
    "keep_path": _paths,
    "gather_slots": lambda: _plane_moves("gather_slots", "out"),
    "scatter_slots": lambda: _plane_moves("scatter_slots", "batch"),
    "scatter_states": _marked_states,
    "pack_slots": lambda: _packs("pack_slots"),
    "unpack_slots": lambda: _packs("unpack_slots"),
    "pack_int8": lambda: _int8_packs("pack_int8"),
    "unpack_int8": lambda: _int8_packs("unpack_int8"),
}
