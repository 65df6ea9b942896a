"""Parked requests in scripts: the model compares registers, pages, records, tails and every byte after each call."""

import pytest

from tests.proof.stateful.script import ALL, Play, script

T = [2, 0, 0, 1, 2, 1, 0, 0, 2, 1, 1, 2, 0, 2, 1, 0]
TIERS = {"tiered": True, "prefix": True, "host_slots": 4, "host_pages": 12, "slots": 16, "rows": 3, "page_size": 2,
         "pages": 30, "pages_per_row": 10}  # fmt: skip

pytestmark = pytest.mark.script


@script(strategy=ALL, overlap=(False, True), in_place=(False, True), **TIERS)
def test_B82_a_row_is_parked_behind_the_forward_that_computes_it(play: Play) -> None:
    a, b = play.admit(T[:7], T[:3])
    play.step([a, b], [5, 3])
    play.land()
    flight = play.step([a, b], [2, 1], run=False)
    (parked,) = play.park(a)
    play.launch(flight)
    play.land()
    (a,) = play.resume(parked, size=12)
    play.run(a, T[:11])
    play.end(a, b)


@script(strategy=ALL, overlap=(False, True), tails=True, tail=3, **TIERS)
def test_a_tail_goes_with_its_row(play: Play) -> None:
    a, b = play.admit(T[:5], T[:5])
    play.step([a, b], 5)
    play.step([a, b], 3, 2, accepted=[2, 3])
    play.land()
    parked = play.park(a, b, told=True)
    rows = play.resume(*reversed(parked), size=16)
    play.step(rows, 2, 1, accepted=[1, 2])
    play.land()
    play.end(*rows)


@script(strategy=ALL, overlap=(False, True), tails=True, **TIERS)
def test_a_request_goes_on_while_its_parking_waits(play: Play) -> None:
    a, b = play.admit(T[:6], T[:2])
    flight = play.step([a, b], [3, 2], run=False)
    parked = play.park(a, told=True)
    (a,) = play.resume(*parked, size=10)
    play.ask(a, [4, 6, 8])  # 8 lies beyond its prompt
    play.launch(flight)
    play.land()
    play.step([a, b], [3, 1], replays=True)
    play.run(a, T[:6] + [1] * 4)
    play.end(a, b)


@script(strategy=ALL, overlap=True, **TIERS)
def test_a_parked_request_of_no_tokens_takes_no_packet_more_than_a_new_one(play: Play) -> None:
    a, b = play.admit(T[:6], T[:3])
    flight = play.step([a], 3, run=False)
    parked = play.park(b)
    (b,) = play.resume(*parked, size=4)
    play.launch(flight)
    play.step([b], 2)
    play.end(a, b)


@script(strategy=ALL, told=(False, True), **TIERS)
def test_a_session_and_a_row_that_reads_a_cached_state_are_parked(play: Play) -> None:
    (talk,) = play.open("a")
    play.turn(T[:9], talk, prompt=5)
    play.turn(T[:9])
    (row,) = play.admit(T[:12])
    parked = play.park(row, sessions=[talk], told=play.told)
    play.evict(states=9, pages=99)
    rows = play.resume(*parked, size=14)
    for row in rows:
        play.run(row, T[:13])
    play.end(*rows)


@script(strategy=ALL, how=("told", "release"), **TIERS)
def test_a_parked_request_goes_on_as_a_turn(play: Play) -> None:
    (talk,) = play.open("a")
    play.turn(T[3:12], talk, prompt=5)
    (row,) = play.admit(T[:9])
    play.run(row, T[:7])
    parked = play.park(row, told=True)
    (row,) = play.resume(*parked, sessions=[talk], snapshot_at=[8], size=12)
    play.run(row, T[:11])
    play.end(row, how=play.how)
    play.turn(T[:14], talk)
    play.turn(T[:15], talk)


@script(strategy=ALL, overlap=(False, True), **TIERS)
def test_pages_that_a_load_has_still_to_fill_do_not_go_down(play: Play) -> None:
    """The load waits for the forward behind which `b` ends. `a` leaves more tokens than were known when it parked."""
    a, b = play.admit(T[:2], T[:3])
    play.run_all([a, b], [T[:8], T[:3]])
    parked = play.park(a)
    flight = play.step([b], 1, run=False)
    play.end(b, land=False)
    (a,) = play.resume(*parked, size=10)
    play.end(a, how="told", land=False)
    play.evict(states=9, pages=99)
    play.reached("refused")
    play.launch(flight)
    play.land()
    play.turn(T[:10])


@script(strategy="redirect", how=("resume", "drop", "clear"), **TIERS | {"host_pages": 3})
def test_pages_wait_on_the_device_for_room_below(play: Play) -> None:
    rows = play.admit(T[:5], T[1:6])
    play.step(rows, 5)
    play.land()
    one, two = play.park(*rows)
    play.poll()
    if play.how == "clear":
        play.empty_host()
        return
    rows = play.resume(two) if play.how == "resume" else []
    play.forget(one)
    play.poll()
    play.poll()
    play.end(*rows, *(play.resume(two) if play.how == "drop" else []))


@script(strategy=ALL, overlap=(False, True), beside=(False, True), **TIERS | {"host_pages": 3})
def test_pages_go_down_beside_a_step_that_does_not_write_them(play: Play) -> None:
    """Without `submit(step)`, a loop that overlaps calls `poll` only while a step is open."""
    a, b, c = play.admit(T[:5], T[1:6], T[2:7])
    play.run_all([a, b, c], [T[:5], T[1:6], T[2:7]])
    one, *two = play.park(a) if play.beside else play.park(a, b)
    flight = play.step([b, c] if play.beside else [c], 1, run=False)
    two = two or play.park(b)
    play.forget(one)
    play.poll()
    play.poll()
    assert bool(play.mem.stats().tiers.parked_pages) == play.beside
    play.launch(flight)
    play.land()
    play.poll()
    assert play.mem.stats().tiers.parked_pages == 0
    play.end(c, *play.resume(*two))


@script(strategy="redirect", **TIERS | {"host_slots": 1})
def test_too_little_host_memory_is_back_pressure(play: Play) -> None:
    a, b = play.admit(T[:5], T[1:6])
    play.step([a, b], 5)
    play.land()
    assert play.park(a, b) == []
    play.reached("OutOfRecords")
    (parked,) = play.park(a)
    assert play.park(b) == []
    play.reached("OutOfRecords")
    play.end(b, *play.resume(parked))
