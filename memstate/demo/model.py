"""A small hybrid language model over bytes: three recurrent layers to one attention layer, fixed random weights.

Knows no slot's owner, no scheduler and no cache: it reads and writes whatever slots and pages it is given, and the
same object runs the cached loop and the uncached one.

    recurrent   causal conv1d, then the gated delta rule; both states live in slots: read -> write, snapshot
    attention   keys and values live in pages, addressed through a page table; page 0 is never read
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from memstate.demo.arithmetic import WEIGHT_BITS, attend, fixed, gate, linear, rms_norm, unit_norm
from memstate.kernels.dispatch import Backend
from memstate.layout import Plane, StateLayout

VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class ModelSize:
    """Sizes of the model; all but the counts of layers and heads are channels."""

    recurrent_layers: int = 3
    width: int = 32
    key: int = 16
    value: int = 16
    heads: int = 2
    taps: int = 4
    hidden: int = 64

    @property
    def conv_channels(self) -> int:
        """One key head shared by all value heads: q and k, then v."""
        return 2 * self.key + self.heads * self.value

    def state_layout(self) -> StateLayout:
        """What one slot holds: the conv windows and the delta rule's matrices of all recurrent layers."""
        conv = Plane("conv", (self.taps - 1, self.conv_channels), torch.float32)
        ssm = Plane("ssm", (self.heads, self.key, self.value), torch.float32)
        return StateLayout((conv, ssm), self.recurrent_layers)

    def page_layout(self, page_size: int) -> StateLayout:
        """What one KV page holds: `page_size` tokens of the attention layer."""
        shape = (page_size, self.heads, self.value)
        return StateLayout(
            tuple(Plane(name, shape, torch.float32, rewritten_each_step=False) for name in ("key", "value")), 1
        )


class Slots(NamedTuple):
    """Where a step's states and pages lie: int32 `batch` each, 0 for padding; rows index the page table."""

    rows: Tensor
    tokens: Tensor
    read: Tensor
    write: Tensor
    snapshot: Tensor


class Memory(NamedTuple):
    """The bytes the model works on: planes `layer slot ...`, pages `page token head dim`, page table `row page`."""

    conv: Tensor
    ssm: Tensor
    key: Tensor
    value: Tensor
    page_table: Tensor


class HybridModel:
    """Fixed random weights from a seed; `forward` is the whole model.

    backend: runs the conv and delta kernels; the model's own, so that its launches are counted apart from the
    library's.
    """

    def __init__(self, size: ModelSize, seed: int, backend: Backend) -> None:
        self.size, self.backend = size, backend
        self._random = torch.Generator().manual_seed(seed)
        s = size
        self.embedding = self._draw(VOCABULARY, s.width, scale=1.0)
        self.recurrent = [
            {
                "inward": self._matrix(s.width, s.conv_channels),
                "taps": self._draw(s.conv_channels, s.taps, scale=0.6),
                "bias": self._draw(s.conv_channels, scale=0.1),
                "rates": self._matrix(s.width, 2 * s.heads),
                "gate": self._matrix(s.width, s.heads * s.value),
                "outward": self._matrix(s.heads * s.value, s.width),
            }
            for _ in range(s.recurrent_layers)
        ]
        self.attention = {
            "inward": self._matrix(s.width, 3 * s.heads * s.value),
            "outward": self._matrix(s.heads * s.value, s.width),
        }
        self.mlp = [
            {"up": self._matrix(s.width, s.hidden), "down": self._matrix(s.hidden, s.width)}
            for _ in range(s.recurrent_layers + 1)
        ]
        self.head = self._matrix(s.width, VOCABULARY, gain=1.5)

    def _draw(self, *shape: int, scale: float) -> Tensor:
        """Drawn on the host, so that every device has the same weights."""
        return (torch.randn(shape, generator=self._random) * scale).to(self.backend.device)

    def _matrix(self, inward: int, outward: int, gain: float = 1.0) -> Tensor:
        """A weight of `linear`: `in out`, float64 on the grid that keeps its sums exact."""
        return fixed(self._draw(inward, outward, scale=gain * inward**-0.5), WEIGHT_BITS)

    def forward(self, tokens: Tensor, start: Tensor, slots: Slots, memory: Memory) -> Tensor:
        """Logits `batch vocabulary` after the last real token of each row; padded rows give numbers nobody reads.

        tokens: int64 `batch token`; start: int64 `batch`, tokens already folded into the row's state. Changes: planes
        at `write` and `snapshot`, the row's pages at start .. start + tokens. Syncs: no; capturable.
        """
        x = self.embedding[tokens]
        for layer, (weights, mlp) in enumerate(zip(self.recurrent, self.mlp, strict=False)):
            x = x + self._recur(rms_norm(x), weights, slots, memory.conv[layer], memory.ssm[layer])
            x = x + _mlp(rms_norm(x), mlp)
        x = x + self._attend(rms_norm(x), start, slots, memory)
        x = x + _mlp(rms_norm(x), self.mlp[-1])
        last = (slots.tokens.long() - 1).clamp(min=0)
        x = x.gather(1, last[:, None, None].expand(-1, 1, x.shape[2])).squeeze(1)
        return linear(rms_norm(x), self.head)

    def _recur(self, x: Tensor, w: dict[str, Tensor], slots: Slots, conv: Tensor, ssm: Tensor) -> Tensor:
        """x `batch token width` through conv and delta rule; for its formula see `memstate.kernels.gated_delta`."""
        s, (batch, steps, _) = self.size, x.shape
        where = (slots.read, slots.write, slots.snapshot, slots.tokens)
        mixed = linear(x, w["inward"])
        window = torch.empty_like(mixed)
        self.backend.conv_step(mixed, w["taps"], w["bias"], conv, *where, None, window)
        q, k, v = window.split((s.key, s.key, s.heads * s.value), -1)
        forget, learn = linear(x, w["rates"]).split(s.heads, -1)
        out = x.new_empty(batch, steps, s.heads, s.value)
        self.backend.gated_delta_step(
            unit_norm(q).unsqueeze(2), unit_norm(k).unsqueeze(2), v.unflatten(-1, (s.heads, s.value)).contiguous(),
            -0.1 * gate(forget), gate(learn), ssm, *where, 1.0, out,
        )  # fmt: skip
        return linear(rms_norm(out).flatten(2) * gate(linear(x, w["gate"])), w["outward"])

    def _attend(self, x: Tensor, start: Tensor, slots: Slots, memory: Memory) -> Tensor:
        """x `batch token width` over all pages that a row may have; what is not yet written is masked."""
        s, (_, steps, _) = self.size, x.shape
        q, k, v = linear(x, self.attention["inward"]).unflatten(-1, (3, s.heads, s.value)).unbind(2)
        pages = memory.page_table[slots.rows.long()].long()
        page_size, at = memory.key.shape[1], torch.arange(steps, device=x.device)
        position = start[:, None] + at
        real = at < slots.tokens[:, None]
        page = pages.gather(1, (position // page_size).clamp(max=pages.shape[1] - 1))
        page = torch.where(real, page, 0)
        offset = position % page_size
        memory.key[page, offset] = k
        memory.value[page, offset] = v

        keys, values = (plane[pages].flatten(1, 2).transpose(1, 2) for plane in (memory.key, memory.value))
        written = (pages > 0).repeat_interleave(page_size, 1)[:, None]
        visible = (torch.arange(keys.shape[2], device=x.device) <= position[:, :, None]) & written & real[:, :, None]
        mixed = attend(q.transpose(1, 2), keys, values, visible[:, None]).transpose(1, 2)
        return linear(mixed.flatten(2), self.attention["outward"])


def _mlp(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    return linear(linear(x, w["up"]).clamp(min=0.0).square(), w["down"])
