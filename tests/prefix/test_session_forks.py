"""Forked sessions: a conversation goes on in two ways from one state.

Snapshots every 4 tokens, pages of 2.
"""

from random import Random

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support.planes import every_strategy
from tests.support.talks import TEXT, Talks, told
from tests.support.ways import every_way_and_cache, with_and_without_cache


def forked(talks: Talks, session: ms.Session, name: str = "twin") -> ms.Session:
    """Forks a session, copies the KV of the page that is filled in part, and returns the fork."""
    free, pages = talks.mem.free_slots, talks.mem.free_pages
    twin, copies = talks.mem.sessions.fork(session, name)
    for new, old in copies:
        talks.kv[new] = talks.kv[old]
    assert talks.mem.free_slots == free and talks.mem.free_pages == pages - len(copies)
    assert talks.kept(twin) == talks.kept(session)[:1]
    talks.look()
    return twin


@every_way_and_cache
@pytest.mark.parametrize("first", [8, 9])
def test_S13_both_go_on_from_one_state_and_neither_sees_what_the_other_says(
    backend: Backend, name: str, overlap: bool, cache: bool, first: int
) -> None:
    for turns in ("a then twin", "twin then a"):
        talks, mem, session = told(backend, name, overlap, cache, first=first)
        twin = forked(talks, session)
        before = mem.stats().copied_bytes
        assert talks.whole([*TEXT[:first], 50, 51, 52, 53], session if turns[0] == "a" else twin) == first
        assert talks.whole([*TEXT[:first], 60, 61, 62], twin if turns[0] == "a" else session) == first
        assert name != "redirect" or mem.stats().copied_bytes == before  # other strategies copy anyway
        assert talks.whole([*TEXT[:first], 60, 61, 62, 1], twin if turns[0] == "a" else session) == first + 3
        assert talks.whole([*TEXT[:first], 50, 51, 52, 53, 1], session if turns[0] == "a" else twin) == first + 4


@every_strategy
@with_and_without_cache
def test_S13_turns_of_all_forks_begin_together(backend: Backend, name: str, cache: bool) -> None:
    talks, mem, session = told(backend, name, cache=cache, first=9)
    twins = [session, forked(talks, session)]
    twins.append(forked(talks, twins[1], "of a fork"))
    texts = [[*TEXT[:9], 50 + n, 51] for n in range(3)]
    rows = mem.admit([ms.Request("t", tokens=text, session=twin) for text, twin in zip(texts, twins, strict=True)])
    for row in rows:
        assert mem.info(row).length == 9
        talks.fed[row] = TEXT[:9]
    talks.look()
    for row, text in zip(rows, texts, strict=True):
        talks.run(row, text)
    talks.look()
    for row in rows:
        talks.end(row)
    talks.look()
    assert [talks.whole([*text, 1], twin) for text, twin in zip(texts, twins, strict=True)] == [11, 11, 11]


@with_and_without_cache
@pytest.mark.parametrize("which", [0, 1])
def test_S13_closing_one_leaves_the_other(backend: Backend, cache: bool, which: int) -> None:
    talks, mem, session = told(backend, "redirect", cache=cache, first=9)
    both = [session, forked(talks, session)]
    mem.sessions.close(both.pop(which))
    talks.look()
    assert talks.kept(both[0])[0] == 9
    moved = mem.stats().copied_bytes
    assert talks.whole([*TEXT[:9], 50, 51], both[0]) == 9
    assert mem.stats().copied_bytes == moved
    mem.sessions.close(both[0])
    talks.look()


@every_strategy
@with_and_without_cache
def test_S13_forks_make_way_together_where_others_need_the_room(backend: Backend, name: str, cache: bool) -> None:
    talks, mem, session = told(backend, name, cache=cache, first=9, slots=6, pages=24, rows=3)
    twin = forked(talks, session)
    rows = []
    while True:
        try:
            rows.append(talks.turn([100 + len(rows)] * 5))
        except (ms.OutOfSlots, ms.OutOfRows):
            break
        talks.look()
    for row in rows:
        talks.run(row, talks.fed[row])
        mem.end([row])
    talks.look()
    for one, new in ((session, 50), (twin, 60)):
        assert talks.whole([*TEXT[:9], new], one) in (0, 4, 8, 9)


def test_S13_a_state_that_a_row_is_about_to_read_makes_no_room(backend: Backend) -> None:
    talks, mem, session = told(backend, "redirect", cache=False, first=9, slots=3, rows=3)
    twin = forked(talks, session)
    row = talks.turn([*TEXT[:9], 50], session)
    rows = mem.admit([ms.Request("other")] * mem.free_slots)
    with pytest.raises(ms.OutOfSlots):
        mem.admit([ms.Request("one more")])
    assert talks.kept(twin) == [9]
    mem.end(rows)
    talks.run(row, [*TEXT[:9], 50])
    talks.end(row)
    talks.look()
    assert talks.whole([*TEXT[:9], 60], twin) == 9


@pytest.mark.parametrize("seed", range(12))
def test_S13_forks_at_random_have_their_own_states_and_nothing_is_lost(backend: Backend, seed: int) -> None:
    random = Random(seed)
    name, cache = random.choice(["redirect", "ping-pong", "lazy", "none"]), random.random() < 0.7
    talks = Talks(backend, name, random.random() < 0.5, cache, slots=random.choice([4, 6, 10]), pages=60)
    texts = {talks.mem.sessions.open("a"): [1]}
    for at in range(60):
        session = random.choice([*texts])
        match random.choice(["turn", "turn", "turn", "edit", "fork", "close", "both", "recover"]):
            case "turn":
                texts[session] = [*texts[session], *(1000 + at * 10 + n for n in range(random.randint(1, 4)))]
                texts[session] = texts[session][:40]
                talks.whole(texts[session], session)
            case "edit":
                texts[session] = [*texts[session][: random.randint(1, len(texts[session]))], 1000 + at * 10]
                talks.whole(texts[session], session)
            case "fork" if len(texts) < 5:
                texts[forked(talks, session, f"fork {at}")] = texts[session]
            case "close" if len(texts) > 1:
                talks.mem.sessions.close(session)
                del texts[session]
            case "both" if len(texts) > 1 and name != "ping-pong":
                two = random.sample([*texts], 2)
                try:
                    rows = talks.mem.admit(
                        [ms.Request("t", tokens=[*texts[one], 1000 + at * 10], session=one) for one in two]
                    )
                except ms.OutOfSlots:
                    continue
                for row, one in zip(rows, two, strict=True):
                    talks.fed[row] = texts[one][: talks.mem.info(row).length]
                talks.look()
                talks.mem.end(rows)  # aborted: the sessions keep the older states that registers still hold
            case "recover" if random.random() < 0.3:
                talks.mem.recover()
        talks.look()
    for session in texts:
        talks.mem.sessions.close(session)


def test_S13_forks_outlive_a_recovery(backend: Backend) -> None:
    talks, mem, session = told(backend, "redirect", first=9)
    twin = forked(talks, session)
    mem.recover()
    assert mem.audit().clean and (talks.kept(session)[0], talks.kept(twin)) == (9, [9])
    assert talks.whole([*TEXT[:9], 50], session) == talks.whole([*TEXT[:9], 60], twin) == 9


def test_S13_what_cannot_be_forked_is_refused_and_changes_nothing(backend: Backend) -> None:
    talks, mem, session = told(backend, "redirect", first=9, pages=10)
    with pytest.raises(ms.InvalidArgument, match="session"):
        mem.sessions.fork(session, ["a"])  # type: ignore[arg-type]
    row = talks.turn([*TEXT[:9], 1], session)
    with pytest.raises(ms.InvalidArgument, match="turn running"):
        mem.sessions.fork(session, "b")
    talks.run(row, [*TEXT[:9], 1, 2])
    talks.end(row)
    held = mem.admit([ms.Request("held", length=2 * mem.free_pages)])
    with pytest.raises(ms.OutOfPages):
        mem.sessions.fork(session, "b")
    assert len(mem.sessions.infos()) == 1 and talks.kept(session)[0] == 11
    mem.end(held)
    mem.sessions.close(session)
    with pytest.raises(ms.StaleHandle, match="closed"):
        mem.sessions.fork(session, "b")
    empty = mem.sessions.open("empty")
    twin, copies = mem.sessions.fork(empty, "twin of nothing")
    assert copies == [] and talks.whole(TEXT[:3], twin) in (0, 2)
    mem.sessions.close(empty)
    talks.look()
