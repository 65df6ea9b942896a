"""Prompts in chunks of any size: states at marks inside them, and everything else as without a cache.

`Prefill` compares each state with the fold of its tokens, and KV with the tokens themselves. Pages hold 4 tokens.
"""

import random
from collections.abc import Sequence
from math import lcm
from unittest import mock

import numpy as np
import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.prefix.placement import Ends, Nowhere, Placement
from memstate.prefix.policies import Lru, LruPages
from memstate.slots.registers import RegisterFile
from tests.support import inside, owners
from tests.support.build import Whole
from tests.support.planes import both_orders, every_snapshot, every_strategy
from tests.support.prefill import GIVES, Prefill
from tests.support.serving import PAGE, TRACKING, written

T = [7 * n % 50 for n in range(120)]
CHUNKS = (1, 3, 7, 8, 9, 1000)


def server(
    backend: Backend, name: str = "redirect", gives: str = "1", placement: Placement | None = None, **more: object
) -> Prefill:
    prefix = ms.Prefix(Lru(), LruPages(), **({"placement": placement} if placement else {}))
    return Prefill(backend, name, gives, **({"every": 64, "slots": 24, "pages": 100, "prefix": prefix} | more))


def serve(at: Prefill, most: int, obey: bool, goal: int = 2) -> list[int]:
    """Serves four prompts with the same beginning, the first two at once, then the first prompt again.

    Returns the length at which each request started.
    """
    prompts = [[*T[:17], *[60 + n] * tail] for n, tail in enumerate((5, 14, 10, 2))]
    starts, rows = list[int](), dict[ms.Row, list[int]]()
    for batch in (prompts[:2], prompts[2:3], prompts[3:], prompts[:1]):
        for n, tokens in enumerate(batch):
            rows[at.start(tokens)] = tokens
            starts.append(at.mem.info(list(rows)[-1]).length)
            if n == 0 and len(batch) > 1:
                at.go(list(rows), most, obey)  # so that one row decodes while the other reads its prompt
        while rows:
            going = [row for row, tokens in rows.items() if len(at.text[row]) < len(tokens) + goal]
            if going:
                at.go([going[0], None, *going[1:]], most, obey)
                continue
            at.land()
            for row, tokens in rows.items():
                assert at.text[row] == written(tokens, goal)
            at.end(list(rows))
            rows.clear()
    at.look(idle=True)
    return starts


@pytest.mark.sample
@both_orders
@every_strategy
def test_M3_answers_and_states_are_those_of_an_uncached_run(name: str, overlap: bool, backend: Backend) -> None:
    """Runs differ in chunks, grid and placement. Half of them ignore the chunk ends that the manager proposes.

    All runs together combine each chunk size with each grid.
    """
    placements, strategy = (None, Ends(8), Nowhere()), list(TRACKING).index(name)
    for n, gives in enumerate(GIVES):
        most, placement = CHUNKS[(strategy + 3 * overlap - n) % len(CHUNKS)], placements[(n + strategy) % 3]
        at = server(backend, name, gives, placement, overlap=overlap, slots=40)
        starts = serve(at, most, obey=bool((n + overlap) % 2))
        assert starts[0] == 0 and set(starts) <= {0, 4, 8, 12, 16, 20}, (gives, most)
        if name == "none" or isinstance(placement, Nowhere):
            assert set(starts) == {0}
        elif gives == "1":
            assert starts[3:] == [16, 20], most  # the branch point, and the end of the prompt
        at.empty()


@every_strategy
def test_M10_a_plan_with_any_number_of_marks_is_one_upload_and_two_launches(name: str, backend: Backend) -> None:
    """A plan launches ownership and plan, and nothing after the forward.

    Without a grid, the next plan also has a launch that copies.
    """
    for gives in ("1", "4", "ends"):
        at = server(backend, name, gives, Whole(PAGE), slots=60, rows=3, pages=120)
        rows = at.admit(*(ms.Request(n, tokens=[n, *T[: 39 + n]]) for n in range(3)))
        at.mem.submit()
        # `stored` says whether the forward also stores the state at the end
        counts, stored = at.mem.backend.counts, gives != "ends" and name != "redirect"
        for end in (40, 41):
            at.mem.extend(rows, [end] * 3)
            counts.reset()
            step = at.mem.plan(rows, [end - at.mem.info(row).length for row in rows])
            inside = 0 if name == "none" or gives == "ends" or end > 40 else 9 + stored
            left = 0 if name == "none" or end == 40 or stored else 1
            assert step.marked == 3 * inside and counts.uploads <= 1 and counts.syncs == 0
            owned = {"ownership": 1} if inside or end == 41 else {}  # at 41, each row needs another page
            copied = {"run_data": 1} if left and name != "redirect" else {}
            assert counts.launches == {"plan": 1} | owned | copied, (gives, end)
            counts.reset()
            at.mem.submit(step)
            at.mem.settle(step)
            assert not counts.launches and not counts.uploads
        at.mem.end(rows)
        at.mem.audit().raise_if_leaking()


@pytest.mark.parametrize("gives", ["1", "4", "ends", "in place"])
@every_snapshot
def test_M15_the_same_prompt_of_whole_pages_hits_all_but_its_last_page(name: str, gives: str, backend: Backend) -> None:
    """The second request already hits. A longer prompt starts one page before the end of the first prompt, and the next
    longer prompt starts at this end.
    """

    def started(tokens: list[int]) -> int:
        row = at.start(tokens)
        start = at.mem.info(row).length
        while len(at.text[row]) < len(tokens) + 2:  # one token of the answer is computed
            at.go([row], 1000)
        at.land()
        assert at.text[row] == written(tokens, 2)
        at.end([row])
        at.look(idle=True)
        return start

    at = server(backend, name, gives)
    assert [started(T[:24]) for _ in range(3)] == [0, 20, 20] and sorted(at.states()) == [20]
    longer = [[*T[:24], 60 + n, 61] for n in range(3)]
    assert at.mem.match(longer[0]).kv_length == 24
    assert [started(tokens) for tokens in longer] == [20, 24, 24] and sorted(at.states()) == [20, 24]
    at.empty()


# -- long prompts ---------------------------------------------------------------------------------------


def long_prompt(backend: Backend, name: str, **more: object) -> Prefill:
    """Returns a server with pages of 64 tokens, KV of the caller, `every` of 256, and flash-linear-attention's grid."""
    settings = {"every": 256, "page": 64, "pages": 0, "slots": 12}
    return Prefill(backend, name, "1", **(settings | {"grid": 64, "prefix": ms.Prefix()} | more))


@every_snapshot
def test_M16_a_prompt_of_8_000_tokens_is_one_forward_and_leaves_three_states_at_most(
    name: str, backend: Backend
) -> None:
    at = long_prompt(backend, name)
    text = [7 * n % 1001 for n in range(8000)]
    session = at.mem.sessions.open("chat")
    row = at.start(text, session=session)
    at.go([row], 8192)
    assert at.forwards == 1 and at.mem.info(row).length == 8000
    for _ in range(20):
        at.go([row], 8192)
    at.land()
    at.end([row])
    figures = at.mem.stats().prefix
    assert figures and figures.inserted <= 3 and figures.states <= 3
    said = at.text[row]
    assert len(said) == 8021 and at.mem.match([*said, 5]).length == at.mem.match(text).length == 7936
    again = at.start([*said, 5, 6], session=session)
    assert at.mem.info(again).length == 8020, "its session has the end itself"
    at.mem.end([again])


TURNS = {  # strategy, page size, every, smallest start of the next turn after a prompt of 30 and an answer of 21 tokens
    "pages of one token": ("ping-pong", 1, 64, 50),
    "Redirect with the cadence of a page": ("redirect", 4, 4, 48),
    "a longer cadence": ("lazy", 4, 16, 48 - 16 + 1),
    "an answer without a boundary": ("ping-pong", 4, 64, 28),
}


@pytest.mark.parametrize("case", TURNS)
def test_M21_the_next_turn_starts_at_the_newest_state_of_whole_pages(case: str, backend: Backend) -> None:
    name, page, every, least = TURNS[case]
    at = server(backend, name, page=page, every=every, pages=100 if page > 1 else 0)
    row = at.start(T[:30])
    at.go([row], 1000)
    for _ in range(20):
        at.go([row], 1)
    at.land()
    at.end([row])
    said = at.text[row]
    assert len(said) == 51
    row = at.start([*said, 5, 6])
    assert least <= at.mem.info(row).length <= 50 and at.mem.info(row).length % page == 0
    assert case != "an answer without a boundary" or at.mem.info(row).length == 28
    at.go([row], 1000)
    at.land()
    at.look()
    at.end([row])
    at.empty()


CASES = {  # page size, settings, tokens of the prompt, limit of a chunk in tokens, lengths of the kept states
    "300 tokens, a grid of 64": (64, {"grid": 64}, 300, 1000, [256]),
    "63 tokens": (4, {"grid": 64}, 63, 1000, []),
    "pages of 128": (128, {"grid": 64}, 200, 1000, [128]),
    "chunks of 100": (4, {"grid": 64}, 301, 100, [300]),
}


@pytest.mark.parametrize("case", CASES)
def test_M4_states_inside_chunks_equal_those_of_runs_that_end_there(case: str, backend: Backend) -> None:
    page, settings, prompt, most, lengths = CASES[case]
    at = long_prompt(backend, "redirect", page=page, **({"every": 256} | settings))
    text = [7 * n % 1001 for n in range(prompt)]
    row = at.start(text)
    while at.mem.info(row).length <= prompt:
        at.go([row], most)
    at.land()
    assert sorted(at.states()) == lengths
    for length, snapshot in at.states().items():
        assert not at.planes.wrong({at.slot(snapshot.register): tuple(text[:length])})


# -- between plan and settle ----------------------------------------------------------------------------


@both_orders
@every_snapshot
def test_M5_no_mark_is_found_before_its_step_is_settled(name: str, overlap: bool, backend: Backend) -> None:
    """A cancelled step leaves no state; states that were kept before it stay with the row."""
    at = server(backend, name, "1", Ends(8), overlap=overlap)
    row = at.start(T[:40])
    at.go([row], 17)
    at.land()
    assert at.mem.match(T[:40]).length == 16
    at.mem.extend([row], [40])
    step = at.mem.plan([row], 40 - 17)
    held = at.mem.info(row).slots
    assert step.marked >= 2 and at.mem.match(T[:40]).length == 16
    other = at.start([*T[:36], 1])
    assert at.mem.info(other).length == 16, "not from a state of a step that may never run"
    assert held == {"redirect": 1, "lazy": 2, "ping-pong": 2 + overlap}[name] + step.marked, "a slot for each mark"
    at.mem.cancel(step, keep="cache", tokens=[T[:40]])
    assert at.mem.match(T[:40]).length == 16
    at.run([other], publish=False)
    at.look()
    at.mem.end([other])
    at.empty()


@pytest.mark.parametrize("how", [None, "handle", "cache", "finish"])
@every_snapshot
def test_M6_a_row_that_ends_hands_out_its_marks_or_gives_them_back(name: str, how: str, backend: Backend) -> None:
    for flying in (False, True):
        at = server(backend, name, "4", Ends(8), overlap=flying)
        row = at.start(T[:30])
        first = at.step([row], 18)
        if not flying:
            at.mem.settle(first)
        second = at.step([row], 5) if flying else None
        kept = owners.marks(at.mem).kept[row.index]
        assert [one.length for one in kept] == [8, 16]
        if how == "finish" and second:  # the first step gave the last token, so the second is dead
            at.mem.settle(first, [True])
            at.mem.end([row], keep="cache", tokens=[T[:18]])
        elif how in ("cache", "finish"):
            at.mem.end([row], keep="cache", tokens=[T[:30]])
        else:
            left = at.mem.end([row], keep=how)
            assert not how or [snap.length for snap in left] == [16]
            at.mem.drop(left if how else [])
        given = how in ("cache", "finish")
        assert sorted(at.states())[:2] == ([8, 16] if given else []) and not owners.marks(at.mem).rows
        for step in at.mem._parts.log.unsettled.copy():
            at.mem.settle(step)
        at.look(idle=True)
        at.empty()


@every_snapshot
def test_M7_the_newest_mark_is_handed_out_as_a_snapshot(name: str, backend: Backend) -> None:
    at = server(backend, name, "1", Nowhere())
    (row,) = at.admit(ms.Request("a", tokens=T[:30], snapshot_at=[8, 16, 28]))
    at.run([row], 20, publish=False)
    assert at.mem.info(row).slots == {"ping-pong": 3, "lazy": 2, "redirect": 1}[name] + 2
    (kept,) = at.mem.publish([row])
    assert kept and kept.length == 16 and list(kept.pages) == owners.pages_of(at.mem, row)[:4]
    assert not at.planes.wrong({at.slot(kept.register): tuple(T[:16])})
    (resumed,) = at.mem.admit([ms.Request("b", length=20, resume=kept)])
    at.text[resumed] = [*T[:16], 90, 91]
    at.run([resumed, row], publish=False)
    at.look()
    at.mem.end([row, resumed])
    at.mem.drop([kept])


@pytest.mark.parametrize("told", [False, True])
def test_M12_a_state_that_its_row_goes_on_from_outlives_its_eviction(backend: Backend, told: bool) -> None:
    """Publishes a state between forward and settle, and evicts it after settle; the row still reads it (Redirect)."""
    at = server(backend, "redirect", "ends", Ends(8))
    row = at.start(T[:20])
    step = at.step_to([row], [8])
    at.publish([row])
    at.mem.settle(step, [False] if told else None)
    assert at.mem.info(row).confirmed == 8
    at.cache.evict_states(9)
    other = at.start([90, 91, 92, 93, 94])
    at.run([other])
    at.run([row])
    at.look()
    at.end([row, other])


def test_a_mark_that_is_dropped_before_its_forward_keeps_its_slot_until_then(backend: Backend) -> None:
    at = server(backend, "redirect", "1", Nowhere())
    (row,) = at.admit(ms.Request("a", tokens=T[:30], snapshot_at=[8]))
    step = at.step_to([row], [20], run=False)
    (kept,) = at.mem.publish([row])
    assert kept and kept.length == 8
    at.mem.drop([kept])
    at.mem.submit()
    slots = inside.registers(at.mem).table.slots
    assert int(slots[kept.register]), "the forward will write there"
    at._forward(step, [T[:20]])
    at.mem.submit(step)
    assert not int(slots[kept.register])
    at.mem.settle(step)
    at.end([row])


@every_snapshot
def test_M14_a_turn_leaves_the_state_at_its_end_to_its_session(name: str, backend: Backend) -> None:
    at = server(backend, name, "ends", Nowhere())
    session = at.mem.sessions.open("chat")
    (row,) = at.admit(ms.Request("a", tokens=T[:12], snapshot_at=[8], session=session))
    at.run_to([row], [8])
    assert not at.states()
    at.mem.end([row], keep="cache", tokens=[T[:8]])
    assert [(info.states, info.tokens) for info in at.mem.sessions.infos()] == [(1, 8)]
    at.mem.sessions.close(session)


@pytest.mark.parametrize("parent", ["at a mark", "behind one", "after its publication"])
@every_snapshot
def test_M13_forks_and_their_row_go_on_from_a_mark(name: str, parent: str, backend: Backend) -> None:
    """The marks stay with the row; under Redirect, the row and its forks read the kept state directly."""
    for gives in ("ends", "1"):
        for first in (0, 1):
            at = server(backend, name, gives, Whole(8), overlap=False, pages=200)
            row = at.start(T[:24])
            for end in (8, 16) if parent != "behind one" else (8, 16, 18):
                at.mem.settle(at.step_to([row], [end]))
            if parent == "after its publication":
                at.publish([row])
            (fork,) = at.mem.fork(row, ["fork"]).rows
            at.text[fork] = [*at.text[row][: at.mem.info(row).length], 70, 71, 72, 73, 74, 75]
            if parent == "behind one":
                shared = owners.pages_of(at.mem, row)[4]
                at.kv[owners.pages_of(at.mem, fork)[4]] = at.kv[shared]
            order = [row, fork] if first else [fork, row]
            for one in order:
                at.run([one], publish=False)
                at.look()
            at.end([order[0]])
            at.look()
            at.run([order[1]])
            at.end([order[1]])
            at.look(idle=True)
            assert {8, 16, 24} <= {len(tokens) for tokens in at.states_by_prefix()}
            at.empty()


# -- too few slots --------------------------------------------------------------------------------------


@every_snapshot
def test_M8_marks_without_a_slot_are_given_up_and_counted(name: str, backend: Backend) -> None:
    """Lengths that the request names get slots first, then the prompt's end. Tokens stay right, and no slot leaks."""
    needs = {"ping-pong": 3, "lazy": 2, "redirect": 1}[name]
    for spare, lengths in ((0, []), (1, [12]), (2, [12, 28]), (3, [12, 24, 28]), (4, [12, 16, 24, 28])):
        at = server(backend, name, "1", Ends(8), slots=needs + spare, rows=1, overlap=True)
        (row,) = at.admit(ms.Request("a", tokens=T[:30], snapshot_at=[12]))
        at.mem.settle(at.step_to([row], [30]))
        refused = at.mem.stats().refused
        assert refused == 5 - spare  # marks are due at 8, 12, 16, 24 and 28
        at.publish([row])
        assert sorted(at.states()) == lengths and at.mem.free_slots == 0
        at.run([row], 1, publish=False)
        assert at.text[row] == written(T[:30], 2)
        at.end([row])
        at.empty()


def test_M9_marks_leave_the_reserve(backend: Backend) -> None:
    at = server(backend, "redirect", "1", Ends(8), slots=5, reserve=2)
    row = at.start(T[:23])
    at.mem.settle(at.step_to([row], [23]))
    assert (at.mem.stats().refused, at.mem.free_slots) == (1, 2)  # marks are due at 8, 16 and 20
    at.end([row])


# -- other calls with marks -----------------------------------------------------------------------------


def test_lengths_of_a_request_may_be_an_array(backend: Backend) -> None:
    at = server(backend, "redirect", "1", Nowhere())
    given = ([8, 16], np.array([16, 8], np.uint16), np.array([]))
    rows = at.admit(*(ms.Request("a", tokens=T[:30], snapshot_at=lengths) for lengths in given))
    at.run(rows, 20, publish=False)
    said = [text for _, text in at.mem._reports.owners().values()]
    counts = [said.count(f"row {row.index} (named of {n} tokens)") for row in rows for n in (8, 16)]
    assert counts == [1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("keep", [True, False])
def test_M18_an_interrupted_plan_leaves_no_mark(keep: bool, backend: Backend) -> None:
    """Published states at marks stay; states of the row, and of the step that never ran, are lost."""
    at = server(backend, "redirect", "1", Ends(8), overlap=False)
    row = at.start(T[:40])
    at.run([row], 17)  # the states at 8 and 16 are published
    at.run([row], 9, publish=False)  # the state at 24 stays with the row
    at.mem.extend([row], [40])
    with mock.patch.object(RegisterFile, "plan", side_effect=MemoryError), pytest.raises(MemoryError):
        at.mem.plan([row], 14)
    at.mem.recover(keep=keep)
    assert not owners.marks(at.mem).rows and sorted(at.states()) == ([8, 16] if keep else [])
    at.look(idle=True)
    assert at.turn(T[:40], most=1000) == (16 if keep else 0)
    at.empty()


def test_M19_named_lengths_and_those_of_a_placement_are_kept_once(backend: Backend) -> None:
    """Lengths that the match covers are kept already; lengths beyond the prompt are no marks."""
    at = server(backend, "redirect", "1")
    assert at.turn(T[:18], most=1000) == 0
    (row,) = at.admit(ms.Request("a", tokens=T[:26], snapshot_at=[8, 16, 23, 24, 25, 27, 28, 200]))
    assert at.mem.info(row).length == 16
    while at.mem.info(row).length < 30:
        at.run([row], 1000)
    assert sorted(at.states()) == [16, 20, 24]
    figures = at.mem.stats().prefix
    assert figures and (figures.inserted, figures.duplicates) == (3, 0)
    assert at.mem.info(row).next_boundary == 64 and not owners.marks(at.mem).rows
    at.end([row])


def test_B29a_lengths_beyond_a_prompt_that_is_known_are_ignored(backend: Backend) -> None:
    """Where the tokens are not known, as in a fork or without a prompt, no length is ignored: it may still
    be reached.
    """
    for placement in (Nowhere(), None):
        for tokens, lengths in ((T[:10], {8}), (None, {8, 12})):
            prefix = ms.Prefix(placement=placement) if placement else None
            at = server(backend, "redirect", "1", prefix=prefix)
            (row,) = at.mem.admit([ms.Request("a", length=20, tokens=tokens, snapshot_at=[9, 14])])
            assert {length for length, _ in owners.marks(at.mem)._coming[row.index].wanted} == lengths
    at = server(backend, "redirect", "1", Nowhere())
    named, rest = at.mem.admit([ms.Request("a", tokens=T[:10]), ms.Request("b", length=30)])
    (fork,) = at.mem.fork(named, ["fork"]).rows
    for one in (named, rest, fork):
        at.mem.snapshot_at(one, [9, 11, 14])
    coming = owners.marks(at.mem)._coming
    assert [[at for at, _ in coming[one.index].wanted] for one in (named, rest, fork)] == [[8], [8, 12], [8, 12]]


def ask(at: Prefill, rows: list[ms.Row], budgets: Sequence[int], draw: random.Random) -> None:
    """Serves rows, in the chunks of `mem.chunk`, until each is two tokens beyond its prompt. Forks some of the rows."""
    goal = {row: len(at.text[row]) + 2 for row in rows}
    while going := [row for row in rows if len(at.text[row]) < goal[row]]:
        lengths = [at.mem.info(row).length for row in going]
        left = [len(at.text[row]) - length for row, length in zip(going, lengths, strict=True)]
        chunks = [at.mem.chunk(row, min(draw.choice(budgets), most)) for row, most in zip(going, left, strict=True)]
        at.flying.append(at.step_to(going, [a + b for a, b in zip(lengths, chunks, strict=True)]))
        at.land(len(at.flying) - at.mem.overlap)
        if len(rows) < 8 and draw.random() < 0.1:
            at.land()
            row = draw.choice(rows)
            forked = at.mem.fork(row, ["fork"])
            for copy, page in forked.page_copies:
                at.kv[copy] = at.kv[page]
            rows.insert(draw.randrange(len(rows)), forked.rows[0])
            at.text[forked.rows[0]], goal[forked.rows[0]] = list(at.text[row]), goal[row]
    at.land()
    at.end(rows)
    at.look(idle=True)


@pytest.mark.parametrize("seed", range(60))
def test_M22_a_loop_that_asks_for_its_chunks_loses_no_state(seed: int, backend: Backend) -> None:
    """Draws grid, page size, strategy and budgets; rows decode before prompts in the batch, and prompts share a batch.

    A repeated prompt starts at its last whole page; on a grid of its own chunks, less than a page and a grid before.
    """
    draw = random.Random(seed)
    page, grid = draw.choice((1, 2, 4, 5, 8)), draw.choice((None, 1, 2, 3, 4, 8, 12, 16))
    packed, name = grid is not None and draw.random() < 0.7, draw.choice(("redirect", "lazy", "ping-pong"))
    given: dict[str, object] = {"grid": grid, "packed": packed, "overlap": draw.random() < 0.5}
    if name == "redirect" and draw.random() < 0.5:
        given["direct_hits"] = False
    placement = draw.choice((None, Ends(2 * page), Ends(None)))
    at = server(backend, name, "1", placement, page=page, every=4 * page, slots=200, rows=8, pages=600, **given)
    base = [draw.randrange(50) for _ in range(25)]
    for _ in range(2):
        prompts = [
            base[: draw.randrange(26)] + [draw.randrange(50, 70) for _ in range(draw.randrange(1, 3 * page + 2))]
            for _ in range(draw.randrange(1, 4))
        ]
        rows = [at.start([80 + n]) for n in range(draw.randrange(3))]
        for prompt in prompts:
            named = [draw.randrange(40) for _ in range(draw.randrange(3))]
            rows.insert(draw.randrange(len(rows) + 1), at.start(prompt, snapshot_at=named))
        budgets = (1, page, page + 1, 17, 1000)
        ask(at, rows, budgets if draw.random() < 0.5 else (draw.choice(budgets),), draw)
        assert at.mem.stats().missed == at.mem.stats().refused == 0
        for prompt in prompts:
            length, end = at.mem.match(prompt).length, (len(prompt) - 1) // page * page
            assert length == end if packed or not grid else end - lcm(page, grid) < length <= end
    at.empty()


@every_strategy
def test_M11_next_boundary_says_where_a_chunk_should_end(name: str, backend: Backend) -> None:
    """Without a grid, or on the grid of the packed batch, all marks are boundaries; on the grid of the chunk, none is.

    Beyond the prompt, each multiple of `every` is a boundary.
    """
    stops = [8, 20, 32]
    for gives, seen in (("ends", stops), ("8 packed", stops), ("1 packed", [32]), ("1", [32]), ("8", [32])):
        at = server(backend, name, gives, every=16)
        (row,) = at.admit(ms.Request("a", tokens=T[:22], snapshot_at=[8]))
        boundaries = list[int]()
        while at.mem.info(row).length < 32:
            boundaries.append(at.mem.info(row).next_boundary)
            at.run([row], 1000, publish=False)
        marks = seen if name != "none" or seen == [32] else [8, 32]
        assert sorted(set(boundaries)) == marks, gives
        at.mem.end([row])
