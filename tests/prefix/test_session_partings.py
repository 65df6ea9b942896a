"""Turns that part from the last answer: states that a session keeps then, and hits of six chats.

Snapshots every 4 tokens, pages of 2.
"""

from functools import cache
from typing import Any

import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import OPS, Backend
from tests.support import owners
from tests.support.chats import TOOLS, Template, Words, agent, chat, interleaved, system
from tests.support.talks import TEXT, Talks
from tests.support.ways import with_and_without_cache

ASKED, ANSWER = TEXT[:5], list(range(50, 58))
Talk = list[tuple[list[int], list[int]]]


@cache
def rendered(name: str, thinks: bool, agents: bool) -> list[Talk]:
    """Returns six conversations under two system prompts, as tokens."""
    template, told = Template(name, Words()), [system(0), system(1)]
    if agents:
        turns = [agent(("agent", n), told=told[n % 2], thinks=thinks) for n in range(6)]
        return [template.conversation(each, tools=TOOLS) for each in turns]
    return [template.conversation(chat(("chat", n), told=told[n % 2], thinks=thinks)) for n in range(6)]


def hits(talks: list[Talk], slots: int, sessions: bool, every: int = 16) -> int:
    """Returns how many prompt tokens are hits when six clients take turns. The forward computes nothing."""
    turns = [turn for talk in talks for turn in talk]
    longest, pages = max(len(p) + len(a) for p, a in turns), sum(len(p) + len(a) for p, a in turns) // 16 + 200
    mem = ms.StateManager(
        ms.StateLayout((ms.Plane("s", (1,), torch.float32),), layers=1), slots=slots, max_requests=1,
        tracking=ms.Redirect(every), pages=ms.Pages(size=16, count=pages, per_row=longest // 16 + 2),
        prefix=ms.Prefix(), forward=ms.Forward(grid=1), backend="reference",
    )  # fmt: skip
    for op in OPS:
        setattr(mem.backend, op, lambda *_: None)
    opened, hit = [mem.sessions.open(n) if sessions else None for n in range(6)], 0
    for n, (prompt, answer) in interleaved(talks):
        tokens = prompt + answer
        (row,) = mem.admit([ms.Request(n, tokens=prompt, length=len(tokens), session=opened[n])])
        at = mem.info(row).length
        hit += at
        while at < len(tokens):
            chunk = mem.chunk(row, len(prompt) - at) if at < len(prompt) else min(16 - at % 16, len(tokens) - at)
            mem.settle(mem.plan([row], chunk if at < len(prompt) else [chunk]))
            at = mem.info(row).length
        mem.end([row], keep="cache", tokens=[tokens])
    return hit


def part_of(talks: list[Talk]) -> float:
    return 1 / sum(len(prompt) for talk in talks for prompt, _ in talk)


@pytest.mark.parametrize(("name", "thinks"), [("opens", True), ("thinks", True), ("shut", True), ("thinks", False)])
def test_S14_six_chats_that_drop_thoughts_hit_at_least_as_with_a_cache_alone(name: str, thinks: bool) -> None:
    """Prompts part 0 to 4 tokens before the end of the last prompt.

    If sessions kept the answers, only 40 % would hit.
    """
    talks = rendered(name, thinks, agents=False)
    hit = hits(talks, 16, sessions=True)
    assert hit * part_of(talks) > 0.65 and hit >= hits(talks, 16, sessions=False)


@pytest.mark.parametrize("slots", [16, 20, 30])
def test_S14_prompts_that_part_a_page_early_hit_at_least_as_with_a_cache_alone(slots: int) -> None:
    talks = rendered("long", True, agents=False)
    assert hits(talks, slots, sessions=True) >= hits(talks, slots, sessions=False)


@pytest.mark.parametrize(
    ("agents", "name", "thinks", "expected"),
    [
        (False, "plain", False, {16: 39_829, 20: 39_829, 30: 40_181}),
        (True, "plain", False, {16: 318_157, 20: 318_157, 30: 318_509}),
        (True, "loops", True, {20: 253_648, 30: 257_632}),  # 245 152 and 247 664 if the first prompts were superseded
    ],
    ids=["chats", "agents", "thoughts for a loop"],
)
def test_S14_what_goes_on_from_its_answers_hits_them(
    agents: bool, name: str, thinks: bool, expected: dict[int, int]
) -> None:
    talks = rendered(name, thinks, agents)
    assert {slots: hits(talks, slots, sessions=True) for slots in expected} == expected


@pytest.mark.parametrize(
    ("name", "slots", "sessions", "gain"),
    [
        ("plain", 24, False, 3_264),  # prompts repeat the answers unchanged
        ("plain", 24, True, 0),  # a session keeps the end of an answer, at any length
        ("loops", 12, True, -4_417),  # the state takes a slot, and prompts lack the answer's thoughts
    ],
)
def test_states_at_each_page_of_answers_pay_where_no_session_keeps_their_ends(
    name: str, slots: int, sessions: bool, gain: int
) -> None:
    """Compares hits with the `every` that docs/transformers.md advises, and with the default of 256."""
    talks = rendered(name, name == "loops", agents=name == "loops")
    assert hits(talks, slots, sessions) - hits(talks, slots, sessions, every=256) == gain


def answered(backend: Backend, turns: int = 1, **more: Any) -> tuple[Talks, ms.Session, list[int]]:
    """Returns chats, one session of these chats, and the last prompt of this session.

    Every turn of the session except the first has parted from the answer before it.
    """
    talks = Talks(backend, "redirect", overlap=False, **more)
    session, prompt = talks.mem.sessions.open("a"), list(ASKED)
    for turn in range(turns):
        assert parted(talks, session) == max(0, turn - 1)
        talks.whole([*prompt, *(token + 10 * turn for token in ANSWER)], session, prompt=len(prompt))
        prompt += [90 + turn] * 4
    return talks, session, prompt[:-4]


def parted(talks: Talks, session: ms.Session) -> int:
    return next(info.parted for info in talks.mem.sessions.infos() if info.session == session)


def test_S14_after_two_partings_the_cache_keeps_what_a_turn_leaves(backend: Backend) -> None:
    """The states at the start of the turn and at the end of its prompt stay; its other states are evicted first."""
    talks, session, prompt = answered(backend, 2)
    assert parted(talks, session) == 1 and talks.kept(session)[0] == 17 and talks.cached() == [4, 8]
    assert talks.whole([*prompt, 91, 91, 91, 91, *ANSWER], session, prompt=13) == 8
    assert parted(talks, session) == 2 and talks.kept(session) == [] and talks.cached() == [4, 8, 12, 20]
    assert talks.mem.stats().held_by_sessions == 0 and talks.mem.stats().sessions_parted == 2
    evicted = talks.mem.prefix.next_states(2)  # type: ignore[union-attr]
    assert sorted(node.end * 2 for node in evicted) == [4, 20]


def test_S14_a_turn_that_goes_on_ends_it(backend: Backend) -> None:
    talks, session, prompt = answered(backend, 3)
    said = [*prompt, *(token + 20 for token in ANSWER)]
    assert talks.kept(session) == [] and talks.whole([*said, 7, 8], session, prompt=len(said) + 1) == 20
    assert parted(talks, session) == 0 and talks.kept(session)[0] == len(said) + 2


@pytest.mark.parametrize("turns", [2, 3])
@pytest.mark.parametrize("how", ["again", "shorter", "aborted"])
def test_S14_a_turn_without_a_word_of_its_own_is_neither(backend: Backend, how: str, turns: int) -> None:
    """The client wants another answer: it sends the same prompt, its beginning, or a prompt after an aborted turn.

    Such a turn leaves the session's count of partings as it is: it adds nothing and does not reset the count.
    """
    talks, session, prompt = answered(backend, turns)
    if how == "aborted":
        talks.mem.end([talks.turn([*prompt, *ANSWER[:1], 7, 8], session)])
        before = parted(talks, session)
        talks.whole([*prompt, *ANSWER], session, prompt=len(prompt))
        assert parted(talks, session) == before
    else:
        talks.whole(prompt if how == "again" else prompt[:-2], session)
        assert parted(talks, session) == turns - 1


def test_S14_turns_without_an_answer_go_on_from_their_prompt(backend: Backend) -> None:
    """Turns may have no answer to go on from: a classifier answers with one token, which no step reads."""
    talks, session, prompt = answered(backend, 3)
    talks.whole([*prompt, 7, 8], session)
    assert parted(talks, session) == 3
    talks.whole([*prompt, 7, 8], session)
    assert parted(talks, session) == 3  # the client sends the same prompt again
    assert talks.whole([*prompt, 7, 8, 9], session) == 14 and parted(talks, session) == 0
    assert talks.whole([*prompt, 7, 8, 9, 10], session) == len(prompt) + 3


def test_S14_an_aborted_turn_gives_back_what_it_began_with(backend: Backend) -> None:
    """Slots are short, so the row has taken over the cached state, which then has no other owner."""
    talks, session, prompt = answered(backend, 3, slots=4)
    talks.mem.prefix.evict_states(talks.mem.prefix.states - 1)  # type: ignore[union-attr]
    (left,) = talks.cached()
    others = talks.mem.pool.claim(talks.mem.free_slots)
    row = talks.turn([*prompt, *range(170, 190)], session)
    assert talks.mem.info(row).length == left and talks.cached() == []
    talks.mem.end([row])
    assert talks.kept(session) == [left] and parted(talks, session) > 1
    talks.mem.pool.release(others)
    assert talks.whole([*prompt, *range(170, 176)], session) == left


def test_S14_a_session_forgets_states_that_were_evicted(backend: Backend) -> None:
    """It forgets them even after a single parting, which decides nothing, and even if turns bring no new tokens."""
    talks, session, prompt = answered(backend, 2)
    for shorter in (0, 2, 4):
        talks.whole(prompt[: len(prompt) - shorter], session)
        talks.mem.prefix.evict_states(9)  # type: ignore[union-attr]
    talks.whole(prompt[:3], session)
    assert parted(talks, session) == 1
    assert all(node.snapshot for node in owners.session(talks.mem, session).own)


@pytest.mark.parametrize(("same", "expected"), [(1, (2, 8)), (7, (0, 16))], ids=["its first token", "all but one"])
def test_S14_a_turn_parts_where_no_state_of_the_answer_serves_it(
    backend: Backend, same: int, expected: tuple[int, int]
) -> None:
    """A state may serve the next turn because all answers begin with the same token, or serve none because the next
    prompt changes the last tokens of an answer.
    """
    talks, session, prompt = answered(backend, 2)
    last = [token + 10 for token in ANSWER]
    start = talks.whole([*prompt, *last[:same], 7, 8], session)
    assert (parted(talks, session), start) == expected


@with_and_without_cache
def test_S14_a_session_keeps_all_where_nothing_else_would(backend: Backend, cache: bool) -> None:
    talks, session, _ = answered(backend, 4, cache=cache)
    assert parted(talks, session) == 3 and bool(talks.kept(session)) != cache


def test_S14_one_parting_alone_supersedes_nothing(backend: Backend) -> None:
    """A single parting may be an edit, so the policy ranks the states of answers and prompts alike."""
    talks, session, _ = answered(backend, 2, slots=6)
    talks.mem._parts.room.give_way(owners.session(talks.mem, session))
    assert talks.cached() == [4, 8, 16] and talks.mem.prefix.superseded_states == 0  # type: ignore[union-attr]


def test_S14_what_was_left_under_another_salt_is_not_superseded(backend: Backend) -> None:
    talks, session, prompt = answered(backend, 3)
    row = talks.turn(prompt, session, salt="other")
    assert parted(talks, session) == 3 and talks.mem.info(row).length == 0
    assert talks.cached() == [4, 8, 12, 20] and talks.mem.prefix.superseded_states == 2  # type: ignore[union-attr]


def test_S14_forks_part_like_what_they_come_from(backend: Backend) -> None:
    talks, session, prompt = answered(backend, 3)
    fork = talks.mem.sessions.fork(session, "b").session
    talks.whole([*prompt, 7, *ANSWER], fork, prompt=len(prompt) + 1)
    assert (parted(talks, session), parted(talks, fork)) == (2, 3) and not talks.kept(fork)


def test_S14_recover_keeps_the_count(backend: Backend) -> None:
    talks, session, prompt = answered(backend, 3)
    talks.mem.recover()
    assert parted(talks, session) == 2
    talks.whole([*prompt, *ANSWER], session, prompt=len(prompt))
    assert parted(talks, session) == 2 and not talks.kept(session)
