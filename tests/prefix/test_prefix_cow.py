"""Hits: a state is read directly or copied, is not evicted meanwhile, and keeps its bytes. Refusals change nothing.

Pages hold 4 tokens; every prompt of whole pages leaves one state, at its end (placement `Whole`).
"""

from collections.abc import Sequence
from typing import Any

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.prefix.policies import Lru, LruPages
from tests.support import owners
from tests.support.held import held
from tests.support.serving import Server

X, Y, Z, W = ([100 * n + i for i in range(8)] for n in range(1, 5))
hits = pytest.mark.parametrize(
    ("name", "direct"),
    [("redirect", True), ("redirect", False), ("ping-pong", False), ("lazy", False), ("none", False)],
    ids=["redirect, read", "redirect, copied", "ping-pong", "lazy", "none"],
)


def server(
    backend: Backend, name: str, direct: bool, states: Sequence[list[int]], spare: int = 0, **more: Any
) -> Server:
    """Returns a server with `spare` free slots and a cached state of each prompt in `states`, the oldest first."""
    settings = {"every": 64, "rows": 4, "pages": 30, "prefix": ms.Prefix(states=Lru(), pages=LruPages())} | more
    at = Server(backend, name, whole=True, direct_hits=direct, slots=len(states) + spare, overlap=False, **settings)
    for tokens in states:
        row = at.start(tokens)
        at.prefill(row, publish=False)
        at.end([row])
    at.look(idle=True)
    return at


def per_request(name: str) -> int:
    return 2 if name in ("ping-pong", "lazy") else 1


def everything(at: Server) -> object:
    at.look()
    return held(at.mem)


@hits
def test_B50_the_source_of_a_hit_is_not_evicted_for_it(name: str, direct: bool, backend: Backend) -> None:
    needs = per_request(name)
    at = server(backend, name, direct, [X, Y, Z, W][: 2 + needs], spare=0 if needs == 1 else 1)
    row = at.start([*X, 5, 6])  # X is the oldest
    assert at.mem.info(row).length == 8
    kept = (X, Z) if needs == 1 else (X, Z, W)
    # only as many states were evicted as slots were missing
    assert set(at.states_by_prefix()) == {tuple(tokens) for tokens in kept}
    for _ in range(3):
        at.run([row], publish=False)
        at.look()
    at.mem.end([row])
    assert at.turn([*X, 7], publish=False) == 8


def test_B50_a_row_given_up_before_its_first_step_lets_go(backend: Backend) -> None:
    at = server(backend, "redirect", True, [X, Y], spare=2)
    row, other = at.admit(ms.Request("a", tokens=[*X, 1]), ms.Request("b", tokens=[*X, 2]))
    at.mem.end([row])
    assert at.cache.evict_states(9) == 1 and owners.pinned(at.mem)  # only Y is evictable
    at.mem.end([other], keep="cache", tokens=[[*X, 2]])
    assert not owners.pinned(at.mem) and at.cache.evictable_states == 1
    at.look(idle=True)
    row = at.start([*X, 3])
    at.mem.cancel(at.step([row], run=False))
    assert not owners.pinned(at.mem)
    at.look(idle=True)
    assert at.turn([*X, 4], publish=False) == 8


REFUSALS: dict[str, tuple[type[ms.MemstateError], list[list[int]]]] = {
    "rows": (ms.OutOfRows, [[*X, 1], [*Y, 2], [*X, 3], [*Z, 3], [4], [5]]),
    "slots": (ms.OutOfSlots, [[*X, 1], [*Y, 2], [*Z, 3], [4], [5]]),
    "pages": (ms.OutOfPages, [[*X, *range(40)], [*Y, *range(33)]]),
}


@hits
@pytest.mark.parametrize("what", REFUSALS)
def test_B50_a_refusal_gives_pin_and_lease_and_slot_back(what: str, name: str, direct: bool, backend: Backend) -> None:
    """If evictions would free too little, nothing is evicted."""
    error, prompts = REFUSALS[what]
    spare = 2 * per_request(name)  # room for the running row and one more
    at = server(backend, name, direct, [X, Y, Z], spare=spare, pages=24, rows=6)
    running = at.start([*Z, 5])
    at.run([running], publish=False)
    before = everything(at)
    for _ in range(2):
        with pytest.raises(error) as caught:
            at.mem.admit([ms.Request(n, tokens=tokens) for n, tokens in enumerate(prompts)])
        assert everything(at) == before
    free = {"rows": 5, "slots": per_request(name), "pages": 24 - 6 - 1}[what]
    assert caught.value.requested > caught.value.free == free  # type: ignore[attr-defined]
    assert not owners.pinned(at.mem) and at.cache.evictable_states == 3
    row = at.start(prompts[0])  # one request alone fits
    assert at.mem.info(row).length == 8
    at.run([row, running], publish=False)


@pytest.mark.parametrize("direct", [True, False], ids=["read", "copied"])
def test_B46_a_pinned_state_is_never_evicted_and_pins_balance(direct: bool, backend: Backend) -> None:
    at = server(backend, "redirect", direct, [X, Y], spare=1)
    row = at.start([*X, 1])
    pinned = at.states_by_prefix()[tuple(X)].register if direct else None
    assert owners.pinned(at.mem) == ([pinned] if direct else [])
    for bad in ([row, row], [ms.Row(row.index, row.generation - 1)], ["row"]):
        with pytest.raises(ms.MemstateError):
            at.mem.plan(bad)  # type: ignore[arg-type]
        assert owners.pinned(at.mem) == ([pinned] if direct else [])
    with pytest.raises(ms.OutOfSlots) as caught:  # a state that is being read cannot be evicted
        at.mem.admit([ms.Request(n, tokens=[n]) for n in range(2 if direct else 3)])
    assert caught.value.evictable == (1 if direct else 2)
    for snap in at.states_by_prefix().values():
        with pytest.raises(ms.InvalidArgument, match="the prefix cache's"):
            at.mem.drop([snap])
    assert len(at.states_by_prefix()) == 2
    at.run([row], publish=False)
    assert not owners.pinned(at.mem) and at.cache.evictable_states == 2
    at.look()
    at.start([7])  # the new row gets the slot of Y, the state that nobody used
    assert set(at.states_by_prefix()) == {tuple(X)}
