"""Audits beside a prefix cache and sessions: every owner has a name, a leak has none."""

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.slots.test_audit import nothing_but
from tests.support import inside, owners
from tests.support.planes import both_orders, every_snapshot, every_strategy
from tests.support.scan import scan_registers
from tests.support.talks import TEXT, Talks

pytestmark = pytest.mark.sample(interpreter=0)  # the same host code on every backend
OTHER = [70 + token for token in TEXT]


def busy(backend: Backend, name: str = "redirect") -> tuple[Talks, ms.Row, ms.Session]:
    """A row that runs, a cached state of 8 tokens, and idle sessions `a`, of 9 tokens, and ('b', 1), of 3.

    They are prompts of one token and answers, so that their states are in lanes.
    """
    talks = Talks(backend, name)
    first, second = talks.mem.sessions.open("a"), talks.mem.sessions.open(("b", 1))
    talks.whole([50 + token for token in TEXT[:9]], first, prompt=1)
    talks.whole([90, 91, 92], second, prompt=1)
    talks.whole(TEXT[:8], prompt=1)
    row = talks.turn(TEXT)
    talks.run(row, TEXT[:9])
    talks.mem.submit()
    return talks, row, first


@every_strategy
def test_B74_slots_of_idle_sessions_are_owned_by_name(backend: Backend, name: str) -> None:
    talks, row, session = busy(backend, name)
    mem = talks.mem
    lanes = {"none": 0, "ping-pong": 2}.get(name, 1)
    first = ["session 'a' (9 tokens)", "session 'a' (8 tokens)", "session 'a' (4 tokens)"][: 1 + lanes]
    second = ["session ('b', 1) (3 tokens)"]
    kinds = mem.audit().owned_by_kind
    assert (kinds["session"], kinds["cached"]) == (len(first + second), 1)
    sessions = [owner for kind, owner in mem._reports.owners().values() if kind == "session"]
    assert sorted(sessions) == sorted(first + second)
    assert [owner for kind, owner in mem._reports.owners().values() if kind == "cached"] == [
        f"cached prefix of 8 tokens in register {next(iter(owners.nodes(mem.prefix)))}"
    ]
    turn = talks.turn([50 + token for token in TEXT], session)
    kinds = mem.audit().owned_by_kind
    assert kinds["session"] == len(second) and kinds["live"] == 2
    assert mem._reports.owners()[3 * turn.index] == ("live", f"row {turn.index} (request 'talk') live")
    mem.end([turn, row])
    mem.sessions.close(session)
    assert mem.audit().owned_by_kind == {"session": len(second), "cached": 1}
    assert str(mem.audit()).startswith(f"24 slots: {23 - len(second)} free, owned: ")


@every_strategy
@both_orders
def test_B74_a_turn_leaves_nothing_of_the_turns_before_it(backend: Backend, name: str, overlap: bool) -> None:
    """Without publications a conversation holds what one row holds, however long it gets."""
    talks = Talks(backend, name, overlap)
    session = talks.mem.sessions.open("a")
    text: list[int] = []
    for turn in range(5):
        known = len(text) + 1
        text += [turn, 1, 2, 3, 4][: 3 + turn % 3]
        talks.whole(text, session, prompt=known)
        held = 24 - talks.mem.free_slots
        assert held == len(talks.kept(session)) <= talks.mem.tracking.most_slots(overlap)
        assert talks.kept(session)[0] == len(text)
        assert len(owners.session(talks.mem, session).pages) == (len(text) + 1) // 2 == 80 - talks.mem.free_pages
    assert talks.all_free()


@every_snapshot
def test_B74_a_newer_turn_supersedes_the_conversations_older_snapshots(backend: Backend, name: str) -> None:
    """They go before those of others, though these are older; but not what somebody else has gone on from."""
    talks = Talks(backend, name, prefix=ms.Prefix(states=ms.policies.Lru()))
    mem, session = talks.mem, talks.mem.sessions.open("a")
    others = [OTHER, [90 + token for token in TEXT]]
    for other in others:
        talks.whole(other[:8], prompt=1)  # older than what follows
    talks.whole(TEXT[:13], session, prompt=1, publish=True)
    assert sorted(owners.states(mem)[at].length for at in owners.nodes(mem.prefix)) == [4, 8, 8, 8, 12]
    mem.end([talks.turn([*TEXT[:8], 60])])  # which goes on from 8
    talks.whole(TEXT, session)
    assert mem.prefix.evict_states(2) == 2
    assert [mem.match([*text, 1]).length for text in (*others, TEXT, TEXT[:7])] == [8, 8, 8, 0]
    assert talks.all_free()


@every_snapshot
def test_M20_a_row_that_decodes_supersedes_the_last_state_that_it_left(backend: Backend, name: str) -> None:
    """It goes before those of others, though these are older; but not what somebody else has gone on from."""
    talks = Talks(backend, name, prefix=ms.Prefix(states=ms.policies.Lru()))
    talks.whole(OTHER[:8], prompt=1)  # older than what follows
    row = talks.turn(TEXT[:1])
    for length in (5, 9, 13):
        talks.run(row, TEXT[:length])
        talks.mem.publish([row], keep="cache", tokens=[TEXT[:length]])
        if length == 9:
            talks.mem.end([talks.turn([*TEXT[:8], 60])])  # which goes on from 8
    assert talks.cached() == [4, 8, 8, 12]
    assert talks.mem.prefix.evict_states(1) == 1 and talks.cached() == [8, 8, 12]
    assert talks.mem.prefix.evict_states(1) == 1 and talks.cached() == [8, 12]
    assert [talks.mem.match([*text, 1]).length for text in (OTHER, TEXT)] == [0, 12]
    talks.end(row)
    talks.look()


def aborted(backend: Backend) -> tuple[Talks, ms.Session]:
    """A session that is back at 8 tokens, after a turn from 9 to 13 that left a cached state of 12 and was aborted."""
    talks = Talks(backend, "ping-pong", prefix=ms.Prefix(states=ms.policies.Lru()))
    session = talks.mem.sessions.open("a")
    talks.whole(OTHER[:8], prompt=1)
    talks.whole(TEXT[:9], session, prompt=1)
    row = talks.turn(TEXT[:10], session)
    talks.run(row, TEXT[:13])
    talks.mem.publish([row], keep="cache", tokens=[TEXT[:13]])
    talks.mem.end([row])
    assert talks.kept(session) == [8] and talks.mem.match(TEXT).length == 12
    return talks, session


def test_B74_a_session_that_went_back_supersedes_nothing_longer(backend: Backend) -> None:
    talks, _ = aborted(backend)
    assert talks.mem.prefix.evict_states(1) == 1
    assert (talks.mem.match(TEXT).length, talks.mem.match(OTHER).length) == (12, 0)


def test_B74_turns_that_go_on_from_the_cache_supersede_too(backend: Backend) -> None:
    """With a step in flight and its snapshots published, a turn may leave the session itself with nothing."""
    talks = Talks(backend, "redirect", prefix=ms.Prefix(states=ms.policies.Lru()))
    session = talks.mem.sessions.open("a")
    talks.whole(OTHER[:8], prompt=1)
    assert talks.whole(TEXT[:9], session, prompt=1, publish=True, dead=True) == 0
    assert talks.kept(session) == [] and talks.whole(TEXT[:12], session, prompt=9, publish=True, dead=True) == 8
    assert talks.kept(session) == [12] and talks.cached() == [4, 8, 8]  # one of them is not its own
    assert talks.mem.prefix.evict_states(2) == 2 and talks.mem.match(OTHER).length == 8


def test_B74_an_aborted_turn_keeps_no_pages_from_being_evicted(backend: Backend) -> None:
    """The session shares the pages of 8 tokens, and keeps those of 12."""
    talks, session = aborted(backend)
    assert len(owners.session(talks.mem, session).pages) == 4
    assert talks.mem.prefix.tree.leased_pages == 4 and talks.mem.prefix.evictable_pages == 4 + 2


def registers(talks: Talks, row: ms.Row, session: ms.Session) -> dict[str, tuple[int, str]]:
    """A register of each kind of owner, and its name."""
    kept, cached = owners.session(talks.mem, session).kept[0].register, next(iter(owners.nodes(talks.mem.prefix)))
    return {
        "row": (3 * row.index, f"row {row.index} (request 'talk') live"),
        "cached": (cached, f"cached prefix of 8 tokens in register {cached}"),
        "session": (kept, "session 'a' (9 tokens)"),
    }


@pytest.mark.parametrize("owner", ["row", "cached", "session"])
def test_B75_what_is_emptied_or_taken_by_hand_is_named_and_nothing_else(backend: Backend, owner: str) -> None:
    talks, row, session = busy(backend)
    nothing_but(talks.mem.audit())
    register, name = registers(talks, row, session)[owner]
    slots = inside.registers(talks.mem).table.slots
    taken, held = int(talks.mem.pool.claim(1)[0]), int(slots[register])
    nothing_but(talks.mem.audit(), leaked=[taken])
    slots[register] = 0
    nothing_but(talks.mem.audit(), leaked=sorted([taken, held]), lost=[name])
    slots[register] = held
    talks.mem.pool.release([taken])
    nothing_but(talks.mem.audit())
    talks.look()


@pytest.mark.parametrize("pair", [("row", "cached"), ("row", "session"), ("session", "cached"), ("cached", "row")])
def test_B76_a_slot_planted_in_two_registers_is_named_with_both(backend: Backend, pair: tuple[str, str]) -> None:
    """The first one's slot is planted with the second; what that had is a leak."""
    talks, row, session = busy(backend)
    (one, one_name), (other, other_name) = (registers(talks, row, session)[owner] for owner in pair)
    slots = inside.registers(talks.mem).table.slots
    planted, gone = int(slots[one]), int(slots[other])
    slots[other] = planted
    names = [name for _, name in sorted([(one, one_name), (other, other_name)])]
    report = talks.mem.audit()
    nothing_but(report, leaked=[gone], double_owned={planted: names})
    said = f"slot {planted} has 2 owners: {names[0]}, {names[1]}"
    assert said in str(report) and report.faults == [f"slot {gone} leaked: not free and not owned", said]
    assert talks.mem.inspect().faults == report.faults
    slots[other] = gone
    talks.look()


@every_strategy
@both_orders
def test_B77_whatever_is_under_way_is_no_leak(backend: Backend, name: str, overlap: bool) -> None:
    """After every call: requests that run, unsettled steps, groups, cached states, marks, pins, sessions, turns."""
    talks = Talks(backend, name, overlap)
    mem, session = talks.mem, talks.mem.sessions.open("a")
    kinds: set[str] = set()

    def look(value: object = None) -> object:
        report = mem.audit()
        nothing_but(report)
        assert scan_registers(inside.registers(mem)).problems == [] and "unknown" not in report.owned_by_kind
        assert sum(report.owned_by_kind.values()) + report.free == report.capacity
        kinds.update(report.owned_by_kind)
        return value

    look(talks.whole(TEXT[:9], session))
    with mem.pool.allocator.group(2):
        reader = talks.turn(TEXT[:4])
        talks.run(reader, TEXT[:4])
        look(talks.end(reader))
        (reader,) = look(mem.admit([ms.Request("reader", tokens=TEXT)]))  # type: ignore[misc]
        look(mem.prefix.evict_states(5))  # under Redirect the reader's is pinned
        turn = look(talks.turn(TEXT[:10], session))
        talks.fed[reader] = TEXT[: mem.info(reader).length]
        rows = [turn, reader]
        for n in range(5):
            step = look(talks.feed(rows, [[TEXT[mem.info(row).length]] for row in rows]))
            look(None if overlap else mem.settle(step))
            look(mem.settle(step) if overlap else None)
            look(mem.publish(rows, keep="cache", tokens=[talks.fed[row] for row in rows]) if n % 2 == 0 else None)
    step = talks.feed(rows, [[TEXT[mem.info(row).length]] for row in rows])
    look(mem.end([turn], keep="cache", tokens=[talks.known(turn)]))
    look(mem.end([reader]))
    look(mem.settle(step))
    look(mem.sessions.close(session))
    assert kinds == {"live", "cached", "session", "group"} | (set() if name == "none" else {"lane", "mark"})
    assert talks.all_free()
