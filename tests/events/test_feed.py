"""Replaying the events of a manager gives its prefix cache again, whatever happens in between."""

from collections.abc import Hashable, Iterator
from random import Random

import pytest
import torch

import memstate as ms
from memstate.errors import ConfigurationError, OutOfPages, OutOfSlots
from memstate.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, Feed, Index, salt_tag
from memstate.events.wire import KV, STATES, pack, unpack
from memstate.tiers import Tiers
from memstate.tokens import BYTES, Key, joined
from tests.support.build import build

LAYOUT = ms.StateLayout((ms.Plane("ssm", (4,), torch.float32),), layers=1)
PAGE = 4
SALTS: tuple[Hashable, ...] = (None, "a", b"a", 1, ("a", 1))


def manager(pages: int = 40, below: int = 0, **given: object) -> ms.StateManager:
    """Returns a manager; `pages` is 0 if the caller keeps KV, `below` is the number of states in host memory."""
    owned = {"pages": pages, "pages_per_row": 16} if pages else {}
    if below:
        kv = ms.Planes(LAYOUT, pages, ms.Backend("reference")) if pages else None
        owned["tiers"] = Tiers("m", host_slots=below, kv=kv)
    settings = {"slots": 10, "max_requests": 3, "page_size": PAGE, "backend": "reference", **owned}
    return build(LAYOUT, prefix=ms.Prefix(), tracking=ms.Redirect(every=8), **(settings | given))


def serve(mem: ms.StateManager, prompt: list[int], salt: Hashable = None) -> None:
    (row,) = mem.admit([ms.Request("r", tokens=prompt, salt=salt)])
    while mem.info(row).length < len(prompt):
        mem.settle(mem.plan([row], mem.chunk(row, 8)))
    mem.end([row], keep="cache", tokens=[prompt])


def read(feed: Feed, index: Index) -> list[object]:
    """Encodes and decodes the newest events, applies them to an index, and returns them."""
    batch = feed.take()
    if batch is None:
        return []
    index.apply("w", unpack(pack(batch)))
    return batch.events


def told(index: Index) -> dict[tuple[str | None, Key], set[int]]:
    """Returns what an index has: (salt tag, tokens) of each block -> its groups."""
    blocks = index._workers["w"]
    ends: dict[object, tuple[str | None, Key]] = {}
    for (above, tokens), block in blocks._next.items():  # the dict has each block after its parent
        tag, before = (above[0], b"") if isinstance(above, tuple) else ends[above]
        ends[block] = tag, before + tokens
    assert set(ends) == set(blocks._groups)
    return {ends[block]: set(groups) for block, groups in blocks._groups.items()}


def held(mem: ms.StateManager) -> dict[tuple[str | None, Key], set[int]]:
    """Returns what the cache has: (salt tag, tokens) of each block -> its groups."""
    groups: dict[tuple[str | None, Key], set[int]] = {}
    for salt, node in mem.prefix.tree.walk():
        if node.ghost:
            continue
        key = joined(step.key for step in list(node.path())[::-1])
        unit = PAGE * BYTES
        for end in range(len(key) - len(node.key) + unit, len(key) + 1, unit):
            groups.setdefault((salt_tag(salt), key[:end]), set()).add(KV)
        if node.snapshot is not None:
            groups[salt_tag(salt), key].add(STATES)
    return groups


def test_the_first_batch_is_a_snapshot_and_nothing_is_told_twice() -> None:
    mem, index = manager(), Index()
    serve(mem, list(range(16)))
    feed = Feed(mem)
    first = read(feed, index)
    assert isinstance(first[0], AllBlocksCleared)
    assert told(index) == held(mem) != {}
    assert feed.take() is None
    mem.match(list(range(16)))
    assert feed.take() is None


def test_events_of_one_prompt() -> None:
    mem, index = manager(whole=True), Index()
    feed = Feed(mem)
    read(feed, index)
    serve(mem, list(range(8)), salt="a")
    stored = [event for event in read(feed, index) if isinstance(event, BlockStored)]
    kv, state = stored[0], stored[-1]
    assert (kv.group_idx, kv.kv_cache_spec_kind, kv.parent_block_hash) == (KV, "full_attention", None)
    assert (kv.token_ids, kv.block_size, kv.extra_keys) == (list(range(8)), PAGE, [(salt_tag("a"),), None])
    assert (state.group_idx, state.kv_cache_spec_kind, state.block_hashes) == (STATES, "mamba", kv.block_hashes[-1:])
    assert (state.parent_block_hash, state.token_ids) == (kv.block_hashes[0], [4, 5, 6, 7])
    assert kv.cache_salt == state.cache_salt == salt_tag("a")
    serve(mem, list(range(16)), salt="a")
    more = [event for event in read(feed, index) if isinstance(event, BlockStored) and event.group_idx == KV]
    assert [event.token_ids for event in more] == [list(range(8, 16))]  # events come only for the new pages
    assert more[0].parent_block_hash == kv.block_hashes[-1]
    mem.prefix.clear()
    removed = [event for event in read(feed, index) if isinstance(event, BlockRemoved)]
    assert {event.group_idx for event in removed} == {KV, STATES}
    assert told(index) == {}


def test_all_groups_that_are_read_must_have_a_block() -> None:
    """A model may have several groups, for example of full attention and of windows."""
    index = Index()
    for group, blocks in ((0, [1, 2, 3]), (1, [1, 2])):
        tokens = [5] * (2 * len(blocks))
        index.apply("w", EventBatch(0.0, [BlockStored(blocks, None, tokens, 2, group_idx=group)]))
    assert index.find([5] * 9) == [("w", 4, 4)]
    assert index.find([5] * 4) == [("w", 2, 2)]  # a hit leaves out the last token
    index.apply("w", EventBatch(0.0, [BlockRemoved([1])]))  # this event removes the block from all groups
    assert index.find([5] * 9) == []


def test_without_a_state_nothing_is_resumed() -> None:
    """An index that has seen no state yet resumes nothing either."""
    index = Index()
    read(Feed(manager()), index)
    index.apply("w", EventBatch(0.0, [BlockStored([1], None, [5] * PAGE, PAGE, group_idx=KV)]))
    assert index.find([5] * 9) == [("w", 0, PAGE)]


def test_tenants_with_equal_tokens_are_told_apart() -> None:
    mem, index, prompt = manager(slots=20), Index(), list(range(9))
    feed = Feed(mem)
    for salt in SALTS:
        read(feed, index)
        assert index.find(prompt, salt) == []
        serve(mem, prompt[:8], salt)
    read(feed, index)
    assert [index.find(prompt, salt)[0].length for salt in SALTS] == [8] * len(SALTS)
    assert len(index._workers["w"]._groups) == 2 * len(SALTS)
    assert not any(salt in str(index._workers["w"]._next) for salt in ("'a'", "b'a'"))  # no event contains a salt


def test_refusals() -> None:
    mem = manager()
    with pytest.raises(ConfigurationError, match="without a prefix cache"):
        Feed(ms.StateManager(LAYOUT, slots=2, max_requests=1, backend="reference"))
    feed = Feed(mem)
    with pytest.raises(ConfigurationError, match="has a feed"):
        Feed(mem)
    feed.close()
    Feed(mem)


@pytest.fixture(params=range(12))
def draw(request: pytest.FixtureRequest) -> Iterator[Random]:
    """A source of random choices."""
    yield Random(request.param)


@pytest.mark.sample(3)
def test_replaying_the_events_gives_the_tree(draw: Random) -> None:
    below = draw.choice([0, 0, 8])
    mem, index = manager(draw.choice([0, 14, 40]), below, slots=draw.choice([5, 10])), Index()
    feed = Feed(mem)
    stems = [[draw.randrange(9) for _ in range(draw.randrange(4, 24))] for _ in range(3)]
    rows: dict[ms.Row, list[int]] = {}
    for number in range(150):
        action = draw.random()
        prompt = draw.choice(stems)[: draw.randrange(2, 24)] + [draw.randrange(9) for _ in range(draw.randrange(1, 8))]
        salt = draw.choice(SALTS[:3])
        try:
            if action < 0.3:
                (row,) = mem.admit([ms.Request(number, tokens=prompt, salt=salt)])
                rows[row] = prompt
            elif action < 0.75 and rows:
                row = draw.choice(list(rows))
                if mem.info(row).length < len(rows[row]):
                    mem.settle(mem.plan([row], mem.chunk(row, draw.randrange(1, 12))))
                    mem.publish([row], keep="cache", tokens=[rows[row]])
            elif action < 0.93 and rows:
                row = draw.choice(list(rows))
                known = rows.pop(row)[: mem.info(row).length]
                if known and draw.random() < 0.8:
                    mem.end([row], keep="cache", tokens=[known])
                else:
                    mem.end([row])
            elif action < 0.95:
                mem.prefix.clear()
            elif action < 0.96:
                mem.recover(keep=draw.random() < 0.5)
                rows = {}
            if below:
                mem.poll()
        except (OutOfSlots, OutOfPages, ms.OutOfRows):
            pass
        if draw.random() < 0.5:
            read(feed, index)
            assert told(index) == held(mem)
            for best in index.find(prompt, salt):
                match = mem.match(prompt, salt)
                assert (best.length, best.kv) == (match.length, match.kv_length)
    mem.close()
