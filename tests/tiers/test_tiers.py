"""Host memory and storage below the cache, judged by the model: what goes down, what comes back, who makes room."""

import pytest

import memstate as ms
from tests.proof.stateful.script import ALL, Play, script

HOST = {"prefix": True, "tiered": True, "host_slots": 8, "host_pages": 40}
STORED = HOST | {"storing": True}
WAYS = {"strategy": ALL, "overlap": (False, True)}
WRITES = {"write": ("through", "selective", "back")}
TIGHT = tuple({"strategy": name, "slots": n} for name, n in zip(ALL, (2, 3, 3, 2), strict=True))
NO_KV = {"pages": 0, "pages_per_row": 0, "host_pages": 0}
ONE, TWO = list(range(1, 9)), list(range(21, 33))


def other(n: int, length: int = 8) -> list[int]:
    return [100 * n + at for at in range(length)]


@script(**WAYS, **HOST, **WRITES, kept=({"host_slots": 8}, NO_KV))
def test_states_go_down_as_the_policy_says_and_come_back(play: Play) -> None:
    play.turn(ONE)
    play.turn(TWO)
    play.evict(states=1)  # before a submit or poll
    for n in range(3):
        play.turn([*TWO, n])
        play.poll()
    play.go_down()
    play.turn([*TWO, 5])
    play.turn([*ONE, 1])
    play.reached("state out", "host hit")


@script(**WAYS, **HOST, in_place=(False, True), parts=(("fold", "few", "few_scale"),))
def test_B40a_whole_numbers_and_their_scales_go_down_and_come_back(play: Play) -> None:
    play.turn(ONE)
    play.poll()
    play.go_down()
    play.turn([*ONE, 1])
    play.reached("state out", "host hit")


@script(**WAYS, **HOST, write=("through", "back"))
def test_a_state_that_is_published_and_evicted_in_one_packet_is_saved(play: Play) -> None:
    """Requests that begin at once get the slot of the state."""
    (row,) = play.admit(ONE)
    play.run(row, ONE)
    play.submit()
    play.end(row)
    play.evict(states=9)
    rows = play.admit(*[other(n) for n in range(4)])
    for row in rows:
        play.run(row, other(rows.index(row)))
    play.end(*rows, how="release")
    play.turn([*ONE, 1])
    play.reached("state out", "host hit")


@script(strategy=("ping-pong", "lazy", "redirect"), **HOST, write="back")
def test_kv_goes_down_at_once_although_its_state_waits_for_a_forward(play: Play) -> None:
    """KV is saved first, since its pages may get other owners before the forward is launched."""
    (row,) = play.admit([1])
    play.run(row, ONE)
    step = play.step([row], run=False)
    play.publish(row)
    play.evict(states=9)
    play.launch(step, tell=True)
    play.land()
    play.end(row)
    play.reached("kv out", "state out")


@script(strategy=ALL, **HOST, staging=(1, 2, 50))
def test_hits_of_one_admission_are_loaded_together(play: Play) -> None:
    """The record of a request that ends at once stays in use until its load has arrived."""
    texts = [other(n, 2 * n) for n in range(1, 6)]
    for text in texts:
        play.turn(text)
    play.go_down()
    rows = play.admit([*texts[4], 1], [*texts[2], 1], [*texts[2], 2], [*texts[0], 1])
    play.end(rows[0], how="release", land=False)
    play.thin(states=9)
    play.evict(states=9)
    for row in rows[1:]:
        play.step([row])
    play.land()
    play.end(*rows[1:])
    play.match([*texts[4], 1])
    play.reached("thinned", "host hit")


@script(**WAYS, **HOST)
def test_B64_a_tombstone_gets_its_state_back(play: Play) -> None:
    play.turn(ONE)
    play.drain()
    play.evict(states=99)
    play.match([*ONE, 1])
    play.turn([*ONE, 1])
    play.reached("host hit")


@script(tight=TIGHT, **HOST, write=("back", "through"))
def test_S7_an_idle_sessions_state_goes_down_for_a_request_and_comes_up_by_its_tokens(play: Play) -> None:
    sessions = play.open("a", "b", "c")
    for n, session in enumerate(sessions):
        play.turn(other(n), session)
        play.drain()
    for n, session in enumerate(sessions):
        play.turn([*other(n), 1], session)
        play.drain()
    play.reached("state out", "host hit")


@script(tight=TIGHT, **STORED, write=("back", "through"), stored=(False, True))
def test_S16_a_session_that_rests_travels_down_and_its_turn_or_a_prefetch_brings_it_back(play: Play) -> None:
    (a,) = play.open("a")
    play.turn(ONE, a)
    play.rest(a)
    play.drain()
    play.turn(other(2))
    play.turn(other(3))
    play.drain()
    play.evict(states=9)
    if play.stored:
        play.flush()
        play.empty_host()
        play.fetch([*ONE, 1], session=a)
    play.turn([*ONE, 1], a)
    play.reached("storage hit" if play.stored else "host hit")


@script(strategy="none", slots=3, snapshots=2, share=1.0, **HOST)
def test_S7_a_load_makes_idle_sessions_give_way(play: Play) -> None:
    play.turn(TWO)
    play.go_down()
    for n, session in enumerate(play.open("a", "b")):
        play.turn(other(n), session)
    play.turn([*TWO, 1])
    play.reached("host hit")


@script(**HOST | {"host_slots": 1, "host_pages": 8}, write="back")
def test_a_record_that_is_being_filled_is_nobody_else_s(play: Play) -> None:
    for n in range(2):
        play.turn(other(n))
    play.submit()
    play.evict(states=1)
    play.evict(states=1)
    play.reached("refused")
    play.poll()
    play.turn(other(3))
    play.go_down()
    play.reached("thinned")


@script(**HOST | {"host_slots": 2, "host_pages": 2}, write="back")
def test_a_prompts_own_pages_do_not_make_room_for_it(play: Play) -> None:
    """Host memory has two pages of the prompt. A third does not fit, and may replace neither of them."""
    play.turn(ONE[:4])
    play.go_down()
    play.turn(ONE[:6])
    play.go_down()
    play.turn([*ONE[:6], 0])
    play.reached("refused", "host hit")


SIZES = ({"host_slots": 8, "host_pages": 40}, {"host_slots": 2, "host_pages": 8})


@script(prefix=True, tiered=True, storing=True, **WRITES, sizes=SIZES)
def test_a_storage_that_never_answers_leaves_host_memory_evictable(play: Play) -> None:
    """Writes to storage may pin a quarter of the records of each kind, and at least one record."""
    for n in range(12):
        play.turn(other(n))
        play.turn([*other(n), 1])
        play.turn([*other(n), 2])
        play.go_down()
    play.drain()
    play.reached("written", "write_missed")


@script(strategy=("none", "redirect"), **STORED)
def test_what_is_not_sent_or_lacks_its_kv_is_saved_later(play: Play) -> None:
    play.turn(ONE)
    play.poll()  # the device does not know yet where the state is
    play.submit()
    play.poll()
    play.reached("state out")
    play.drain()
    play.thin(pages=2)
    play.flush()
    play.go_down()
    play.turn([*ONE, 1])
    play.reached("thinned", "written", "host hit")


@script(**STORED | {"host_pages": 6})
def test_kv_that_does_not_fit_together_is_written_one_by_one(play: Play) -> None:
    for n in range(2):
        play.turn(other(n))
        play.drain()
    play.thin(pages=99)
    play.flush()
    play.reached("thinned", "refused", "written")


@script(strategy=ALL, **HOST, rows=1)
def test_a_refused_hit_keeps_no_record(play: Play) -> None:
    play.turn(ONE)
    play.go_down()
    (row,) = play.admit([0])
    play.admit([*ONE, 1])
    play.end(row, how="release")
    play.admit([*ONE, 1], [*ONE, 2])
    play.reached("OutOfRows")
    play.turn([*ONE, 3])
    play.reached("host hit")


@script(**STORED, broken=(False, True), denied=(False, True))
def test_storage_that_fails_is_counted_and_host_memory_serves_on(play: Play) -> None:
    play.turn(ONE)
    play.submit()
    play.poll()
    play.poll()
    play.break_store(play.broken)
    if play.denied:
        play.spoil("state", ONE, "denied")
    play.drain()
    play.reached("write_failed" if play.broken or play.denied else "written")
    play.go_down()
    play.turn([*ONE, 1])
    play.fetch(TWO)
    play.break_store()
    if play.denied:
        play.spoil("state", ONE, "")
    play.flush()
    play.reached("written", "host hit")


@script(**WAYS, **STORED)
def test_a_reset_empties_host_memory_and_leaves_storage(play: Play) -> None:
    play.turn(ONE)
    play.turn(TWO)
    play.go_down()
    play.admit([*ONE, 1])
    play.flush()
    play.reset()
    play.turn([*ONE, 1])
    play.fetch([*TWO, 1])
    play.turn([*TWO, 1])
    play.reached("written", "storage hit")


@script(**WAYS, **STORED, keep=(False, True))
def test_host_memory_outlives_sleep(play: Play) -> None:
    play.turn(ONE)
    play.turn(TWO)
    play.go_down()
    rows = play.admit([*ONE, 1]) if play.keep else []  # its load is on its way
    play.sleep(play.keep)
    play.poll()
    play.match([*ONE, 1])
    play.prefetch([*ONE, 1])
    play.reached("Asleep")
    play.wake()
    for row in rows:
        play.run(row, [*ONE, 1])
    play.end(*rows)
    play.turn([*TWO, 1])
    play.turn([*ONE, 2])
    play.reached("host hit")


@script(strategy=ALL, **STORED, write="back")
def test_a_manager_that_sleeps_gives_nothing_to_host_memory(play: Play) -> None:
    """The call is refused before a record is filed for a state that was never copied."""
    play.turn(ONE)
    play.sleep()
    play.flush()
    with pytest.raises(ms.Asleep):
        play.mem.close()
    play.reached("Asleep")
    play.wake()
    play.go_down()
    play.turn([*ONE, 1])
    play.reached("host hit")


@script(**STORED | {"host_slots": 2, "host_pages": 8}, write=("back", "through"))
def test_flushing_more_than_host_memory_holds_writes_all_of_it(play: Play) -> None:
    """Records are written in turns: those that storage has already make room in host memory for the rest."""
    for n in range(5):
        play.turn(other(n))
    play.flush()
    play.evict(states=99, pages=99)
    play.empty_host()
    play.fetch([*other(0), 1])
    play.turn([*other(0), 1])
    play.flush()
    play.reached("written", "storage hit")


@script(**STORED, **WRITES, salts=(("a", "b"), ("a", None), (None, "a"), ("", None), (1, "1")))
def test_B53_host_memory_and_storage_give_what_their_own_salt_has(play: Play) -> None:
    for n in range(3):
        play.turn([*TWO, *range(n)], salt=play.salts[0])
    play.go_down()
    for salt in play.salts[::-1]:
        play.match([*TWO, 5], salt)
        play.turn([*TWO, 5], salt=salt)
    play.flush()
    play.evict(states=99, pages=99)
    play.empty_host()
    for salt in play.salts[::-1]:
        play.fetch([*TWO, 6], salt)
        play.turn([*TWO, 6], salt=salt)
    play.reached("host hit", "storage hit")
