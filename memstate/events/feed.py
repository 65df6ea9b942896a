"""Turns changes of a prefix cache into events. Knows no socket.

The cache tells the feed of each change at once. `take` returns the events since the call before.
"""

import time
from typing import Any

from memstate.errors import ConfigurationError
from memstate.events.wire import (
    KINDS,
    KV,
    STATES,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    salt_tag,
    shorten,
)
from memstate.prefix.cache import PrefixCache
from memstate.prefix.tree import Node
from memstate.tiers.keys import Keys
from memstate.tiers.records import DIGEST_BYTES
from memstate.tokens import BYTES, ids, joined


class Feed:
    """Gathers the events of a manager's prefix cache.

    The first batch is a snapshot: an `AllBlocksCleared`, then events for all content of the cache. So is the first
    batch after `reset` or `recover`. From a snapshot alone, a reader knows all that the cache has.

    Args:
        mem: A manager that has a prefix cache and no feed yet.
        rank: The worker's data-parallel rank, None for none.

    Raises:
        ConfigurationError: The manager has no prefix cache, or has a feed already.
    """

    def __init__(self, mem: Any, rank: int | None = None) -> None:
        cache: PrefixCache | None = getattr(mem, "prefix", None)
        if cache is None:
            raise ConfigurationError("events of a manager without a prefix cache: build it with prefix=ms.Prefix()")
        if cache.settings.keyed:
            raise ConfigurationError("events of Prefix(keyed=True): it knows no tokens; the engine tells of its blocks")
        if cache.watcher is not None:
            raise ConfigurationError("this prefix cache has a feed: close it first")
        self._cache, self._rank, self._size = cache, rank, cache.page_size
        self._keys = mem.tiers.keys if mem.tiers is not None else Keys(bytes(DIGEST_BYTES), self._size)
        self._events: list[Event] = []
        self._whole = True
        cache.watcher = self

    def close(self) -> None:
        """Ends the feed: the cache no longer tells it of changes."""
        if self._cache.watcher is self:
            self._cache.watcher = None

    def replaced(self) -> None:
        """Makes the next batch a snapshot."""
        self._whole, self._events = True, []

    def take(self) -> EventBatch | None:
        """Returns the events since the last call, None if there are none.

        Syncs: no.
        """
        if self._whole:
            self._whole, self._events = False, self._snapshot()
        events, self._events = self._events, []
        return EventBatch(time.time(), events, self._rank) if events else None

    def pages_stored(self, node: Node, first: int) -> None:
        """Notes that pages got KV; see `Watcher`."""
        if not self._whole:
            self._events.append(self._stored(node, first, node.end, KV))

    def pages_removed(self, node: Node, pages: int) -> None:
        """Notes pages whose KV is given up; see `Watcher`."""
        if not self._whole:
            self._events.append(BlockRemoved(self._hashes(node)[node.end - pages :], group_idx=KV))

    def state_stored(self, node: Node) -> None:
        """Notes that a state has been cached; see `Watcher`."""
        if not self._whole:
            self._events.append(self._stored(node, node.end - 1, node.end, STATES))

    def state_removed(self, node: Node) -> None:
        """Notes that a state is no longer cached; see `Watcher`."""
        if not self._whole:
            self._events.append(BlockRemoved(self._hashes(node)[-1:], group_idx=STATES))

    def _snapshot(self) -> list[Event]:
        events: list[Event] = [AllBlocksCleared()]
        # An empty event of the group of states tells readers that a prefix can only be resumed where it has a state.
        events.append(BlockStored([], None, [], self._size, group_idx=STATES, kv_cache_spec_kind=KINDS[STATES]))
        for _, node in self._cache.tree.walk():
            if not node.ghost:
                events.append(self._stored(node, node.end - len(node.key) // (self._size * BYTES), node.end, KV))
            if node.snapshot is not None:
                events.append(self._stored(node, node.end - 1, node.end, STATES))
        return events

    def _stored(self, node: Node, first: int, end: int, group: int) -> BlockStored:
        hashes, tag = self._hashes(node), salt_tag(self._cache.tree.salt(node))
        tokens = ids(joined([step.key for step in node.path()][::-1]))
        extra = [(tag,), *[None] * (end - 1)] if tag is not None and not first else None
        return BlockStored(
            hashes[first:end], hashes[first - 1] if first else None,
            tokens[first * self._size : end * self._size].tolist(), self._size, extra_keys=extra, group_idx=group,
            kv_cache_spec_kind=KINDS[group], cache_salt=tag,
        )  # fmt: skip

    def _hashes(self, node: Node) -> list[int | bytes]:
        return [shorten(digest) for digest in self._keys.of_node(self._cache.tree, node)]
