"""Makes arguments of the ops, of any sizes, for launches whose results nobody reads. All are tensors of the CPU.

Integers are zeros: entries of padding. Other memory is left as it comes, so states may be as large as those of a model.
"""

from collections.abc import Callable, Iterable
from inspect import signature
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memstate.kernels import tables
from memstate.kernels.dispatch import Backend
from memstate.kernels.levels import bitmap_ints
from memstate.kernels.tables import ACCESS_BYTES, HEADER_INTS, Rules

Arguments = dict[str, Any]  # name of an argument -> its value
POOL_BYTES = 1 << 31  # memory that is smaller has addresses of 32 bits for AMD's compiler; a model's pool is larger
STORES = ("", "_marks", "_tail", "_tree")  # what a decode step stores besides plain slots


class Step(NamedTuple):
    """What may differ between two decode steps of one model.

    Attributes:
        batch: Entries of the batch.
        tokens: Tokens of an entry.
        apart: Elements from slot to slot. 0: slots lie one behind the other.
        start: Elements of memory before the first input. Before the second there are twice as many, and so on.
        places: Tokens of a ring, and nodes of a tree.
        slots: Slots of the pool, the null slot too. 0: so many that they fill `POOL_BYTES`.
    """

    batch: int = 1
    tokens: int = 1
    apart: int = 0
    start: int = 0
    places: int = 4
    slots: int = 0


STEP = Step()


def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    """Returns a tensor of zeros."""
    return torch.zeros(shape, dtype=dtype, device="cpu")


def ints(n: int, start: int = 0) -> Tensor:
    """Returns a column of `n` zeros (padding) that begins `start` elements after the start of its memory."""
    return zeros(start + n, dtype=torch.int32)[start:]


def memory(count: int, dtype: torch.dtype) -> Tensor:
    """Returns `count` elements as they come. In a process with deterministic results, `torch.empty` would fill them."""
    return torch.empty(0, dtype=dtype, device="cpu").set_(torch.UntypedStorage(count * dtype.itemsize, device="cpu"))


def shifted(*shape: int, start: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Returns a contiguous tensor that begins `start` elements after the start of its memory."""
    return memory(start + prod(shape), dtype)[start:].view(shape)


def planes(
    *block: int, layers: int = 2, slots: int = 0, apart: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:  # fmt: skip
    """Returns a plane `layer slot ...`.

    Args:
        block: Axes of one layer of one slot.
        layers: Layers.
        slots: Slots, the null slot too. 0: so many that they fill `POOL_BYTES`.
        apart: Elements from slot to slot. 0: slots lie one behind the other.
        dtype: Dtype of the elements.
    """
    apart = apart or prod(block)
    slots = slots or POOL_BYTES // (layers * apart * dtype.itemsize) + 1
    strides = slots * apart, apart, *torch.empty(block, dtype=dtype, device="meta").stride()
    return memory(layers * slots * apart, dtype).as_strided((layers, slots, *block), strides)


def states(*slot: int, step: Step = STEP, dtype: torch.dtype = torch.float32, swapped: bool = False) -> Tensor:
    """Returns the states of one layer, `slot ...`; `swapped`: the last two axes lie in memory the other way round."""
    block = (*slot[:-2], slot[-1], slot[-2]) if swapped else slot
    layer = planes(*block, layers=1, slots=step.slots, apart=step.apart, dtype=dtype)[0]
    return layer.mT if swapped else layer


def ring(*token: int, places: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Returns the rings of two rows, with a gap between the rows."""
    row = torch.empty(places, *token, dtype=dtype, device="meta")
    apart = -(-row.nbytes // ACCESS_BYTES) * ACCESS_BYTES // dtype.itemsize + 8 * places
    return memory(2 * apart, dtype).as_strided((2, *row.shape), (apart, *row.stride()))


# -- ownership and plans ---------------------------------------------------------------------------------------------


def registers(capacity: int) -> tables.Registers:
    """Returns a register file over a pool of `capacity` slots."""
    slots, labels, tracked, source, cells = (ints(64) for _ in range(5))
    return tables.Registers(
        slots, labels, tracked, source, cells, ints(bitmap_ints(capacity)), ints(tables.COUNTERS), capacity
    )  # fmt: skip


def record(batch: int) -> tables.StepRecord:
    """Returns the columns of a step. As in a manager, each begins at a multiple of 256 bytes."""
    return tables.StepRecord(*(ints(max(256, batch))[:batch] for _ in tables.StepRecord._fields))


def tails(batch: int) -> tables.TailRecord:
    """Returns the columns of a step for its tails."""
    return tables.TailRecord(*(ints(1 if name == "batch" else max(256, batch)) for name in tables.TailRecord._fields))


def marks(room: int = 64, start: int = 0) -> tables.StepMarks:
    """Returns memory for `room` marks, of which a step has none."""
    return tables.StepMarks(*(ints(size, start) for size in (1, room, room, room)))


def packet(batch: int, columns: int) -> Tensor:
    """Returns a packet without entries. Behind its header it has room for the columns of a batch."""
    return ints(HEADER_INTS + columns * -(-batch // 4) * 4)


def plan(batch: int, rules: Rules, with_tails: bool = False, capacity: int = 1000, room: int = 64) -> Arguments:
    """Returns the arguments of a plan for rows that have no tails, or tails of up to 2 tokens.

    Args:
        batch: Entries of the batch.
        rules: The rules.
        with_tails: Whether rows have tails.
        capacity: Slots of the pool.
        room: Marks for which there is memory.
    """
    file, more = registers(capacity), Arguments()
    if with_tails:
        file = file._replace(pending=ints(file.source.numel()), newest=ints(file.source.numel()))
        rules, more = rules._replace(tail=2), {"tails": tails(batch)}
    step = {"packet": packet(batch, 2), "record": record(batch), "marks": marks(room)}
    return {"registers": file, "rules": rules} | step | more


# -- decode steps ----------------------------------------------------------------------------------------------------


def _inputs(
    step: Step, *tokens: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, aligned: bool = False
) -> list[Tensor]:  # fmt: skip
    """Returns inputs `batch token ...`; `aligned`: each begins on a 16-byte boundary."""
    apart = step.start * (8 if aligned else 1)
    return [
        shifted(step.batch, step.tokens, *token, start=apart * number, dtype=dtype)
        for number, token in enumerate(tokens, 1)
    ]


def _rows(step: Step) -> Arguments:
    """Returns the columns of a decode step."""
    return {name: ints(step.batch, step.start) for name in ("read", "write", "snapshot", "tokens")}


def _stores(stores: str, step: Step, tail: Callable[[], Any]) -> Arguments:
    """Returns marks, or a tail with its cursor and trees, as one of `STORES` says."""
    if stores == "_marks":
        return {"marks": marks(start=step.start)}
    if not stores:
        return {}
    cursor = tables.Cursor(*(ints(step.batch, step.start + number) for number in range(4)))
    tree = ints(step.batch * step.places, step.start).view(step.batch, step.places)
    return {"tail": tail(), "cursor": cursor} | ({"parents": tree} if stores == "_tree" else {})


def scales(state: Tensor, rows: tuple[int, ...], chance: bool, step: Step) -> Arguments:
    """Returns the scales of a state of whole numbers, and lengths and a seed if they are rounded by chance."""
    given: Arguments = {}
    if not state.is_floating_point():
        given["scales"] = shifted(len(state), *rows, start=step.start, dtype=torch.float32)
    return given | ({"lengths": ints(step.batch, step.start), "seed": 7} if chance else {})


def conv_step(
    channels: int, taps: int, dtype: torch.dtype = torch.float32, swapped: bool = False, stores: str = "",
    step: Step = STEP,
) -> Arguments:  # fmt: skip
    """Returns the arguments of a convolution step.

    Args:
        channels: Channels of the convolution.
        taps: Taps of the convolution.
        dtype: Dtype of the state.
        swapped: Whether a slot stores `channel tap`.
        stores: One of `STORES`.
        step: What differs between steps.
    """
    x, out = _inputs(step, (channels,), (channels,), aligned=True)
    state = states(taps - 1, channels, step=step, dtype=dtype, swapped=swapped)
    kept = _stores(stores, step, lambda: tables.ConvTail(ring(channels, places=step.places)))
    weight, bias = shifted(channels, taps), shifted(channels)
    return {"x": x, "weight": weight, "bias": bias, "state": state, "out": out} | _rows(step) | kept


def gated_delta_step(
    heads: tuple[int, int], key: int, value: int, dtype: torch.dtype = torch.float32, swapped: bool = False,
    per_key: bool = False, gates: bool = False, low_rank: bool = False, stores: str = "", chance: bool = False,
    step: Step = STEP,
) -> Arguments:  # fmt: skip
    """Returns the arguments of a gated delta step.

    Args:
        heads: Heads of values, and heads of keys.
        key: Keys of a head.
        value: Values of a head.
        dtype: Dtype of the state.
        swapped: Whether a slot stores `value key`.
        per_key: Whether each key has a decay.
        gates: Whether the kernel computes the gates.
        low_rank: Whether it is the generalized rule of RWKV-7.
        stores: One of `STORES`.
        chance: Whether whole numbers are rounded by chance.
        step: What differs between steps.
    """
    of_key, of_value = (heads[1], key), (heads[0], value)
    rates = (heads[0], key) if per_key else heads[:1]
    q, k, a, b, v, out = _inputs(step, *4 * (of_key,), of_value, of_value)
    decay, beta = _inputs(step, rates, heads[:1], dtype=torch.bfloat16 if gates else torch.float32)
    given: Arguments = {"q": q, "k": k, "v": v, "decay": decay, "beta": beta, "out": out} | _rows(step)
    if gates:
        weights = {"a_log": shifted(heads[0], dtype=torch.float32), "dt_bias": shifted(*rates)}
        given |= weights | {"sigmoid": True, "normalize": True}
    if low_rank:
        given |= {"beta": None, "a": a, "b": b}

    def tail() -> tables.DeltaTail:
        gate, kept = (ring(*sizes, places=step.places, dtype=torch.float32) for sizes in (rates, heads[:1]))
        k, v, a, b = (ring(*sizes, places=step.places) for sizes in (of_key, of_value, of_key, of_key))
        return tables.DeltaTail(k, v, gate, None, a, b) if low_rank else tables.DeltaTail(k, v, gate, kept)

    state = states(heads[0], key, value, step=step, dtype=dtype, swapped=swapped)
    return given | {"state": state} | scales(state, of_value, chance, step) | _stores(stores, step, tail)


def in_order(op: str, given: Arguments) -> tuple[Any, ...]:
    """Returns all arguments of an op in the order of its parameters, with defaults for those that are not given."""
    parameters = signature(getattr(Backend, op)).parameters.values()
    return tuple(given.get(each.name, each.default) for each in parameters)


def conv_delta_step(
    heads: tuple[int, int], key: int, value: int, dtype: torch.dtype = torch.float32, taps: int = 4, stores: str = "",
    step: Step = STEP,
) -> Arguments:  # fmt: skip
    """Returns the arguments of a convolution step, and of a gated delta step on slices of its output.

    Args:
        heads: Heads of values, and heads of keys.
        key: Keys of a head.
        value: Values of a head.
        dtype: Dtype of the states.
        taps: Taps of the convolution.
        stores: One of `STORES`.
        step: What differs between steps.
    """
    sizes = (heads[1] * key, heads[1] * key, heads[0] * value)
    conv = conv_step(sum(sizes), taps, torch.bfloat16, True, stores, step)
    delta = gated_delta_step(heads, key, value, dtype, gates=True, stores=stores, step=step)
    for name, part in zip("qkv", conv["out"].split(sizes, -1), strict=True):
        delta[name] = part.unflatten(-1, delta[name].shape[2:])
    delta |= {name: conv[name] for name in (*_rows(step), "marks", "cursor", "parents") if name in conv}
    return {"conv": in_order("conv_step", conv), "delta": in_order("gated_delta_step", delta)}


def selective_step(
    heads: tuple[int, int], dim: int, state: int, dtype: torch.dtype = torch.float32, tied: bool = True,
    swapped: bool = False, stores: str = "", chance: bool = False, step: Step = STEP,
) -> Arguments:  # fmt: skip
    """Returns the arguments of a selective step.

    Args:
        heads: Heads, and groups of heads.
        dim: Dims of a head.
        state: States of a head.
        dtype: Dtype of the state.
        tied: Whether a head has one decay, as in Mamba-2.
        swapped: Whether a slot stores `state dim`.
        stores: One of `STORES`.
        chance: Whether whole numbers are rounded by chance.
        step: What differs between steps.
    """
    of_head, of_group, rates = (heads[0], dim), (heads[1], state), heads[:1] if tied else (heads[0], dim)
    x, b, c, z, out, dt = _inputs(step, of_head, of_group, of_group, of_head, of_head, rates)
    a = shifted(*rates, *(() if tied else (state,)), dtype=torch.float32)
    weights = {name: shifted(*rates, dtype=torch.float32) for name in ("d", "dt_bias")} | {"softplus": True}
    given = {"x": x, "dt": dt, "a": a, "b": b, "c": c, "z": z, "out": out} | weights | _rows(step)

    def tail() -> tables.SelectiveTail:
        x, b = (ring(*sizes, places=step.places) for sizes in (of_head, of_group))
        return tables.SelectiveTail(x, b, ring(*rates, places=step.places, dtype=torch.float32))

    held = states(heads[0], dim, state, step=step, dtype=dtype, swapped=swapped)
    return given | {"state": held} | scales(held, of_head, chance, step) | _stores(stores, step, tail)


def mamba3_step(
    heads: int, dim: int, state: int, angles: int, dtype: torch.dtype = torch.float32, stores: str = "",
    step: Step = STEP,
) -> Arguments:  # fmt: skip
    """Returns the arguments of a step of Mamba-3 with one group of heads.

    Args:
        heads: Heads.
        dim: Dims of a head.
        state: States of a head.
        angles: Angles of a head.
        dtype: Dtype of the matrices; the keys and values of a state are bf16.
        stores: "" or "_marks".
        step: What differs between steps.
    """
    x, z, out, b, c = _inputs(step, *3 * ((heads, dim),), *2 * ((1, state),), aligned=True)
    rotation, trap = _inputs(step, (angles,), (heads,))
    dt, decay = _inputs(step, (heads,), (heads,), dtype=torch.float32)
    given = {"x": x, "b": b, "c": c, "dt": dt, "decay": decay, "trap": trap, "rotation": rotation, "z": z, "out": out}
    weights = {"b_bias": (heads, state), "c_bias": (heads, state), "d": (heads,)}
    given |= {name: shifted(*sizes, dtype=torch.float32) for name, sizes in weights.items()}
    ssm = states(heads, dim, state, step=step, dtype=dtype)
    angle = states(heads, angles, step=step._replace(slots=len(ssm)))
    k, v = (states(heads, n, step=step._replace(slots=len(ssm)), dtype=torch.bfloat16) for n in (state, dim))
    held = tables.Mamba3State(angle, ssm, k, v)
    return given | {"state": held} | _rows(step) | _stores(stores, step, tuple)


# -- moves -----------------------------------------------------------------------------------------------------------


def plane_map(tiles: int = 1, capacity: int = 8, unit: int = ACCESS_BYTES, filled: bool = False) -> tables.PlaneMap:
    """Returns a map of `tiles` tiles without bytes, in units of `unit` bytes; `filled`: fresh slots have a pattern."""
    blocks = (zeros(1, capacity + 1, 16, dtype=torch.uint8),)
    fills = zeros(tiles, dtype=torch.int64) if filled else None
    return tables.PlaneMap(zeros(tiles, 3, dtype=torch.int64), blocks, unit, fills=fills)


def keep_path(batch: int = 1, depth: int = 4, unit: int = ACCESS_BYTES) -> Arguments:
    """Returns the arguments to keep the paths of a batch, of at most `depth` nodes."""
    blocks = (zeros(1, depth + 1, 64, dtype=torch.uint8),)
    rings = tables.RingMap(zeros(2, 4, dtype=torch.int64), blocks, (4,), unit)
    return {"rings": rings, "record": tails(batch), "nodes": ints(batch * depth, batch % 4).view(batch, depth)}


def moved(plane: Tensor, name: str, batch: int = 1, start: int = 0) -> Arguments:
    """Returns the arguments to gather or scatter entries of a plane; `name` is the argument of the entries."""
    entries = shifted(len(plane), batch, *plane.shape[2:], dtype=plane.dtype)
    return {"plane": plane, "slots": ints(batch, start), name: entries}


def scatter_states(
    block: tuple[int, ...], window: tuple[int, int], dtype: torch.dtype = torch.float32, transposed: bool = False,
    swapped: bool = False, without: Iterable[str] = (), step: Step = STEP,
) -> Arguments:  # fmt: skip
    """Returns the arguments to scatter the states at marks.

    Args:
        block: Axes of a state.
        window: Taps and channels of a window.
        dtype: Dtype of the states; windows and inputs are bf16.
        transposed: Whether the last two axes of `h` are swapped.
        swapped: Whether a slot stores windows as `channel tap`.
        without: Arguments that are None.
        step: What differs between steps. Chunks begin anew with each row.
    """
    batch, tokens, apart, start, *_, slots = step
    plane = planes(*block, slots=slots, apart=apart, dtype=dtype)
    h = (*block[:-2], block[-1], block[-2]) if transposed else block
    conv = planes(*(window[::-1] if swapped else window), slots=plane.shape[1], apart=apart, dtype=torch.bfloat16)
    given = {
        "marks": marks(start=start), "starts": ints(batch + 1, start), "read": ints(batch, start),
        "write": ints(batch, start + 1), "plane": plane, "h": shifted(2, tokens, *h), "transposed": transposed,
        "first": ints(batch + 1, start + 2), "chunk": tokens, "conv": conv.mT if swapped else conv,
        "inputs": shifted(2, tokens, window[1]),
    }  # fmt: skip
    return given | dict.fromkeys(without)


def record_map(tiles: int = 2, capacity: int = 8, unit: int = ACCESS_BYTES) -> tables.RecordMap:
    """Returns a map between planes and records, of `tiles` tiles without bytes, in units of `unit` bytes."""
    blocks = (zeros(1, capacity + 1, 16, dtype=torch.uint8),)
    pieces = tuple(tables.RecordPiece(0, 0, 0, 0, 0) for _ in range(tiles))
    return tables.RecordMap(zeros(tiles, 4, dtype=torch.int64), blocks, pieces, 16, unit)


def scaled_map(plane: Tensor, axis: int = 1) -> tables.ScaledMap:
    """Returns a map between a plane and records, with a scale for all values along one axis of a slot."""
    count = prod(plane.shape[2:])
    scales = -(-count // ACCESS_BYTES) * ACCESS_BYTES
    layer = scales + -(-4 * count // plane.shape[2 + axis] // ACCESS_BYTES) * ACCESS_BYTES
    layers = zeros(len(plane), 2, dtype=torch.int64)
    return tables.ScaledMap(layers, (plane,), axis, 0, scales, layer, len(plane) * layer)


def entries(held: Tensor, registers: int = 0, batch: int = 1, start: int = 0) -> tuple[Any, ...]:
    """Returns the other arguments to move records: slots in `registers` registers, or by id if there are none.

    No entry has a place.
    """
    return ints(registers) if registers else None, ints(batch, start), ints(batch, start + 1).sub_(1), held
