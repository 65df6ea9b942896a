"""Forks and reorders of rows, and states that arrive from elsewhere. Nothing is copied but a page filled in part."""

from random import Random

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.proof.stateful.script import ALL, Play, script
from tests.support.build import on
from tests.support.planes import LAYOUT

T = list(range(1, 40))
BARE = {"pages": 0, "page_size": 1, "pages_per_row": 0}  # the engine keeps the KV


@script(strategy=ALL, tails=(False, True), slots=(12, 5), case=BARE)
def test_B17_the_shared_state_goes_with_its_last_reader(play: Play) -> None:
    """With 5 slots, a fork is refused under strategies whose rows have lanes."""
    (row,) = play.admit(None)
    play.run(row, T[:2])
    forks = play.fork(row, "b", "c")
    for one in forks:
        play.fork(one, "d")  # its state is still that of the row
        play.end(one, how="release")
    play.step([row])
    play.submit()
    play.fork(row, *"defgh")
    play.reached("OutOfRows")
    play.may_raise("OutOfSlots")


@script(strategy=ALL, pages=12, pages_per_row=6)
def test_full_pages_are_shared_and_the_rest_is_named(play: Play) -> None:
    (row,) = play.admit(T[:5])
    play.run(row, T[:5])
    b, c = play.fork(row, "b", "c")
    play.step([b, c])
    play.end(row, how="release")
    play.end(b, c, how="publish")


@script(strategy=ALL, lack=("pages", "slots", "rows"), overlap=True, slots=9, rows=3, pages=4, pages_per_row=3)
def test_B17_a_fork_is_made_whole_or_not_at_all(play: Play) -> None:
    (row,) = play.admit(None, length=3)
    play.run(row, T[:3])
    if play.lack == "pages":
        play.extend(row, 5)
        (other,) = play.admit(None, length=2)
        play.fork(row, "b")
        play.end(other, how="release")
    elif play.lack == "slots":
        ids = play.claim(play.mem.free_slots)
        play.fork(row, "b")
        play.release(ids)
    else:
        play.fork(row, "b", "c", "d")
    play.step([row])
    play.fork(row, "e")
    play.settle([row])
    play.fork(row, "f")
    play.end(row, how="release")
    play.fork(row, "g")
    play.reached(f"OutOf{play.lack.title()}", "InvalidArgument", "StaleHandle")


@script(strategy=ALL, prefix=True)
def test_B17_a_fork_takes_no_snapshot_inside_of_the_prompt(play: Play) -> None:
    (row,) = play.admit(T[:11])
    play.step([row], 3)
    (fork,) = play.fork(row, "b")
    for one in (row, fork):
        play.run(one, T[:14])
    play.end(row, fork)


@script(strategy="redirect", slots=4, rows=3, case=BARE)
def test_B17_a_state_that_others_read_makes_no_room(play: Play) -> None:
    (row,), (other,) = play.admit(None), play.admit(None)
    play.step([row, other])
    (fork,) = play.fork(row, "b")
    play.reorder([row, fork, other], [0, 2, 2])
    play.reached("OutOfSlots")


@script(strategy="redirect", snapshots=0, case=BARE)
def test_B17_without_a_holder_a_fork_is_refused_before_it_begins(play: Play) -> None:
    (row,) = play.admit(None)
    play.run(row, T[:2])
    play.fork(row, "b")
    play.reorder([row], [0, 0])
    play.step([row])
    play.reached("InvalidArgument")


@script(strategy=ALL, tails=(False, True), slots=20, rows=5, case=BARE)
def test_B81_every_row_goes_on_from_the_one_that_it_was(play: Play) -> None:
    """Some reorders find rows that have not read the state that they share."""
    random, rows = Random(7), play.admit(None, None, None, None)
    play.step(rows, 3)
    for turn in range(6):
        play.land()
        rows = play.reorder(rows, [random.randrange(4) for _ in rows])
        if turn % 3:
            play.step(rows, 2)


@script(strategy=ALL, slots=(5, 9), rows=3, pages=6, pages_per_row=2)
def test_B17_rows_that_nobody_names_make_room_for_the_forks(play: Play) -> None:
    rows = play.admit(None, None, length=3) + play.admit(None, length=3)
    play.step(rows, 3)
    play.land()
    rows = play.reorder(rows, [1, 1, 1][: len(rows)])
    play.reorder(rows, [2, 2, 0][: len(rows)])
    play.reorder(rows, [])
    play.may_raise("OutOfSlots", "InvalidArgument", "StaleHandle")


@script(lack=("OutOfSlots", "OutOfRows", "OutOfPages"), strategy="redirect", slots=8, pages=8)
def test_B17_a_reorder_is_made_whole_or_not_at_all(play: Play) -> None:
    rows = play.admit(None, None, None, length=3)
    play.step(rows, 3)
    play.land()
    ids = play.claim(4) if play.lack == "OutOfSlots" else []
    play.extend(rows[0], 8 if play.lack == "OutOfPages" else 3)
    play.reorder(rows, [0, 0, 1, 1, 1] if play.lack == "OutOfRows" else [0, 0, 1, 2])
    play.release(ids)
    play.step(rows)
    play.reached(play.lack)


@script(strategy="redirect", overlap=True, pages=12, pages_per_row=3, prefix=True)
def test_B17_rows_that_cannot_be_forked_or_ended_are_refused(play: Play) -> None:
    (a,), (b,) = play.admit(None, length=6), play.admit(T[:3], sessions=play.open("talk"))
    play.step([a, b])
    play.land()
    play.reorder([a, b], [0])  # b is a turn of a session
    play.step([b])
    play.reorder([a, b], [1, 0])
    play.reorder([a, b], [0])
    play.settle([b])
    play.reorder([a, b], [1])
    play.reorder([a], [0])
    play.reorder([], [])
    play.reached("InvalidArgument")


@script(strategy=ALL, overlap=True, case=BARE)
def test_B31_a_state_arrives_in_a_row_whose_last_request_is_in_a_step(play: Play) -> None:
    (row,) = play.admit(None)
    play.launch(play.step([row], run=False), tell=True)
    play.end(row, how="release", land=False)
    (again,) = play.admit(None)
    play.arrive([again], [3])
    play.settle()
    play.step([again])


@script(strategy="redirect", page_size=1, pages=4, pages_per_row=4)
def test_B31_an_arrival_that_makes_no_sense_is_refused(play: Play) -> None:
    fresh, begun = play.admit(None, None, length=2)
    play.step([begun])
    for rows, lengths in (([begun], [3]), ([fresh], [0]), ([fresh, fresh], [1, 1]), ([fresh], [5])):
        play.arrive(rows, lengths)
    play.step([fresh], run=False)
    play.arrive([fresh], [1])
    play.launch(play.machine.flights[-1])
    play.reached("InvalidArgument", "OutOfPages")


@pytest.mark.parametrize("n", [2, 32])
def test_a_reorder_is_one_upload_and_one_launch(backend: Backend, n: int) -> None:
    mem = on(backend, LAYOUT, slots=3 * n, max_requests=n, tracking=ms.Redirect(4))
    rows = mem.admit([ms.Request(number) for number in range(n)])
    for _ in range(2):
        mem.settle(mem.plan(rows))
    mem.submit()
    mem.backend.counts.reset()
    mem.reorder(rows, [entry // 2 for entry in range(n)])
    mem.submit()
    counts = mem.backend.counts
    assert (counts.uploads, dict(counts.launches), counts.syncs) == (1, {"ownership": 1}, 0)
