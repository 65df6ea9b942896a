"""Turns that part from the last answer: states that a session keeps then, and hits of six chats.

Snapshots every 4 tokens, pages of 2.
"""

from functools import cache

import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import OPS, Backend
from tests.proof.stateful.script import Play, script
from tests.support import owners
from tests.support.chats import TOOLS, Template, Words, agent, chat, interleaved, system

ASKED, ANSWER = list(range(1, 6)), list(range(50, 58))
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


PARTS = {"strategy": "redirect", "prefix": True}


def answered(play: Play, turns: int = 1) -> tuple[ms.Session, list[int]]:
    """Returns a session of some turns, and its last prompt. Each turn except the first parts from the answer before."""
    (a,), prompt = play.open("a"), list(ASKED)
    for turn in range(turns):
        play.turn([*prompt, *(token + 10 * turn for token in ANSWER)], a, prompt=len(prompt))
        prompt += [90 + turn] * 4
    return a, prompt[:-4]


@script(**PARTS)
def test_S14_after_two_partings_the_cache_keeps_what_a_turn_leaves(play: Play) -> None:
    """The states at the start of the turn and at the end of its prompt stay; its other states are evicted first."""
    a, prompt = answered(play, 2)
    play.turn([*prompt, 91, 91, 91, 91, *ANSWER], a, prompt=13)
    play.reached(parted=play.mem.stats().sessions_parted, superseded=play.mem.prefix.superseded_states)
    play.evict(states=2)
    play.turn([*prompt, 7, 8], a)


@script(**PARTS)
def test_S14_a_turn_that_goes_on_ends_it(play: Play) -> None:
    a, prompt = answered(play, 3)
    said = [*prompt, *(token + 20 for token in ANSWER)]
    play.turn([*said, 7, 8], a, prompt=len(said) + 1)
    play.reached("hit_tokens")


@script(**PARTS, turns=(2, 3), at=("again", "shorter", "aborted"))
def test_S14_a_turn_without_a_word_of_its_own_is_neither(play: Play) -> None:
    """The client wants another answer: it sends the same prompt, its beginning, or a prompt after an aborted turn.

    Such a turn leaves the session's count of partings as it is: it adds nothing and does not reset the count.
    """
    a, prompt = answered(play, play.turns)
    if play.at == "aborted":
        play.end(*play.admit([*prompt, *ANSWER[:1], 7, 8], sessions=[a]), how="release")
        play.turn([*prompt, *ANSWER], a, prompt=len(prompt))
    else:
        play.turn(prompt if play.at == "again" else prompt[:-2], a)
    play.reached("hit_tokens")


@script(**PARTS)
def test_S14_turns_without_an_answer_go_on_from_their_prompt(play: Play) -> None:
    """Turns may have no answer to go on from: a classifier answers with one token, which no step reads."""
    a, prompt = answered(play, 3)
    for more in ([7, 8], [7, 8], [7, 8, 9], [7, 8, 9, 10]):
        play.turn([*prompt, *more], a)
    play.reached("hit_tokens")


@script(**PARTS, slots=4)
def test_S14_an_aborted_turn_gives_back_what_it_began_with(play: Play) -> None:
    """Slots are short, so the row has taken over the cached state, which then has no other owner."""
    a, prompt = answered(play, 3)
    play.evict(states=play.mem.prefix.states - 1)
    others = play.admit(*[None] * play.mem.free_slots)
    (row,) = play.admit([*prompt, *range(170, 190)], sessions=[a])
    play.reached(taken_over=not play.mem.prefix.states)
    play.end(row, *others, how="release")
    play.turn([*prompt, *range(170, 176)], a)


@script(**PARTS)
def test_S14_a_session_forgets_states_that_were_evicted(play: Play) -> None:
    """It forgets them even after a single parting, which decides nothing, and even if turns bring no new tokens."""
    a, prompt = answered(play, 2)
    for shorter in (0, 2, 4):
        play.turn(prompt[: len(prompt) - shorter], a)
        play.evict(states=9)
    play.turn(prompt[:3], a)
    assert all(node.snapshot for node in owners.session(play.mem, a).own)
    play.reached("evicted_states", "hit_tokens")


@script(**PARTS, same=(1, 7))
def test_S14_a_turn_parts_where_no_state_of_the_answer_serves_it(play: Play) -> None:
    """A state may serve the next turn because all answers begin with the same token, or serve none because the next
    prompt changes the last tokens of an answer.
    """
    a, prompt = answered(play, 2)
    play.turn([*prompt, *(token + 10 for token in ANSWER[: play.same]), 7, 8], a)
    play.reached("hit_tokens")


@script(strategy="redirect", prefix=(False, True))
def test_S14_a_session_keeps_all_where_nothing_else_would(play: Play) -> None:
    answered(play, 4)


@script(**PARTS, slots=6)
def test_S14_one_parting_alone_supersedes_nothing(play: Play) -> None:
    """A single parting may be an edit, so the policy ranks the states of answers and prompts alike."""
    a, _ = answered(play, 2)
    play.rest(a)
    for _ in range(3):
        play.evict(states=1)
    play.reached("evicted_states", "hit_tokens")


@script(**PARTS)
def test_S14_what_was_left_under_another_salt_is_not_superseded(play: Play) -> None:
    a, prompt = answered(play, 3)
    play.turn(prompt, a, salt="other")
    for _ in range(6):
        play.evict(states=1)
    play.reached("evicted_states", "hit_tokens")


@script(strategy=("ping-pong", "lazy", "redirect"), prefix=True)
def test_S14_a_state_that_another_uses_is_superseded_no_longer(play: Play) -> None:
    (a,) = play.open("a")
    text = list(range(1, 16))
    play.turn(text[:9], a)
    play.turn(text, a)
    play.turn([*text[:8], 99, 98])
    play.turn([77] * 9)
    for _ in range(8):
        play.evict(states=1)
    play.reached("evicted_states", "hit_tokens")


@script(**PARTS)
def test_S14_forks_part_like_what_they_come_from(play: Play) -> None:
    a, prompt = answered(play, 3)
    fork = play.fork_session(a)
    play.turn([*prompt, 7, *ANSWER], fork, prompt=len(prompt) + 1)
    play.turn([*prompt, 8, *ANSWER], a, prompt=len(prompt) + 1)
    play.reached("hit_tokens")


@pytest.mark.script
def test_S14_recover_keeps_the_count(backend: Backend) -> None:
    play = Play(backend, **PARTS)
    a, prompt = answered(play, 3)
    play.submit()
    play.mem.recover()
    (info,) = play.mem.sessions.infos()
    assert (info.session, info.parted, info.states) == (a, 2, 0) and play.mem.match([*prompt, 7]).length
