"""Checks the arguments of decode steps. Knows no Triton.

They run once for each kind of call, see `memstate.kernels.remembered`; without that, once per layer and step. So they
compare plainly, and parse no patterns. Each raises a ValueError that names the first argument that does not fit.
"""

from itertools import combinations
from math import prod
from numbers import Real
from operator import is_
from typing import Any

import torch
from torch import Tensor

from memstate.kernels.blocks import PlaneBlocks, blocks_of, is_dense, is_transposed, taps_are_fastest, tokens_of
from memstate.kernels.checks import (
    FLOATS,
    check_apart,
    check_columns,
    check_contiguous,
    check_distinct,
    check_float,
    check_marks,
    check_memory,
    check_nodes,
    check_shape,
    check_sizes,
    check_tensors,
    check_written,
    fill_gaps,
)
from memstate.kernels.reference.scaled import SHARED, TOP
from memstate.kernels.remembered import remembered
from memstate.kernels.tables import ACCESS_BYTES, ConvTail, Cursor, DeltaTail, Mamba3State, SelectiveTail, StepMarks

Keeps = dict[str, tuple[tuple[int, ...], torch.dtype]]  # field of a tail -> (shape, dtype) of one token in its ring
ACTIVATIONS = ("silu", None)
DELTA_DEFAULTS = (*[None] * 5, False, False, *[None] * 8, 0, 0)  # of what a call of `gated_delta_step` may leave out
LARGEST = torch.finfo(torch.float32).max
MOST_TOKENS = 2**31  # tokens of a batch, padding included: kernels count them in 32 bits
MOST_PROGRAMS = 65535  # programs along the second and the third axis of a grid: heads and rows
MOST_ELEMENTS = 8192  # elements of a matrix that one program holds
MAMBA3 = {  # argument or plane of `mamba3_step` -> its axes without `batch token` or `slot`
    "x": "head dim", "b": "group state", "c": "group state", "dt": "head", "decay": "head", "trap": "head",
    "rotation": "angle", "z": "head dim", "b_bias": "head state", "c_bias": "head state", "d": "head",
    "angle": "head angle", "ssm": "head dim state", "k": "head state", "v": "head dim",
}  # fmt: skip


def check(
    name: str, tensor: Tensor, pattern: str, shape: tuple[int, ...], device: torch.device, in_words: bool = False
) -> None:
    """Refuses a tensor with another shape, dtype or device than allowed, or that is not contiguous.

    `in_words` says that lanes move 16 bytes at a time if the last axis allows it.
    """
    dense = tensor.shape == shape and tensor.is_contiguous()
    if not (dense and tensor.dtype in FLOATS and tensor.device == device) or tensor.is_neg():
        check_shape(name, tensor, pattern, shape)
        check_contiguous(name, tensor, pattern)
        check_float(name, tensor)
        check_memory(name, tensor, device)
    if in_words and shape[-1] * tensor.element_size() % ACCESS_BYTES == 0:
        check_address(name, tensor)


def check_tokens(name: str, tensor: Tensor, pattern: str, shape: tuple[int, ...], device: torch.device) -> int:
    """Returns the number of elements from one token to the next, in a tensor that may be a slice of a wider one.

    Args:
        name: name of the tensor.
        tensor: `batch token ..`. The elements of one token are contiguous, and tokens lie at equal distances.
        pattern: axes of the tensor in einops letters.
        shape: the expected shape.
        device: the expected device.

    Raises:
        ValueError: the shape, dtype, device or strides do not fit, or a token has a multiple of 16 bytes but does not
            begin on a 16-byte boundary, so lanes cannot move 16 bytes at a time.
    """
    if tensor.shape != shape or tensor.dtype not in FLOATS or tensor.device != device or tensor.is_neg():
        check_shape(name, tensor, pattern, shape)
        check_float(name, tensor)
        check_memory(name, tensor, device)
    distance = width = prod(shape[2:])
    if not tensor.is_contiguous():
        (batch, token, *rest), (of_row, of_token, *inner) = shape, tensor.stride()
        distance = of_token if token > 1 else of_row if batch > 1 else width
        even = batch == 1 or token <= 1 or of_row == token * distance
        if not (is_dense(tuple(rest), tuple(inner)) and even and distance >= width):
            raise ValueError(
                f"{name}: `{pattern}` must be contiguous in what belongs to a token, with tokens at equal distances, "
                f"got strides {tensor.stride()}: use .contiguous()"
            )
    size = tensor.element_size()
    if width * size % ACCESS_BYTES == 0 and (tensor.data_ptr() % ACCESS_BYTES or distance * size % ACCESS_BYTES):
        raise ValueError(
            f"{name}: expected tokens that begin at multiples of {ACCESS_BYTES} bytes, got address "
            f"{tensor.data_ptr():#x} and {distance * size} bytes between tokens: use .clone()"
        )
    return distance


def check_inputs(
    sizes: tuple[int, int], device: torch.device, *inputs: tuple[str, Tensor | None, str, tuple[int, ...]]
) -> tuple[int | None, ...]:
    """Returns the results of `check_tokens` for some inputs; None for an input that is None.

    Args:
        sizes: entries and tokens of the step.
        device: the expected device.
        inputs: name, tensor, and the pattern and shape of one token.
    """
    return tuple(
        None if tensor is None else check_tokens(name, tensor, f"batch token {pattern}", sizes + shape, device)
        for name, tensor, pattern, shape in inputs
    )


def check_count(name: str, batch: int, token: int) -> None:
    """Refuses a batch with more tokens, padding included, than a kernel can count."""
    if batch * token >= MOST_TOKENS:
        raise ValueError(f"{name}: expected fewer than 2**31 tokens in a batch, got {batch} x {token}")


def check_grid(name: str, **sizes: int) -> None:
    """Refuses more rows or heads than one launch can have programs for.

    Args:
        name: name of the tensor that has these axes.
        sizes: axis -> size.

    Raises:
        ValueError: names the axis and its size.
    """
    for axis, size in sizes.items():
        if size > MOST_PROGRAMS:
            raise ValueError(
                f"{name}: expected at most {MOST_PROGRAMS} of `{axis}` in one launch, got {size}: launch parts of it"
            )


def check_state(state: Tensor, pattern: str, shape: tuple[int, ...], name: str = "state") -> PlaneBlocks:
    """Returns where the slots lie; refuses slots that have another shape, are not contiguous, or share bytes."""
    if state.shape[1:] != shape:
        raise ValueError(f"{name}: expected `{pattern}` = {('slots', *shape)}, got {tuple(state.shape)}")
    if not is_dense(shape, state.stride()[1:]):
        raise ValueError(f"{name}: one slot of `{pattern}` must be contiguous, got strides {state.stride()}")
    return check_slots(state, shape, name)


def check_slots(state: Tensor, shape: tuple[int, ...], name: str = "state") -> PlaneBlocks:
    """Returns where slots lie, which must be dense; refuses slots that share bytes."""
    if state.is_neg():
        check_memory(name, state, state.device)
    size = state.element_size()
    slots = PlaneBlocks(state.data_ptr(), prod(shape) * size, ((state.shape[0], state.stride(0) * size),))
    check_distinct(name, slots)
    return slots


def check_kept(marks: StepMarks, tensors: dict[str, Tensor | None], device: torch.device) -> None:
    """Refuses marks that do not fit, and adds their columns to the tensors of the step."""
    if not isinstance(marks, StepMarks):
        raise ValueError(f"marks: expected StepMarks or None, got {type(marks).__name__}")
    check_marks(device, marks)
    tensors |= marks._asdict()


def check_tail(
    tail: Any, kind: Any, cursor: Cursor | None, parents: Tensor | None, keeps: Keeps,
    tensors: dict[str, Tensor | None], batch: int, device: torch.device,
) -> list[str]:  # fmt: skip
    """Refuses rings and a cursor that do not fit the step, and adds them to the tensors of the step.

    Args:
        tail: the rings, `row ring ...`, or None.
        kind: class of named tuple that `tail` must be, such as `ConvTail`.
        cursor: columns of the cursor, or None.
        parents: parents of the nodes of trees, or None.
        keeps: field of the tail -> shape and dtype of one token in its ring. Other fields must be None.
        tensors: tensors of the step, by name.
        batch: entries of the step.
        device: device of the step.

    Returns:
        The names of the rings in `tensors`.

    Raises:
        ValueError: names the ring or column that does not fit.
    """
    if tail is None and cursor is None and parents is None:
        return []
    if type(tail) is not kind or not isinstance(cursor, Cursor):
        raise ValueError(
            f"tail, cursor: expected a {kind.__name__} and a Cursor, or None for both (and for parents), got "
            f"{type(tail).__name__} and {type(cursor).__name__}"
        )
    if parents is not None:
        check_nodes("parents", parents, device, batch)
        tensors["parents"] = parents
    names = []
    check_columns(device, batch, **{f"cursor.{name}": column for name, column in cursor._asdict().items()})
    sizes = tail[0].shape[:2] if isinstance(tail[0], Tensor) else ()
    for field, ring in tail._asdict().items():
        name = f"tail.{field}"
        if field not in keeps:
            if ring is not None:
                raise ValueError(f"{name}: expected None beside these inputs, got {type(ring).__name__}")
            continue
        shape, dtype = keeps[field]
        check_tensors({name: ring})
        fits = ring.dim() > 2 and ring.shape == (*sizes, *shape) and ring.dtype == dtype and min(sizes) > 0
        if not fits or not is_dense(tuple(ring.shape[1:]), ring.stride()[1:]):
            raise ValueError(
                f"{name}: expected {dtype} `row ring ..` = {(*sizes, *shape)}, contiguous in each row, got "
                f"{ring.dtype} {tuple(ring.shape)} with strides {ring.stride()}"
            )
        check_memory(name, ring, device)
        check_distinct(name, tokens_of(ring))
        if (ring.data_ptr() | ring.stride(0) * ring.element_size()) % ACCESS_BYTES and ring.shape[0] > 1:
            raise ValueError(
                f"{name}: expected rows that begin at multiples of {ACCESS_BYTES} bytes, got address "
                f"{ring.data_ptr():#x} and {ring.stride(0) * ring.element_size()} bytes between rows"
            )
        tensors[name] = ring
        names.append(name)
    tensors.update((f"cursor.{name}", column) for name, column in cursor._asdict().items())
    return names


def check_scales(
    scales: Tensor | None, lengths: Tensor | None, seed: int | None, layer: int, first_head: int, state: Tensor,
    rows: tuple[int, int], keys: int, tensors: dict[str, Tensor | None], batch: int,
) -> None:  # fmt: skip
    """Refuses a state whose dtype does not fit its scales, scales that do not fit it, and what draws do not take.

    Args:
        scales: scales of a state of whole numbers, or None.
        lengths: tokens of the state that each row reads, or None.
        seed: seed of the draws, or None to round to the nearest number.
        layer: number of the layer.
        first_head: number of the first head in the model.
        state: the states.
        rows: heads, and rows of a head; each row has a scale.
        keys: elements of a row.
        tensors: tensors of the step, by name; the scales and lengths are added.
        batch: entries of the step.

    Raises:
        ValueError: names the argument that does not fit.
    """
    kinds = FLOATS if scales is None else tuple(TOP)
    if state.dtype not in kinds:
        beside = "without" if scales is None else "with"
        raise ValueError(f"state: expected one of {kinds} {beside} scales, got {state.dtype}")
    for name, number in (("seed", 0 if seed is None else seed), ("layer", layer), ("first_head", first_head)):
        if type(number) is not int or not 0 <= number < MOST_TOKENS:
            raise ValueError(f"{name}: expected a whole number from 0 to 2**31 - 1, got {number!r:.60}")
    if (seed is None) != (lengths is None) or (scales is None and seed is not None):
        raise ValueError("lengths, seed: expected both, beside scales, or None for both")
    if scales is None:
        return
    check_tensors({"scales": scales})
    shape = (state.shape[0], *rows)
    if scales.shape != shape or scales.dtype != torch.float32 or not is_dense(rows, scales.stride()[1:]):
        raise ValueError(
            f"scales: expected float32 {shape}, one for each row of `state`, contiguous in each slot, got "
            f"{scales.dtype} {tuple(scales.shape)} with strides {scales.stride()}"
        )
    if keys % SHARED:
        raise ValueError(f"state: expected rows of a multiple of {SHARED} numbers beside scales, got {keys}")
    check_memory("scales", scales, state.device)
    check_distinct("scales", blocks_of(scales, 1))
    if lengths is not None:
        check_columns(state.device, batch, lengths=lengths)
    tensors |= {"scales": scales, "lengths": lengths}


def _check_rest(
    slots: PlaneBlocks, tensors: dict[str, Tensor | None], batch: int, keeps: Keeps, kind: Any,
    marks: StepMarks | None, tail: Any, cursor: Cursor | None, parents: Tensor | None,
) -> None:  # fmt: skip
    """Refuses marks, tails and trees that do not fit the step, and tensors that the step must not write.

    Args:
        slots: where the slots of the state lie.
        tensors: tensors of the step, by name.
        batch: entries of the step.
        keeps: see `check_tail`.
        kind: class of named tuple that `tail` must be.
        marks: marks of the step, or None.
        tail: rings of the step, or None.
        cursor: columns of the cursor, or None.
        parents: parents of the nodes of trees, or None.
    """
    device = tensors["tokens"].device  # type: ignore[union-attr]  # its check has passed
    if marks is not None:
        check_kept(marks, tensors, device)
    written = ["out", *({"scales"} & tensors.keys())]
    written += check_tail(tail, kind, cursor, parents, keeps, tensors, batch, device)
    check_written(tensors, "state", *written)
    check_apart("state", slots, tensors, *written)


def check_address(name: str, tensor: Tensor) -> None:
    """Refuses a tensor that does not begin on a 16-byte boundary: lanes could not move 16 bytes at a time."""
    if tensor.data_ptr() % ACCESS_BYTES:
        raise ValueError(
            f"{name}: expected to begin at a multiple of {ACCESS_BYTES} bytes, got address {tensor.data_ptr():#x}: "
            "use .clone()"
        )


@remembered("state", "out", "tail")
def check_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, read: Tensor, write: Tensor, snapshot: Tensor,
    tokens: Tensor, activation: str | None, out: Tensor | None, marks: StepMarks | None, tail: ConvTail | None,
    cursor: Cursor | None, parents: Tensor | None,
) -> tuple[int, int]:  # fmt: skip
    """Refuses arguments of `conv_step` that do not fit.

    Returns:
        For x and for out, the number of elements from one token to the next.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r}: expected one of {ACTIVATIONS}")
    rows = {"read": read, "write": write, "snapshot": snapshot, "tokens": tokens}
    tensors = {"state": state, "x": x, "weight": weight, **rows, "bias": bias, "out": out}
    check_tensors(tensors, "bias", "out")
    device = state.device
    if x.dim() != 3 or weight.dim() != 2 or weight.shape[1] < 2:
        raise ValueError(
            f"expected x `batch token channel` and weight `channel tap` with at least 2 taps, "
            f"got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    batch, token, channel = x.shape
    taps = weight.shape[1]
    check_sizes(channel=channel)
    check_grid("x", batch=batch)
    x_distance, out_distance = check_tokens("x", x, "batch token channel", (batch, token, channel), device), channel
    check("weight", weight, "channel tap", (channel, taps), device)
    if bias is not None:
        check("bias", bias, "channel", (channel,), device)
    slots = _check_conv_state(state, (taps - 1, channel))
    check_columns(device, batch, **rows)
    if out is not None:
        out_distance = check_tokens("out", out, "batch token channel", (batch, token, channel), device)
    _check_rest(slots, tensors, batch, {"x": ((channel,), x.dtype)}, ConvTail, marks, tail, cursor, parents)
    return x_distance, out_distance


def _check_conv_state(state: Tensor, shape: tuple[int, int]) -> PlaneBlocks:
    """Returns where the slots lie; refuses slots that are neither `tap-1 channel` nor `channel tap-1` in memory."""
    if state.shape[1:] != shape:
        raise ValueError(f"state: expected `slot tap-1 channel` = {('slots', *shape)}, got {tuple(state.shape)}")
    check_float("state", state)
    if not taps_are_fastest(state) and not is_dense(shape, state.stride()[1:]):
        raise ValueError(
            f"state: a slot `tap-1 channel` must be contiguous, or the transpose of a contiguous `channel tap-1`, "
            f"got strides {state.stride()}"
        )
    return check_slots(state, shape)


@remembered("state", "out", "tail", "scales")
def check_gated_delta(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, state: Tensor, read: Tensor, write: Tensor,
    snapshot: Tensor, tokens: Tensor, scale: float | None, out: Tensor | None, marks: StepMarks | None,
    a_log: Tensor | None, dt_bias: Tensor | None, sigmoid: bool, normalize: bool, a: Tensor | None, b: Tensor | None,
    tail: DeltaTail | None, cursor: Cursor | None, parents: Tensor | None, scales: Tensor | None,
    lengths: Tensor | None, seed: int | None, layer: int, first_head: int,
) -> tuple[int | None, ...]:  # fmt: skip
    """Refuses arguments of `gated_delta_step` that do not fit each other.

    Returns:
        For each of q, k, v, decay, beta, a and b, the number of elements from one token to the next; None for a tensor
        that is not given.
    """
    rows = {"read": read, "write": write, "snapshot": snapshot, "tokens": tokens}
    tensors: dict[str, Tensor | None] = {
        "state": state, "q": q, "k": k, "v": v, "decay": decay, "beta": beta, "a": a, "b": b, **rows,
        "a_log": a_log, "dt_bias": dt_bias, "out": out,
    }  # fmt: skip
    low_rank = a is not None or b is not None
    check_tensors(tensors, *(("beta",) if low_rank else ("a", "b")), "a_log", "dt_bias", "out")
    device = state.device
    for name, switch in (("sigmoid", sigmoid), ("normalize", normalize)):
        if not isinstance(switch, bool):
            raise ValueError(f"{name}: expected True or False, got {switch!r}")
    if low_rank and (beta is not None or a_log is not None or sigmoid or normalize):
        raise ValueError("a, b: expected beta=None beside them, and no a_log, sigmoid or normalize")
    if scale is not None and not (isinstance(scale, float | int | Real) and abs(scale) <= LARGEST):
        raise ValueError(f"scale: expected a number that float32 holds, or None, got {scale!r:.60}")
    if q.dim() != 4 or v.dim() != 4 or not q.shape[2] or v.shape[2] % q.shape[2]:
        raise ValueError(
            f"expected q `batch token key_head key` and v `batch token head value` with head a multiple of key_head, "
            f"got {tuple(q.shape)} and {tuple(v.shape)}"
        )
    (batch, token, head, value), (key_head, key) = v.shape, q.shape[2:]
    check_sizes(head=head, key=key, value=value)
    check_grid("v", batch=batch, head=head)
    check_count("v", batch, token)
    by_key = decay.dim() == 4
    of_head, rates = ("head key", (head, key)) if by_key else ("head", (head,))
    keys = "key_head key", (key_head, key)
    apart = check_inputs(
        (batch, token), device, ("q", q, *keys), ("k", k, *keys), ("v", v, "head value", (head, value)),
        ("decay", decay, of_head, rates), ("beta", beta, "head", (head,)), ("a", a, *keys), ("b", b, *keys),
    )  # fmt: skip
    if a_log is not None:
        check("a_log", a_log, "head", (head,), device)
    if dt_bias is not None:
        if a_log is None:
            raise ValueError("dt_bias: expected None without a_log, which turns projections into decays")
        check("dt_bias", dt_bias, of_head, rates, device, by_key)
    if scales is not None and low_rank:
        raise ValueError("scales: expected None beside a and b")
    slots = _check_matrices(state, (head, key, value), "key", "value")
    check_scales(scales, lengths, seed, layer, first_head, state, (head, value), key, tensors, batch)
    check_columns(device, batch, **rows)
    if out is not None:
        check("out", out, "batch token head value", v.shape, device, in_words=True)
    keeps: Keeps = {"v": ((head, value), v.dtype), "gate": (rates, torch.float32)}
    keeps |= {name: ((key_head, key), x.dtype) for name, x in (("k", k), ("a", a), ("b", b)) if x is not None}
    keeps |= {} if low_rank else {"beta": ((head,), torch.float32)}
    _check_rest(slots, tensors, batch, keeps, DeltaTail, marks, tail, cursor, parents)
    return apart


def _check_matrices(state: Tensor, shape: tuple[int, int, int], row: str, column: str) -> PlaneBlocks:
    """Returns where the slots lie; refuses slots that are neither `head row column` nor `head column row` in memory."""
    head, rows, columns = shape
    if state.shape[1:] == shape and is_transposed(state):
        return check_state(state.mT, f"slot head {column} {row}", (head, columns, rows))
    return check_state(state, f"slot head {row} {column}", shape)


@remembered("state", "out", "tail", "scales")
def check_selective(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, read: Tensor, write: Tensor,
    snapshot: Tensor, tokens: Tensor, d: Tensor | None, z: Tensor | None, dt_bias: Tensor | None, softplus: bool,
    out: Tensor | None, marks: StepMarks | None, tail: SelectiveTail | None, cursor: Cursor | None,
    parents: Tensor | None, scales: Tensor | None, lengths: Tensor | None, seed: int | None, layer: int,
    first_head: int, dt_min: float | None, dt_max: float | None,
) -> tuple[int | None, ...]:  # fmt: skip
    """Refuses arguments of `selective_step` that do not fit each other.

    Returns:
        For each of x, dt, b, c and z, the number of elements from one token to the next; None for z if it is None.
    """
    rows = {"read": read, "write": write, "snapshot": snapshot, "tokens": tokens}
    tensors: dict[str, Tensor | None] = {
        "state": state, "x": x, "dt": dt, "a": a, "b": b, "c": c, **rows,
        "d": d, "z": z, "dt_bias": dt_bias, "out": out,
    }  # fmt: skip
    check_tensors(tensors, "d", "z", "dt_bias", "out")
    device = state.device
    if not isinstance(softplus, bool):
        raise ValueError(f"softplus: expected True or False, got {softplus!r}")
    limits = [each for each in (dt_min, dt_max) if each is not None]
    if not all(isinstance(each, float | int | Real) and each == each for each in limits) or limits != sorted(limits):
        raise ValueError(f"dt_min {dt_min!r}, dt_max {dt_max!r}: expected numbers, the first at most the second")
    if x.dim() != 4 or b.dim() != 4 or not b.shape[2] or x.shape[2] % b.shape[2]:
        raise ValueError(
            f"expected x `batch token head dim` and b `batch token group state` with head a multiple of group, "
            f"got {tuple(x.shape)} and {tuple(b.shape)}"
        )
    if dt.dim() not in (3, 4):
        raise ValueError(
            f"dt: expected `batch token head` (Mamba2) or `batch token head dim` (Mamba1), got {tuple(dt.shape)}"
        )
    batch, token, head, dim = x.shape
    states = b.shape[3]
    check_sizes(head=head, dim=dim, state=states)
    check_grid("x", batch=batch, head=head)
    check_count("x", batch, token)
    # Tied: each head has one dt, a, d and dt_bias. Not tied: each channel of a head has its own.
    tied = dt.dim() == 3
    pattern, shape = ("head", (head,)) if tied else ("head dim", (head, dim))
    shared, own = ("group state", (b.shape[2], states)), ("head dim", (head, dim))
    distances = check_inputs(
        (batch, token), device, ("x", x, *own), ("dt", dt, pattern, shape), ("b", b, *shared), ("c", c, *shared),
        ("z", z, *own),
    )  # fmt: skip
    check("a", a, pattern if tied else "head dim state", shape if tied else (head, dim, states), device)
    if not tied:
        check_address("a", a)
    for name, weight in (("d", d), ("dt_bias", dt_bias)):
        if weight is not None:
            check(name, weight, pattern, shape, device)
    if scales is not None and not tied:
        raise ValueError("scales: expected None for dt `batch token head dim` (Mamba1)")
    if not tied and state.shape[1:] == (head, dim, states) and is_transposed(state):
        raise ValueError(
            "state: expected `slot head dim state` contiguous in each slot, got `slot head state dim`: that order is "
            "for dt `batch token head` (Mamba2); a of Mamba1 lies as `head dim state`"
        )
    slots = _check_matrices(state, (head, dim, states), "dim", "state")
    check_scales(scales, lengths, seed, layer, first_head, state, (head, dim), states, tensors, batch)
    check_columns(device, batch, **rows)
    if out is not None:
        check("out", out, "batch token head dim", (batch, token, head, dim), device, is_transposed(state))
    keeps: Keeps = {"x": ((head, dim), x.dtype), "b": (b.shape[2:], b.dtype), "dt": (shape, torch.float32)}
    _check_rest(slots, tensors, batch, keeps, SelectiveTail, marks, tail, cursor, parents)
    return distances


@remembered("state", "out")
def check_mamba3(
    x: Tensor, b: Tensor, c: Tensor, dt: Tensor, decay: Tensor, trap: Tensor, rotation: Tensor, b_bias: Tensor,
    c_bias: Tensor, d: Tensor, state: Mamba3State, read: Tensor, write: Tensor, snapshot: Tensor, tokens: Tensor,
    z: Tensor | None, out: Tensor | None, marks: StepMarks | None,
) -> tuple[tuple[int | None, ...], list[int]]:  # fmt: skip
    """Refuses arguments of `mamba3_step` that do not fit each other.

    Returns:
        (for each of x, b, c, dt, decay, trap, rotation and z, the number of elements from one token to the next, None
        for z if it is None; for each plane, the distance between its slots, in units of 16 bytes).
    """
    if not isinstance(state, Mamba3State):
        raise ValueError(f"state: expected Mamba3State, got {type(state).__name__}")
    rows = {"read": read, "write": write, "snapshot": snapshot, "tokens": tokens}
    inputs = {"x": x, "b": b, "c": c, "dt": dt, "decay": decay, "trap": trap, "rotation": rotation, "z": z}
    weights = {"b_bias": b_bias, "c_bias": c_bias, "d": d}
    planes = {f"state.{field}": plane for field, plane in state._asdict().items()}
    others: dict[str, Tensor | None] = {**inputs, **weights, **rows, "out": out}
    check_tensors(planes | others, "z", "out")
    device, count = state.ssm.device, state.ssm.shape[0]
    if x.dim() != 4 or b.dim() != 4 or not b.shape[2] or x.shape[2] % b.shape[2] or rotation.dim() != 3:
        raise ValueError(
            f"expected x `batch token head dim`, b `batch token group state` with head a multiple of group, and "
            f"rotation `batch token angle`, got {tuple(x.shape)}, {tuple(b.shape)} and {tuple(rotation.shape)}"
        )
    (batch, token, head, dim), (group, states), angle = x.shape, b.shape[2:], rotation.shape[2]
    check_sizes(head=head, dim=dim, state=states, angle=angle)
    if dim & (dim - 1) or states & (states - 1) or dim * states > MOST_ELEMENTS or 2 * angle > states:
        raise ValueError(
            f"expected x and b with `dim` and `state` powers of two, whose product is at most {MOST_ELEMENTS}, and "
            f"rotation with `angle` at most state / 2, got dim {dim}, state {states} and angle {angle}"
        )
    check_grid("x", batch=batch)
    check_count("x", batch, token)
    shapes: dict[str, tuple[int, ...]] = {"rotation": (angle,), "angle": (head, angle), "ssm": (head, dim, states)}
    shapes |= dict.fromkeys(("x", "z", "v"), (head, dim)) | dict.fromkeys(("b", "c"), (group, states))
    shapes |= dict.fromkeys(("dt", "decay", "trap", "d"), (head,))
    shapes |= dict.fromkeys(("b_bias", "c_bias", "k"), (head, states))
    distances = check_inputs(
        (batch, token), device, *((name, given, MAMBA3[name], shapes[name]) for name, given in inputs.items())
    )
    for name, weight in weights.items():
        check(name, weight, MAMBA3[name], shapes[name], device)
    check_columns(device, batch, **rows)
    if out is not None:
        check("out", out, "batch token head dim", (batch, token, head, dim), device)
    slots, apart = dict[str, PlaneBlocks](), list[int]()
    for (field, plane), name in zip(state._asdict().items(), planes, strict=True):
        check_float(name, plane)
        slots[name] = check_state(plane, f"slot {MAMBA3[field]}", shapes[field], name)
        check_memory(name, plane, device)
        if plane.shape[0] != count or (plane.dtype != torch.float32 and plane is state.angle):
            raise ValueError(
                f"{name}: expected {count} slots, of angles in fp32, got {tuple(plane.shape)} {plane.dtype}"
            )
        bytes_apart, of_head = plane.stride(0) * plane.element_size(), prod(shapes[field][1:]) * plane.element_size()
        if (plane.data_ptr() | (count > 1) * bytes_apart | of_head) % ACCESS_BYTES:
            raise ValueError(
                f"{name}: expected slots and heads that begin at multiples of {ACCESS_BYTES} bytes, got address "
                f"{plane.data_ptr():#x}, {bytes_apart} bytes between slots and {of_head} between heads"
            )
        apart.append(bytes_apart // ACCESS_BYTES)
    if marks is not None:
        check_kept(marks, others, device)
    check_written(planes | others, *planes, "out")
    for name, blocks in slots.items():
        check_apart(name, blocks, others, "out")
    for (name, mine), (other, its) in combinations(slots.items(), 2):
        _check_planes_apart(name, mine, other, its)
    return distances, apart


def _check_planes_apart(name: str, mine: PlaneBlocks, other: str, its: PlaneBlocks) -> None:
    """Refuses planes whose slots share bytes. Slots of one plane may lie in gaps of the other."""
    if mine.start < its.end() and its.start < mine.end() and not fill_gaps(mine, its):
        raise ValueError(f"{name}: shares bytes with {other}: give each plane memory of its own")


def check_conv_delta(conv: tuple[Any, ...], delta: tuple[Any, ...]) -> tuple[Any, ...]:
    """Refuses arguments of `conv_delta_step` that do not fit, also to each other.

    The second launch reads the state, the columns of the step and its marks while the first one runs. So the first one
    must not write them.

    Returns:
        All arguments of both steps, in order, and the results of their checks.
    """
    if not (isinstance(conv, tuple) and isinstance(delta, tuple) and 10 <= len(conv) <= 14 and 10 <= len(delta) <= 27):
        raise ValueError("conv, delta: expected two tuples: arguments of conv_step, `out` too, and of gated_delta_step")
    conv, delta = conv + (None,) * (14 - len(conv)), delta + DELTA_DEFAULTS[len(delta) - 10 :]
    checked, out = (check_conv(*conv), check_gated_delta(*delta)), conv[9]
    columns, its = (*conv[4:8], *(conv[10] or ())), (*delta[6:10], *(delta[12] or ()))
    if len(columns) != len(its) or not all(map(is_, columns, its)):
        raise ValueError("read, write, snapshot, tokens, marks: expected the same tensors in both steps")
    for name, plane in (("state", delta[5]), ("scales", delta[22])):
        if plane is not None:
            slots = blocks_of(plane, 1)
            _check_planes_apart("state of conv_step", blocks_of(conv[3], 1), f"{name} of gated_delta_step", slots)
            check_apart(name, slots, {"out": out, "tail.x": conv[11] and conv[11].x})
    if out is None or delta[2].shape[:2] != out.shape[:2] or not all(_within(each, out) for each in delta[:3]):
        raise ValueError("q, k, v: expected slices of `out` of conv_step, which the step computes")
    return conv, delta, *checked


def _within(part: Tensor, whole: Tensor) -> bool:
    mine, its = tokens_of(part), tokens_of(whole)
    return its.start <= mine.start and mine.end() <= its.end()
