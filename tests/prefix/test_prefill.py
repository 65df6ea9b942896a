"""Prompts in chunks of any size: states at marks inside them, and everything else as without a cache.

The model judges each call: see `tests/proof/stateful/script.py`. Pages hold 4 tokens.
"""

import random
from math import lcm
from unittest import mock

import numpy as np
import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.slots.registers import RegisterFile
from tests.proof.stateful.script import ALL, Play, script
from tests.support import inside, owners

T = [7 * n % 50 for n in range(120)]
SNAPSHOTS = ("ping-pong", "lazy", "redirect")
HERE = {"every": 64, "page_size": 4, "slots": 24, "pages": 100, "pages_per_row": 40}
CACHED = {**HERE, "prefix": True}
# where a forward can store states: only at the end of a chunk, or on a grid that counts from the start of the row's
# chunk, or of the packed batch
GIVES: tuple[dict[str, object], ...] = (
    {"grid": 0}, {"grid": 1}, {"grid": 4}, {"grid": 8}, {"grid": 4, "packed": True}, {"grid": 8, "packed": True},
    {"grid": 1, "packed": True}, {"in_place": True},
)  # fmt: skip
GRIDS = tuple(give for give in GIVES if "packed" not in give and give.get("grid") != 8)
CHUNKS = ((1, True), (3, False), (7, True), (8, False), (9, True), (1000, False), (5, True), (1000, True))
RUNS = tuple({**give, "most": most, "obey": obey} for give, (most, obey) in zip(GIVES, CHUNKS, strict=True))


@script(strategy=ALL, overlap=(False, True), **{**CACHED, "slots": 40}, placed=(0, 8), of=RUNS)
def test_M3_answers_and_states_are_those_of_an_uncached_run(play: Play) -> None:
    """Serves four prompts with the same beginning, the first two at once, then the first prompt again.

    Half of the runs ignore the chunk ends that the manager proposes.
    """
    how = {"most": play.most, "obey": play.obey}
    texts = [[*T[:17], *[60 + n] * tail] for n, tail in enumerate((5, 14, 10, 2))]
    first, second = rows = play.admit(*texts[:2])
    play.run_all([first], [texts[0][:9]], **how)  # so that one row decodes while the other reads its prompt
    play.run_all([first, second], [[*text, 90, 91] for text in texts[:2]], publish=True, **how)
    play.end(*rows)
    for text in (*texts[2:], texts[0]):
        play.turn([*text, 90, 91], prompt=len(text), **how)


@script(strategy=ALL, **{**CACHED, "slots": 60, "pages": 120}, rows=3, placed=4, gives=GRIDS)
def test_M10_a_plan_with_any_number_of_marks_is_one_upload_and_two_launches(play: Play) -> None:
    """Without a grid, the next plan also has a launch that copies. The launches of each plan are compared."""
    texts = [[n, *T[: 39 + n]] for n in range(3)]
    rows = play.admit(*texts)
    for end in (40, 41):
        play.run_all(rows, [text[:end] for text in texts], most=1000, obey=False)


@script(strategy=SNAPSHOTS, **CACHED, gives=GRIDS)
def test_M15_the_same_prompt_of_whole_pages_hits_all_but_its_last_page(play: Play) -> None:
    """The second request already hits. A longer prompt starts one page before the end of the first prompt, and the next
    longer prompt starts at this end.
    """
    longer = [[*T[:24], 60 + n, 61] for n in range(3)]
    for text in (T[:24], T[:24], T[:24], *longer):
        play.turn([*text, 90], prompt=len(text), most=1000)
    play.reached("hit_tokens")


LONG = {"every": 256, "prefix": True, "page_size": 64, "pages": 0, "pages_per_row": 0, "slots": 12, "grid": 64}


@script(strategy=SNAPSHOTS, **LONG)
def test_M16_a_prompt_of_8_000_tokens_is_one_forward_and_leaves_three_states_at_most(play: Play) -> None:
    (a,), text = play.open("chat"), [7 * n % 1001 for n in range(8020)]
    (row,) = play.admit(text[:8000], sessions=[a])
    flight = play.step([row], 8000)
    play.run(row, text)
    assert flight and flight.step.marked <= 2 and play.mem.prefix.states <= 3
    play.end(row)
    play.match([*text, 5])
    play.admit([*text, 5, 6], sessions=[a])  # its session has the end itself


TURNS = (
    {"strategy": "ping-pong", "page_size": 1, "pages": 0, "pages_per_row": 0}, {"strategy": "redirect", "every": 4},
    {"strategy": "lazy", "every": 16}, {"strategy": "ping-pong"},
)  # fmt: skip


@script(**CACHED, of=TURNS)
def test_M21_the_next_turn_starts_at_the_newest_state_of_whole_pages(play: Play) -> None:
    said = [*T[:30], *range(60, 81)]
    play.turn(said, prompt=30)
    play.turn([*said, 5, 6])
    play.reached("hit_tokens")


PROMPTS = ({"length": 300, "most": 1000}, {"length": 63, "most": 1000, "page_size": 4},
           {"length": 200, "most": 1000, "page_size": 128}, {"length": 301, "most": 100, "page_size": 4})  # fmt: skip


@script(strategy="redirect", **LONG, of=PROMPTS)
def test_M4_states_inside_chunks_equal_those_of_runs_that_end_there(play: Play) -> None:
    text = [7 * n % 1001 for n in range(play.length + 1)]
    play.turn(text, prompt=play.length, most=play.most)
    play.match(text)


# Between plan and settle


@script(strategy=SNAPSHOTS, overlap=(False, True), **CACHED, grid=1, placed=8)
def test_M5_no_mark_is_found_before_its_step_is_settled(play: Play) -> None:
    """A cancelled step leaves no state; states that were kept before it stay with the row."""
    (row,) = play.admit(T[:40])
    play.run(row, T[:17], most=17, obey=False, publish=True)
    play.match(T[:40])
    flight = play.step([row], 23, run=False)
    play.match(T[:40])
    (other,) = play.admit([*T[:36], 1])  # not from a state of a step that may never run
    play.reached("hit_tokens", marked=flight.step.marked)
    play.cancel(flight, how="told")
    play.match(T[:40])
    play.run(other, [*T[:36], 1])


@script(
    strategy=SNAPSHOTS, overlap=(False, True), **CACHED, grid=4, placed=8, at=("release", "publish", "told", "dead")
)
def test_M6_a_row_that_ends_hands_out_its_marks_or_gives_them_back(play: Play) -> None:
    (row,) = play.admit(T[:30])
    play.step([row], 18)
    play.reached(marks=len(owners.marks(play.mem).kept[row.index]))
    if play.settings.overlap:
        play.step([row], 5, ended=[row] if play.at == "dead" else [])
    else:
        play.land()
    play.drop(*play.end(row, how="told" if play.at == "dead" else play.at))
    play.match(T[:30])


@script(strategy=SNAPSHOTS, **HERE, grid=1)
def test_M7_the_newest_mark_is_handed_out_as_a_snapshot(play: Play) -> None:
    (row,) = play.admit(T[:30], snapshot_at=[8, 16, 28])
    play.run(row, T[:20], most=20, obey=False)
    (kept,) = play.publish(row, handles=True)
    (resumed,) = play.admit(None, length=20, resume=kept)
    play.step([resumed, row], [2, 9])
    play.land()
    play.end(row, resumed, how="release")
    play.drop(kept)


@script(strategy="redirect", **CACHED, placed=8)
def test_M12_a_state_that_its_row_goes_on_from_outlives_its_eviction(play: Play) -> None:
    """Publishes a state between forward and settle, and evicts it after settle; the row still reads it (Redirect)."""
    (row,) = play.admit(T[:20])
    flight = play.step([row], 8, run=False)
    play.launch(flight)
    play.publish(row)
    play.settle()
    play.evict(states=9)
    play.turn([90, 91, 92, 93, 94])
    play.run(row, T[:20])


@script(strategy="redirect", **HERE, grid=1)
def test_a_mark_that_is_dropped_before_its_forward_keeps_its_slot_until_then(play: Play) -> None:
    (row,) = play.admit(T[:30], snapshot_at=[8])
    flight = play.step([row], 20, run=False)
    (kept,) = play.publish(row, handles=True)
    play.drop(kept)
    play.submit()
    slots = inside.registers(play.mem).table.slots
    play.reached(slot=int(slots[kept.register]))  # the forward will write there
    play.launch(flight, tell=True)
    play.submit()


@script(strategy=SNAPSHOTS, **HERE)
def test_M14_a_turn_leaves_the_state_at_its_end_to_its_session(play: Play) -> None:
    (a,) = play.open("chat")
    (row,) = play.admit(T[:12], snapshot_at=[8], sessions=[a])
    play.run(row, T[:8])
    play.end(row)
    play.turn(T[:12], a)


@script(
    strategy=SNAPSHOTS,
    **{**CACHED, "pages": 200},
    placed=8,
    grid=(0, 1),
    at=("at", "behind", "published"),
    first=(0, 1),
)
def test_M13_forks_and_their_row_go_on_from_a_mark(play: Play) -> None:
    """The marks stay with the row; under Redirect, the row and its forks read the kept state directly."""
    (row,) = play.admit(T[:24])
    play.run(row, T[: 18 if play.at == "behind" else 16], most=8)
    if play.at == "published":
        play.publish(row)
    pair = [row, *play.fork(row, "fork")]
    order = pair if play.first else pair[::-1]
    said = {row: T[:25], pair[1]: [*T[:18], *range(70, 76)]}
    for one in order:
        play.step([one], 1)
    play.land()
    play.end(order[0])
    play.run(order[1], said[order[1]])
    play.end(order[1])


# Too few slots


NEEDS = {"ping-pong": 3, "lazy": 2, "redirect": 1}
SPARE = tuple({"strategy": name, "slots": needs + spare} for name, needs in NEEDS.items() for spare in range(5))


@script(**{**CACHED, "slots": 0}, rows=1, overlap=True, grid=1, placed=8, of=SPARE)
def test_M8_marks_without_a_slot_are_given_up_and_counted(play: Play) -> None:
    """Lengths that the request names get slots first, then the prompt's end."""
    (row,) = play.admit(T[:30], snapshot_at=[12])
    play.run(row, T[:30], most=30, obey=False)
    play.reached("refused")
    play.publish(row)
    play.run(row, T[:31])
    play.end(row)


@script(strategy="redirect", **{**CACHED, "slots": 5}, grid=1, placed=8, reserve=2)
def test_M9_marks_leave_the_reserve(play: Play) -> None:
    (row,) = play.admit(T[:23])
    play.run(row, T[:23], most=23, obey=False)
    play.reached("refused", left=play.mem.free_slots)


# Other calls with marks


@pytest.mark.script
def test_lengths_of_a_request_may_be_an_array(backend: Backend) -> None:
    mem = Play(backend, strategy="redirect", **HERE, grid=1).mem
    given = ([8, 16], np.array([16, 8], np.uint16), np.array([]))
    rows = mem.admit([ms.Request("a", tokens=T[:30], length=30, snapshot_at=lengths) for lengths in given])
    mem.plan(rows, [20] * 3)
    said = [text for _, text in mem._reports.owners().values()]
    counts = [said.count(f"row {row.index} (named of {n} tokens)") for row in rows for n in (8, 16)]
    assert counts == [1, 1, 1, 1, 0, 0]


@pytest.mark.script
@pytest.mark.parametrize("keep", [True, False])
def test_M18_an_interrupted_plan_leaves_no_mark(keep: bool, backend: Backend) -> None:
    """Published states at marks stay; states of the row, and of the step that never ran, are lost."""
    play = Play(backend, strategy="redirect", **CACHED, grid=1, placed=8)
    mem, (row,) = play.mem, play.admit(T[:40])
    play.run(row, T[:17], most=17, obey=False)
    play.publish(row)  # the states at 8 and 16
    play.run(row, T[:26], most=9, obey=False)  # the state at 24 stays with the row
    play.extend(row, 40)
    with mock.patch.object(RegisterFile, "plan", side_effect=MemoryError), pytest.raises(MemoryError):
        mem.plan([row], 14)
    mem.recover(keep=keep)
    assert not owners.marks(mem).rows and mem.audit().clean
    assert mem.match(T[:40]).length == mem.prefix.states * 8 == 16 * keep


@script(strategy="redirect", **CACHED, grid=1)
def test_M19_named_lengths_and_those_of_a_placement_are_kept_once(play: Play) -> None:
    """Lengths that the match covers are kept already; lengths beyond the prompt are no marks."""
    play.turn(T[:18], most=1000)
    (row,) = play.admit(T[:26], snapshot_at=[8, 16, 23, 24, 25, 27, 28, 200])
    play.run(row, T[:30], most=1000, publish=True)
    play.end(row)


@script(strategy="redirect", **{**HERE, "slots": 40}, prefix=(False, True), grid=1)
def test_B29a_lengths_beyond_a_prompt_that_is_known_are_ignored(play: Play) -> None:
    """Where the tokens are not known, as in a fork or without a prompt, no length is ignored: it may still
    be reached.
    """
    named, rest = play.admit(T[:10], snapshot_at=[9, 14]) + play.admit(None, snapshot_at=[9, 14])
    (fork,) = play.fork(named, "fork")
    for one in (named, rest, fork):
        play.ask(one, [9, 11, 14])
        play.run(one, T[:20], most=7, obey=False)
        play.end(one, how="publish")


@pytest.mark.script
@pytest.mark.parametrize("seed", range(60))
def test_M22_a_loop_that_asks_for_its_chunks_loses_no_state(seed: int, backend: Backend) -> None:
    """Draws grid, page size, strategy and budgets; rows decode before prompts in the batch, and prompts share a batch.

    A repeated prompt starts at its last whole page; on a grid of its own chunks, less than a page and a grid before.
    """
    draw = random.Random(seed)
    page, grid = draw.choice((1, 2, 4, 5, 8)), draw.choice((0, 1, 2, 3, 4, 8, 12, 16))
    packed, name = bool(grid) and draw.random() < 0.4, draw.choice(SNAPSHOTS)
    direct = False if name == "redirect" and draw.random() < 0.5 else None
    play = Play(
        backend, strategy=name, prefix=True, page_size=page, every=4 * page, slots=200, rows=8, pages=600,
        pages_per_row=80, grid=grid, packed=packed, overlap=draw.random() < 0.5, direct_hits=direct,
        placed=draw.choice((0, 2 * page)),
    )  # fmt: skip
    base = [draw.randrange(50) for _ in range(25)]
    for _ in range(2):
        prompts = [
            base[: draw.randrange(26)] + [draw.randrange(50, 70) for _ in range(draw.randrange(1, 3 * page + 2))]
            for _ in range(draw.randrange(1, 4))
        ]
        texts = [[80 + n] for n in range(draw.randrange(3))]
        for prompt in prompts:
            texts.insert(draw.randrange(len(texts) + 1), prompt)
        rows = [row for text in texts for row in play.admit(text, snapshot_at=[draw.randrange(40) for _ in range(2)])]
        budgets = (1, page, page + 1, 17, 1000)
        budgets = budgets if draw.random() < 0.5 else (draw.choice(budgets),)
        ends = {row: len(text) + 2 for row, text in zip(rows, texts, strict=True)}
        while going := [row for row in ends if play.mem.info(row).length < ends[row]]:
            most = [min(draw.choice(budgets), ends[row] - play.mem.info(row).length) for row in going]
            play.step(going, [play.chunk(row, n) for row, n in zip(going, most, strict=True)])
            if len(ends) < 8 and draw.random() < 0.1:
                play.land()
                row = draw.choice([*ends])
                ends |= dict.fromkeys(play.fork(row, "fork"), ends[row])
        play.land()
        play.end(*ends)
        assert play.model.missed == play.model.refused == 0
        for prompt in prompts:
            length, end = play.mem.match(prompt).length, (len(prompt) - 1) // page * page
            assert length == end if packed or not grid else end - lcm(page, grid) < length <= end
    play.finish()


CHUNKED = ({"grid": 0}, {"grid": 8, "packed": True}, {"grid": 1, "packed": True}, {"grid": 1}, {"grid": 8})


@script(strategy=ALL, **{**CACHED, "every": 16}, gives=CHUNKED)
def test_M11_next_boundary_says_where_a_chunk_should_end(play: Play) -> None:
    """Without a grid, or on the grid of the packed batch, all marks are boundaries; on the grid of the chunk, none is.

    Beyond the prompt, each multiple of `every` is a boundary.
    """
    (row,) = play.admit(T[:22], snapshot_at=[8])
    play.run(row, T[:32], most=1000)
