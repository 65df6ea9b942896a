"""The recurrent layers of the demo's model: projections around two kernels, whose states live in slots.

    gdn      q k v   conv   gated delta rule with one decay per head; all heads share q and k
    kda      q k v   conv   gated delta rule with one decay per key channel
    mamba2   x B C   conv   selective state update; a slot holds the conv window as `channel tap-1`

The layers read, write and snapshot the slots that they are given.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import Cursor, StepMarks
from memstate.state.layout import Order, Plane, StateLayout
from memstate_tools.demo.arithmetic import Weights, gate, linear, rms_norm, unit_norm
from memstate_tools.demo.sizes import ModelSize

Where = tuple[Tensor, Tensor, Tensor, Tensor]  # read, write, snapshot, tokens: int32 `batch`
Tails = tuple[Any, Any]  # tails of conv and ssm of a layer, from `mem.planes.tail`


class Mixer(ABC):
    """One recurrent layer with its weights."""

    def __init__(self, size: ModelSize, weights: Weights, backend: Backend) -> None:
        self.size, self.backend = size, backend
        (channels, rates), inner = self.widths(size), size.heads * size.value
        self.inward = weights.matrix(size.width, channels)
        self.taps = weights.draw(channels, size.taps, scale=0.6)
        self.bias = weights.draw(channels, scale=0.1)
        self.rates = weights.matrix(size.width, rates)
        self.gate = weights.matrix(size.width, inner)
        self.outward = weights.matrix(inner, size.width)

    @staticmethod
    @abstractmethod
    def widths(size: ModelSize) -> tuple[int, int]:
        """Returns two numbers: channels, which the conv reads, and rates, which control how a state changes."""

    @classmethod
    def shapes(cls, size: ModelSize) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of the planes conv and ssm, per slot and layer."""
        return (size.taps - 1, cls.widths(size)[0]), (size.heads, size.key, size.value)

    @staticmethod
    def window(conv: Tensor) -> Tensor:
        """Returns the plane conv of a layer as `slot tap-1 channel`."""
        return conv

    @classmethod
    @abstractmethod
    def rings(cls, size: ModelSize) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the tail of one token in one layer, without the inputs of the conv: name -> shape."""

    @abstractmethod
    def advance(
        self, mixed: Tensor, rates: Tensor, ssm: Tensor, where: Where, out: Tensor, marks: StepMarks | None,
        tail: Any, cursor: Cursor | None, parents: Tensor | None,
    ) -> None:  # fmt: skip
        """Runs the recurrence over `mixed`, the output of the conv. Writes the result to `out`, changes `ssm`."""

    def __call__(
        self, x: Tensor, where: Where, conv: Tensor, ssm: Tensor, marks: StepMarks | None = None,
        tails: Tails | None = None, cursor: Cursor | None = None, parents: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Runs conv and recurrence over normalised x `batch token width`. Changes both planes.

        With marks, the states at the marks are stored too. With tails and a cursor, the tails of rows are folded into
        the state. Then the tokens of a row may form a tree; `parents` has the parent of each token.

        Syncs: no.
        """
        of_conv, of_ssm = tails if tails is not None else (None, None)
        mixed = linear(x, self.inward)
        seen = torch.empty_like(mixed)
        self.backend.conv_step(
            mixed, self.taps, self.bias, self.window(conv), *where, None, seen, marks=marks,
            tail=of_conv, cursor=cursor, parents=parents,
        )  # fmt: skip
        out = x.new_empty(*x.shape[:2], self.size.heads, self.size.value)
        self.advance(seen, linear(x, self.rates), ssm, where, out, marks, of_ssm, cursor, parents)
        return linear(rms_norm(out).flatten(2) * gate(linear(x, self.gate)), self.outward)


class KimiDelta(Mixer):
    """The gated delta rule with one decay per key channel: `memstate.kernels.gated_delta`."""

    @staticmethod
    def widths(size: ModelSize) -> tuple[int, int]:
        """See `Mixer`."""
        return size.heads * (2 * size.key + size.value), size.heads * (size.key + 1)

    @classmethod
    def rings(cls, size: ModelSize) -> dict[str, tuple[int, ...]]:
        """See `Mixer`."""
        rates = cls.widths(size)[1] // size.heads - 1  # rates of a head, without the one for learning
        keys = (cls.widths(size)[0] // size.key - size.heads * size.value // size.key) // 2
        gate = (size.heads, rates) if rates > 1 else (size.heads,)
        return {"k": (keys, size.key), "v": (size.heads, size.value), "gate": gate, "beta": (size.heads,)}

    def advance(
        self, mixed: Tensor, rates: Tensor, ssm: Tensor, where: Where, out: Tensor, marks: StepMarks | None,
        tail: Any, cursor: Cursor | None, parents: Tensor | None,
    ) -> None:  # fmt: skip
        """See `Mixer`."""
        s = self.size
        # channels of v, and number of learning rates; the channels that v leaves are those of q and k
        values, learning = s.heads * s.value, s.heads
        keys, forgetting = (mixed.shape[-1] - values) // 2, rates.shape[-1] - learning
        q, k, v = mixed.split((keys, keys, values), -1)
        q, k = (unit_norm(part.unflatten(-1, (-1, s.key))) for part in (q, k))
        forget, learn = rates.split((forgetting, learning), -1)
        decay = -0.1 * gate(forget if forgetting == s.heads else forget.unflatten(-1, (s.heads, s.key)))
        v = v.unflatten(-1, (s.heads, s.value))
        self.backend.gated_delta_step(
            q, k, v, decay, gate(learn), ssm, *where, 1.0, out, marks=marks, tail=tail, cursor=cursor, parents=parents
        )


class GatedDelta(KimiDelta):
    """The gated delta rule with one decay per head, and with q and k that all heads share."""

    @staticmethod
    def widths(size: ModelSize) -> tuple[int, int]:
        """See `Mixer`."""
        return 2 * size.key + size.heads * size.value, 2 * size.heads


class Mamba2(Mixer):
    """Mamba-2: the formula of `memstate.kernels.selective`, with step, decay and skip per head; heads share B and C."""

    def __init__(self, size: ModelSize, weights: Weights, backend: Backend) -> None:
        super().__init__(size, weights, backend)
        self.decay = -(0.1 + weights.draw(size.heads, scale=0.2).abs())
        self.skip = weights.draw(size.heads, scale=1.0)
        self.rate_bias = weights.draw(size.heads, scale=0.5) - 2.0  # softplus of it gives steps of about 1/8

    @staticmethod
    def widths(size: ModelSize) -> tuple[int, int]:
        """See `Mixer`."""
        return size.heads * size.value + 2 * size.key, size.heads

    @classmethod
    def shapes(cls, size: ModelSize) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See `Mixer`."""
        return (cls.widths(size)[0], size.taps - 1), (size.heads, size.value, size.key)

    @classmethod
    def rings(cls, size: ModelSize) -> dict[str, tuple[int, ...]]:
        """See `Mixer`."""
        return {"x": (size.heads, size.value), "b": (1, size.key), "dt": (size.heads,)}

    @staticmethod
    def window(conv: Tensor) -> Tensor:
        """See `Mixer`."""
        return conv.transpose(1, 2)

    def advance(
        self, mixed: Tensor, rates: Tensor, ssm: Tensor, where: Where, out: Tensor, marks: StepMarks | None,
        tail: Any, cursor: Cursor | None, parents: Tensor | None,
    ) -> None:  # fmt: skip
        """See `Mixer`."""
        s = self.size
        x, b, c = mixed.split((s.heads * s.value, s.key, s.key), -1)
        x, b, c = x.unflatten(-1, (s.heads, s.value)), unit_norm(b).unsqueeze(2), unit_norm(c).unsqueeze(2)
        self.backend.selective_step(
            x, rates, self.decay, b, c, ssm, *where, d=self.skip, dt_bias=self.rate_bias, softplus=True, out=out,
            marks=marks, tail=tail, cursor=cursor, parents=parents,
        )  # fmt: skip


TURNED = ("value-key", "state-dim")  # orders of a state for which kernels get the transposed view
MIXERS: dict[str, type[Mixer]] = {"gdn": GatedDelta, "mamba2": Mamba2, "kda": KimiDelta}


def state_layout(
    size: ModelSize, model: str = "gdn", order: Order = "layer_major", state_order: str | None = None, tail: int = 0
) -> StateLayout:
    """Returns the layout of a slot: the conv windows and recurrent states of all recurrent layers.

    With a tail, the layout also has the rings of a row for its last tokens.
    """
    conv, ssm = MIXERS[model].shapes(size)
    if state_order in TURNED:
        ssm = (ssm[0], ssm[2], ssm[1])
    planes = (Plane("conv", conv, torch.float32), Plane("ssm", ssm, torch.float32))
    rows = None
    if tail:
        of_ssm = {f"ssm_{name}": shape for name, shape in MIXERS[model].rings(size).items()}
        shapes = {"conv_x": (MIXERS[model].widths(size)[0],), **of_ssm}
        rings = (Plane(name, (3 * tail - 1, *shape), torch.float32, fill=None) for name, shape in shapes.items())
        rows = StateLayout(tuple(rings), size.recurrent_layers, order)
    return StateLayout(planes, size.recurrent_layers, order, rows=rows)
