"""Refused requests: a cache that cannot free enough evicts nothing, and the request has taken nothing."""

from collections.abc import Iterator

import pytest

import memstate as ms
from memstate.integrations.sglang.prefix import PrefixPart
from memstate.kernels.dispatch import Backend
from memstate.prefix.policies import Lru, LruPages
from memstate.prefix.tree import Node
from tests.support import owners
from tests.support.held import held
from tests.support.serving import Server

T = list(range(100, 116))


def server(backend: Backend, policy: Lru | None = None, **more: object) -> Server:
    prefix = ms.Prefix(states=policy or Lru(), pages=LruPages())
    sizes = {"every": 64, "slots": 6, "rows": 3, "pages": 8}
    return Server(backend, whole=True, **(sizes | {"prefix": prefix} | more))  # type: ignore[arg-type]


def figures(at: Server) -> object:
    at.look()
    return held(at.mem)


class Mean(Lru):
    """A policy that offers nothing."""

    def victims(self) -> Iterator[Node]:
        return iter(())


def test_states_that_a_policy_does_not_offer_make_way_oldest_first(backend: Backend) -> None:
    at = server(backend, slots=4, prefix=ms.Prefix(states=Mean(), pages=LruPages(), most_states=2))
    prompts = [[100 * n + token for token in T[:9]] for n in range(3)]
    for prompt in prompts:
        at.turn(prompt[:8])
    assert [at.mem.match(prompt).length for prompt in prompts] == [0, 8, 8]
    at.mem.end(at.mem.admit([ms.Request(n) for n in range(3)]))
    assert (at.cache.states, at.mem.free_slots) == (1, 3)
    at.look()


class Twice(Lru):
    """A policy that offers each state twice."""

    def victims(self) -> Iterator[Node]:
        return (node for node in super().victims() for _ in range(2))


def test_a_state_that_a_policy_offers_twice_is_evicted_once(backend: Backend) -> None:
    at = server(backend, Twice(), slots=4)
    for n in range(3):
        at.turn([100 * n + token for token in T[:8]])
    assert at.cache.states == 3
    at.mem.end(at.mem.admit([ms.Request(n) for n in range(3)]))
    assert (at.cache.states, at.mem.free_slots) == (1, 3)
    at.look()


def test_what_needs_a_cache_says_so_where_there_is_none(backend: Backend) -> None:
    at = Server(backend, prefix=False)
    row = at.start(T[:5])  # tokens are allowed without a cache
    step = at.step([row], run=False)
    for call in (
        lambda: at.mem.match(T),
        lambda: at.mem.publish([row], keep="cache", tokens=[T]),
        lambda: at.mem.end([row], keep="cache", tokens=[T]),
        lambda: at.mem.end([row], keep="cache", tokens=[T]),
        lambda: at.mem.cancel(step, keep="cache", tokens=[T]),
    ):
        with pytest.raises(ms.ConfigurationError, match="prefix=ms"):
            call()
    at.mem.settle(step)
    at.mem.end([row])
    at.mem.audit().raise_if_leaking()
    assert not at.mem.stats().prefix and at.mem.free_slots == 16


def test_a_salt_or_a_snapshot_that_cannot_be_meant_changes_nothing(backend: Backend) -> None:
    at = server(backend)
    at.turn(T[:8])
    (cached,) = at.states().values()
    before = figures(at)
    for call in (
        lambda: at.mem.match(T, salt=["a"]),
        lambda: at.mem.admit([ms.Request("a", tokens=T[:9]), ms.Request("b", tokens=T, salt=["a"])]),
        lambda: at.mem.drop([cached]),
        lambda: at.mem.admit([ms.Request("a", tokens=T[:9]), ms.Request("b", tokens=T, length=-1)]),
        lambda: at.mem.admit([ms.Request("a", tokens=T[:9]), ms.Request("b", tokens=T, snapshot_at=[-3])]),
        # more pages than a row has
        lambda: at.mem.admit([ms.Request("a", tokens=T[:9]), ms.Request("b", length=4 * 41)]),
    ):
        with pytest.raises(ms.InvalidArgument):
            call()
        assert figures(at) == before and not owners.pinned(at.mem)


def test_tokens_that_end_before_the_confirmed_ones_are_refused() -> None:
    """If they were taken, no state would ever be found, and nobody would notice. A caller can name a shorter length."""
    at = server(Backend("reference"))
    row = at.start(T[:9])
    at.prefill(row, publish=False)
    before = held(at.mem)
    with pytest.raises(ms.InvalidArgument, match=r"row 1 \(request 'of 9'\): 8 tokens, and 9 are confirmed"):
        at.mem.end([row], keep="cache", tokens=[T[:8]])
    assert held(at.mem) == before
    at.mem.end([row], keep="cache", lengths=[8], tokens=[T[:8]])
    assert at.mem.match(T[:9]).length == 8


@pytest.mark.parametrize("call", ["end", "publish"])
def test_of_a_fork_only_the_tokens_that_it_shares_are_known(call: str) -> None:
    """Later tokens of a fork are not known: they may differ from those of the row's prompt."""
    at = server(Backend("reference"))
    row = at.start(T[:10])
    at.mem.settle(at.step_to([row], [4]))
    (fork,) = at.mem.fork(row, ["fork"]).rows
    at.text[fork] = [*T[:4], 50, 51, 52, 53, 54]
    at.mem.settle(at.step_to([row, fork], [8, 8]))
    before = held(at.mem)
    with pytest.raises(ms.InvalidArgument, match=r"request 'fork'\): 4 tokens, and 8 are confirmed"):
        getattr(at.mem, call)([fork], keep="cache")
    assert held(at.mem) == before
    at.mem.end([row], keep="cache")
    at.mem.end([fork], keep="cache", tokens=[at.text[fork]])
    assert [at.mem.match(text).length for text in (T[:10], at.text[fork])] == [8, 8]


def test_a_session_is_told_all_tokens() -> None:
    at = server(Backend("reference"))
    session = at.mem.sessions.open("talk")
    row = at.start(T[:9], session=session)
    at.prefill(row, publish=False)
    with pytest.raises(ms.InvalidArgument, match="8 tokens, and 9 are confirmed"):
        at.mem.end([row], keep="cache", tokens=[T[:8]])
    at.mem.end([row], keep="cache", tokens=[T[:9]])
    assert at.mem.sessions.infos()[0].tokens == 9


def test_a_hit_is_not_locked_whose_state_has_another_owner_by_now() -> None:
    """The engine has reused the id of the state: in the cache, this id now stands for another prompt."""
    cache = PrefixPart(2)
    cache.insert([1, 2, 3, 4], [10, 11], 7)
    hit = cache.match([1, 2, 3, 4, 5])
    assert cache.evict(states=1).states == [7]
    cache.insert([5, 6, 7, 8], [12, 13], 7)
    with pytest.raises(ms.InvalidArgument, match="has been evicted since it was matched"):
        cache.lock(hit)
    assert cache.evict(states=1).states == [7], "nothing is locked"
