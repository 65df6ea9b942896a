"""Tests memstate's events in vLLM's decoder, vLLM's events in memstate's index, and both over ZMQ."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM cannot be imported: see docs/vllm.md", exc_type=ImportError)

import msgspec
from vllm.distributed import kv_events

from memstate.events import Feed, Index, Subscriber, salt_tag
from memstate.events.wire import pack, unpack
from tests.events.test_feed import manager, serve
from tests.events.test_subscriber import until
from tests.support.vllm_engine import Engine


def test_vllm_reads_our_events() -> None:
    mem = manager(whole=True)
    feed = Feed(mem, rank=2)
    feed.take()
    serve(mem, list(range(8)), salt="tenant")
    mem.prefix.clear()
    mem.recover(keep=False)
    mine = feed.take()
    serve(mem, list(range(8)), salt="tenant")
    mem.prefix.clear()
    for batch in (mine, feed.take()):
        theirs = msgspec.msgpack.Decoder(kv_events.KVEventBatch).decode(pack(batch))
        assert (theirs.ts, theirs.data_parallel_rank) == (batch.ts, 2)
        assert [type(each).__name__ for each in theirs.events] == [type(each).__name__ for each in batch.events]
        for one, other in zip(theirs.events, batch.events, strict=True):
            names = set(other.__struct_fields__) & set(one.__struct_fields__)
            shown = {name: (getattr(one, name), getattr(other, name)) for name in names - {"extra_keys"}}
            assert all(left == right for left, right in shown.values()), shown
    stored = [each for each in theirs.events if isinstance(each, kv_events.BlockStored)]
    assert stored[0].extra_keys == [(salt_tag("tenant"),), None]


@pytest.mark.parametrize("kinds", [("attention",), ("attention", "state")])
def test_our_index_reads_vllms_events(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    """The index finds the lengths that vLLM's own cache finds."""
    engine, index = Engine(tmp_path, kinds), Index()
    engine.connector.scheduler.matched = lambda request, computed: 0
    manager_of = engine.scheduler.kv_cache_manager
    manager_of.block_pool.enable_kv_cache_events = True
    engine.scheduler.kv_event_publisher = SimpleNamespace(
        publish=lambda batch: index.apply("w", unpack(msgspec.msgpack.Encoder().encode(batch)))
    )
    stems = [list(range(30)), list(range(20)) + [9] * 10, [5] * 14]
    for number, stem in enumerate(stems):
        engine.serve(str(number), stem, 3, salt="tenant" if number == 1 else None)
    for stem in stems:
        for salt in (None, "tenant"):
            request = engine.add(f"{stem}{salt}", [*stem, 1, 2, 3], 1, salt=salt)
            hit = manager_of.get_computed_blocks(request)[1]
            matches = index.find([*stem, 1, 2, 3], tag=salt)
            assert (matches[0].length if matches else 0) == hit
    assert any(index.find([*stem, 1]) for stem in stems)
    engine.run()
    engine.close()


def test_our_subscriber_hears_vllms_publisher() -> None:
    """The subscriber also gets events from before its start."""
    ports = [f"tcp://127.0.0.1:{port}" for port in (47311, 47312)]
    publisher: Any = kv_events.ZmqEventPublisher(0, "tcp://*:47311", "tcp://*:47312")
    index = Index()
    subscriber = Subscriber(index)
    try:
        event = {"lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": 0}
        for at in range(3):
            before = at or None
            stored = kv_events.BlockStored([at + 1], before, [at, at], 2, **event)
            publisher.publish(kv_events.KVEventBatch(ts=0.0, events=[stored]))
        subscriber.add("w", *ports)
        until(lambda: [each.length for each in index.find([0, 0, 1, 1, 2, 2, 3])] == [6], subscriber.poll)
    finally:
        subscriber.close()
        publisher.shutdown()
