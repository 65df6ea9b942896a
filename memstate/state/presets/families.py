"""Kinds of recurrent state: the planes of one layer from its dimensions. Knows no model and no number of layers.

Every plane says what tensor parallelism cuts: heads, groups of heads, or channels. A window holds the inputs that a
causal convolution of `width` taps needs from before, so width-1 of them, as engines keep it; the cache of transformers
keeps one more, the input of the step itself.
"""

from dataclasses import dataclass, replace
from typing import Literal, Protocol, get_args

import torch

from memstate.errors import InvalidArgument
from memstate.state.layout import Plane
from memstate.state.sharding import Part

ConvOrder = Literal["channel_first", "width_first"]
SsmOrder = Literal["key_value", "value_key", "dim_state", "state_dim", "engine"]


class Family(Protocol):
    """The dimensions of one kind of state."""

    def planes(self, ssm_dtype: torch.dtype, conv_dtype: torch.dtype) -> tuple[Plane, ...]:
        """The planes of one layer, cut by heads, groups or channels."""


@dataclass(frozen=True)
class DeltaRule:
    """Gated delta rule: ssm `head key value`, and a window over the channels q | k | v.

    Gated DeltaNet, https://arxiv.org/abs/2412.06464; Kimi Delta Attention, https://arxiv.org/abs/2510.26692, whose
    engines keep the window as `(width-1) channel`: width_first.
    """

    key_heads: int
    value_heads: int
    key: int
    value: int
    width: int
    width_first: bool = False

    def planes(self, ssm_dtype: torch.dtype, conv_dtype: torch.dtype) -> tuple[Plane, ...]:
        """Windows of q, k and v, and one `key value` matrix a value head."""
        keys = (Part("q", self.key_heads, self.key), Part("k", self.key_heads, self.key))
        window = _window((*keys, Part("v", self.value_heads, self.value)), self.width, conv_dtype, self.width_first)
        return window, _heads((self.value_heads, self.key, self.value), ssm_dtype)


@dataclass(frozen=True)
class Mamba2:
    """Mamba-2: ssm `head dim state`, and a window over x | B | C. See https://arxiv.org/abs/2405.21060."""

    heads: int
    dim: int
    groups: int
    state: int
    width: int

    def planes(self, ssm_dtype: torch.dtype, conv_dtype: torch.dtype) -> tuple[Plane, ...]:
        """Windows of x, B and C, and one `dim state` matrix a head."""
        groups = (Part("B", self.groups, self.state), Part("C", self.groups, self.state))
        window = _window((Part("x", self.heads, self.dim), *groups), self.width, conv_dtype)
        return window, _heads((self.heads, self.dim, self.state), ssm_dtype)


@dataclass(frozen=True)
class Mamba:
    """Mamba: ssm `channel state`, and a window over the channels. See https://arxiv.org/abs/2312.00752."""

    channels: int
    state: int
    width: int

    def planes(self, ssm_dtype: torch.dtype, conv_dtype: torch.dtype) -> tuple[Plane, ...]:
        """Windows of x, and one row of states a channel."""
        channels = Part("x", self.channels)
        ssm = Plane("ssm", (self.channels, self.state), ssm_dtype, parts=(channels,))
        return _window((channels,), self.width, conv_dtype), ssm


@dataclass(frozen=True)
class ShortConv:
    """Gated short convolution: a window over the channels and no ssm plane. See https://arxiv.org/abs/2511.23404."""

    channels: int
    width: int

    def planes(self, ssm_dtype: torch.dtype, conv_dtype: torch.dtype) -> tuple[Plane, ...]:
        """Windows alone."""
        return (_window((Part("x", self.channels),), self.width, conv_dtype),)


def _window(parts: tuple[Part, ...], width: int, dtype: torch.dtype, width_first: bool = False) -> Plane:
    """The last width-1 inputs of a causal convolution, `channel (width-1)` unless width_first."""
    shape, axis = (sum(part.length for part in parts), width - 1), 0
    if width_first:
        shape, axis = (shape[1], shape[0]), 1
    return Plane("conv", shape, dtype, parts=parts, axis=axis)


def ordered(planes: tuple[Plane, ...], order: ConvOrder) -> tuple[Plane, ...]:
    """The same planes with windows as `channel (width-1)` or `(width-1) channel`; the cut stays one of the channels.

    Args:
        planes: of one layer.
        order: "channel_first" or "width_first".

    Raises:
        InvalidArgument: another order.
    """
    if order not in get_args(ConvOrder):
        raise InvalidArgument(f"conv_order {order!r}: expected {' or '.join(get_args(ConvOrder))}")
    axis = get_args(ConvOrder).index(order)
    return tuple(
        replace(plane, shape=plane.shape[::-1], axis=axis) if plane.name == "conv" and plane.axis != axis else plane
        for plane in planes
    )


TURNED = ("value_key", "state_dim")
SSM_ORDERS: dict[type, tuple[str, ...]] = {DeltaRule: ("key_value", "value_key"), Mamba2: ("dim_state", "state_dim")}


def ssm_ordered(family: Family, planes: tuple[Plane, ...], order: SsmOrder) -> tuple[Plane, ...]:
    """The same planes with the matrix of a head in either order.

    Args:
        family: of the planes.
        planes: of one layer, as the family has them.
        order: "key_value" or "value_key" of a delta rule, "dim_state" or "state_dim" of Mamba-2, or "engine": as SGLang
            and vLLM store them, which is "value_key", "dim_state" and no change for the others.

    Raises:
        InvalidArgument: another order, or one of another kind of state.
    """
    if order not in get_args(SsmOrder):
        raise InvalidArgument(f"ssm_order {order!r}: expected {' or '.join(get_args(SsmOrder))}")
    orders = SSM_ORDERS.get(type(family), ())
    if order not in (*orders, "engine"):
        expected = " or ".join((*orders, "engine"))
        raise InvalidArgument(f"ssm_order {order!r}: not of {type(family).__name__}; expected {expected}")
    if order not in TURNED and not (order == "engine" and isinstance(family, DeltaRule)):
        return planes
    return tuple(
        replace(plane, shape=(*plane.shape[:-2], *plane.shape[:-3:-1]), order=orders[1])
        if plane.name == "ssm"
        else plane
        for plane in planes
    )


def _heads(shape: tuple[int, int, int], dtype: torch.dtype) -> Plane:
    return Plane("ssm", shape, dtype, parts=(Part("head", shape[0]),))
