"""A small hybrid language model over bytes: three recurrent layers to one attention layer, fixed random weights.

The model reads and writes the slots and pages that it is given. The same object runs the cached and the uncached loop.

    recurrent   see `memstate_tools.demo.mixers`; states live in slots: read -> write, snapshot
    attention   keys and values live in pages, addressed through a page table; page 0 is never read
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import Cursor, StepMarks
from memstate_tools.demo.arithmetic import Weights, attend, linear, rms_norm
from memstate_tools.demo.mixers import MIXERS, TURNED, Tails
from memstate_tools.demo.sizes import ModelSize
from memstate_tools.demo.trees import StepTree

VOCABULARY = 256  # one token per byte value


class StepPlaces(NamedTuple):
    """The slots, rows and lengths of a step: int32 `batch` each, 0 for padding.

    Attributes:
        rows: Rows of the page table.
        tokens: Tokens of each row in this step.
        read: Slots to read states from.
        write: Slots to write states to.
        snapshot: Slots to write snapshots to.
        marks: Lengths inside the step at which states are stored too.
        cursor: How far the tails of rows are folded.
        accepted: Written by the sampler: how many tokens of each row are real.
    """

    rows: Tensor
    tokens: Tensor
    read: Tensor
    write: Tensor
    snapshot: Tensor
    marks: StepMarks | None = None
    cursor: Cursor | None = None
    accepted: Tensor | None = None


class DemoMemory(NamedTuple):
    """The memory that the model works on.

    Attributes:
        conv: Plane `layer slot ...`, or `slot ...` of each layer.
        ssm: Plane `layer slot ...`, or `slot ...` of each layer.
        key: Keys, `page token head dim`.
        value: Values, `page token head dim`.
        page_table: Pages of each row, `row page`.
        tails: Tails of each recurrent layer; empty if rows have no tails.
    """

    conv: Tensor | Sequence[Tensor]
    ssm: Tensor | Sequence[Tensor]
    key: Tensor
    value: Tensor
    page_table: Tensor
    tails: Sequence[Tails] = ()


class HybridModel:
    """A model with fixed random weights from a seed. `forward` runs all of it.

    Args:
        size: Numbers of layers, heads and channels.
        seed: Seed of the weights.
        backend: Runs the kernels of the recurrent layers. It counts its own launches.
        mixer: Kind of the recurrent layers.
        state_order: Order of a state in memory; None: the default of the mixer.
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

    def forward(self, tokens: Tensor, start: Tensor, tree: StepTree, slots: StepPlaces, memory: DemoMemory) -> Tensor:
        """Returns logits `batch node vocabulary` after the nodes of each row; any numbers for nodes that a row lacks.

        It changes planes at `write` and `snapshot`, and the row's pages at start .. start + tokens. A CUDA graph can
        capture it.

        Args:
            tokens: Input tokens, int64 `batch token`.
            start: Tokens already folded into the row's state, int64 `batch`.
            tree: The token that each token follows.
            slots: Slots of states, rows of pages.
            memory: The memory to read and to change.

        Syncs: no.
        """
        x, at = self.embedding[tokens], torch.arange(tokens.shape[1], device=tokens.device)
        parents = tree.spread(tree.tree.parents, at) if tree.tree.branches else None
        where = (slots.read, slots.write, slots.snapshot, slots.tokens)
        for layer, (mixer, mlp) in enumerate(zip(self.recurrent, self.mlp, strict=False)):
            ssm = memory.ssm[layer].mT if self.state_order in TURNED else memory.ssm[layer]
            tails = memory.tails[layer] if memory.tails else None
            x = x + mixer(rms_norm(x), where, memory.conv[layer], ssm, slots.marks, tails, slots.cursor, parents)
            x = x + _mlp(rms_norm(x), mlp)
        x = x + self._attend(rms_norm(x), start, tree, slots, memory)
        x = x + _mlp(rms_norm(x), self.mlp[-1])
        x = x.gather(1, tree.tokens(len(at))[:, :, None].expand(-1, -1, x.shape[2]))
        return linear(rms_norm(x), self.head)

    def keep_path(self, start: Tensor, nodes: Tensor, slots: StepPlaces, memory: DemoMemory) -> None:
        """Closes the gaps between keys and values of accepted nodes of a tree, as `mem.device.keep_path` does in tails.

        Syncs: no.
        """
        assert slots.accepted is not None  # only rows with tails have trees
        pages, at = _pages(slots, memory), torch.arange(nodes.shape[1], device=nodes.device)
        moved = (nodes > at) & (at < slots.accepted[:, None])
        source, target = (_places(pages, start[:, None] + tokens, moved, memory) for tokens in (nodes, at))
        memory.key[target] = memory.key[source]
        memory.value[target] = memory.value[source]

    def _attend(self, x: Tensor, start: Tensor, tree: StepTree, slots: StepPlaces, memory: DemoMemory) -> Tensor:
        """Attends over all pages that a row may have, and masks unwritten positions. x: `batch token width`."""
        s, at = self.size, torch.arange(x.shape[1], device=x.device)
        q, k, v = linear(x, self.attention["inward"]).unflatten(-1, (3, s.heads, s.value)).unbind(2)
        pages, real = _pages(slots, memory), at < slots.tokens[:, None]
        target = _places(pages, start[:, None] + at, real, memory)
        memory.key[target] = k
        memory.value[target] = v

        keys, values = (plane[pages].flatten(1, 2).transpose(1, 2) for plane in (memory.key, memory.value))
        written = (pages > 0).repeat_interleave(memory.key.shape[1], 1)[:, None]
        places = torch.arange(keys.shape[2], device=x.device) - start[:, None]
        visible = tree.follow(at, places) & written & real[:, :, None]
        mixed = attend(q.transpose(1, 2), keys, values, visible[:, None]).transpose(1, 2)
        return linear(mixed.flatten(2), self.attention["outward"])


def _pages(slots: StepPlaces, memory: DemoMemory) -> Tensor:
    """Returns the pages of each row: `batch page`."""
    return memory.page_table[slots.rows.long()].long()


def _places(pages: Tensor, position: Tensor, real: Tensor, memory: DemoMemory) -> tuple[Tensor, Tensor]:
    """Returns page and offset of each position: `batch token`. A position that is not real gets page 0."""
    page_size = memory.key.shape[1]
    page = pages.gather(1, (position // page_size).clamp(max=pages.shape[1] - 1))
    return torch.where(real, page, 0), position % page_size


def _mlp(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    return linear(linear(x, w["up"]).clamp(min=0.0).square(), w["down"])
