"""Serves requests over host memory and storage. The bytes of states and KV follow from all tokens up to them.

Each step checks the state and the KV that it reads.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import memstate as ms
from memstate.state.layout import Plane, StateLayout
from memstate.state.planes import Planes
from memstate.tiers import TierManager
from tests.support.tiered_small import PAGE, tiered

History = tuple[int, ...]
KV = StateLayout((Plane("kv", (PAGE, 2), torch.int64),), layers=2)


def folds(tokens: Sequence[int]) -> list[int]:
    """Returns a signed 64-bit integer for each prefix of these tokens, which depends on all tokens of the prefix."""
    values = [0]
    for token in tokens:
        values.append((values[-1] * 0x5851F42D4C957F2D + token + 1 + 2**63) % 2**64 - 2**63)
    return values


@lru_cache(maxsize=8192)
def written(prompt: History, goal: int) -> History:
    """Returns a prompt and the next `goal` tokens that the model says, computed without a manager."""
    text = prompt
    for _ in range(goal):
        text += ((folds(text)[-1] >> 40) % 50,)
    return text


class Tiered:
    """A manager with tiers, of which one request at a time runs. tiers: settings that replace the usual ones."""

    def __init__(self, tracking: ms.Tracking, tiers: dict[str, Any], pages: int, slots: int) -> None:
        self.kv = Planes(KV, pages, ms.Backend("reference"))
        tiers = {"kv": self.kv, "executor": None} | tiers
        self.mem = tiered(tiers=tiers, tracking=tracking, pages=pages, slots=slots)

    @property
    def below(self) -> TierManager:
        assert self.mem.tiers is not None
        return self.mem.tiers

    def turn(self, tokens: Sequence[int], goal: int = 1, most: int = 64, **more: Any) -> int:
        """Runs a request from its admission to its end, at most `most` tokens in a step, and caches what it leaves.

        more: fields of the request. Returns the length that it starts from.
        """
        mem, text = self.mem, written(tuple(tokens), goal)
        (row,) = mem.admit([ms.Request("turn", tokens=tokens, **more)])
        start = length = mem.info(row).length
        while length < len(text) - 1:
            end = min(mem.info(row).next_boundary, length + most, max(len(tokens), length + 1))
            mem.extend([row], [end])
            step = mem.plan([row], [end - length])
            self._forward(step, text)
            mem.settle(step)
            mem.publish([row], keep="cache", tokens=[text[: max(len(tokens), end)]])
            length = end
        mem.end([row], keep="cache", tokens=[text])
        return start

    def _forward(self, step: ms.Step, text: History) -> None:
        """Checks the state and the KV up to the start of a step, and stores those of its tokens."""
        numbers = [int(v[0]) for v in (step.numbers, step.before, step.after, step.read, step.write, step.snapshot)]
        row, before, after, read, write, snapshot = numbers
        pages = self.mem.device.page_table[row].tolist()
        for at, kv in enumerate(kv_of(text[:after])):
            place = pages[at // PAGE], at % PAGE
            if at >= before:
                self.kv["kv"][:, *place] = kv
            assert torch.equal(self.kv["kv"][:, *place], kv), f"KV of token {at} is not its prompt's"
        for name, plane in self.mem.planes.items():
            told = state_of(text[:before])[name]
            assert not before or torch.equal(plane[:, read], told), f"{name} of {before} tokens is not its prompt's"
            for slot in (write, *[snapshot] * (snapshot > 0)):
                plane[:, slot] = state_of(text[:after])[name]


# -- expected bytes, computed without the library's layouts -------------------------------------------


def kv_of(text: Sequence[int]) -> Tensor:
    """Returns the KV of a text, `token layer 2`."""
    kv = torch.tensor([*zip(text, folds(text)[1:], strict=True)], device="cpu")
    return torch.stack([kv, 3 * kv], 1)


def state_of(text: Sequence[int]) -> dict[str, Tensor]:
    """Returns the state after a text by the name of its plane, `layer element`."""
    long, short = (folds(text)[-1] * torch.arange(1, 2 * n + 1, device="cpu").view(2, n) for n in (3, 5))
    return {"long": long, "short": short.to(torch.int32)}


def padded(blocks: Iterable[Tensor]) -> bytes:
    """Returns the bytes of all blocks in order. Each block is padded with zeros to a multiple of 16 bytes."""
    parts = [block.contiguous().numpy().tobytes() for block in blocks]
    return b"".join(part + bytes(-len(part) % 16) for part in parts)


def state_bytes(tokens: History) -> bytes:
    """Returns the body of the record of the state after these tokens."""
    return padded(plane[layer] for layer in range(2) for plane in state_of(tokens).values())


def page_bytes(tokens: History) -> bytes:
    """Returns the body of the record of the last KV page of these tokens."""
    return padded(kv_of(tokens)[-PAGE:].transpose(0, 1))
