"""A small hybrid language model over bytes: three recurrent layers to one attention layer, fixed random weights.

Knows no slot's owner, no scheduler and no cache: it reads and writes whatever slots and pages it is given, and the
same object runs the cached loop and the uncached one.

    recurrent   see `memstate.cli.demo.mixers`; states live in slots: read -> write, snapshot
    attention   keys and values live in pages, addressed through a page table; page 0 is never read
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from memstate.cli.demo.arithmetic import Weights, attend, linear, rms_norm
from memstate.cli.demo.mixers import MIXERS, TURNED, Tails
from memstate.cli.demo.sizes import ModelSize
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import Cursor, Marks

VOCABULARY = 256  # bytes


class Slots(NamedTuple):
    """Where the states and pages of a step lie: int32 `batch` each, 0 for padding; rows index the page table.

    Marks say which states inside of the step are kept as well, a cursor how far the tails of rows are folded. The
    sampler writes to `accepted` how many tokens of each row are real.
    """

    rows: Tensor
    tokens: Tensor
    read: Tensor
    write: Tensor
    snapshot: Tensor
    marks: Marks | None = None
    cursor: Cursor | None = None
    accepted: Tensor | None = None


class Memory(NamedTuple):
    """The bytes that the model works on.

    Attributes:
        conv: Plane `layer slot ...`, or `slot ...` of each layer.
        ssm: Likewise.
        key: `page token head dim`.
        value: `page token head dim`.
        page_table: `row page`.
        tails: Of each recurrent layer; none where rows have no tails.
    """

    conv: Tensor | Sequence[Tensor]
    ssm: Tensor | Sequence[Tensor]
    key: Tensor
    value: Tensor
    page_table: Tensor
    tails: Sequence[Tails] = ()


class HybridModel:
    """Fixed random weights from a seed; `forward` is the whole model.

    Args:
        size: Sizes.
        seed: Of the weights.
        backend: Runs the kernels of the recurrent layers. Its launches are counted apart.
        mixer: Kind of the recurrent layers.
        state_order: Order of a state in memory; None for the mixer's own.
    """

    def __init__(
        self, size: ModelSize, seed: int, backend: Backend, mixer: str = "gdn", state_order: str | None = None
    ) -> None:
        self.size, self.backend, self.mixer, self.state_order = size, backend, mixer, state_order
        s, weights = size, Weights(seed, backend.device)
        self.embedding = weights.draw(VOCABULARY, s.width, scale=1.0)
        self.recurrent = [MIXERS[mixer](s, weights, backend) for _ in range(s.recurrent_layers)]
        self.attention = {
            "inward": weights.matrix(s.width, 3 * s.heads * s.value),
            "outward": weights.matrix(s.heads * s.value, s.width),
        }
        self.mlp = [
            {"up": weights.matrix(s.width, s.hidden), "down": weights.matrix(s.hidden, s.width)}
            for _ in range(s.recurrent_layers + 1)
        ]
        self.head = weights.matrix(s.width, VOCABULARY, gain=1.5)

    def forward(self, tokens: Tensor, start: Tensor, slots: Slots, memory: Memory, asked: int = 1) -> Tensor:
        """Returns logits `batch asked vocabulary` after the last real tokens of each row; padded rows have none.

        Changes planes at `write` and `snapshot`, and the row's pages at start .. start + tokens. It can be captured.

        Args:
            tokens: int64 `batch token`.
            start: int64 `batch`, tokens already folded into the row's state.
            slots: Where states and pages lie.
            memory: The bytes.
            asked: Tokens, of which a row may have fewer; the first stands for those that it lacks.

        Syncs: no.
        """
        x = self.embedding[tokens]
        where = (slots.read, slots.write, slots.snapshot, slots.tokens)
        for layer, (mixer, mlp) in enumerate(zip(self.recurrent, self.mlp, strict=False)):
            ssm = memory.ssm[layer].mT if self.state_order in TURNED else memory.ssm[layer]
            tails = memory.tails[layer] if memory.tails and slots.cursor else None
            x = x + mixer(rms_norm(x), where, memory.conv[layer], ssm, slots.marks, tails, slots.cursor)
            x = x + _mlp(rms_norm(x), mlp)
        x = x + self._attend(rms_norm(x), start, slots, memory)
        x = x + _mlp(rms_norm(x), self.mlp[-1])
        last = (slots.tokens.long()[:, None] + torch.arange(-asked, 0, device=x.device)).clamp(min=0)
        x = x.gather(1, last[:, :, None].expand(-1, -1, x.shape[2]))
        return linear(rms_norm(x), self.head)

    def _attend(self, x: Tensor, start: Tensor, slots: Slots, memory: Memory) -> Tensor:
        """Attends over all pages that a row may have, masking what is not written yet. x: `batch token width`."""
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
