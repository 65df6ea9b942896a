"""Sessions: what a turn leaves to the next turn, from which state that turn goes on, and forks.

The model judges each call: see `tests/proof/stateful/script.py`. Snapshots every 4 tokens, pages of 2.
"""

from collections.abc import Callable
from typing import Any

import memstate as ms
from tests.proof.stateful.script import ALL, COPIED, Play, script
from tests.support import owners

T = list(range(1, 16))
CACHES = {"prefix": (False, True)}
WAYS = {"strategy": ALL, "overlap": (False, True), **CACHES}
KINDS = {"strategy": ALL, "overlap": True, **CACHES}


@script(**WAYS)
def test_B69_a_turn_that_ends_moves_everything_to_the_session(play: Play) -> None:
    """States at marks of the prompt go to the cache, if there is one."""
    (a,) = play.open("a")
    play.turn(T[:9], a, snapshot_at=[6])
    play.audit()
    play.turn(T, a)


@script(**WAYS)
def test_B73_the_next_turn_goes_on_where_the_last_one_ended(play: Play) -> None:
    """The turn takes moves only: no byte is copied or zeroed, no slot changes, and pages stay."""
    (a,) = play.open("a")
    for length in (7, 9, 12, 15):
        play.turn(T[:length], a)


EDITS = ([*T[:8], 50, 51], [*T[:6], 50, 51], [50, *T[1:]], T[:9], T[:8], T[:10])


@script(**KINDS)
def test_B73_an_edited_history_goes_on_from_an_older_state(play: Play) -> None:
    """States beyond the common beginning of both histories are released; a cached state at a mark may remain."""
    for text in EDITS:
        (a,) = play.open("a")
        play.turn(T[:9], a)
        play.turn(text, a)
        play.turn([*text, 60], a)
        play.close(a)


@script(strategy="redirect", overlap=(False, True), **CACHES)
def test_B73_two_turns_at_once_are_refused(play: Play) -> None:
    (a,) = play.open("a")
    play.turn(T[:5], a)
    twice = [ms.Request(name, tokens=T, session=a) for name in "ab"]
    play.refuses(ms.InvalidArgument, lambda: play.mem.admit(twice), "one turn at a time")
    play.admit(T, T[:9], [1], sessions=[a, a, None])
    (row,) = play.admit(T, sessions=[a])
    play.refuses(ms.InvalidArgument, lambda: play.mem.admit(twice[:1]), "one turn at a time")
    play.run(row, T)
    play.admit(T, [1], sessions=[a, None])
    play.end(row)
    play.turn([*T, 1], a)
    play.reached("InvalidArgument")


@script(strategy=("ping-pong", "lazy"), overlap=True, prefix=True)
def test_a_session_leases_no_further_than_its_state(play: Play) -> None:
    (a,) = play.open("a")
    play.turn(T[:11], a, prompt=1, dead=True)
    play.evict(pages=99)
    play.turn(T, a)


@script(strategy=ALL, overlap=(False, True), prefix=True)
def test_B72_a_session_can_be_closed_whenever_no_turn_runs(play: Play) -> None:
    """A session gives back all that it holds, also before its first turn, and after a dead step."""
    for lengths in ([], [7], [7, 9], [3], [1]):
        (a,) = play.open("a")
        for length in lengths:
            play.turn(T[:length], a, dead=play.settings.overlap and length != 9)
        play.close(a)
        play.close(a)
        play.admit(T, sessions=[a])
        play.refuses(ms.StaleHandle, lambda a=a: play.mem.sessions.close(a), r"it was closed, ended by recover")
    play.reached("StaleHandle")


@script(strategy=ALL, overlap=(False, True), **CACHES)
def test_B71_an_aborted_turn_goes_back_to_where_it_began(play: Play) -> None:
    """The session gets back its older states, if registers still hold them; what the turn computed is lost."""
    for steps, settled in ((1, True), (3, False), (4, False), (5, True)):
        (a,) = play.open("a")
        play.turn(T[:9], a)
        (row,) = play.admit(T, sessions=[a])
        play.run(row, T[: 8 + steps])
        play.step([row], 1)
        if settled:
            play.land()
        play.end(row, how="release")
        play.turn([*T[:9], 70, 71], a)
        play.close(a)


@script(strategy=ALL)
def test_B71_a_page_filled_in_part_that_somebody_else_has_is_not_gone_on_in(play: Play) -> None:
    """A turn from the state of 9 tokens would write to a page that has another owner too."""
    (a,) = play.open("a")
    play.turn(T[:9], a)
    (row,) = play.admit(T, sessions=[a])
    with play.shared(owners.pages_of(play.mem, row)[4:5]):
        play.end(row, how="release")
    play.turn([*T[:9], 70], a)


@script(strategy=ALL, **CACHES)
def test_B70_sleep_keeps_idle_sessions_and_reset_voids_them(play: Play) -> None:
    (a,) = play.open("a")
    play.turn(T[:9], a)
    play.refuses(ms.InvalidArgument, lambda: play.mem.device.sleep(keep=False), "slots are held")
    play.sleep()
    play.open("b")
    play.close(a)
    play.admit(T)
    play.reached("Asleep")
    play.wake()
    play.turn(T, a)
    (running,) = play.admit([*T, 1], sessions=[a])
    play.reset()
    play.close(a)
    play.admit(T, sessions=[a])
    play.refuses(ms.StaleHandle, lambda: play.mem.end([running], keep="cache", tokens=[T]))
    (b,) = play.open("a")
    play.turn(T[:9], b)
    play.turn(T, b)
    play.reached("StaleHandle")


# Forks: a conversation goes on in two ways from one state


@script(strategy=(*ALL, COPIED), overlap=(False, True), **CACHES, case=((4, 8), (4, 9)), at=("a", "twin"))
def test_S13_both_go_on_from_one_state_and_neither_sees_what_the_other_says(play: Play) -> None:
    first, (a,) = T[: play.case[1]], play.open("a")
    play.turn(first, a)
    twin = play.fork_session(a)
    one, two = (a, twin) if play.at == "a" else (twin, a)
    play.turn([*first, 50, 51, 52, 53], one)
    play.turn([*first, 60, 61, 62], two)
    play.turn([*first, 60, 61, 62, 1], two)
    play.turn([*first, 50, 51, 52, 53, 1], one)


BEGUN = ({"strategy": "redirect", "at": "one by one"}, *({"strategy": name, "at": "in one call"} for name in ALL))


@script(strategy=ALL, overlap=True, prefix=(False, True))
def test_S13_forks_outlive_a_recovery(play: Play) -> None:
    (a,) = play.open("a")
    play.turn(T[:9], a)
    twin = play.fork_session(a)
    play.admit(T)
    play.recover()
    kept = [one for talk in play.model.talks for one in talk.kept]
    play.turn([*T[:9], 50, 51], twin)
    play.turn([*T[:9], 60, 61], a)
    play.reached(kept=kept)


@script(overlap=True, **CACHES, of=BEGUN)
def test_S13_turns_of_all_forks_begin_together(play: Play) -> None:
    (a,) = play.open("a")
    play.turn(T[:9], a)
    forks = [a, play.fork_session(a)]
    forks.append(play.fork_session(forks[1], "of a fork"))
    texts = [[*T[:9], 50 + n, 51] for n in range(3)]
    if play.at == "in one call":
        rows = play.admit(*texts, sessions=forks)
    else:  # the first step of each is still to come
        rows = [row for text, fork in zip(texts, forks, strict=True) for row in play.admit(text, sessions=[fork])]
    for row, text in zip(rows, texts, strict=True):
        play.run(row, text)
    play.end(*rows)
    for fork, text in zip(forks, texts, strict=True):
        play.turn([*text, 1], fork)


@script(strategy="redirect", **CACHES, at=("a", "twin"))
def test_S13_closing_one_leaves_the_other(play: Play) -> None:
    (a,) = play.open("a")
    play.turn(T[:9], a)
    twin = play.fork_session(a)
    one, two = (a, twin) if play.at == "a" else (twin, a)
    play.close(one)
    play.turn([*T[:9], 50, 51], two)
    play.close(two)


@script(**KINDS, slots=6, pages=24, rows=3)
def test_S13_forks_make_way_together_where_others_need_the_room(play: Play) -> None:
    (a,) = play.open("a")
    play.turn(T[:9], a)
    twin, rows = play.fork_session(a), []
    while more := play.admit([100 + len(rows)] * 5):
        rows += more
    play.reached("OutOfSlots" if "OutOfSlots" in play.machine.errors else "OutOfRows")
    for row in rows:
        play.run(row, [])
        play.end(row, how="release")
    play.turn([*T[:9], 50], a)
    play.turn([*T[:9], 60], twin)


@script(strategy="redirect", slots=3, rows=3)
def test_S13_a_state_that_a_row_is_about_to_read_makes_no_room(play: Play) -> None:
    (a,) = play.open("a")
    play.turn(T[:9], a)
    twin = play.fork_session(a)
    (row,) = play.admit([*T[:9], 50], sessions=[a])
    play.admit(None)
    play.admit(None)
    play.reached("OutOfSlots")
    play.run(row, [*T[:9], 50])
    play.end(row)
    play.turn([*T[:9], 60], twin)


@script(strategy="redirect", prefix=True, pages=10)
def test_S13_what_cannot_be_forked_is_refused_and_changes_nothing(play: Play) -> None:
    (a,) = play.open("a")
    play.turn(T[:9], a)
    play.refuses(ms.InvalidArgument, lambda: play.mem.sessions.fork(a, ["a"]), "session")  # type: ignore[arg-type]
    (row,) = play.admit([*T[:9], 1], sessions=[a])
    play.refuses(ms.InvalidArgument, lambda: play.mem.sessions.fork(a, "b"), "turn running")
    play.run(row, [*T[:9], 1, 2])
    play.end(row)
    (held,) = play.admit(None, length=2 * play.mem.free_pages)
    play.fork_session(a)
    play.reached("OutOfPages")
    play.end(held, how="release")
    play.close(a)
    play.refuses(ms.StaleHandle, lambda: play.mem.sessions.fork(a, "b"), "closed")
    (b,) = play.open("empty")
    play.turn(T[:3], play.fork_session(b))


# Misuse


def ask(mem: ms.StateManager, **more: Any) -> ms.Rows:
    return mem.admit([ms.Request("a", **more)])


REFUSED: dict[str, Callable[[ms.StateManager, ms.Session, ms.Snapshot], object]] = {
    "no tokens": lambda mem, session, snap: ask(mem, session=session),
    "no token": lambda mem, session, snap: ask(mem, tokens=[], session=session),
    "a state as well": lambda mem, session, snap: ask(mem, tokens=T, session=session, resume=snap),
    "a name": lambda mem, session, snap: ask(mem, tokens=T, session="a"),
    "a salt that is no key": lambda mem, session, snap: ask(mem, tokens=T, session=session, salt=["a"]),
    "a name that is no key": lambda mem, session, snap: mem.sessions.open(["a"]),  # type: ignore[arg-type]
    "a row": lambda mem, session, snap: mem.sessions.close(ms.Row(1, 1)),  # type: ignore[arg-type]
}


@script(strategy="ping-pong", at=tuple(REFUSED))
def test_G1_misuse_is_refused_and_changes_nothing(play: Play) -> None:
    (a,) = play.open("a")
    play.turn(T[:9], a)
    (row,) = play.admit(T[:5])
    play.run(row, T[:5])
    (snap,) = play.publish(row, handles=True)
    play.refuses(ms.InvalidArgument, lambda: REFUSED[play.at](play.mem, a, snap))


@script(strategy="none")
def test_B19_a_session_of_another_manager_is_stale(play: Play) -> None:
    play.open("a")
    play.close(*Play(play.machine.mem.backend).open("a"))
    play.reached("StaleHandle")


WRONG = {"not its prompt": [*T[:9], 50], "new tokens alone": T[9:]}


@script(strategy="none", overlap=True, **CACHES, at=("end", "publish", "cancel"), wrong=tuple(WRONG))
def test_G1_tokens_of_a_turn_that_are_not_its_prompt_are_refused(play: Play) -> None:
    """The whole prompt is compared, not only the tokens from which the turn began."""
    (a,) = play.open("a")
    play.turn(T[:9], a)
    (row,) = play.admit(T, sessions=[a])
    flight = play.step([row], 1, run=False)
    named = flight.step if play.at == "cancel" else [row]
    call = lambda: getattr(play.mem, play.at)(named, keep="cache", tokens=[WRONG[play.wrong]])  # noqa: E731
    play.refuses(ms.InvalidArgument, call, "not those of its prompt")
    play.cancel(flight)
