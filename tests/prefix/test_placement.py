"""At which lengths the default placement keeps states."""

import pytest

from memstate.prefix.match import Match
from memstate.prefix.placement import Ends

CASES = {  # tokens, length, KV, evicted, page, every: lengths with their kinds
    "a new prompt": (29, 0, 0, 0, 8, None, {24: "prompt"}),
    "whole pages": (24, 0, 0, 0, 8, None, {16: "prompt"}),
    "one page": (8, 0, 0, 0, 8, None, {}),
    "a page of one token": (29, 0, 0, 0, 1, None, {28: "prompt"}),
    "a branch point, and a state that was evicted": (29, 0, 16, 8, 8, None, {8: "again", 16: "branch", 24: "prompt"}),
    "a long prompt": (42, 0, 0, 0, 8, 16, {16: "every", 32: "every", 40: "prompt"}),
    "no whole pages apart": (42, 0, 0, 0, 8, 10, {16: "every", 32: "every", 40: "prompt"}),
    "as long as two such": (32, 0, 0, 0, 8, 16, {16: "every", 24: "prompt"}),
    "behind a hit": (42, 24, 24, 24, 8, 16, {32: "every", 40: "prompt"}),
}


@pytest.mark.parametrize("case", CASES)
def test_M15_states_are_placed_at_ends_branch_points_and_now_and_then(case: str) -> None:
    tokens, length, kv, evicted, page, every, expected = CASES[case]
    found = Ends(every).marks(Match(tokens, length, kv, evicted), page)
    assert {at: kind for at, kind in sorted(found.items()) if at > length} == expected
