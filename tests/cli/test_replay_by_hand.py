"""Replays by hand: the least-recently-used policy against a list of runs that is searched from end to end, an optimum
found by trying everything, and what holds for every policy and trace.
"""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import combinations
from typing import Any

import pytest

from memstate.cli.replay import CLAIRVOYANT, NAMES, Loop, Replayed, ideal
from memstate.cli.replay import replay as replay_any
from memstate.cli.traces import BLOCK, TraceRequest
from memstate.cli.traces.make import KINDS, make

Blocks = tuple[int, ...]
BY_HAND = Loop(placement="by-hand")


def replay(trace: Sequence[TraceRequest], states: int, pages: int, policy: str, start: float = 0.0) -> Replayed:
    return replay_any(trace, states, pages, policy, start, None, BY_HAND)


def request(*blocks: int, rest: int = 0) -> TraceRequest:
    """Filled blocks, the last one perhaps only in part: `rest` tokens of it."""
    return TraceRequest(0, BLOCK * len(blocks) - (BLOCK - rest if rest else 0), 0, blocks)


def filled(one: TraceRequest) -> Blocks:
    return one.hash_ids[: one.input_length // BLOCK]


def drawn(seed: int, requests: int = 70) -> list[TraceRequest]:
    """Prompts that begin as others do, go on, part, come again, or are shorter than a block."""
    draw, fresh, known = random.Random(f"replay {seed}"), iter(range(10**9)), list[Blocks]([()])
    trace = []
    for _ in range(requests):
        old = draw.choice(known[-12:])
        kept = old if draw.random() < 0.5 else old[: draw.randint(0, len(old))]
        blocks = (*kept, *(next(fresh) for _ in range(draw.choice((0, 1, 1, 2, 4)))))[:9]
        known.append(blocks)
        rest = draw.randint(1, BLOCK - 1) if draw.random() < 0.4 else 0
        trace.append(request(*blocks, *([next(fresh)] if rest else ()), rest=rest))
    return trace


# -- the least recently used -----------------------------------------------------------------------


@dataclass(eq=False)
class Run:
    """Blocks of a prompt from `begin` on. used, touched: when its state and its KV were of use last."""

    whole: Blocks
    begin: int
    touched: int = 0
    used: int = 0  # 0: no state
    evicted: bool = False

    @property
    def size(self) -> int:
        return len(self.whole) - self.begin


@dataclass
class Naive:
    """What `lru` and `lru-tombstones` promise, with lists that are searched from end to end."""

    states: int
    pages: int
    tombstones: bool
    runs: list[Run] = field(default_factory=list)
    lease: Blocks = ()
    now: int = 0
    evicted_states: int = 0
    evicted_pages: int = 0

    def clock(self) -> int:
        self.now += 1
        return self.now

    def above(self, run: Run) -> Run | None:
        return next((one for one in self.runs if one.whole == run.whole[: run.begin]), None)

    def bare(self, run: Run) -> bool:
        """Whether it is a leaf that nobody is on."""
        below = [one for one in self.runs if one.begin == len(run.whole) and one.whole[: one.begin] == run.whole]
        return run in self.runs and not below and self.lease[: len(run.whole)] != run.whole

    def entered(self, blocks: Blocks) -> list[Run]:
        """The runs that a prompt goes into, the first block's first."""
        found = [
            run
            for run in self.runs
            if run.whole[: run.begin + 1] == blocks[: run.begin + 1] and run.begin < len(blocks)
        ]
        return sorted(found, key=lambda run: run.begin)

    def ask(self, blocks: Blocks) -> tuple[int, dict[str, int]]:
        """One request: blocks that it need not compute, and why not the others."""
        path = self.entered(blocks)
        through = [run for run in path if run.whole == blocks[: len(run.whole)]]
        stated = next((run for run in reversed(through) if run.used), None)
        hit = len(stated.whole) if stated else 0
        kv = max((shared(run.whole, blocks) for run in path), default=0)
        gone = max((len(run.whole) for run in through if run.evicted and len(run.whole) > hit), default=hit)
        if path:
            path[-1].touched = self.clock()
        if stated:
            stated.used = self.clock()
        self.lease = blocks[:hit]
        self.make_room(len(blocks) - hit)
        wanted = {gone: "again"} | {kv: "branch"} | {len(blocks): "prompt"}
        for length in sorted(n for n, kind in wanted.items() if n > hit and kind != "again"):
            run = self.grow(blocks[:length])
            run.used, run.evicted = self.clock(), False
        end = self.grow(blocks) if blocks else None
        self.lease = blocks
        self.evict()
        self.lease = ()
        if end:
            self.clean(end)
        return hit, {"no_sharing": len(blocks) - kv, "evicted": gone - hit, "no_snapshot": kv - gone}

    def grow(self, blocks: Blocks) -> Run:
        """Makes a run end where the prompt ends."""
        path = self.entered(blocks)
        last = path[-1] if path else None
        if last and (cut := shared(last.whole, blocks)) < len(last.whole):
            upper = Run(last.whole[:cut], last.begin, last.touched)
            self.runs.append(upper)
            last.begin, last = cut, upper
        reached = len(last.whole) if last else 0
        if last and reached == len(blocks):
            return last
        leaf = last and not any(run.begin == reached and run.whole[:reached] == last.whole for run in self.runs)
        if last and leaf and not last.used and not last.evicted:  # nothing ever ended there
            last.whole, run = blocks, last
        else:
            run = Run(blocks, reached)
            self.runs.append(run)
        if (parent := self.above(run)) and (grand := self.above(parent)):
            grand.touched = max(grand.touched, parent.touched)
        run.touched = run.touched or self.clock()
        return run

    def make_room(self, pages: int) -> None:
        while (missing := pages - self.pages + sum(run.size for run in self.runs)) > 0:
            leaf = min((run for run in self.runs if self.bare(run)), key=lambda run: run.touched)
            self.give_up(leaf, missing)

    def give_up(self, leaf: Run, pages: int) -> Run | None:
        parent = self.above(leaf)
        if parent:
            parent.touched = max(parent.touched, leaf.touched)
        if not leaf.used and pages < leaf.size:  # the end of it is enough, and what is left is a leaf of no history
            leaf.whole, leaf.evicted = leaf.whole[:-pages], False
            self.evicted_pages += pages
            return None
        self.evicted_states += bool(leaf.used)
        self.evicted_pages += leaf.size
        self.runs.remove(leaf)
        return parent

    def evict(self) -> None:
        stated = sorted((run for run in self.runs if run.used), key=lambda run: run.used)
        victims = stated[: max(0, len(stated) - self.states)]
        for run in victims:
            run.used, run.evicted = 0, True
            self.evicted_states += 1
        for run in victims:
            self.clean(run)

    def clean(self, run: Run | None) -> None:
        """Without tombstones KV goes with the state that it led to, and so on upwards."""
        while run and self.bare(run) and not run.used and run.evicted and not self.tombstones:
            run = self.give_up(run, run.size)


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.sample(20)
@pytest.mark.parametrize("policy", ["lru", "lru-tombstones"])
@pytest.mark.parametrize("seed", range(30))
def test_the_least_recently_used_go_as_in_a_list(seed: int, policy: str) -> None:
    draw = random.Random(f"sizes {seed}")
    trace, start = drawn(seed), draw.choice((0.0, 0.3, 0.75))
    states, pages = draw.randint(1, 9), max(len(filled(one)) for one in trace) + draw.randint(0, 25)
    naive, hits, lost = Naive(states, pages, policy == "lru-tombstones"), [], list[dict[str, int]]()
    for one in trace:
        hit, why = naive.ask(filled(one))
        hits.append(hit)
        lost.append(why | {"not_filled": len(one.hash_ids) - len(filled(one))})
    first, asked = int(start * len(trace)), [len(one.hash_ids) for one in trace]
    misses = {reason: sum(why[reason] for why in lost[first:]) for reason in lost[0]}
    found = replay(trace, states, pages, policy, start)
    assert (found.evicted_states, found.evicted_pages) == (naive.evicted_states, naive.evicted_pages)
    assert found.misses_by_reason == misses
    assert found.block_hit_rate == sum(hits[first:]) / sum(asked[first:])
    assert found.whole_hit_rate == sum(hits) / sum(asked)
    assert (found.leaked_slots, found.requests) == (0, len(trace) - first)


# -- what holds for all ----------------------------------------------------------------------------


def same(one: Replayed) -> dict[str, Any]:
    """All but times."""
    return {name: value for name, value in asdict(one).items() if not name.startswith("us_")}


def holds(trace: Sequence[TraceRequest], one: Replayed) -> None:
    """What every replay promises."""
    late = trace[len(trace) - one.requests :]
    asked = sum(len(each.hash_ids) for each in late)
    hits = round(one.block_hit_rate * asked)
    assert one.block_hit_rate * asked == pytest.approx(hits, abs=1e-6)
    assert hits + sum(one.misses_by_reason.values()) == asked and min(one.misses_by_reason.values()) >= 0
    assert set(one.misses_by_reason) == {"no_sharing", "evicted", "no_snapshot", "not_filled"}
    assert one.misses_by_reason["not_filled"] == sum(len(each.hash_ids) - len(filled(each)) for each in late)
    assert 0 <= one.block_hit_rate <= one.ideal_hit_rate == ideal(trace, one.start) <= 1
    assert one.leaked_slots == 0 and one.us_per_match > 0 and one.us_per_insert > 0


@pytest.mark.sample
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", NAMES)
def test_every_policy_replays_every_kind_and_twice_the_same(policy: str, kind: str) -> None:
    trace = make(kind, 90, 3)
    pages = max(len(filled(one)) for one in trace) + 40
    one, again = (replay(trace, 6, pages, policy, 0.25) for _ in range(2))
    assert same(one) == same(again)
    assert one.evicted_states and one.evicted_pages and one.block_hit_rate
    holds(trace, one)


@pytest.mark.sample
@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_every_policy_under_little_room(policy: str, seed: int) -> None:
    trace = drawn(100 + seed)
    for states, more in ((1, 0), (2, 5), (5, 30)):
        holds(trace, replay(trace, states, 9 + more, policy, 0.5))


@pytest.mark.parametrize("policy", NAMES)
def test_conversations_that_only_go_on_reach_the_ideal_where_there_is_room(policy: str) -> None:
    draw, talks, trace = random.Random(5), [list[int]() for _ in range(4)], []
    for at in range(60):
        talk = talks[draw.randrange(4)]
        talk += range(10 * at, 10 * at + draw.randint(0, 3))
        trace.append(request(*talk, 10 * at + 9, rest=7))
    one = replay(trace, 2 * len(trace), 1000, policy)
    assert one.block_hit_rate == one.ideal_hit_rate > 0.5 and one.evicted_states == one.evicted_pages == 0
    assert one.misses_by_reason["evicted"] == one.misses_by_reason["no_snapshot"] == 0


@pytest.mark.parametrize("kind", [*KINDS, "drawn"])
def test_the_clairvoyant_reaches_the_ideal_where_there_is_room(kind: str) -> None:
    """Wherever prompts part; what learns as it goes cannot."""
    trace = drawn(11) if kind == "drawn" else make(kind, 150, 5)
    room = sum(len(one.hash_ids) for one in trace)
    found = replay(trace, room, room, CLAIRVOYANT)
    assert found.block_hit_rate == found.ideal_hit_rate > 0.2 and found.leaked_slots == 0
    assert found.misses_by_reason["evicted"] == found.misses_by_reason["no_snapshot"] == 0


@pytest.mark.parametrize("seed", range(6))
def test_no_policy_beats_the_clairvoyant_where_prompts_share_nothing(seed: int) -> None:
    """Prompts of one length with nothing in common: then what is used again latest goes first at no loss, and the
    clairvoyant is the best there is. Where room is short and prompts differ in length, nothing is promised.
    """
    draw, prompts = random.Random(f"clairvoyant {seed}"), [tuple(range(3 * n, 3 * n + 3)) for n in range(6)]
    asked = draw.choices(range(6), k=24)
    trace, states = [request(*prompts[n]) for n in asked], draw.randint(1, 3)
    best = {frozenset[int](): 0}  # what is kept -> most hits that can have led there
    for n in asked:
        following: dict[frozenset[int], int] = {}
        for kept, hits in best.items():
            choice = kept | {n}
            for size in range(min(states, len(choice)) + 1):
                for some in map(frozenset, combinations(choice, size)):
                    following[some] = max(following.get(some, 0), hits + (n in kept))
        best = following
    found = {policy: replay(trace, states, 100, policy).block_hit_rate for policy in NAMES}
    assert found[CLAIRVOYANT] == max(best.values()) / len(asked) > 0
    assert max(found.values()) == found[CLAIRVOYANT] and min(found.values()) < found[CLAIRVOYANT]


@lru_cache
def made(kind: str) -> list[TraceRequest]:
    return make(kind, 700, 0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("states", [16, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_the_default_beats_the_least_recently_used(kind: str, states: int) -> None:
    """By more than a hundredth of all blocks; times play no part in it."""
    default, lru = (replay(made(kind), states, 50_000, policy) for policy in ("return-rate", "lru"))
    assert default.block_hit_rate > lru.block_hit_rate + 0.01
    assert default.leaked_slots == lru.leaked_slots == 0


# -- by hand ---------------------------------------------------------------------------------------


def test_a_trace_by_hand() -> None:
    """Two prompts part behind block 2: the second finds KV and no state, and leaves one there for the third."""
    trace = [request(1, 2, 3), request(1, 2, 4), request(1, 2, 5), request(1, 2, 3, 6, rest=9)]
    one = replay(trace, 10, 100, "lru")
    assert one.block_hit_rate == (0 + 0 + 2 + 3) / 13 and one.ideal_hit_rate == (0 + 2 + 2 + 3) / 13
    assert one.misses_by_reason == {"no_sharing": 3 + 1 + 1 + 0, "evicted": 0, "no_snapshot": 2, "not_filled": 1}
    least = replay([request(1, 2), request(3, 4), request(1, 2)], 1, 100, "lru-tombstones")
    assert least.block_hit_rate == 0 and least.evicted_states == 2 and least.evicted_pages == 0
    assert least.misses_by_reason == {"no_sharing": 4, "evicted": 2, "no_snapshot": 0, "not_filled": 0}


def test_the_ideal_counts_what_any_request_had_before() -> None:
    trace = [request(1, 2, 3), request(1, 2, 9, rest=1), request(4), request(1, 2, 3, 5)]
    assert ideal(trace) == (0 + 2 + 0 + 3) / 11
    assert ideal(trace, 0.5) == 3 / 5
