"""The example engine that keeps its own KV blocks: it is right in random traffic, and mistakes in it are found."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import memstate as ms
from memstate.testing import EngineDiffers, compare
from memstate.tokens import BYTES, Key, encode_keys
from tests.support.sources import ROOT, Change, changed

SOURCE = (ROOT / "examples" / "own_blocks.py").read_text()
REFERENCE = "debug=debug,", 'debug=debug, backend="reference",'
Prompts = list[tuple[list[int], int]]  # tokens, new tokens
own = changed(SOURCE, REFERENCE)


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
    dead = [node for node in cache.stated() if node.key[-own.BLOCK * BYTES :] not in known]
    first = set(cache.next_states(cache.superseded_states))
    return len(dead), sum(node not in first for node in dead)


def ms_key(key: bytes) -> Key:
    """Returns a key of the example in the form that the prefix cache uses."""
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


SEEDS = range(300)
KEYS = "filled = [job.keys[: end // BLOCK] for"
PUBLISH = 'mem.publish(rows, keep="cache", keys=filled)'


def comparable(kind: Any) -> Any:
    """Returns the class of an engine with the arguments and the `serve` that `compare` needs."""

    class Compared(kind):  # type: ignore[misc]
        def __init__(self, slots=24, max_requests=4, pages=60, every=own.BLOCK, host_slots=0, debug=False) -> None:
            super().__init__(slots, max_requests, pages or 60, every, debug)

        def serve(self, given: Any) -> Any:
            return super().serve(jobs([(list(tokens), 6) for tokens in given]))

    return Compared


@pytest.mark.sample(20)
@pytest.mark.parametrize("seed", SEEDS)
def test_K6_random_traffic_gets_the_answers_of_the_uncached_run(seed: int) -> None:
    draw = Random(seed)
    engine = own.Engine(
        slots=draw.choice([9, 14, 24]), max_requests=draw.choice([2, 4, 6]), blocks=draw.choice([26, 40, 60]),
        every=draw.choice([4, 8]), debug=True,
    )  # fmt: skip
    assert list(served(engine, prompts(draw, 16), draw)) == []
    engine.mem.audit().raise_if_leaking()
    assert len(engine.blocks.free) == len(engine.blocks.keys) and not any(engine.blocks.users)
    assert without_kv(engine)[1] <= 0.05 * engine.mem.prefix.states


def test_hits_are_nine_tenths_of_those_where_memstate_keeps_the_pages() -> None:
    hits = dict.fromkeys((own.Engine, Owned), 0)
    for kind in hits:
        for seed in range(10):
            engine = kind(slots=20, max_requests=4, blocks=60)
            engine.forward = lambda step, fed: torch.stack([own.EMBED[tokens[-1]] @ own.EMBED.T for tokens in fed])
            for _ in engine.serve(jobs(prompts(Random(seed), 24))):
                pass
            hits[kind] += engine.hits
    assert hits[own.Engine] >= 0.9 * hits[Owned] > 0


def test_compare_passes_the_example() -> None:
    found = compare(comparable(own.Engine), [tokens for tokens, _ in prompts(Random(5), 6)])
    assert found["together"]["hits"] and found["scarce"]["hits"] and not found["alone"]["hits"]


def test_a_forward_that_raises_leaves_no_state_that_it_did_not_store() -> None:
    draw, given = Random(4), prompts(Random(4), 16)
    engine = own.Engine(slots=24, max_requests=4, blocks=60, debug=True)
    forward, failed = engine.forward, 0

    def fails(step: ms.Step, fed: Sequence[Sequence[int]]) -> Tensor:
        logits = forward(step, fed)
        if draw.random() < 0.2:
            raise RuntimeError("out of memory")
        return logits

    engine.forward = fails
    for _ in range(12):
        try:
            assert list(served(engine, given)) == []
        except RuntimeError:
            failed += 1
            engine.waiting.clear()
        engine.mem.audit().raise_if_leaking()
        assert not engine.running and len(engine.blocks.free) == 60
    engine.forward = forward
    assert failed and list(served(engine, given)) == [] and engine.hits


SHIFTS = {
    "on": (KEYS, "filled = [job.keys[1 : end // BLOCK] + [b'0' * 16] for"),
    "back": (KEYS, "filled = [[b'0' * 16][: end // BLOCK] + job.keys[: max(0, end // BLOCK - 1)] for"),
    "the last": (KEYS, "filled = [job.keys[: end // BLOCK][:-1] + [b'0' * 16] * (end // BLOCK > 0) for"),
    "of another request": (KEYS, "filled = [self.running[0].keys[: end // BLOCK] for"),
}


@pytest.mark.parametrize("change", SHIFTS.values(), ids=SHIFTS)
def test_keys_of_other_blocks_are_refused(change: Change) -> None:
    engine = changed(SOURCE, REFERENCE, change).Engine(debug=True)
    with pytest.raises(ms.InvalidArgument, match="the keys are not those of its prompt"):
        list(engine.serve(jobs(prompts(Random(1), 12))))


class Back(own.Engine):  # type: ignore[misc]
    """An engine with a mistake: in all calls, each block gets the key of the block before it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        mem = self.mem
        match, admit, publish, end = mem.match, mem.admit, mem.publish, mem.end
        wrapped = {
            "match": lambda keys, length, reach=None: match(keys=back(keys), length=length, reach=reach),
            "admit": lambda requests: admit([replace(one, keys=back(one.keys)) for one in requests]),
            "publish": lambda rows, keep, keys: publish(rows, keep, keys=[*map(back, keys)]),
            "end": lambda rows, keep, keys: end(rows, keep, keys=[*map(back, keys)]),
        }
        for name, call in wrapped.items():
            setattr(mem, name, call)


def back(keys: Sequence[bytes]) -> list[bytes]:
    """Returns the keys moved on by one place: a made-up key comes first, and the last key is left out."""
    return [b"0" * 16, *keys[:-1]] if keys else []


def test_keys_one_block_back_everywhere_are_found_by_compare_alone() -> None:
    given = prompts(Random(1), 20)
    assert list(served(Back(40, 4, 120), given))  # wrong answers, and no error
    with pytest.raises(EngineDiffers, match="it is the state of prompt"):
        compare(comparable(Back), [tokens for tokens, _ in given])


def test_without_forget_answers_are_right(caplog: pytest.LogCaptureFixture) -> None:
    draw, kind = (
        Random(3),
        changed(SOURCE, REFERENCE, ("            self.mem.forget([key])", "            pass")).Engine,
    )
    engine = kind(slots=14, max_requests=4, blocks=40, debug=True)
    assert list(served(engine, prompts(draw, 24), draw)) == []
    assert without_kv(engine)[1] > 0 and not caplog.records  # states without KV still hold slots


def test_keys_that_are_block_ids_are_told(caplog: pytest.LogCaptureFixture) -> None:
    ids = [
        ("keys=job.keys, length=length, reach=reach).length", "keys=held, length=length, reach=reach).length"),
        ("keys=job.keys, length=length, reach=reach)])", "keys=held, length=length, reach=reach)])"),
        ("filled = [job.keys[: end // BLOCK] for", "filled = [job.table[: end // BLOCK] for"),
        ('keep="cache", keys=[keys])', 'keep="cache", keys=[job.table[: len(keys)]])'),
        ("state = self.mem.match(keys=keys,", "state = self.mem.match(keys=job.table[: len(keys)],"),
        ("self.mem.forget([key])", "self.mem.forget([block])"),
    ]
    engine = changed(SOURCE, REFERENCE, *ids).Engine(24, 4, 40)
    with caplog.at_level(logging.WARNING), pytest.raises(ms.InvalidArgument, match="keys are not those of its prompt"):
        list(served(engine, prompts(Random(2), 24)))
    assert caplog.records[0].getMessage().startswith("keys like ids keys='[0, 1")
