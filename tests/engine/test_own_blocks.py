"""The example engine that keeps its own KV blocks: it is right in random traffic, and mistakes in it are found."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import memstate as ms
from memstate.testing import EngineDiffers, compare
from tests.support import own_blocks
from tests.support.engine_faults import Change
from tests.support.own_blocks import Owned, jobs, own, prompts, served, without_kv

SEEDS = range(300)
KEYS = "filled = [job.keys[: end // BLOCK] for"
PUBLISH = 'mem.publish(rows, keep="cache", keys=filled)'


def changed(*changes: Change) -> Any:
    """Returns the engine of the example with other lines."""
    return own_blocks.module(*changes).Engine


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
    engine = changed(change)(debug=True)
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
    draw, kind = Random(3), changed(("            self.mem.forget([key])", "            pass"))
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
    engine = changed(*ids)(24, 4, 40)
    with caplog.at_level(logging.WARNING), pytest.raises(ms.InvalidArgument, match="keys are not those of its prompt"):
        list(served(engine, prompts(Random(2), 24)))
    assert caplog.records[0].getMessage().startswith("keys like ids keys='[0, 1")
