"""Describes the planes of one layer, by the kind of the layer, and their orders in memory. Knows no field and no model.

Every plane says what tensor parallelism cuts: heads, groups of heads, or channels. A window holds the earlier inputs
that a causal convolution of `width` taps needs: width-1 inputs, as in engines. The cache of transformers also holds the
input of the step itself. The order of axes is that of this cache.
"""

from dataclasses import replace
from math import inf
from typing import Literal, NamedTuple, get_args

import torch

from memstate.errors import InvalidArgument
from memstate.state.layout import NUMBERS, Plane, StateLayout
from memstate.state.presets import tails
from memstate.state.presets.tails import OF_MODEL
from memstate.state.sharding import Part

ConvOrder = Literal["channel_first", "width_first", "engine"]
SHARED = 16  # neighbours that one draw of a step rounds: elements of a row of whole numbers are a multiple of it
SsmOrder = Literal["key_value", "value_key", "dim_state", "state_dim", "engine"]


class LayerState(NamedTuple):
    """The state of one layer, as in the classes of transformers.

    Attributes:
        planes: planes of the layer, windows first; several planes may have the same name.
        orders: possible orders of a head's matrix in memory, the usual one first.
        engine: two flags: engines keep windows as `(width-1) channel`; engines keep matrices in `orders[1]`.
        rows: planes of rows, see `StateLayout`.
        rings: fields of the tail of each plane; empty if the decode step takes no tail.
        summed: axis of the last plane, in the usual order, whose elements share a scale if they are whole numbers; None
            if the decode step takes no whole numbers.
    """

    planes: tuple[Plane, ...]
    orders: tuple[str, ...] = ()
    engine: tuple[bool, bool] = (False, False)
    rows: tuple[Plane, ...] = ()
    rings: tuple[tails.Fields, ...] = ()
    summed: int | None = None

    def typed(self, model: torch.dtype, conv: torch.dtype | None, ssm: torch.dtype | None) -> "LayerState":
        """Returns the state with the dtype of the model; `conv` and `ssm` are dtypes for the planes of these names."""
        asked = {"conv": conv, "ssm": ssm}

        def of(plane: Plane) -> Plane:
            if not plane.dtype.is_floating_point:
                return plane
            return replace(plane, dtype=asked.get(plane.name) or (model if plane.dtype == OF_MODEL else plane.dtype))

        rings = tuple(tuple(map(of, fields)) for fields in self.rings)
        return self._replace(planes=tuple(map(of, self.planes)), rows=tuple(map(of, self.rows)), rings=rings)


def window(*parts: Part, width: int) -> Plane:
    """Returns the plane of the last width-1 inputs of a causal convolution, `channel (width-1)`."""
    return Plane("conv", (sum(part.length for part in parts), width - 1), OF_MODEL, parts=parts)


def matrices(heads: int, *shape: int) -> Plane:
    """Returns a plane with a matrix for each head."""
    return Plane("ssm", (heads, *shape), torch.float32, parts=(Part("head", heads),))


def linear(heads: int, key: int, value: int, *convs: Plane) -> LayerState:
    """Returns the state of linear attention, ssm `head key value`, behind windows. Its steps have no tail."""
    return LayerState((*convs, matrices(heads, key, value)), ("key_value", "value_key"))


def lightning(heads: int, size: int) -> LayerState:
    """Returns the state of lightning attention, https://arxiv.org/abs/2401.04658: ssm `head key value`, no window.

    A head forgets at a constant rate. `selective_step` computes a step of it with x = v, b = k, c = q and dt = 1.
    """
    return linear(heads, size, size)._replace(rings=(tails.of_selective(heads, size, heads, size),), summed=1)


def channels(units: int, size: int, *convs: Plane) -> LayerState:
    """Returns the state of a recurrence of single channels, ssm `channel`; ranks cut whole units of `size` channels."""
    return LayerState((*convs, Plane("ssm", (units * size,), torch.float32, parts=(Part("x", units, size),))))


def delta_rule(
    key_heads: int, value_heads: int, key: int, value: int, width: int, *, by_key: bool = False
) -> LayerState:
    """Returns the state of a gated delta rule: ssm `head key value`, and a window over the channels q | k | v.

    This is the state of Gated DeltaNet, https://arxiv.org/abs/2412.06464. Kimi Delta Attention,
    https://arxiv.org/abs/2510.26692, has the same state, but one gate per key channel (`by_key`), and engines keep its
    windows width first.
    """
    parts = Part("q", key_heads, key), Part("k", key_heads, key), Part("v", value_heads, value)
    conv = window(*parts, width=width)
    rings = tails.of_window(conv), tails.of_delta_rule(key_heads, value_heads, key, value, by_key=by_key)
    return linear(value_heads, key, value, conv)._replace(engine=(by_key, True), rings=rings, summed=1)


def mamba2(heads: int, dim: int, groups: int, state: int, width: int) -> LayerState:
    """Returns the state of Mamba-2: ssm `head dim state`, and a window over x | B | C.

    See https://arxiv.org/abs/2405.21060.
    """
    parts = Part("x", heads, dim), Part("B", groups, state), Part("C", groups, state)
    conv, ssm = window(*parts, width=width), matrices(heads, dim, state)
    rings = tails.of_window(conv), tails.of_selective(heads, dim, groups, state)
    return LayerState((conv, ssm), ("dim_state", "state_dim"), rings=rings, summed=2)


def mamba3(heads: int, dim: int, state: int, angles: int) -> LayerState:
    """Returns the state of Mamba-3: the angles of each head, ssm `head dim state`, and the last key and value.

    The planes are those of `mamba_ssm` 2.3.2 for one input and one output, in the order of `Mamba3State`.
    """
    parts = (Part("head", heads),)
    angle = Plane("angle", (heads, angles), torch.float32, parts=parts)
    k, v = (Plane(name, (heads, size), OF_MODEL, parts=parts) for name, size in (("k", state), ("v", dim)))
    return LayerState((angle, matrices(heads, dim, state), k, v), ("dim_state",))


def mamba(channels: int, state: int, width: int) -> LayerState:
    """Returns the state of Mamba: ssm `channel state`, and a window over the channels.

    See https://arxiv.org/abs/2312.00752.
    """
    part = Part("x", channels)
    conv = window(part, width=width)
    ssm = Plane("ssm", (channels, state), torch.float32, parts=(part,))
    return LayerState((conv, ssm), rings=(tails.of_window(conv), tails.of_channels(1, channels, state)))


def convolutions(*convs: Plane) -> LayerState:
    """Returns the state of a layer that has only convolutions."""
    return LayerState(convs, rings=tuple(map(tails.of_window, convs)))


def compressor(name: str, rate: int, size: int, overlap: int = 0) -> LayerState:
    """Returns the state of a layer that pools each window of `rate` tokens into one entry of KV.

    Planes of rows hold keys and gates of the open window, `token channel`. The last token of a window is not kept,
    because it closes the window in its own step. Nothing of a closed window is kept, because its KV has all of it. If
    windows overlap, however, each token has a second set of keys and gates for the next window, and the state holds the
    last closed window. Gates start at -inf, so that missing tokens have no weight.

    Args:
        name: start of the names of planes, before "_kv" and "_gate".
        rate: tokens of a window.
        size: channels of an entry.
        overlap: if windows overlap, the grid of the state (`Plane.grid`), otherwise 0.
    """

    def planes(tokens: int, channels: int, gates: torch.dtype, grid: int = 1) -> tuple[Plane, ...]:
        kv = Plane(f"{name}_kv", (tokens, channels), OF_MODEL, rewritten_each_step=False, grid=grid)
        return kv, replace(kv, name=f"{name}_gate", dtype=gates, fill=-inf)

    last = planes(rate, size, torch.float32, overlap) if overlap else ()  # fp32: the class adds a bias in fp32
    return LayerState(last, rows=planes(rate - 1, 2 * size if overlap else size, OF_MODEL))


def scaled(kind: str, layout: StateLayout, summed: int | None) -> StateLayout:
    """Returns a layout in which the scales of each plane of whole numbers lie behind it.

    Args:
        kind: type of the model, for errors.
        layout: the layout without scales.
        summed: as in `LayerState`.

    Raises:
        InvalidArgument: the decode step of the model takes no whole numbers, or not of these sizes.
    """
    planes = list[Plane]()
    for plane in layout.planes:
        planes.append(plane)
        if plane.dtype not in NUMBERS:
            continue
        if summed is None:
            raise InvalidArgument(f"{kind}: no states of {plane.dtype}: only delta rules and Mamba-2 have them")
        axis = len(plane.shape) - summed if plane.order else summed  # the other order exchanges the last two axes
        if plane.shape[axis] % SHARED:
            why = f"{plane.shape[axis]} numbers share a scale: expected a multiple of {SHARED}"
            raise InvalidArgument(f"{kind}: no states of {plane.dtype}: {why}")
        planes.append(plane.scales(axis))
    return replace(layout, planes=tuple(planes))


def conv_ordered(kept: LayerState, order: ConvOrder) -> LayerState:
    """Returns the state with windows as `channel (width-1)` or `(width-1) channel`; ranks still cut the channels.

    Args:
        kept: the state of a layer, as in transformers.
        order: "channel_first", "width_first", or "engine", the order of SGLang and vLLM.

    Raises:
        InvalidArgument: there is no such order.
    """
    if order not in get_args(ConvOrder):
        raise InvalidArgument(f"conv_order {order!r}: expected {' or '.join(get_args(ConvOrder))}")
    if order == "channel_first" or (order == "engine" and not kept.engine[0]):
        return kept
    planes = [
        replace(plane, shape=plane.shape[::-1], axis=1) if plane.name == "conv" and len(plane.shape) == 2 else plane
        for plane in kept.planes
    ]
    return kept._replace(planes=tuple(planes))


def ssm_ordered(kept: LayerState, order: SsmOrder) -> LayerState:
    """Returns the state with the matrix of each head in the given order.

    Args:
        kept: the state of a layer, as in transformers.
        order: "key_value" or "value_key" of a delta rule, "dim_state" or "state_dim" of Mamba-2, or "engine", the order
            of SGLang and vLLM: "value_key", "dim_state", and no change for other states.

    Raises:
        InvalidArgument: there is no such order, or this kind of state does not have it.
    """
    if order not in get_args(SsmOrder):
        raise InvalidArgument(f"ssm_order {order!r}: expected {' or '.join(get_args(SsmOrder))}")
    if order not in (*kept.orders, "engine"):
        raise InvalidArgument(
            f"ssm_order {order!r}: not of this model; expected {' or '.join((*kept.orders, 'engine'))}"
        )
    if order not in kept.orders[1:] and not (order == "engine" and kept.engine[1]):
        return kept
    planes = [
        replace(plane, shape=(*plane.shape[:-2], *plane.shape[:-3:-1]), order=kept.orders[1])
        if plane.name == "ssm"
        else plane
        for plane in kept.planes
    ]
    return kept._replace(planes=tuple(planes))
