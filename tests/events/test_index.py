"""Wrong events that reach an index: it forgets only what they remove, and still answers."""

from random import Random
from typing import Any

import msgspec
import pytest

from memstate.errors import InvalidArgument
from memstate.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, Index
from memstate.events.wire import unpack
from tests.support.processes import python

STORED = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [5, 6], "block_size": 2}


def told(*events: Any) -> Index:
    """Returns an index with these events of one worker."""
    index = Index()
    index.apply("w", EventBatch(0.0, list(events)))
    return index


def test_a_block_that_is_told_again_with_other_tokens() -> None:
    index = told(BlockStored([1], None, [5, 6], 2), BlockStored([1], None, [7, 8], 2))
    assert (index.find([5, 6, 9]), index.find([7, 8, 9])) == ([], [("w", 2, 2)])
    index.apply("w", EventBatch(0.0, [BlockRemoved([1])]))
    assert index.find([5, 6, 9]) == index.find([7, 8, 9]) == []
    assert not (index._workers["w"]._next or index._workers["w"]._step)


def test_a_block_stays_while_another_medium_has_it() -> None:
    """Engines report blocks in host memory too."""
    index = told(BlockStored([1], None, [5, 6], 2), BlockStored([1], None, [5, 6], 2, medium="CPU"))
    index.apply("w", EventBatch(0.0, [BlockRemoved([1], medium="GPU")]))
    assert index.find([5, 6, 9]) == [("w", 2, 2)]
    index.apply("w", EventBatch(0.0, [BlockRemoved([1], medium="GPU"), BlockRemoved([2], medium="CPU")]))
    assert index.find([5, 6, 9]) == [("w", 2, 2)]
    index.apply("w", EventBatch(0.0, [BlockRemoved([1], medium="CPU")]))
    assert index.find([5, 6, 9]) == []
    index = told(BlockStored([1], None, [5, 6], 2), BlockStored([1], None, [5, 6], 2, medium="CPU"))
    index.apply("w", EventBatch(0.0, [BlockRemoved([1], medium=None)]))  # None: from every medium
    assert index.find([5, 6, 9]) == []


def encoded(*events: Any) -> bytes:
    return msgspec.msgpack.encode([0.0, list(events), 3])


WRONG = [{"token_ids": [5, 2**63]}, {"block_size": 0}, {"block_size": -2}, {"extra_keys": [5]},
         {"extra_keys": ["text"]}, {"block_hashes": [None]}, {"token_ids": [[5, 6], [6, 7]]}]  # fmt: skip
NONE = [b"", b"rubbish", b"\xc0", encoded()[:-2], b"\x92\xff\x91\x80", b"\x91" * 5000]


@pytest.mark.parametrize("payload", [*NONE, *(encoded(STORED | wrong) for wrong in WRONG)])
def test_what_means_nothing_is_no_batch(payload: bytes) -> None:
    with pytest.raises(InvalidArgument, match="no batch"):
        unpack(payload)


def test_unknown_fields_are_left_out() -> None:
    """Engines of other versions may send fields that the index does not know."""
    batch = unpack(encoded(STORED | {"session_id": "s"}, {"type": "AllBlocksCleared"}))
    assert batch.data_parallel_rank == 3
    assert [type(each) for each in batch.events] == [BlockStored, AllBlocksCleared]


def drawn(draw: Random) -> dict[str, Any]:
    """Returns an event of the right shape with random values."""
    return {
        "type": draw.choice(["BlockStored", "BlockStored", "BlockRemoved", "AllBlocksCleared"]),
        "block_hashes": [draw.randrange(6) for _ in range(draw.randrange(4))],
        "parent_block_hash": draw.choice([None, draw.randrange(6)]),
        "token_ids": [draw.randrange(3) for _ in range(draw.choice([0, 2, 4, 6]))],
        "block_size": draw.choice([2, 2, 2, 1, 4]),
        "group_idx": draw.choice([None, 0, 1, -7]),
        "kv_cache_spec_kind": draw.choice([None, "mamba", "full_attention", "z"]),
        "extra_keys": draw.choice([None, [], [None], [[]], [["a"]], [["a", b"b", [1]]]]),
        "cache_salt": draw.choice([None, "a"]),
        "medium": draw.choice([None, "GPU", "CPU"]),
    }


def test_whatever_is_told_the_index_answers_and_keeps_no_more_than_it_was_told() -> None:
    draw = Random(0)
    for _ in range(60):
        index = Index()
        for _ in range(20):
            batch = unpack(encoded(*(drawn(draw) for _ in range(draw.randrange(1, 4)))))
            index.apply("w", batch)
            for tag in (None, "a"):
                assert len(index.find([draw.randrange(3) for _ in range(9)], tag=tag)) <= 1
            blocks = index._workers["w"]
            assert set(blocks._step) <= set(blocks._groups)
            assert set(blocks._next.values()) <= set(blocks._step)
            assert all(blocks._step[block] == step for step, block in blocks._next.items())


def test_readers_load_no_torch() -> None:
    """Routers read events, and need no torch."""
    code = "import sys; from memstate.events import Subscriber, salt_tag; salt_tag('a'); print('torch' in sys.modules)"
    assert python("-c", code) == "False\n"
