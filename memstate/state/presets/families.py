"""What one layer of a model keeps: its planes, and the orders in which they can lie. Knows no field and no model.

Every plane says what tensor parallelism cuts: heads, groups of heads, or channels. A window holds the inputs that a
causal convolution of `width` taps needs from before, so width-1 of them, as engines keep it; the cache of transformers
keeps one more, the input of the step itself. The axes have the order that they have in that cache.
"""

from dataclasses import replace
from math import inf
from typing import Literal, NamedTuple, get_args

import torch

from memstate.errors import InvalidArgument
from memstate.state.layout import Plane
from memstate.state.presets import tails
from memstate.state.presets.tails import OF_MODEL
from memstate.state.sharding import Part

ConvOrder = Literal["channel_first", "width_first", "engine"]
SsmOrder = Literal["key_value", "value_key", "dim_state", "state_dim", "engine"]


class Kept(NamedTuple):
    """The state of one layer, as the classes of transformers have it.

    Attributes:
        planes: windows first; several may have the same name.
        orders: the orders in which the matrix of a head can lie, the usual one first.
        engine: whether engines keep windows as `(width-1) channel`, and whether they keep matrices in the second order.
        rows: what a request has beside its state, see `StateLayout`.
        rings: for each plane, what a tail keeps of one token; nothing where a decode step has no tail.
    """

    planes: tuple[Plane, ...]
    orders: tuple[str, ...] = ()
    engine: tuple[bool, bool] = (False, False)
    rows: tuple[Plane, ...] = ()
    rings: tuple[tails.Fields, ...] = ()

    def typed(self, model: torch.dtype, conv: torch.dtype | None, ssm: torch.dtype | None) -> "Kept":
        """Returns it with the dtype of a model, or with dtypes of the caller for the planes of a name."""
        asked = {"conv": conv, "ssm": ssm}

        def of(plane: Plane) -> Plane:
            if not plane.dtype.is_floating_point:
                return plane
            return replace(plane, dtype=asked.get(plane.name) or (model if plane.dtype == OF_MODEL else plane.dtype))

        rings = tuple(tuple(map(of, fields)) for fields in self.rings)
        return self._replace(planes=tuple(map(of, self.planes)), rows=tuple(map(of, self.rows)), rings=rings)


def window(*parts: Part, width: int) -> Plane:
    """The last width-1 inputs of a causal convolution, `channel (width-1)`."""
    return Plane("conv", (sum(part.length for part in parts), width - 1), OF_MODEL, parts=parts)


def matrices(heads: int, *shape: int) -> Plane:
    """A matrix for each head."""
    return Plane("ssm", (heads, *shape), torch.float32, parts=(Part("head", heads),))


def delta_rule(key_heads: int, value_heads: int, key: int, value: int, width: int, *, by_key: bool = False) -> Kept:
    """Gated delta rule: ssm `head key value`, and a window over the channels q | k | v.

    Gated DeltaNet, https://arxiv.org/abs/2412.06464. Kimi Delta Attention, https://arxiv.org/abs/2510.26692, has the
    same state, with a gate a key channel; engines keep its windows width first.
    """
    parts = Part("q", key_heads, key), Part("k", key_heads, key), Part("v", value_heads, value)
    conv, ssm = window(*parts, width=width), matrices(value_heads, key, value)
    rings = tails.of_window(conv), tails.of_delta_rule(key_heads, value_heads, key, value, by_key=by_key)
    return Kept((conv, ssm), ("key_value", "value_key"), (by_key, True), rings=rings)


def mamba2(heads: int, dim: int, groups: int, state: int, width: int) -> Kept:
    """Mamba-2: ssm `head dim state`, and a window over x | B | C. See https://arxiv.org/abs/2405.21060."""
    parts = Part("x", heads, dim), Part("B", groups, state), Part("C", groups, state)
    conv, ssm = window(*parts, width=width), matrices(heads, dim, state)
    rings = tails.of_window(conv), tails.of_selective(heads, dim, groups, state)
    return Kept((conv, ssm), ("dim_state", "state_dim"), rings=rings)


def mamba3(heads: int, dim: int, state: int, angles: int) -> Kept:
    """Mamba-3: ssm `head dim state`, how far each head has turned, and its last key and value.

    As `mamba_ssm` 2.3.2 has it for one input and one output. `Mamba3State` takes the planes in this order.
    """
    parts = (Part("head", heads),)
    angle = Plane("angle", (heads, angles), torch.float32, parts=parts)
    k, v = (Plane(name, (heads, size), OF_MODEL, parts=parts) for name, size in (("k", state), ("v", dim)))
    return Kept((angle, matrices(heads, dim, state), k, v), ("dim_state",))


def mamba(channels: int, state: int, width: int) -> Kept:
    """Mamba: ssm `channel state`, and a window over the channels. See https://arxiv.org/abs/2312.00752."""
    part = Part("x", channels)
    conv = window(part, width=width)
    ssm = Plane("ssm", (channels, state), torch.float32, parts=(part,))
    return Kept((conv, ssm), rings=(tails.of_window(conv), tails.of_channels(1, channels, state)))


def convolutions(*convs: Plane) -> Kept:
    """Convolutions alone."""
    return Kept(convs, rings=tuple(map(tails.of_window, convs)))


def compressor(name: str, rate: int, size: int, overlap: int = 0) -> Kept:
    """Windows of `rate` tokens that become one entry of KV each: keys and gates of the open window, `token channel`.

    The last token of a window need not be kept, since it closes the window in its own step. Where a window closes, all
    is in the KV, unless windows overlap: then each token has a second series of keys and gates for the window after its
    own, and the state is that of the last window. Gates start at -inf, which gives what is not there no weight.

    Args:
        name: of the planes, with "_kv" and "_gate" behind it.
        rate: tokens of a window.
        size: channels of an entry.
        overlap: the grid of the state if windows overlap, 0 if they do not.
    """

    def planes(tokens: int, channels: int, gates: torch.dtype, grid: int = 1) -> tuple[Plane, ...]:
        kv = Plane(f"{name}_kv", (tokens, channels), OF_MODEL, rewritten_each_step=False, grid=grid)
        return kv, replace(kv, name=f"{name}_gate", dtype=gates, fill=-inf)

    last = planes(rate, size, torch.float32, overlap) if overlap else ()  # with a bias, which the class has in fp32
    return Kept(last, rows=planes(rate - 1, 2 * size if overlap else size, OF_MODEL))


def conv_ordered(kept: Kept, order: ConvOrder) -> Kept:
    """The same state with windows as `channel (width-1)` or `(width-1) channel`; the cut stays one of the channels.

    Args:
        kept: by a layer, as transformers has it.
        order: "channel_first", "width_first", or "engine": as SGLang and vLLM store them.

    Raises:
        InvalidArgument: another order.
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


def ssm_ordered(kept: Kept, order: SsmOrder) -> Kept:
    """The same state with the matrix of a head in either order.

    Args:
        kept: by a layer, as transformers has it.
        order: "key_value" or "value_key" of a delta rule, "dim_state" or "state_dim" of Mamba-2, or "engine": as SGLang
            and vLLM store them, which is "value_key", "dim_state" and no change for the others.

    Raises:
        InvalidArgument: another order, or one of another kind of state.
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
