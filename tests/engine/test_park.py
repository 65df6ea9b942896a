"""Requests park in host memory, and go on with the same bytes: their state of any length, their tail and their KV."""

import pytest
import torch

import memstate as ms
from memstate.tiers import manager
from tests.support.parked import FILLED, OTHER, ROWS, TEXT, Station, tailed, whole
from tests.support.planes import MAKERS, every_strategy
from tests.support.tiered_small import PAGE

# -- it goes on exactly ----------------------------------------------------------------------------


@every_strategy
@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, 4 * PAGE + 1])
@pytest.mark.parametrize("known", [False, True])
def test_B83_a_request_goes_on_where_it_was_parked(name: str, length: int, known: bool) -> None:
    """Its slots and pages are free at once. What they held before is gone when it goes on."""
    at = Station(tracking=MAKERS[name]())
    free = at.mem.free_slots, at.mem.free_pages
    (row,) = at.admit(TEXT[:10])
    at.reach(row, length)
    (parked,) = at.park(row, known=known)
    assert (at.mem.free_slots, at.mem.free_pages) == free
    assert (parked.length, parked.pending, parked.user) == (length, 0, b"")
    at.scribble()
    at.mem.poll()
    (row,) = at.resume([parked])
    at.reach(row, 30)
    at.look(row)
    at.finish()


@every_strategy
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_what_the_open_step_computes_is_parked_too(name: str, overlap: bool, in_place: bool) -> None:
    """The copies come one action behind the forward. The step can no longer be cancelled."""
    at = Station(tracking=MAKERS[name](), overlap=overlap, in_place=in_place)
    rows = at.start(TEXT[:6], OTHER[:6])

    def between(step: ms.Step) -> list[ms.Parked]:
        parked = at.park(rows[0])
        with pytest.raises(ms.InvalidArgument, match="handed out"):
            at.mem.cancel(step)
        at.mem.submit()
        assert at.below.host.moved[0] == 0
        return parked

    (parked,) = at.step(rows, 3, between)
    assert parked.length == 9 and at.below.host.moved[0] == 1
    at.scribble()
    at.look(rows[1])
    (row,) = at.resume([parked])
    at.reach(row, 14)
    at.look(row)
    at.finish()


def test_a_row_that_was_not_in_the_open_step_is_parked_at_once() -> None:
    at = Station()
    rows = at.start(TEXT[:6], OTHER[:7])
    parked = at.step(rows[:1], 1, lambda step: (at.park(rows[1]), at.mem.submit()))[0]
    at.scribble()
    at.resume(parked)
    at.finish()


def test_rows_and_idle_sessions_are_parked_in_one_call() -> None:
    at = Station()
    session = at.mem.sessions.open("talk")
    (turn,) = at.admit(TEXT[:11], session=session)
    at.reach(turn)
    at.mem.end([turn], keep="cache", tokens=[at.text.pop(turn)])
    row, empty = at.start(OTHER[:5]) + at.admit(TEXT[:3])
    texts = [at.text.pop(one) for one in (row, empty)]
    parked = at.mem.park([row, session, empty], [None, None, texts[1]], user=[b"a", b"b", b""])
    assert [one.length for one in parked] == [5, 11, 0] and [one.user for one in parked] == [b"a", b"b", b""]
    at.text.update(zip(parked, [texts[0], TEXT[:11], texts[1]], strict=True))
    assert at.mem.stats().rows_used == 0
    with pytest.raises(ms.StaleHandle):
        at.mem.sessions.close(session)
    at.scribble()
    at.resume([parked[1]])
    for end, row in zip((16, 12), at.resume([parked[0], parked[2]]), strict=True):
        at.reach(row, end)
        at.look(row)
    at.finish()


def test_a_request_goes_on_as_the_next_turn_of_a_session() -> None:
    """What the session kept before goes. The session keeps what the turn leaves."""
    at = Station(tracking=ms.Redirect(PAGE))
    session = at.mem.sessions.open("talk")
    (turn,) = at.admit(OTHER[:9], session=session)
    at.reach(turn)
    at.mem.end([turn], keep="cache", tokens=[at.text.pop(turn)])
    (row,) = at.start(TEXT[:6])
    (parked,) = at.park(row, known=True)
    (row,) = at.resume([parked], session=session, tokens=TEXT[:8], length=12)
    at.text[row] = TEXT[:8]
    at.reach(row, 11)
    answer = at.text.pop(row)[:11]
    at.mem.end([row], keep="cache", tokens=[answer])
    (row,) = at.admit([*answer, *OTHER[:5]], session=session)
    assert at.mem.info(row).length == 11
    at.look(row)
    at.mem.end([row], keep="cache", tokens=[at.text.pop(row)])
    at.mem.sessions.close(session)
    at.finish()


def test_a_turn_that_finds_no_room_leaves_session_and_parked_request_as_they_were() -> None:
    at = Station(pages=12)
    session = at.mem.sessions.open("talk")
    (turn,) = at.admit(OTHER[:9], session=session)
    at.reach(turn)
    at.mem.end([turn], keep="cache", tokens=[at.text.pop(turn)])
    (row,) = at.start(TEXT[:6])
    (parked,) = at.park(row)
    before = whole(at.mem)
    with pytest.raises(ms.OutOfPages):
        at.mem.admit([ms.Request("long", 13 * PAGE, resume=parked, session=session)])
    after = whole(at.mem)
    for name in ("slots", "pages", "records", "parked"):
        assert after[name] == before[name]
    (turn,) = at.admit(OTHER[:12], session=session)
    assert at.mem.info(turn).length == 9
    at.look(turn)
    at.resume([parked])
    at.mem.end([turn], keep="cache", tokens=[at.text.pop(turn)[:9]])
    at.mem.sessions.close(session)
    at.finish()


@pytest.mark.parametrize("direct", [False, True])
def test_a_row_is_parked_before_it_has_read_its_state(direct: bool) -> None:
    """Its state is the one of the cache, or has just been copied from there. The cache keeps its own."""
    at = Station(tracking=ms.Redirect(PAGE), direct_hits=direct)
    (row,) = at.start(TEXT[:8])
    at.mem.end([row], keep="cache", tokens=[at.text.pop(row)])
    (row,) = at.admit(TEXT[:12])
    assert at.mem.info(row).length == 8
    (parked,) = at.park(row)
    at.mem.prefix.evict_states(9)
    at.mem.prefix.evict_pages(99)
    at.scribble()
    (row,) = at.resume([parked])
    at.reach(row, 13)
    at.finish()


def test_a_row_is_parked_while_its_load_is_on_its_way() -> None:
    at = Station({"write": "through"}, tracking=ms.Redirect(PAGE))
    (row,) = at.start(TEXT[:8])
    at.mem.end([row], keep="cache", tokens=[at.text.pop(row)])
    at.mem.poll()
    at.mem.poll()
    at.mem.prefix.evict_states(9)
    at.mem.prefix.evict_pages(99)
    at.scribble()
    (other,) = at.start(OTHER[:5])
    parked = at.step([other], 1, lambda step: at.park(*at.admit(TEXT[:12])))
    assert [one.length for one in parked] == [8] and at.below.host.moved[1] == 1
    at.scribble()
    at.resume(parked)
    at.finish()


def test_parked_twice_and_by_two_managers() -> None:
    """What goes on is parked again right away, before anything has read it. Managers know only their own requests."""
    one, two = Station(), Station()
    (row,) = one.start(TEXT[:7])
    (parked,) = one.park(row)
    (again,) = one.park(*one.resume([parked]))
    with pytest.raises(ms.StaleHandle, match="another manager"):
        two.mem.admit([ms.Request("r", resume=again)])
    with pytest.raises(ms.StaleHandle):
        two.mem.drop([again])
    one.scribble()
    one.resume([again])
    one.finish()
    two.finish()


def test_debug_checks_every_call() -> None:
    at = Station(debug=True)
    rows = at.start(TEXT[:6], OTHER[:9])
    parked = at.step(rows, 1, lambda step: at.park(*rows))
    for row in at.resume(parked):
        at.reach(row, 14)
    at.finish()


def test_tokens_are_due_when_the_request_goes_on() -> None:
    """With overlap, the caller learns the last tokens only after it has parked. Others may hit what the row leaves."""
    at = Station(tracking=ms.Redirect(PAGE), overlap=True)
    (row,) = at.start(TEXT[:5])
    (parked,) = at.step([row], 4, lambda step: at.park(row))
    assert parked.prompt.tokens == 5 and parked.length == 9
    text = at.text[parked][:9]
    (row,) = at.resume([parked], tokens=[*text, 8, 9], length=11)
    at.text[row] = [*text, 8, 9]
    at.reach(row, 14)
    said = at.text.pop(row)[:14]
    at.mem.end([row], keep="cache", tokens=[said])
    (row,) = at.admit(said)
    assert at.mem.info(row).length == 12
    at.look(row)
    at.finish()


def test_each_of_several_ranks_parks_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A park needs no agreement: all ranks park and go on alike, whatever host memory they have for prompts."""
    monkeypatch.setattr(manager, "Ranks", lambda group: None)
    ranks = [Station({"rank": rank, "ranks": 2, "group": object(), "host_slots": 4 + rank}) for rank in range(2)]
    lengths = []
    for at in ranks:
        (parked,) = at.park(*at.start(TEXT[:9]), known=True)
        at.scribble()
        (row,) = at.resume([parked])
        lengths.append(at.mem.info(row).length)
        at.finish()
    assert lengths == [9, 9]


# -- tails and memory of rows ----------------------------------------------------------------------


def test_pending_tokens_go_with_the_memory_of_the_row() -> None:
    """The state has 5 tokens, the tail 2 more. The step after is that of a row that was not parked."""
    mem = tailed(tracking=ms.Redirect(PAGE))
    rows = mem.admit([ms.Request(n, 40, tokens=TEXT[:5]) for n in range(3)])
    mem.settle(mem.plan(rows, 5))
    for _ in range(2):
        mem.settle(mem.plan(rows, 1, defer=4))
    raw = mem.planes.rows["raw"]
    raw[:, 1:] = torch.arange(raw[:, 1:].numel(), device="cpu").view_as(raw[:, 1:])
    slots = mem.device.read_slots(rows).wait().tolist()
    for plane in mem.planes.values():
        plane[:, slots[1]] = 41
    tail, (parked,) = raw[:, 2].clone(), mem.park(rows[1:2])
    assert (parked.length, parked.pending) == (7, 2)
    mem.submit()
    raw[:, 2], mem.planes["long"][:, slots[1]] = -1, -1
    (again,) = mem.admit([ms.Request("again", 40, resume=parked)])
    mem.submit()
    assert (mem.info(again).length, mem.info(again).pending) == (7, 2)
    assert torch.equal(raw[:, again.index], tail)
    (slot,) = mem.device.read_slots([again]).wait().tolist()
    assert (mem.planes["long"][:, slot] == 41).all() and (mem.planes["short"][:, slot] == 41).all()
    step = mem.plan([rows[0], again], 2)
    assert step.before.tolist()[:2] == [7, 7] and step.after.tolist()[:2] == [9, 9]
    cursor = [column.tolist() for column in step.cursor]
    assert all(column[0] == column[1] for column in cursor[1:]), cursor
    mem.settle(step)
    mem.end([rows[0], rows[2], again])
    mem.submit()
    mem.poll()
    mem.audit().raise_if_leaking()
    assert [each.cache.pool.claimed for each in mem.tiers.host.sets] == [0, 0]


@pytest.mark.parametrize(("rows", "records"), [(FILLED, 1), (ROWS, 0)])
def test_memory_of_rows_that_starts_with_a_value_is_kept(rows: ms.StateLayout, records: int) -> None:
    """A plane with `fill` has what a step put there. A tail without pending tokens is empty, so nothing is copied."""
    mem = tailed(rows, tail=2 * (rows is ROWS))
    (row,) = mem.admit([ms.Request("a", 20)])
    mem.settle(mem.plan([row], 3))
    plane = mem.planes.rows[rows.planes[0].name]
    plane[:, row.index] = 5
    (parked,) = mem.park([row])
    assert mem.tiers.host.of_rows.cache.pool.claimed == records
    mem.submit()
    plane.fill_(-1)
    (row,) = mem.admit([ms.Request("b", 20, resume=parked)])
    mem.submit()
    assert (plane[:, row.index] == 5).all() or not records
    mem.audit().raise_if_leaking()
