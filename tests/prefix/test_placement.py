"""Lengths at which the default placement keeps states, and where the turns of chats then start."""

import random
from math import lcm
from typing import Any

import pytest

import memstate as ms
from memstate.prefix.match import Match
from memstate.prefix.placement import Ends
from tests.proof.stateful.script import Play, script

CASES: dict[str, Any] = {  # tokens, length, KV length, evicted tokens, page size, placement, expected: length -> kind
    "a new prompt": (29, 0, 0, 0, 8, Ends(None), {24: "prompt"}),
    "whole pages": (24, 0, 0, 0, 8, Ends(None), {16: "prompt"}),
    "one page": (8, 0, 0, 0, 8, Ends(None), {}),
    "a page of one token": (29, 0, 0, 0, 1, Ends(None), {28: "prompt"}),
    "a branch point, and an evicted state": (29, 0, 16, 8, 8, Ends(None), {8: "again", 16: "branch", 24: "prompt"}),
    "a long prompt": (42, 0, 0, 0, 8, Ends(16), {16: "every", 32: "every", 40: "prompt"}),
    "no whole pages apart": (42, 0, 0, 0, 8, Ends(10), {16: "every", 32: "every", 40: "prompt"}),
    "as long as two such": (32, 0, 0, 0, 8, Ends(16), {16: "every", 24: "prompt"}),
    "behind a hit": (42, 24, 24, 24, 8, Ends(16), {32: "every", 40: "prompt"}),
    "8 tokens to spare": (42, 0, 0, 0, 8, Ends(None, spare=8), {32: "prompt"}),
    "on the page": (40, 0, 0, 0, 8, Ends(None, 8), {32: "prompt"}),
    "one token off it": (39, 0, 0, 0, 8, Ends(None, 8), {24: "prompt"}),
    "a page of one token, 8 to spare": (29, 0, 0, 0, 1, Ends(None, 8), {21: "prompt"}),
    "as many as the prompt has": (8, 0, 0, 0, 1, Ends(1, 8), {}),
    "more than the prompt has": (20, 0, 0, 0, 1, Ends(1, 21), {}),
    "every so many up to there": (42, 0, 0, 0, 8, Ends(16, 11), {16: "every", 24: "prompt"}),
    "a branch point behind it": (42, 0, 40, 0, 8, Ends(None, 8), {32: "prompt", 40: "branch"}),
    "of a grid of all planes": (42, 0, 0, 0, 24, Ends(None, 8), {24: "prompt"}),
}


@pytest.mark.parametrize("case", CASES)
def test_M15_states_are_placed_at_ends_branch_points_and_now_and_then(case: str) -> None:
    tokens, length, kv, evicted, page, ends, expected = CASES[case]
    marks = ends.marks(Match(tokens, length, kv, evicted), page)
    assert {at: kind for at, kind in sorted(marks.items()) if at > length} == expected and min(marks) >= 0


@pytest.mark.parametrize("name", ["every", "spare"])
def test_what_is_no_number_of_tokens_is_refused(name: str) -> None:
    for wrong in (0, -1, 1.5, True, "8", 2**31, *([None] if name == "spare" else [])):
        with pytest.raises(ms.ConfigurationError, match=rf"^Ends\(.*{name}=.*\): .*expected a whole number of tokens"):
            Ends(**{name: wrong})


GIVES: tuple[dict[str, object], ...] = ({"grid": 0}, {"grid": 1}, {"grid": 8}, {"grid": 8, "packed": True})
PAGES = tuple({"page_size": page, "seed": seed} for page, seed in ((4, 1), (8, 2), (16, 5)))
CHATS = {"strategy": "redirect", "prefix": True, "every": 64, "slots": 60, "pages": 300, "pages_per_row": 40}


@script(**CHATS, gives=GIVES, of=PAGES, spare=(1, 5, 8))
def test_M15_turns_that_leave_the_end_of_a_prompt_out_start_near_where_they_part(play: Play) -> None:
    """The last 5 tokens of a prompt are missing in the next turn. A repeated prompt still starts near its end."""
    spare, page, draw, early = play.spare, play.page_size, random.Random(play.seed), 0
    unit = lcm(page, 8) if play.settings.grid == 8 and not play.settings.packed else page
    text, parting = [draw.randrange(50) for _ in range(20)], 0
    for turn in range(5):
        text += [draw.randrange(50) for _ in range(draw.randrange(1, 15))]
        prompt = [*text, *range(90, 95)]  # the template adds tokens before the thoughts
        (row,) = play.admit(prompt)
        early += turn > 0 and play.mem.info(row).length <= parting - max(0, spare - 5) - unit
        play.run(row, [*prompt, 1, 2], most=1000)
        play.end(row)
        parting = len(text)
        text += [60 + turn, *(draw.randrange(50) for _ in range(draw.randrange(12)))]  # an answer, without thoughts
    if spare < 5:
        play.reached(early=early)
    else:
        assert not early
    same = [60 + n % 7 for n in range(60 + play.seed)]
    play.turn([*same, 1], prompt=len(same), most=1000)
    (row,) = play.admit(same)
    assert play.mem.info(row).length > len(same) - spare - unit
