"""Audits with a prefix cache and sessions: every owner has a name, a leak has none."""

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support import owners
from tests.support.planes import every_snapshot, every_strategy
from tests.support.talks import TEXT, Talks

OTHER = [70 + token for token in TEXT]


def busy(backend: Backend, name: str = "redirect") -> tuple[Talks, ms.Row, ms.Session]:
    """Returns chats with a running row, a cached state of 8 tokens, and two idle sessions: `a`, with 9 tokens, and
    ('b', 1), with 3. Prompts of sessions have one token, so that the states of their answers are in lanes.
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


@every_snapshot
def test_M20_a_row_that_decodes_supersedes_the_last_state_that_it_left(backend: Backend, name: str) -> None:
    """The superseded state is evicted before older states of others, unless another request has gone on from it."""
    talks = Talks(backend, name, prefix=ms.Prefix(states=ms.policies.Lru()))
    talks.whole(OTHER[:8], prompt=1)  # this state is older than the states below
    row = talks.turn(TEXT[:1])
    for length in (5, 9, 13):
        talks.run(row, TEXT[:length])
        talks.mem.publish([row], keep="cache", tokens=[TEXT[:length]])
        if length == 9:
            talks.mem.end([talks.turn([*TEXT[:8], 60])])  # this request goes on from the state of 8
    assert talks.cached() == [4, 8, 8, 12]
    assert talks.mem.prefix.evict_states(1) == 1 and talks.cached() == [8, 8, 12]
    assert talks.mem.prefix.evict_states(1) == 1 and talks.cached() == [8, 12]
    assert [talks.mem.match([*text, 1]).length for text in (OTHER, TEXT)] == [0, 12]
    talks.end(row)
    talks.look()
