"""Runs random traffic through `examples/own_blocks.py`, and computes the expected answers without states and KV."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from random import Random
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import memstate as ms
from tests.support.sources import ROOT

PATH = ROOT / "examples" / "own_blocks.py"
Prompts = list[tuple[list[int], int]]  # tokens, new tokens


def module(*changes: tuple[str, str]) -> Any:
    """Returns the module of the example on the reference backend, with some lines replaced."""
    source = PATH.read_text()
    for old, new in (("debug=debug,", 'debug=debug, backend="reference",'), *changes):
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    loaded = ModuleType("own_blocks")
    exec(source, vars(loaded))
    return loaded


own = module()


@lru_cache(maxsize=4096)
def logits(tokens: tuple[int, ...]) -> Tensor:
    """Returns the logits after these tokens, computed from the first token on."""
    state = torch.zeros(2, 8)
    seen = own.EMBED[list(tokens)]
    for at, token in enumerate(tokens):
        state[0] = 0.9 * state[0] + own.EMBED[token]
        state[1] = 0.9 * state[1] + torch.softmax(seen[: at + 1] @ state[0], 0) @ seen[: at + 1]
    return own.EMBED @ state[1]


def prompts(draw: Random, n: int) -> Prompts:
    """Returns `n` prompts. Many share their first tokens, or continue another prompt."""
    bases = [[draw.randrange(1, own.WORDS) for _ in range(draw.randrange(8, 40))] for _ in range(4)]
    given: Prompts = []
    for _ in range(n):
        start = draw.choice(bases)[: draw.randrange(1, 40)]
        if given and draw.random() < 0.4:
            start = draw.choice(given)[0][:60]
        behind = [draw.randrange(1, own.WORDS) for _ in range(draw.randrange(1, 12))]
        given.append((start + behind, draw.randrange(1, 14)))
    return given


def jobs(given: Prompts) -> list[Any]:
    """Returns a request of the example for each prompt."""
    return [own.Writing(number, tokens, new) for number, (tokens, new) in enumerate(given)]


def served(engine: Any, given: Prompts, draw: Random | None = None) -> Iterator[str]:
    """Serves prompts, and yields a line for each wrong answer.

    Args:
        engine: An engine of the example.
        given: The prompts.
        draw: Chooses requests to abort. None aborts no request.
    """
    answers: dict[int, list[int]] = {number: [] for number in range(len(given))}
    run = engine.serve(jobs(given))
    abort, cut = None, set[int]()
    while True:
        try:
            number, token, scores = run.send(abort)
        except StopIteration:
            break
        before = tuple(given[number][0] + answers[number])
        if number in cut or not torch.equal(scores, logits(before)):
            yield f"request {number} behind {len(before)} tokens"
        answers[number].append(token)
        abort = draw is not None and draw.random() < 0.02
        if abort:
            cut.add(number)
        if draw is not None and draw.random() < 0.02:  # any request: it may wait, read its prompt, or have ended
            cut.add(other := draw.randrange(len(given)))
            engine.abort(other)
            abort = abort or None
    for number, (_, new) in enumerate(given):
        if number not in cut and len(answers[number]) != new:
            yield f"request {number} has {len(answers[number])} tokens of {new}"


def without_kv(engine: Any) -> tuple[int, int]:
    """Returns the number of cached states without KV, and how many of these will not be evicted before all others."""
    cache, known = engine.mem.prefix, {ms_key(key) for key in engine.blocks.by_key}
    dead = [node for node in cache.stated() if node.key[-own.BLOCK * 8 :] not in known]
    first = set(cache.next_states(cache.superseded_states))
    return len(dead), sum(node not in first for node in dead)


def ms_key(key: bytes) -> bytes:
    """Returns a key of the example in the form that the prefix cache uses."""
    from memstate.tokens import encode_keys

    return encode_keys([key], own.BLOCK)


class Owned(own.Engine):
    """The engine of the example, changed: memstate keeps the KV pages, and finds states by tokens."""

    def __init__(self, slots: int, max_requests: int, blocks: int) -> None:
        super().__init__(slots, max_requests, blocks)
        self.mem.close()
        self.kv = torch.full((blocks + 1, own.BLOCK, 8), torch.nan)
        self.mem = ms.StateManager(
            own.STATE, slots=slots, max_requests=max_requests, tracking=ms.Redirect(every=own.BLOCK),
            pages=ms.Pages(size=own.BLOCK, count=blocks, per_row=30), prefix=ms.Prefix(), forward=ms.Forward(grid=1),
            backend="reference",
        )  # fmt: skip
        publish = self.mem.publish
        self.mem.publish = lambda rows, keep, keys: publish(  # type: ignore[method-assign]
            rows, keep, tokens=[job.tokens for job in self.running]
        )
        self.blocks.fill = lambda block, key: block

    def forward(self, step: ms.Step, fed: Sequence[Sequence[int]]) -> Tensor:
        """Runs the forward of the example with the page table of memstate."""
        for entry, job in enumerate(self.running):
            job.table = self.mem.device.page_table[step.rows[entry]].long()
        return super().forward(step, fed)

    def admit(self) -> None:
        """Starts requests as long as there is room."""
        while self.waiting:
            job = self.waiting[0]
            room = (len(job.tokens) // own.BLOCK + 1) * own.BLOCK
            try:
                (job.row,) = self.mem.admit([ms.Request(job.number, tokens=job.tokens, length=room)])
            except (ms.OutOfSlots, ms.OutOfRows, ms.OutOfPages):
                return
            job.table = [0] * 30
            self.hits += self.mem.info(job.row).length
            self.running.append(self.waiting.popleft())

    def end(self, job: Any) -> None:
        """Ends a request, and leaves its states and pages in the cache."""
        self.mem.end([job.row], keep="cache", tokens=[job.tokens])
        self.running.remove(job)

    def grow(self) -> None:
        """Gives each running request the page of its next token."""
        for job in [*self.running]:
            while job in self.running:
                try:
                    self.mem.extend([job.row], [len(job.tokens) + 1])
                    break
                except ms.OutOfPages:
                    self.waiting.appendleft(self.running[-1])
                    self.end(self.running[-1])
