"""Sessions after aborted turns, after sleep and after recover."""

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support import owners
from tests.support.planes import every_strategy
from tests.support.talks import TEXT, Talks, row_holds_nothing, told
from tests.support.ways import every_strategy_and_order


def real_labels(talks: Talks, row: ms.Row, most: int) -> list[int]:
    """Returns the labels of a row's registers on the device, up to a length, longest first."""
    talks.mem.submit()
    return sorted((label for part in range(3) if 0 < (label := talks.label(row, part)) <= most), reverse=True)


@every_strategy_and_order
def test_B71_an_aborted_turn_goes_back_to_where_it_began(backend: Backend, name: str, overlap: bool) -> None:
    """The session gets back its older states, if registers still hold them; what the turn computed is lost."""
    talks, _, session = told(backend, name, overlap, cache=False)
    one_step = {"none": [], "ping-pong": [8, 4] if overlap else [8]}.get(name, [8])
    for steps, settled in (
        ((1, True), (3, False), (4, False), (5, True)) if backend.name == "reference" else ((4, False),)
    ):
        talks.whole(TEXT[:9], session)
        row = talks.turn(TEXT, session)
        assert talks.mem.info(row).length == 9
        talks.run(row, TEXT[: 8 + steps])
        talks.flying.append(talks.feed([row], [[TEXT[8 + steps]]]))
        if settled:
            talks.land()
        expected = real_labels(talks, row, 9)
        assert steps > 1 or expected == one_step
        talks.mem.end([row])
        assert talks.kept(session) == expected and row_holds_nothing(talks.mem, row.index)
        talks.land()
        talks.look()
        row = talks.turn([*TEXT[:9], 70, 71], session)
        assert talks.mem.info(row).length == max(expected, default=0)
        talks.run(row, [*TEXT[:9], 70, 71])
        talks.end(row)
        talks.mem.sessions.close(session)
        session = talks.mem.sessions.open("b")


@every_strategy
def test_B70_sleep_keeps_idle_sessions_and_reset_voids_them(backend: Backend, name: str) -> None:
    talks, mem, session = told(backend, name, first=9)
    with pytest.raises(ms.InvalidArgument, match="slots are held"):
        mem.device.sleep(keep=False)
    mem.device.sleep()
    for asleep in (lambda: mem.sessions.open("b"), lambda: mem.sessions.close(session), lambda: talks.turn(TEXT)):
        with pytest.raises(ms.Asleep):
            asleep()
    mem.device.wake()
    talks.look()
    assert talks.whole(TEXT, session) == 9
    running = talks.turn([*TEXT, 1], session)
    mem.recover(keep=False)
    assert (mem.free_slots, mem.free_pages, mem.sessions.infos(), owners.sessions(mem).by_row) == (24, 80, [], {})
    ended = (lambda: talks.turn(TEXT, session), lambda: mem.end([running], keep="cache", tokens=[TEXT]))
    for stale in (lambda: mem.sessions.close(session), *ended):
        with pytest.raises(ms.StaleHandle):
            stale()
    again = mem.sessions.open("a")
    assert again != session and talks.whole(TEXT[:9], again) == 0 and talks.whole(TEXT, again) == 9


@every_strategy
def test_B71_a_page_filled_in_part_that_somebody_else_has_is_not_gone_on_in(backend: Backend, name: str) -> None:
    """A turn from the state of 9 tokens would write to a page that has another owner too."""
    talks, _, session = told(backend, name, cache=False, first=9)
    older = talks.kept(session)[1:]
    row = talks.turn(TEXT, session)
    shared = owners.pages_of(talks.mem, row)[4:5]
    owners.kv_pages(talks.mem).share(shared)
    talks.mem.end([row])
    assert talks.kept(session) == older
    owners.kv_pages(talks.mem).release(shared)
