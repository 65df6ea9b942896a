"""Runs a test server with host memory and storage below its cache, and checks all KV before a step reads it.

KV depends on all tokens before it, so the KV of the same tokens after another prefix fails the check.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

import memstate as ms
from memstate.prefix.policies import Lru, LruPages
from memstate.state.layout import Plane, StateLayout
from memstate.state.planes import Planes
from memstate.tiers import Prefetch, TierManager, Tiers
from tests.support.planes import History, fold, folds
from tests.support.serving import PAGE, STALE, Server

KV = StateLayout((Plane("kv", (PAGE, 2), torch.int64),), layers=2)


class Tiered(Server):
    """A server with tiers. tiers: settings that replace the usual ones."""

    def __init__(self, name: str, tiers: dict[str, object], pages: int, **settings: object) -> None:
        self.pages = Planes(KV, pages, ms.Backend("reference"))
        usual = {"model": "toy", "kv": self.pages, "reserve": 0.0}
        usual["prefetch"] = Prefetch(threshold=PAGE, limit=None, stop="wait_complete")
        super().__init__(
            ms.Backend("reference"), name, whole=True, pages=pages, prefix=ms.Prefix(Lru(), LruPages()),
            tiers=Tiers(**usual | tiers), **settings,  # type: ignore[arg-type]
        )  # fmt: skip
        self.pages["kv"][:, 1:] = STALE
        self.kv = self.pages["kv"][0, ..., 0]  # type: ignore[assignment]

    @property
    def below(self) -> TierManager:
        assert self.mem.tiers is not None
        return self.mem.tiers

    def _forward(self, step: ms.Step, fed: Sequence[Sequence[int]]) -> None:
        """Checks the KV of each row up to the start of the step, writes the KV of its tokens, then folds the states."""
        table, by_number = self.mem.device.page_table.tolist(), {row.index: row for row in self.mem.rows}
        for i, number in enumerate(step.numbers.tolist()):
            before, after = int(step.before[i]), int(step.after[i])
            told = kv_of(self.text[by_number[number]][:after]) if number else ()
            for at, kv in enumerate(told):
                place = table[number][at // PAGE], at % PAGE
                if at >= before:
                    self.pages["kv"][:, *place] = kv
                assert torch.equal(self.pages["kv"][:, *place], kv), f"KV of row {number} is not its prompt's"
        super()._forward(step, fed)


# -- expected bytes, computed without the library's layouts -------------------------------------------


def kv_of(text: Sequence[int]) -> Tensor:
    """Returns the KV of a text, `token layer 2`."""
    kv = torch.tensor([*zip(text, folds(0, text)[1:], strict=True)], device="cpu")
    return torch.stack([kv, 3 * kv], 1)


def padded(blocks: Iterable[Tensor]) -> bytes:
    """Returns the bytes of all blocks in order. Each block is padded with zeros to a multiple of 16 bytes."""
    parts = [block.contiguous().numpy().tobytes() for block in blocks]
    return b"".join(part + bytes(-len(part) % 16) for part in parts)


def state_bytes(tokens: History) -> bytes:
    """Returns the body of the record of the state after these tokens."""
    long, short = (fold(tokens) * torch.arange(1, 2 * n + 1, device="cpu").view(2, n) for n in (3, 5))
    return padded(block for layer in range(2) for block in (long[layer], short[layer].to(torch.int32)))


def page_bytes(tokens: History) -> bytes:
    """Returns the body of the record of the last KV page of these tokens."""
    return padded(kv_of(tokens)[-PAGE:].transpose(0, 1))
