"""Kinds of recurrent state: the planes of one layer from its dimensions. Knows no model and no number of layers.

Every plane says what tensor parallelism cuts: heads, groups of heads, or channels. A window holds the inputs that a
causal convolution of `width` taps needs from before, so width-1 of them, as engines keep it; the cache of transformers
keeps one more, the input of the step itself. The axes have the order that they have in that cache.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch

from memstate.errors import InvalidArgument
from memstate.state.layout import Plane
from memstate.state.sharding import Part

ConvOrder = Literal["channel_first", "width_first", "engine"]
SsmOrder = Literal["key_value", "value_key", "dim_state", "state_dim", "engine"]


class Family(ABC):
    """The dimensions of the state of one layer.

    Attributes:
        conv_dtype: of windows in the classes of transformers; None: that of the model.
        ssm_dtype: of states in the classes of transformers; None: that of the model.
        width_first: whether engines keep windows as `(width-1) channel`.
        ssm_orders: the orders in which the matrix of a head can lie, the usual one first.
    """

    conv_dtype: ClassVar[torch.dtype | None] = None
    ssm_dtype: ClassVar[torch.dtype | None] = torch.float32
    width_first: ClassVar[bool] = False
    ssm_orders: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def planes(self, ssm_dtype: torch.dtype, conv_dtype: torch.dtype) -> tuple[Plane, ...]:
        """The states of one layer, windows first; several may have the same name."""


@dataclass(frozen=True)
class DeltaRule(Family):
    """Gated delta rule: ssm `head key value`, and a window over the channels q | k | v.

    Gated DeltaNet, https://arxiv.org/abs/2412.06464.
    """

    key_heads: int
    value_heads: int
    key: int
    value: int
    width: int
    ssm_orders: ClassVar[tuple[str, ...]] = ("key_value", "value_key")

    def planes(self, ssm_dtype: torch.dtype, conv_dtype: torch.dtype) -> tuple[Plane, ...]:
        """A window of q, k and v, and one `key value` matrix a value head."""
        keys = (Part("q", self.key_heads, self.key), Part("k", self.key_heads, self.key))
        window = _window((*keys, Part("v", self.value_heads, self.value)), self.width, conv_dtype)
        return window, _heads((self.value_heads, self.key, self.value), ssm_dtype)


class KimiDelta(DeltaRule):
    """Kimi Delta Attention, https://arxiv.org/abs/2510.26692: the same state; engines keep windows width first."""

    width_first: ClassVar[bool] = True


@dataclass(frozen=True)
class NgramDelta(DeltaRule):
    """A layer of a delta rule that also adds embeddings of n-grams, as Qwen4-Exp has in some layers.

    Beside the state of the rule it keeps the inputs of a dilated convolution, and the last tokens.
    """

    channels: int
    inputs: int
    tokens: int

    def planes(self, ssm_dtype: torch.dtype, conv_dtype: torch.dtype) -> tuple[Plane, ...]:
        """The planes of the rule, `channel input` of the convolution, and `token`."""
        window, state = super().planes(ssm_dtype, conv_dtype)
        inputs = Plane("conv", (self.channels, self.inputs), conv_dtype)
        return window, inputs, Plane("conv", (self.tokens,), torch.int64), state


@dataclass(frozen=True)
class Mamba2(Family):
    """Mamba-2: ssm `head dim state`, and a window over x | B | C. See https://arxiv.org/abs/2405.21060."""

    heads: int
    dim: int
    groups: int
    state: int
    width: int
    ssm_orders: ClassVar[tuple[str, ...]] = ("dim_state", "state_dim")

    def planes(self, ssm_dtype: torch.dtype, conv_dtype: torch.dtype) -> tuple[Plane, ...]:
        """A window of x, B and C, and one `dim state` matrix a head."""
        groups = (Part("B", self.groups, self.state), Part("C", self.groups, self.state))
        window = _window((Part("x", self.heads, self.dim), *groups), self.width, conv_dtype)
        return window, _heads((self.heads, self.dim, self.state), ssm_dtype)


@dataclass(frozen=True)
class Mamba(Family):
    """Mamba: ssm `channel state`, and a window over the channels. See https://arxiv.org/abs/2312.00752."""

    channels: int
    state: int
    width: int

    def planes(self, ssm_dtype: torch.dtype, conv_dtype: torch.dtype) -> tuple[Plane, ...]:
        """A window of x, and one row of states a channel."""
        channels = Part("x", self.channels)
        ssm = Plane("ssm", (self.channels, self.state), ssm_dtype, parts=(channels,))
        return _window((channels,), self.width, conv_dtype), ssm


@dataclass(frozen=True)
class HeadedMamba(Family):
    """Mamba with its channels in heads, as in Zamba: ssm `head channel state`. See https://arxiv.org/abs/2405.16712."""

    heads: int
    dim: int
    state: int
    width: int

    def planes(self, ssm_dtype: torch.dtype, conv_dtype: torch.dtype) -> tuple[Plane, ...]:
        """A window of x, and one row of states a channel of a head."""
        window = _window((Part("x", self.heads, self.dim),), self.width, conv_dtype)
        return window, _heads((self.heads, self.dim, self.state), ssm_dtype)


@dataclass(frozen=True)
class ShortConv(Family):
    """Gated short convolution: a window over the channels and no ssm plane. See https://arxiv.org/abs/2511.23404."""

    channels: int
    width: int

    def planes(self, ssm_dtype: torch.dtype, conv_dtype: torch.dtype) -> tuple[Plane, ...]:
        """A window alone."""
        return (_window((Part("x", self.channels),), self.width, conv_dtype),)


@dataclass(frozen=True)
class ShortConvs(Family):
    """Four short convolutions of a layer, as in Inkling: of keys, values, and the outputs of attention and MLP.

    Every rank holds the windows of the outputs. The classes compute all four in fp32.
    """

    heads: int
    dim: int
    hidden: int
    width: int
    conv_dtype: ClassVar[torch.dtype | None] = torch.float32

    def planes(self, ssm_dtype: torch.dtype, conv_dtype: torch.dtype) -> tuple[Plane, ...]:
        """Two windows over the KV heads and two over the hidden size."""
        keys = _window((Part("head", self.heads, self.dim),), self.width, conv_dtype)
        outputs = Plane("conv", (self.hidden, self.width - 1), conv_dtype)
        return keys, keys, outputs, outputs


@dataclass(frozen=True)
class ConvolvedAttention(Family):
    """Compressed convolutional attention, as in Zaya: inputs of two convolutions over q | k, and the last half value.

    See https://arxiv.org/abs/2510.04476. Every rank holds the half value: its heads do not divide.
    """

    heads: int
    kv_heads: int
    dim: int
    inputs: int
    ssm_dtype: ClassVar[torch.dtype | None] = None

    def planes(self, ssm_dtype: torch.dtype, conv_dtype: torch.dtype) -> tuple[Plane, ...]:
        """A window of q and k, and the half value of the token before."""
        window = _window(
            (Part("q", self.heads, self.dim), Part("k", self.kv_heads, self.dim)), self.inputs + 1, conv_dtype
        )
        return window, Plane("ssm", (self.kv_heads * self.dim // 2,), ssm_dtype)


def _window(parts: tuple[Part, ...], width: int, dtype: torch.dtype) -> Plane:
    """The last width-1 inputs of a causal convolution, `channel (width-1)`."""
    return Plane("conv", (sum(part.length for part in parts), width - 1), dtype, parts=parts)


def _heads(shape: tuple[int, int, int], dtype: torch.dtype) -> Plane:
    return Plane("ssm", shape, dtype, parts=(Part("head", shape[0]),))


def ordered(family: Family, planes: tuple[Plane, ...], order: ConvOrder) -> tuple[Plane, ...]:
    """The same planes with windows as `channel (width-1)` or `(width-1) channel`; the cut stays one of the channels.

    Args:
        family: of the planes.
        planes: of one layer, as the family has them.
        order: "channel_first", "width_first", or "engine": as SGLang and vLLM store them.

    Raises:
        InvalidArgument: another order.
    """
    if order not in get_args(ConvOrder):
        raise InvalidArgument(f"conv_order {order!r}: expected {' or '.join(get_args(ConvOrder))}")
    if order == "channel_first" or (order == "engine" and not family.width_first):
        return planes
    return tuple(
        replace(plane, shape=plane.shape[::-1], axis=1) if plane.name == "conv" and len(plane.shape) == 2 else plane
        for plane in planes
    )


TURNED = ("value_key", "state_dim")


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
    if order not in (*family.ssm_orders, "engine"):
        expected = " or ".join((*family.ssm_orders, "engine"))
        raise InvalidArgument(f"ssm_order {order!r}: not of {type(family).__name__}; expected {expected}")
    if order not in TURNED and not (order == "engine" and isinstance(family, DeltaRule)):
        return planes
    return tuple(
        replace(plane, shape=(*plane.shape[:-2], *plane.shape[:-3:-1]), order=family.ssm_orders[1])
        if plane.name == "ssm"
        else plane
        for plane in planes
    )
