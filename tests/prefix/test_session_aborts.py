"""Turns that do not come to their end: aborted, retracted, cancelled, or refused for want of room; and their pages."""

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support import inside, owners
from tests.support.planes import every_strategy
from tests.support.talks import TEXT, Talks, counts, fork, row_holds_nothing, told
from tests.support.ways import every_strategy_and_order

pytestmark = pytest.mark.sample(interpreter=0)  # without MEMSTATE_PROOF the reference alone


def real_labels(talks: Talks, row: ms.Row, most: int) -> list[int]:
    """What a row's registers stand for on the device, up to a length, longest first."""
    talks.mem.submit()
    return sorted((label for part in range(3) if 0 < (label := talks.label(row, part)) <= most), reverse=True)


@every_strategy
def test_B71_a_first_turn_that_began_in_the_cache(backend: Backend, name: str) -> None:
    """A state that was copied is the session's then; one that was to be read once, as under Redirect, never was."""
    talks, _, session = told(backend, name)
    talks.whole(TEXT[:8])
    row = talks.turn(TEXT, session)
    assert talks.mem.info(row).length == 8
    talks.mem.end([row])
    talks.look()
    assert talks.kept(session) == ([] if name == "redirect" else [8]) and not owners.pinned(talks.mem)
    assert talks.whole(TEXT, session) == 8


@every_strategy_and_order
def test_B71_an_aborted_turn_goes_back_to_where_it_began(backend: Backend, name: str, overlap: bool) -> None:
    """As far as a register still has a state of then; what the turn computed is nobody's."""
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


@every_strategy_and_order
def test_B73_a_retracted_turn_comes_back_as_the_next(backend: Backend, name: str, overlap: bool) -> None:
    talks, mem, session = told(backend, name, overlap, first=5)
    row = talks.turn(TEXT, session)
    talks.run(row, TEXT[:7])
    before = (counts(talks), bool(inside.commands(mem).queue))
    for refused in (
        lambda: mem.end([row], keep="handle"),
        lambda: mem.end([row], keep="handle"),
        lambda: mem.end([row], keep="handle", lengths=[4]),
        lambda: mem.end([row], keep="cache", tokens=[]),
    ):
        with pytest.raises(ms.InvalidArgument):
            refused()
        assert before == (counts(talks), bool(inside.commands(mem).queue)) and mem.rows
    assert mem.end([row], keep="cache", tokens=[TEXT[:7]]) == [None]
    talks.look()
    assert talks.kept(session)[0] == 7 and talks.whole(TEXT, session) == 7


@every_strategy_and_order
@pytest.mark.parametrize("keep", [True, False], ids=["with tokens", "aborted"])
def test_B73_a_cancelled_step_ends_the_turn(backend: Backend, name: str, overlap: bool, keep: bool) -> None:
    """The state in `live` says one token more than was ever folded, so that a mark in the cache is what is left."""
    talks, mem, session = told(backend, name, overlap, first=5)
    marks = {"none": []}.get(name, [4, 8] if keep else [4])
    row = talks.turn(TEXT, session)
    talks.run(row, TEXT[:9])
    mem.extend([row], [10])
    step = mem.plan([None, row])
    assert real_labels(talks, row, 9) == []
    with pytest.raises(ms.InvalidArgument, match="turns of sessions"):
        mem.cancel(step, keep="handle")
    first, left = mem.cancel(step, keep="cache" if keep else None, tokens=[None, TEXT[:9]] if keep else None)
    assert first is None and (left.length if left else 0) == (8 if keep and name != "none" else 0)
    assert talks.kept(session) == [] and row_holds_nothing(mem, row.index)
    assert talks.cached() == marks  # the first turn left 4
    talks.look()
    assert talks.whole(TEXT, session) == max(marks, default=0)


@every_strategy
@pytest.mark.parametrize("holders", [0, 1, 2])
def test_B70_without_a_holder_a_state_is_let_go(backend: Backend, name: str, holders: int) -> None:
    """The longest first; for that the session that was used least recently makes way."""
    talks = Talks(backend, name, cache=False, snapshots=holders)
    first, second = talks.mem.sessions.open("a"), talks.mem.sessions.open("b")
    kept = [9] if name == "none" else [9, 8]
    talks.whole(TEXT[:9], first)
    assert talks.kept(first) == kept[:holders]
    talks.whole(TEXT[:9], second)
    assert talks.kept(second) == kept[:holders]
    assert talks.kept(first) == kept[: max(0, holders - len(kept))]
    assert talks.whole(TEXT, second) == (9 if holders else 0)


@pytest.mark.parametrize("read", [False, True], ids=["idle", "about to be read"])
def test_B70_a_cached_state_gives_way_to_a_session_unless_it_is_about_to_be_read(backend: Backend, read: bool) -> None:
    talks, mem, session = told(backend, "redirect", snapshots=1)
    talks.whole(TEXT[:8])
    if read:
        talks.turn(TEXT)
    talks.whole([90, 91, 92], session)
    assert talks.kept(session) == ([] if read else [3])
    assert mem.match(TEXT).length == (8 if read else 0)


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


OTHER = [*TEXT[:9], 77, 78, 79, 80]


@every_strategy_and_order
def test_B73_a_page_that_the_tree_has_is_not_written_again(backend: Backend, name: str, overlap: bool) -> None:
    """A turn begins in a page filled in part, fills it, gives it to the tree, is aborted; the next says otherwise."""
    talks, _, session = told(backend, name, overlap, first=9)
    row = talks.turn(TEXT, session)
    assert talks.mem.info(row).length == 9
    filled = owners.pages_of(talks.mem, row)[4]  # tokens 9 and 10
    talks.run(row, TEXT, publish=True)
    assert filled in talks.mem.prefix.tree.pages_to(talks.mem.prefix.leases[row.index].node)
    talks.mem.end([row])
    talks.look()
    row = talks.turn(OTHER, session)
    assert filled not in owners.pages_of(talks.mem, row)
    talks.run(row, OTHER, publish=True)
    talks.end(row)
    talks.look()
    assert talks.mem.match([*TEXT, 0]).kv_length == 14 and talks.mem.match([*OTHER, 0]).kv_length == 12


@every_strategy
def test_B71_a_page_filled_in_part_that_somebody_else_has_is_not_gone_on_in(backend: Backend, name: str) -> None:
    """The state of 9 tokens would write behind them, in a page that is no longer the row's alone."""
    talks, _, session = told(backend, name, cache=False, first=9)
    older = talks.kept(session)[1:]
    row = talks.turn(TEXT, session)
    shared = owners.pages_of(talks.mem, row)[4:5]
    owners.kv_pages(talks.mem).share(shared)
    talks.mem.end([row])
    assert talks.kept(session) == older
    owners.kv_pages(talks.mem).release(shared)


@pytest.mark.sample(interpreter=1)
@every_strategy_and_order
def test_B73_forks_and_the_conversation_go_on_in_pages_of_their_own(backend: Backend, name: str, overlap: bool) -> None:
    talks, _, session = told(backend, name, overlap, first=7)
    row = talks.turn(TEXT[:8], session)
    early = fork(talks, row, "early")[0]  # before the turn's first step: where the session stands
    talks.run(row, TEXT[:11])
    (late,) = fork(talks, row, "late")
    for other, text in ((early, [*TEXT[:8], 77, 78]), (late, [*TEXT[:11], 88, 89])):
        assert owners.pages_of(talks.mem, other)[-1] not in owners.pages_of(talks.mem, row)
        talks.run(other, text, publish=True)
    talks.look()
    talks.end(row)
    talks.look()
    # With the forks still running. Under Redirect the state of 11 is what the last of them reads, and nobody's; that of
    # 8 would have saved less than a page over the session's 7, and so the first turn's is left.
    assert talks.whole(TEXT, session) == (6 if name == "redirect" else 11)
    for other in (late, early):
        talks.end(other)
        talks.look()


@pytest.mark.parametrize("name", ["ping-pong", "redirect"])
def test_B74_pages_of_an_idle_session_stay_and_go_with_it(backend: Backend, name: str) -> None:
    talks, mem, session = told(backend, name)
    talks.whole(TEXT, session)
    assert mem.prefix.tree.leased_pages == mem.prefix.tree.total_pages == 7
    assert mem.prefix.evictable_pages == mem.prefix.evict_pages(80) == 0
    talks.look()
    mem.sessions.close(session)
    assert mem.prefix.tree.leased_pages == 0 and mem.prefix.evictable_pages == mem.prefix.evict_pages(80) == 7
