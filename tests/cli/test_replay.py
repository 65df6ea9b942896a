"""Tests replays of traces: small ones with known results, properties of all policies, and refusals."""

import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest

import memstate as ms
from memstate.cli.replay import BOUND, NAMES, Loop, Replayed, bound, compare, rated, replay, table
from memstate.cli.replay.requests import Units, followed, served
from memstate.cli.traces import BLOCK, TraceRequest
from memstate.errors import ConfigurationError, InvalidArgument
from memstate.prefix.policies import Lru
from memstate_tools.traces.make import KINDS, make
from tests.support.refusals import refusals

ENDS = Loop(every=16 * BLOCK)  # decode leaves its first state at this length


def request(*blocks: int, rest: int = 0, answer: int = 0) -> TraceRequest:
    """Returns a request for a prompt of blocks with these ids. rest: number of tokens in the last block; 0: all."""
    return TraceRequest(0, BLOCK * len(blocks) - (BLOCK - rest if rest else 0), answer, blocks)


def parting(parts: int, *blocks: int, answer: int) -> TraceRequest:
    """Returns a request for a prompt of full blocks. The next turn repeats it except its last `parts` tokens."""
    return replace(request(*blocks, answer=answer), parts=parts)


def short(kind: str, requests: int, seed: int) -> list[TraceRequest]:
    return [one for one in make(kind, requests, seed) if len(one.hash_ids) <= 40]


def same(one: Replayed) -> dict[str, Any]:
    """Returns the figures of a replay without its times."""
    return {name: value for name, value in asdict(one).items() if not name.startswith("us_")}


def run(
    trace: Sequence[TraceRequest], states: int = 10, pages: int = 100, policy: str = "lru", **loop: Any
) -> Replayed:
    return replay(trace, states, pages, policy, loop=replace(ENDS, **loop))


# -- requests --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chunk", "tokens"), [(8192, 256), (512, 256), (256, 256), (1000, 8), (2000, 16), (63, 1)])
def test_a_unit_divides_chunks_and_half_a_block(chunk: int, tokens: int) -> None:
    units = Units.of(chunk)
    assert units.tokens == tokens and chunk % tokens == 0
    lengths = [units.length(n) for n in range(3 * BLOCK)]
    assert lengths == sorted(lengths)
    assert all(length // units.per_block == n // BLOCK for n, length in enumerate(lengths))
    assert all((length % units.per_block > 0) == (n % BLOCK > 0) for n, length in enumerate(lengths))


def test_an_answer_has_the_blocks_of_the_prompt_that_goes_on_from_it() -> None:
    first = request(1, 2, rest=100, answer=1000)
    trace = [first, request(1, 3, 4, 5, rest=99), request(1, 6, rest=5)]
    assert followed(trace) == [None, 0, None]
    one, two, three = served(trace, Units(256))
    assert one.tokens.tolist() == [2, 3, 6, 7, 8, 9, 10][: Units(256).length(612 + 1000)]
    assert (one.prompt, one.asked, one.filled, one.known) == (3, 2, 1, 0)
    assert (two.follows, two.common, two.known, two.filled) == (0, 1612, 1, 3)
    assert two.tokens.tolist() == [2, 3, 6, 7, 8, 9, 10]
    assert three.follows is None and three.tokens.tolist() == [2, 3, 12]


def test_an_unknown_answer_has_tokens_of_its_own() -> None:
    one, two = served([request(1, answer=1024), request(1, answer=1024)], Units(256))
    assert np.array_equal(one.tokens[:2], two.tokens[:2])
    assert not set(one.tokens[2:].tolist()) & set(two.tokens.tolist())


@pytest.mark.parametrize(
    ("trace", "expected"),
    [
        ([request(1, rest=9), request(1)], None),  # no filled block
        ([request(1, answer=600), request(1, 2)], None),  # the second prompt cannot hold the first and its answer
        ([request(1, answer=100), request(1, 2)], 0),
        ([request(9, 8), request(9, 1), request(9, 2, 3)], None),  # only a system prompt is shared
        ([request(1), request(1, 2), request(1, 3)], None),  # the second prompt has gone on from the first already
        ([request(1, answer=9), request(1, answer=9), request(1, 2)], 0),  # the second request repeats the first
        ([request(1, 2), request(1, answer=9), request(1, 2, 3)], 0),  # the longest earlier prompt counts
        ([parting(0, 1, answer=600), request(1, 2)], 0),  # if the next turn parts, it need not hold the whole answer
        # the next turn parts 5 tokens before the end of the first prompt, so within block 2
        ([parting(5, 1, 2, answer=9), request(1, 3, 4, rest=9)], 0),
        ([request(1, 2, answer=9), request(1, 3, 4, rest=9)], None),
        ([parting(512, 1, answer=9), request(2)], None),  # the next turn shares nothing with the prompt
    ],
)
def test_which_request_a_prompt_goes_on_from(trace: list[TraceRequest], expected: int | None) -> None:
    assert followed(trace)[-1] == expected


def test_only_one_prompt_goes_on_from_an_answer() -> None:
    assert followed([request(1), request(1, 2), request(1, 3)]) == [None, 0, None]
    assert followed([request(1, 2), request(1, 3), request(1, 3, 4), request(1, 2, 5)]) == [None, None, 1, 0]


def test_a_turn_that_parts_has_nothing_of_the_answer() -> None:
    trace = [replace(request(1, 2, rest=100, answer=1000), parts=5), request(1, 3, 4, 5, rest=99)]
    one, two = served(trace, Units(256))
    assert (two.follows, two.common, two.known) == (0, 612 - 5, 1)
    assert one.tokens[:2].tolist() == two.tokens[:2].tolist()
    assert not set(one.tokens[2:].tolist()) & set(two.tokens[2:].tolist())


# -- known answers ---------------------------------------------------------------------------------


def test_a_conversation_goes_on_within_a_page_of_its_answer() -> None:
    trace = [request(1, 2, rest=88, answer=500), request(1, 3, 4, rest=276, answer=10)]
    one = run(trace, every=BLOCK)
    assert one.turns == 1 and one.recomputed_tokens_per_turn == 600 + 500 - 1024
    assert (one.block_hit_rate, one.answer_hit_rate) == (1 / 5, 1 / 5)
    assert one.misses_by_reason == {"no_sharing": 1, "evicted": 0, "no_snapshot": 0, "not_filled": 2}
    assert one.filed_by_kind.keys() <= {"prompt", "end", "boundary"}


def test_a_conversation_that_parts_hits_the_state_of_its_prompt_alone() -> None:
    trace = [parting(0, 1, 2, 9, answer=900), request(1, 2, 9, 3, 4, rest=276, answer=10)]
    one = run(trace, every=BLOCK)
    assert (one.turns, one.recomputed_tokens_per_turn, one.answer_hit_rate) == (1, 512, 0)  # the prompt's state hits
    assert one.block_hit_rate == 2 / 8
    assert run(trace, every=BLOCK, placement="nowhere").block_hit_rate == 0  # no state of the prompt is kept
    goes_on = [replace(trace[0], parts=None), trace[1]]
    assert run(goes_on, every=BLOCK, placement="nowhere").recomputed_tokens_per_turn < 512


def test_chats_with_tails_and_thoughts_miss_their_answers() -> None:
    plain, parted = (make("chat", 200, 4, **lengths) for lengths in ({}, {"tail": 5, "thoughts": 300}))
    assert run(plain, 400, 9000, every=BLOCK).answer_hit_rate > 0.01
    parting_run = run(parted, 400, 9000, every=BLOCK)
    assert parting_run.answer_hit_rate == 0 and parting_run.turns > 50
    assert parting_run.block_hit_rate > parting_run.ideal_hit_rate - 0.01 > 0.3
    assert run(parted, 400, 9000, every=BLOCK, placement="nowhere").block_hit_rate == 0


def test_a_branch_point_is_found_by_the_third_prompt() -> None:
    trace = [request(1, 2, n, 9 + n, rest=9) for n in (3, 4, 5)]
    one = run(trace)
    assert one.block_hit_rate == (0 + 0 + 2) / 12 and one.ideal_hit_rate == (0 + 2 + 2) / 12
    assert one.misses_by_reason == {"no_sharing": 3 + 1 + 1, "evicted": 0, "no_snapshot": 2, "not_filled": 3}
    assert one.filed_by_kind == {"prompt": 3, "branch": 1} and one.states_filed_per_request == 4 / 3


def test_the_last_token_of_a_prompt_is_computed_in_any_case() -> None:
    assert run([request(1, 2)] * 2).block_hit_rate == 1 / 4  # the block with the last token never hits
    assert run([request(1, 2, 3, rest=1)] * 2).block_hit_rate == 2 / 6


def test_the_state_used_longest_ago_goes() -> None:
    trace = [request(n, 10 * n, rest=9) for n in (1, 2, 1, 3, 2, 1)]
    one = run(trace, states=2)
    assert one.block_hit_rate == 1 / 12  # only the third request hits; the fourth evicts 2, the fifth evicts 1
    assert one.evicted_states == 3 and one.leaked_slots == 0


@pytest.mark.parametrize(("chunk", "forwards"), [(512, 3), (256, 5), (64, 19)])
def test_a_prompt_takes_a_forward_for_each_chunk(chunk: int, forwards: int) -> None:
    assert run([request(1, 2, 3, rest=176, answer=600)], chunk=chunk).forwards_per_prompt == forwards


def test_a_prompt_of_8000_tokens_takes_one_forward_and_three_states_at_most() -> None:
    one = run([request(*range(16), rest=320, answer=700)], every=BLOCK)
    assert one.forwards_per_prompt == 1 and one.filed_by_kind == {"prompt": 1, "end": 1}


def test_a_placement_counts_tokens() -> None:
    one = run([request(*range(9), rest=9)], states=20, placement="every-512")
    assert one.states_filed_per_request == 8 and one.forwards_per_prompt == 1


@pytest.mark.parametrize("policy", ["lru", "return-rate"])
def test_larger_chunks_take_fewer_forwards_and_lose_no_hit(policy: str) -> None:
    trace = short("chat", 24, 1)
    runs = [run(trace, 12, 400, policy, chunk=chunk, every=BLOCK) for chunk in (512, 1000, 8192)]
    forwards = [one.forwards_per_prompt for one in runs]
    assert forwards == sorted(forwards, reverse=True) and forwards[-1] >= 1
    assert len({one.whole_hit_rate for one in runs}) == 1
    assert [one.leaked_slots for one in runs] == [0] * 3


def test_a_request_that_could_run_waits_for_pages() -> None:
    """The first request holds all 4 pages for three chunks and an answer; the second waits although a row is free."""
    trace = [request(n, n + 1, n + 2, rest=76, answer=500) for n in (0, 10)]
    one = run(trace, pages=4, chunk=BLOCK, running=2)
    assert (one.longest_wait, one.requests, one.leaked_slots) == (4, 2, 0)
    assert run(trace, pages=8, chunk=BLOCK, running=2).longest_wait == 0


def test_a_turn_waits_for_the_answer_that_it_goes_on_from() -> None:
    trace = [request(1, answer=600), request(1, 2, 3, rest=99)]
    one = run(trace, running=2, every=BLOCK)
    assert (one.longest_wait, one.turns, one.block_hit_rate, one.answer_hit_rate) == (0, 1, 1 / 4, 1 / 4)


def test_prompts_without_tokens_count_and_do_nothing() -> None:
    one = run([TraceRequest(0, 0, 5, ()), request(1, rest=5), TraceRequest(0, 0, 0, ())])
    assert (one.requests, one.block_hit_rate, one.leaked_slots) == (3, 0, 0)


# -- properties of all policies --------------------------------------------------------------------


@pytest.mark.sample
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", NAMES)
def test_every_policy_serves_every_kind_and_twice_the_same(policy: str, kind: str) -> None:
    trace = short(kind, 40, 3)
    one = replay(trace, 6, 150, policy, 0.25, loop=Loop(running=3))
    assert same(one) == same(replay(trace, 6, 150, policy, 0.25, loop=Loop(running=3)))
    late = trace[len(trace) - one.requests :]
    asked = sum(len(each.hash_ids) for each in late)
    hits = (one.block_hit_rate + one.answer_hit_rate) * asked
    assert hits + sum(one.misses_by_reason.values()) == pytest.approx(asked)
    assert 0 <= one.block_hit_rate <= one.ideal_hit_rate
    assert min(one.misses_by_reason.values()) >= 0 == one.leaked_slots
    assert one.us_per_match > 0 and one.us_per_insert > 0


def test_the_fraction_to_start_from_changes_what_is_counted_and_nothing_else() -> None:
    trace = short("chat", 60, 7)
    whole, late = (replay(trace, 4, 80, "return-rate", start) for start in (0.0, 0.5))
    assert whole.block_hit_rate == whole.whole_hit_rate == late.whole_hit_rate
    assert (late.requests, late.evicted_states) == (len(trace) - len(trace) // 2, whole.evicted_states)


def test_kinds_raise_the_hit_rate_of_a_mixed_trace() -> None:
    trace = make("mixed", 800, 0)
    bare = [replace(one, kind=None) for one in trace]
    kinds, without = (replay(each, 24, 5000, "return-rate", 0.5).block_hit_rate for each in (trace, bare))
    assert kinds > without + 0.01
    assert same(replay(trace, 24, 5000, "lru")) == same(replay(bare, 24, 5000, "lru"))


@pytest.mark.parametrize("policy", ["lru", "return-rate"])
def test_ids_may_be_numbers_of_any_size(policy: str) -> None:
    small = [request(1, 2, 3), request(1, 2, 4), request(1, 2, 3, 5)]
    large = [replace(one, hash_ids=tuple(2**63 * n for n in one.hash_ids)) for one in small]
    assert same(replay(large, 4, 20, policy)) == same(replay(small, 4, 20, policy))


def test_an_id_may_be_at_several_places() -> None:
    """Two prompts share the tokens of their common first ids; an equal id at another place shares nothing."""
    trace = [request(1, 2), request(3, 1, 2), request(1, 2, 3)]
    chained = [request(1, 2), request(3, 4, 5), request(1, 2, 6)]
    assert same(run(trace)) == same(run(chained)) and run(trace).block_hit_rate > 0


def test_prompts_shorter_than_a_block_are_asked_for_and_never_found() -> None:
    one = run([request(1, rest=5), request(1, rest=5)], 1, 2, "return-rate")
    assert one.block_hit_rate == one.ideal_hit_rate == 0
    assert one.misses_by_reason == {"no_sharing": 0, "evicted": 0, "no_snapshot": 0, "not_filled": 2}


# -- comparisons of policies -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_is_the_ideal_where_there_is_room(kind: str) -> None:
    trace = make(kind, 150, 5)
    room = sum(len(one.hash_ids) + 4 for one in trace)
    limit = bound(trace, room, room)
    assert limit.block_hit_rate == pytest.approx(limit.ideal_hit_rate) and limit.ideal_hit_rate > 0.2
    half = bound(trace, room, room, 0.5)
    assert half.requests == 75 and half.block_hit_rate == pytest.approx(half.ideal_hit_rate)


def nested(seed: int) -> list[TraceRequest]:
    """Returns requests whose prompts part from each other at many depths; some prompts are repeated."""
    draw, trace = random.Random(f"nested {seed}"), list[TraceRequest]()
    for at in range(40):
        whole = trace and draw.random() < 0.3
        before = draw.choice(trace).hash_ids if trace else ()
        keep = len(before) if whole else draw.randrange(len(before) + 1)
        fresh = tuple(range(100 * at + 10, 100 * at + 10 + draw.randrange(1, 4)))
        trace.append(request(*before[:keep][:9], *fresh, rest=9))
    return trace


@pytest.mark.parametrize("seed", range(6))
def test_no_policy_exceeds_the_bound(seed: int) -> None:
    """The bound holds with few states, with few pages, and with few of both."""
    trace = nested(seed)
    longest = max(len(one.hash_ids) for one in trace)
    for states, pages in ((2, 200), (5, 200), (5, longest + 8), (200, longest + 8)):
        limit = bound(trace, states, pages)
        runs = [replay(trace, states, pages, policy, loop=ENDS) for policy in NAMES]
        best = max(one.block_hit_rate for one in runs)
        assert best <= limit.block_hit_rate + 1e-9 <= limit.ideal_hit_rate + 1e-8
        assert runs[0].ideal_hit_rate == limit.ideal_hit_rate
    assert bound(trace, 2, longest).block_hit_rate <= bound(trace, 2, 200).block_hit_rate < limit.ideal_hit_rate


def test_the_bound_counts_requests_from_the_first_that_counts() -> None:
    trace = [request(1, 2, rest=9), request(3, 4, rest=9), request(1, 2, rest=9), request(3, 4, rest=9)]
    assert [bound(trace, 1, 9, start).block_hit_rate for start in (0.0, 0.5, 0.75)] == pytest.approx(
        [1 / 8, 1 / 4, 1 / 2]
    )
    assert bound(trace, 2, 9).block_hit_rate == pytest.approx(2 / 8)
    assert bound(trace, 2, 3).block_hit_rate == pytest.approx(2 / 8)  # the running request takes two of the three pages
    assert bound(trace, 2, 2).block_hit_rate == 0


@pytest.mark.parametrize("seed", range(6))
def test_the_bound_is_reached_where_prompts_share_nothing(seed: int) -> None:
    """Prompts have equal lengths and share nothing: a search through all choices finds the bound's hits."""
    draw, prompts = random.Random(f"nothing {seed}"), [tuple(range(3 * n, 3 * n + 3)) for n in range(6)]
    asked = draw.choices(range(6), k=24)
    trace, states = [request(*prompts[n], 99 + n, rest=9) for n in asked], draw.randint(1, 3)
    best = {frozenset[int](): 0}  # set of kept prompts -> most hits of all ways to this set
    for n in asked:
        following: dict[frozenset[int], int] = {}
        for kept, hits in best.items():
            choice = kept | {n}
            for size in range(min(states, len(choice)) + 1):
                for some in map(frozenset, combinations(choice, size)):
                    following[some] = max(following.get(some, 0), hits + 3 * (n in kept))
        best = following
    assert bound(trace, states, 100).block_hit_rate == pytest.approx(max(best.values()) / (4 * len(asked)))


@pytest.mark.sample(2)
@pytest.mark.parametrize("states", [16, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_the_default_beats_the_least_recently_used(kind: str, states: int) -> None:
    """The hit rate is higher by more than 0.01."""
    default, lru = (replay(made(kind), states, 50_000, policy) for policy in ("return-rate", "lru"))
    assert default.block_hit_rate > lru.block_hit_rate + 0.01


@cache
def made(kind: str) -> list[TraceRequest]:
    return make(kind, 500, 0)


# -- tables of many runs, and refusals -------------------------------------------------------------


def test_every_policy_has_its_row_and_every_number_of_states_its_column() -> None:
    trace, seen = short("chat", 20, 2), list[tuple[int, int]]()
    replayed = compare(trace, (2, 4), 60, ("lru", "return-rate"), 0.5, lambda *at: seen.append(at))
    assert [(one.policy, one.states) for one in replayed] == [
        ("lru", 2), ("lru", 4), ("return-rate", 2), ("return-rate", 4),
    ]  # fmt: skip
    assert [same(one) for one in replayed if isinstance(one, Replayed)] == [
        same(replay(trace, s, 60, p, 0.5)) for p in ("lru", "return-rate") for s in (2, 4)
    ]
    assert seen == sorted(seen) and seen[-1] == (4 * len(trace), 4 * len(trace))
    rows = table(replayed)
    assert [(row["policy"], row["2"], row["4"]) for row in rows[:2]] == [
        (policy, *(f"{one.block_hit_rate:.3f}" for one in replayed if one.policy == policy))
        for policy in ("lru", "return-rate")
    ]
    ideal = f"{replayed[0].ideal_hit_rate:.3f}"
    assert rows[2] == {"policy": "room for everything", "2": ideal, "4": ideal}
    assert isinstance(replayed[1], Replayed)
    assert (rows[0]["longest wait"], rows[0]["leaked"]) == (replayed[1].longest_wait, 0)


def test_without_scipy_the_bound_is_refused_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="needs scipy: pip install"):
        compare(short("chat", 20, 2), (2,), 60, ("lru", BOUND), progress=lambda *at: pytest.fail("it began"))


def test_beside_the_bound_a_policy_has_its_share_of_it() -> None:
    trace = short("chat", 20, 2)
    runs = compare(trace, (2, 4), 60, ("lru", BOUND))
    rows = {str(row["policy"]): row for row in table(runs)}
    rates = {(one.policy, one.states): one.block_hit_rate for one in runs}
    for size in (2, 4):
        mine, most = rates["lru", size], rates[BOUND, size]
        assert rows["lru"][str(size)] == f"{mine:.3f} ({mine / most:.0%})" and mine <= most
        assert rows[BOUND][str(size)] == f"{most:.3f}"
    assert "leaked" not in rows[BOUND]


def test_a_policy_of_the_callers_own() -> None:
    """A caller can give a policy as a class, as a function, or by its name."""
    trace = short("chat", 60, 0)
    named = same(replay(trace, 8, 100, "lru-tombstones"))
    for policy, name in ((Lru, "Lru"), (lambda: Lru(), "<lambda>"), (f"{Lru.__module__}:Lru",) * 2):
        assert same(replay(trace, 8, 100, policy)) == named | {"policy": name}
    assert [one.policy for one in compare(trace, [2], 100, ["lru", Lru])] == ["lru", "Lru"]
    plan = ms.capacity("qwen3_next", "14GiB", context=32 * 1024, concurrency=4, every=512)
    rates = [[split.hit_rate for split in rated(plan, trace, policy=policy).splits] for policy in (Lru, "return-rate")]
    assert rates[0] != rates[1]


test_what_cannot_be_replayed_is_refused = refusals(
    InvalidArgument,
    (lambda: replay([request(1)], 1, 4, Lru()), r"policy Lru\(\): expected a name, or a class or function"),  # type: ignore[arg-type]
    (lambda: replay([], 1, 4, "lru"), "nothing to replay: no request"),
    (lambda: compare([], (1,), 4, ("lru",)), "nothing to replay: "),
)
