"""Guards of the prefix cache: faulty policies and placements, wrong settings, bounds and interrupted calls."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.prefix.placement import Nowhere
from memstate.prefix.policies import FlopAware, Lru, LruPages, Place, ReturnRate
from memstate.prefix.policies.return_rate import Candidate
from memstate.prefix.tree import Node
from memstate.tokens import SaltedTokens, encode
from tests.proof.injection.points import Tracer
from tests.support import owners
from tests.support.build import build

LAYOUT = ms.StateLayout((ms.Plane("ssm", (4,), torch.float32),), 1)
T = list(range(16))


def manager(**settings: Any) -> ms.StateManager:
    sizes = {"slots": 8, "max_requests": 3, "pages": 40, "page_size": 4, "pages_per_row": 12}
    given = sizes | {"tracking": ms.Redirect(8), "prefix": ms.Prefix(states=Lru()), "backend": "reference"} | settings
    return build(LAYOUT, **given)  # type: ignore[arg-type]


def run(mem: ms.StateManager, row: ms.Row, tokens: list[int]) -> None:
    """Runs a row to the end of the tokens, and so confirms a boundary there."""
    mem.extend([row], [len(tokens)])
    while (done := mem.info(row).length) < len(tokens):
        mem.settle(mem.plan([row], min(mem.info(row).next_boundary, len(tokens)) - done))


class Moody(Lru):
    """A policy that raises in one chosen method."""

    raises = ""

    def admits(self, place: Place) -> bool:
        if self.raises == "admits":
            raise RuntimeError("admits")
        return super().admits(place)

    def added(self, node: Any, kind: str) -> None:
        super().added(node, kind)
        if self.raises == "added":
            raise RuntimeError("added")


@pytest.mark.parametrize("where", ["admits", "added"])
def test_G1_after_a_policy_that_raises_recover_leaves_nothing_half_done(where: str) -> None:
    policy = Moody()
    mem = manager(prefix=ms.Prefix(states=policy), whole=True)
    (row,) = mem.admit([ms.Request("a", tokens=T)])
    run(mem, row, T)
    mem.end([row], keep="cache", tokens=[T])
    (row,) = mem.admit([ms.Request("b", tokens=[*T[:12], 1, 2, 3, 4])])
    run(mem, row, [*T[:12], 1, 2, 3, 4])
    policy.raises = where
    with pytest.raises(RuntimeError):
        mem.publish([row], keep="cache", tokens=[[*T[:12], 1, 2, 3, 4]])
    policy.raises = ""
    with pytest.raises(ms.Broken, match=r"publish\(\) was interrupted .*RuntimeError.*recover\(\)"):
        mem.end([row], keep="cache", tokens=[[*T[:12], 1, 2, 3, 4]])
    kept = mem.recover()
    assert (kept.ended, kept.cached) == (["b"], 2 if where == "admits" else 3)  # the state of 12 tokens was filed first
    with pytest.raises(ms.StaleHandle, match="request 'b' was ended by recover"):
        mem.info(row)
    mem.audit().raise_if_leaking()
    assert mem.match([*T, 1]).length == 16 and mem.prefix is not None and not owners.pinned(mem)
    assert mem.match([*T[:12], 1, 2, 3, 4, 5]).length == (8 if where == "admits" else 12)
    mem.prefix.clear()
    mem.audit().raise_if_leaking()
    assert (mem.free_slots, mem.free_pages, mem.prefix.tree.leased_pages) == (8, 40, 0)


class Odd(ms.prefix.placement.Placement):
    """A placement that returns a given answer, or raises."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def marks(self, match: ms.Match, page_size: int) -> Any:
        return self.answer() if callable(self.answer) else self.answer


def test_M23_a_placement_is_heard_before_anything_changes() -> None:
    """An answer that is not a dict of length -> kind is refused. Errors that the placement raises reach the caller."""
    placement = Odd({})
    mem = manager(prefix=ms.Prefix(Lru(), placement=placement), ends=True)
    before = mem.stats()
    for wrong in (None, [(8, "a")], {"8": "a"}, {8.0: "a"}, {True: "a"}, {9: "a"}, {8: 1}, {8: ["a"]}, {8: None}):
        placement.answer = wrong
        with pytest.raises(ms.InvalidArgument, match=r"returned .*multiples of 4.*\{64: 'prompt'\}"):
            mem.admit([ms.Request("a", tokens=T)])
    placement.answer = lambda: 1 // 0
    with pytest.raises(ZeroDivisionError):
        mem.admit([ms.Request("a", tokens=T)])
    assert mem.stats() == before
    # only length 8 lies in the prompt; other lengths are ignored
    placement.answer = {-3: "a", 0: "a", 8: "mine", len(T) + 1: "a"}
    (row,) = mem.admit([ms.Request("a", tokens=T)])
    run(mem, row, T)
    mem.end([row], keep="cache", tokens=[T])
    assert mem.match([*T[:8], 1]).length == 8


def test_M23_lengths_may_be_numbers_of_numpy() -> None:
    mem = manager(prefix=ms.Prefix(placement=ms.Ends(spare=np.int64(2))))  # type: ignore[arg-type]
    (row,) = mem.admit([ms.Request("a", tokens=T[:14])])
    run(mem, row, T[:14])
    mem.end([row], keep="cache", tokens=[T[:14]])
    assert mem.match(T).length == 12


def test_M23_a_policy_that_raises_at_an_admission_changes_nothing() -> None:
    policy = Moody()
    mem = manager(prefix=ms.Prefix(states=policy))
    policy.raises, before = "admits", mem.stats()
    with pytest.raises(RuntimeError):
        mem.admit([ms.Request("a", tokens=T)])
    policy.raises = ""
    assert mem.stats() == before and len(mem.admit([ms.Request("a", tokens=T)])) == 1


class Meddling(Lru):
    """A policy that recovers and closes a manager from inside its calls, once."""

    mem: ms.StateManager | None = None
    said = ""

    def meddle(self) -> None:
        mem, self.mem = self.mem, None
        for call in (mem.recover, mem.close) if mem is not None else ():
            with pytest.raises(ms.InvalidArgument) as caught:
                call()  # type: ignore[operator]
            self.said += str(caught.value)

    def victims(self) -> Iterator[Node]:
        self.meddle()
        return super().victims()

    def used(self, node: Node) -> None:
        self.meddle()
        super().used(node)


class MeddlingPages(LruPages):
    """A policy of pages that calls `meddle` of a policy of states."""

    def __init__(self, policy: Meddling) -> None:
        super().__init__()
        self.policy = policy

    def victims(self) -> Iterator[Node]:
        self.policy.meddle()
        return super().victims()


@pytest.mark.parametrize("call", ["clear", "settle", "extend", "sessions.fork"])
def test_a_policy_can_neither_recover_nor_close_the_manager_that_asks_it(call: str) -> None:
    policy = Meddling()
    mem = manager(prefix=ms.Prefix(states=policy, pages=MeddlingPages(policy)), pages=8)
    session = mem.sessions.open("talk")
    for tokens, turn in ((T, None), (T[8:14], session)):
        (row,) = mem.admit([ms.Request("a", tokens=tokens, session=turn)])
        run(mem, row, tokens)
        mem.end([row], keep="cache", tokens=[tokens])
    rows = mem.admit([ms.Request("c", tokens=[*T, 1])] if call == "settle" else [ms.Request("c", length=8)])
    assert mem.free_pages == (0 if call != "settle" else 1)
    policy.mem = mem
    if call == "clear":
        mem.prefix.clear()  # type: ignore[union-attr]
    elif call == "settle":
        mem.settle(mem.plan(rows, 1))
    elif call == "extend":
        mem.extend(rows, [12])
    else:
        mem.sessions.fork(session, "other")
    inside = f"() inside {call}(), which still runs: call it afterwards"
    assert policy.said == f"recover{inside}close{inside}"


PREFIXES = [{"states": LruPages()}, {"states": "lru"}, {"states": Lru}, {"pages": Lru()}, {"most_states": -1},
            {"most_states": 1.5}, {"most_states": True}, {"evict": 1}]  # fmt: skip
WRONG: list[Any] = [
    *(partial(ms.Prefix, **wrong) for wrong in PREFIXES),
    *(partial(manager, **wrong) for wrong in ({"prefix": True}, {"prefix": Lru()}, {"journal": -1}, {"journal": 1.5})),
    *(partial(manager, prefix=ms.Prefix(), pages=count, pages_per_row=row) for count, row in ((9, 1), (1, 9))),
    *(partial(FlopAware, *wrong) for wrong in ((float("nan"),), (-1.0,), ("1",))),
]  # fmt: skip


@pytest.mark.parametrize("make", WRONG)
def test_G1_settings_that_cannot_be_meant_are_refused_at_construction(make: Callable[[], object]) -> None:
    with pytest.raises(ms.ConfigurationError):
        make()


def test_a_policy_of_another_manager_is_noticed() -> None:
    shared = Lru()
    first = manager(prefix=ms.Prefix(states=shared))
    with pytest.raises(ms.ConfigurationError, match="another manager"):
        manager(prefix=ms.Prefix(states=shared))
    assert first.free_slots == 8


def test_the_default_policy_keeps_no_tokens_of_what_it_forgot() -> None:
    policy = ReturnRate()
    mem = manager(prefix=ms.Prefix(states=policy))
    assert mem.prefix is not None
    for at in range(60):
        tokens = [100 * at + n for n in range(32)]
        (row,) = mem.admit([ms.Request(at, tokens=tokens)])
        run(mem, row, tokens)
        mem.end([row], keep="cache", tokens=[tokens])
    touches = [spot for request in policy._log.values() for spot, _ in request]
    kept = {id(spot.node): len(spot.node.key) for spot in touches}
    tree = mem.prefix.tree
    assert tree.ghost_pages <= 40 and len(touches) >= 60
    assert sum(kept.values()) <= (tree.total_pages + tree.ghost_pages) * tree.page


def test_refusals_say_how_much_idle_sessions_hold() -> None:
    mem = manager(slots=2, prefix=None)
    for name in "ab":
        session = mem.sessions.open(name)
        (row,) = mem.admit([ms.Request(name, tokens=T[:6], session=session)])
        run(mem, row, T[:6])
        mem.end([row], keep="cache", tokens=[T[:6]])
    assert mem.stats().held_by_sessions == 2 and mem.stats().held_by_snapshots == 0
    with pytest.raises(ms.OutOfSlots) as refusal:
        mem.admit([ms.Request(name) for name in "cde"])
    assert refusal.value.in_sessions == 2 and refusal.value.evictable == 0
    assert "waiting cannot help" in str(owners.row_pages(mem).short_of(41))


def test_a_leaf_that_grew_for_another_row_is_not_the_path_of_the_first() -> None:
    mem = manager(tracking=ms.NoTracking(64))
    one, other = [*T[:8], *[98] * 8], [*T[:8], *[99] * 8]
    first, second = mem.admit([ms.Request("a", tokens=one), ms.Request("b", tokens=other)])
    for row, tokens, n in ((first, one, 8), (second, other, 12), (first, one, 8), (second, other, 4)):
        mem.settle(mem.plan([row], n))
        mem.publish([row], keep="cache", tokens=[tokens])
    assert mem.prefix and mem.prefix.tree.nodes == 3
    for tokens, row in ((one, first), (other, second)):
        node = mem.prefix.match(SaltedTokens(encode([*tokens, 1]), None)).found
        assert node and mem.prefix.tree.pages_to(node.reach)[2:] == owners.row_pages(mem).of(row.index)[2:]


class Listener(Lru):
    """A policy that notes its calls."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        super().__init__()

    def asked(self, node: Node, pages: int) -> None:
        self.heard.append(f"asked {pages}")

    def used(self, node: Node) -> None:
        super().used(node)
        self.heard.append("used")

    def victims(self) -> Iterator[Node]:
        self.heard.append("victims")
        return super().victims()


def test_policies_learn_while_the_forward_runs_and_before_they_are_asked() -> None:
    policy = Listener()
    mem = manager(prefix=ms.Prefix(states=policy))
    (row,) = mem.admit([ms.Request("a", tokens=T[:8])])
    assert policy.heard == []
    step = mem.plan([row], 8)
    assert policy.heard == []
    mem.settle(step)
    assert policy.heard == ["asked 2"]
    mem.end([row], keep="cache", tokens=[T[:8]])  # a row that ends at a state uses the state
    assert policy.heard == ["asked 2", "used"]
    (row,) = mem.admit([ms.Request("b", tokens=T[:13])])
    mem.end([row])
    assert mem.prefix and mem.prefix.evict_states(1) == 1
    assert policy.heard[2:] == ["asked 3", "used", "victims"]


def test_policies_never_know_of_more_than_64_requests_too_few() -> None:
    policy = Listener()
    mem = manager(prefix=ms.Prefix(states=policy), slots=200, max_requests=200, pages=200)
    # the policy learns of the last requests with the next call
    mem.admit([ms.Request(at, tokens=T[:3]) for at in range(200)])
    assert len(policy.heard) >= 200 - 64


class Interrupted(ReturnRate):
    """A policy that raises a KeyboardInterrupt while it learns."""

    planted = False

    def _credit(self, candidate: Candidate) -> None:
        if self.planted:
            self.planted = False
            raise KeyboardInterrupt
        super()._credit(candidate)


def test_a_policy_that_is_interrupted_while_it_learns_breaks_the_manager() -> None:
    policy = Interrupted()
    mem = manager(prefix=ms.Prefix(states=policy))
    (row,) = mem.admit([ms.Request("a", tokens=T[:12])])
    run(mem, row, T[:12])
    mem.end([row], keep="cache", tokens=[T[:12]])
    mem.admit([ms.Request("b", tokens=T[:12])])
    policy.planted = True
    with pytest.raises(KeyboardInterrupt):
        mem.admit([ms.Request("c", tokens=T[:20])])
    with pytest.raises(ms.Broken, match="admit"):
        mem.admit([ms.Request("c", tokens=T[:20])])
    assert mem.recover().ended == ["b"]
    assert mem.info(mem.admit([ms.Request("c", tokens=T[:20])])[0]).length == 8


def test_figures_add_up_wherever_a_request_that_hits_is_interrupted() -> None:
    """Interrupts the request at each point of each function of the cache."""

    def admitted(tracer: Tracer) -> ms.StateManager:
        mem = manager()
        (row,) = mem.admit([ms.Request("a", tokens=T[:12])])
        run(mem, row, T[:12])
        mem.end([row], keep="cache", tokens=[T[:12]])
        with suppress(KeyboardInterrupt):
            tracer.run(lambda: mem.admit([ms.Request("b", tokens=T)]))
        return mem

    count, places = Tracer(), set[str]()
    admitted(count)
    for at in range(1, count.count + 1):
        tracer = Tracer(at, KeyboardInterrupt())
        figures = admitted(tracer).stats().prefix
        lost = figures.lost_no_sharing + figures.lost_evicted + figures.lost_no_snapshot
        assert figures.hit_tokens + lost == figures.prompt_tokens, tracer.place
        places.add(tracer.place.split()[1])
    assert {"use", "match", "hear"} <= places


def test_a_state_that_a_request_takes_over_is_ranked_no_more() -> None:
    policy = Lru()
    mem = manager(slots=2, prefix=ms.Prefix(states=policy), tracking=ms.Redirect(400))
    for at in range(30):
        tokens = [at] * 8
        (row,) = mem.admit([ms.Request("a", tokens=tokens)])
        mem.settle(mem.plan([row], 8))
        mem.end([row], keep="cache")
        rows = [*mem.admit([ms.Request("b", length=4)]), *mem.admit([ms.Request("a", tokens=[*tokens, 1])])]
        assert mem.info(rows[1]).length == 8
        mem.settle(mem.plan(rows, 1))
        mem.end(rows)
    assert mem.prefix and set(policy._order) == set(mem.prefix.stated())


def test_a_state_comes_from_below_while_policies_have_still_to_learn() -> None:
    """The loaded state has the kind of the request that loads it. Its leaf was made by an earlier request."""
    layout = ms.StateLayout([ms.Plane("kv", (4,), torch.int64)], layers=1)
    kv = ms.Planes(layout, 40, Backend("reference", torch.device("cpu")))
    mem = manager(
        slots=16, tracking=ms.Redirect(400), prefix=ms.Prefix(placement=Nowhere()),
        tiers=ms.Tiers("m", host_slots=8, host_pages=40, kv=kv),
    )  # fmt: skip
    assert mem.prefix
    tokens = list(range(16))

    def serve(upto: int, **request: Any) -> None:
        (row,) = mem.admit([ms.Request("one", **request)])
        mem.settle(mem.plan([row], upto - mem.info(row).length))
        mem.end([row], keep="cache", tokens=[[*tokens, 7]])

    serve(16, tokens=tokens)
    for _ in range(5):
        mem.submit()
        mem.poll()
    mem.prefix.clear()
    serve(17, length=17)  # this request leaves KV without a state
    mem.admit([ms.Request("parts", tokens=[*tokens[:8], *[5] * 8])])
    (row,) = mem.admit([ms.Request("loads", tokens=[*tokens, *[9] * 4], kind="chat")])
    assert mem.info(row).length == 16 and [node.kind for node in mem.prefix.stated()] == ["chat"]
    mem.audit().raise_if_leaking()
    mem.close()
