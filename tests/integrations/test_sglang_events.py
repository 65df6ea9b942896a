"""Tests memstate's events in SGLang's decoder."""

import msgspec
import pytest

from memstate.events import Feed
from memstate.events.wire import pack
from tests.events.test_feed import manager, serve

kv_events = pytest.importorskip(
    "sglang.srt.disaggregation.kv_events", reason="SGLang cannot be imported: see docs/kernels.md", exc_type=ImportError
)


def test_sglang_reads_our_events() -> None:
    mem = manager(whole=True)
    feed = Feed(mem, rank=1)
    serve(mem, list(range(8)), salt="tenant")
    mine = feed.take()
    theirs = msgspec.msgpack.Decoder(kv_events.KVEventBatch).decode(pack(mine))
    assert theirs.attn_dp_rank == 1
    assert [type(each).__name__ for each in theirs.events] == [type(each).__name__ for each in mine.events]
    stored = next(each for each in theirs.events if getattr(each, "block_hashes", None))
    assert (len(stored.block_hashes), stored.token_ids, stored.parent_block_hash) == (2, list(range(8)), None)
