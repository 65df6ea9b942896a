"""Hits in host memory: records are loaded once for all requests, and every request reads the right state."""

import pytest

from memstate.kernels.dispatch import Backend
from tests.support.planes import every_strategy
from tests.support.tiered import below, settle, whole
from tests.support.ways import every_order_and_strategy

pytestmark = pytest.mark.sample

ONE = whole(1)


@every_order_and_strategy
def test_a_prompt_goes_on_from_host_memory(name: str, overlap: bool, plain: Backend) -> None:
    at = below(plain, name, whole(1), whole(2, 3), overlap=overlap)
    match = at.mem.match([*whole(2, 3), 1])
    assert (match.length, match.kv_length, match.host_length) == (0, 0, 12)
    assert at.turn([*whole(2, 3), 1], goal=9) == 12
    assert at.turn([*ONE, 5, 6, 7], goal=3) == 8
    stats = at.mem.stats()
    assert stats.prefix and (stats.prefix.loaded, stats.prefix.hit_tokens) == (2, 20)
    assert at.moved[1::2] == (2, 5) and (at.tiers.host_hit_tokens, at.tiers.storage_hit_tokens) == (20, 0)


@pytest.mark.parametrize("staging", [1, 2, 50])
@every_strategy
def test_staging_of_any_size_carries_the_same_bytes(name: str, staging: int, plain: Backend) -> None:
    at = below(plain, name, *(whole(n, n) for n in range(1, 6)), tiers={"staging": staging})
    rows = [at.start([*whole(n, n), 1]) for n in (5, 3, 1)]
    assert [at.mem.info(row).length for row in rows] == [20, 12, 4]
    at.run(rows)
    at.look()
    at.mem.end(rows)
    settle(at)
    assert at.tiers.staging_bytes > 0


def test_hits_through_the_kernels(backend: Backend) -> None:
    """Covers both ways to start from a state: a direct read and a copy."""
    for name, staging in (("redirect", 1), ("lazy", 2)):
        at = below(backend, name, tiers={"staging": staging})
        assert at.turn([*ONE, 1], goal=2) == 8


@every_strategy
def test_B64_a_tombstone_gets_its_state_back(name: str, plain: Backend) -> None:
    at = below(plain, name, kv_stays=True)
    (node,) = [node for _, node in at.cache.tree.walk()]
    assert node.evicted and node.snapshot is None and at.mem.match([*ONE, 1]).kv_length == 8
    row = at.start([*ONE, 1])
    assert at.mem.info(row).length == 8 and at.moved == (1, 1, 2, 0), "its KV was here"
    assert [each for _, each in at.cache.tree.walk()] == [node], "the same node"
    assert node.snapshot is not None and node.snapshot.length == 8 and not node.evicted
    at.checked([row])
