"""The host's rules of marks: which states of prompts a step keeps.

A wanted length is rounded down to a length that the forward can store, at least one page beyond the last kept state.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import memstate as ms
from memstate.requests.marks import RANKS, Mark, Marks, require_lengths
from tests.proof.stateful.script import ALL, Play, script


def marks(page: int = 1, grid: int = 0, packed: bool = False, direct_hits: bool = True) -> Marks:
    commands: Any = SimpleNamespace(registers=None)
    snapshots: Any = SimpleNamespace(drop=lambda snapshots: None)
    return Marks(commands, snapshots, page, grid, packed, direct_hits)


def due(of: Marks, *chunks: tuple[int, int], rows: list[int] | None = None) -> list[tuple[int, int]]:
    """Returns row and length of each mark of one step.

    `chunks` has for each row its lengths before and after the step; `rows` has the numbers of the rows.
    """
    kept = of.due(np.array(rows or range(1, len(chunks) + 1)), *(np.array(side) for side in zip(*chunks, strict=True)))
    assert all(mark.length == chunks[mark.entry][0] + mark.offset for mark in kept)
    return [(mark.row, mark.length) for mark in kept]


CASES: dict[str, tuple[dict[str, Any], list[int], list[tuple[int, int]], list[list[int]]]] = {
    # settings, wanted lengths, chunk of each step, lengths that each step keeps
    "300 tokens, a grid of 64": ({"page": 1, "grid": 64}, [300], [(0, 300), (300, 301)], [[], [300]]),
    "299 of 300": ({"page": 64, "grid": 64}, [256], [(0, 300)], [[256]]),
    "300 are no whole pages": ({"page": 4, "grid": 64}, [296], [(0, 300)], [[256]]),
    "63 tokens": ({"page": 1, "grid": 64}, [60], [(0, 63)], [[]]),
    "64 tokens end there": ({"page": 64, "grid": 64}, [64], [(0, 64), (64, 65)], [[], [64]]),
    "the grid starts with the chunk": ({"page": 4, "grid": 64}, [200], [(0, 20), (20, 300)], [[], [148]]),
    "pages of 128, a grid of 64": ({"page": 128, "grid": 64}, [128], [(0, 200)], [[128]]),
    "a grid that meets no page": ({"page": 64, "grid": 64}, [128], [(0, 20), (20, 200)], [[], []]),
    "a grid that meets one page in two": ({"page": 128, "grid": 64}, [256], [(64, 400)], [[256]]),
    "two floor to one": ({"page": 4, "grid": 64}, [120, 124], [(0, 200)], [[64]]),
    "less than a page more": ({"page": 8, "grid": 1}, [8, 16], [(0, 9), (9, 20)], [[8], [16]]),
    "a grid of 1 gives all": ({"page": 4, "grid": 1}, [4, 8, 16], [(0, 18)], [[4, 8, 16]]),
    "no grid, and chunks that end there": ({"page": 4}, [8, 12], [(0, 8), (8, 12), (12, 13)], [[], [8], [12]]),
    "no grid, and chunks beyond": ({"page": 4}, [8, 12], [(0, 9), (9, 13), (13, 14)], [[], [], []]),
    "soon after the end": ({"page": 4, "grid": 8}, [20], [(0, 16), (16, 30)], [[], [16]]),
    "later than a grid after the end": ({"page": 4, "grid": 8}, [24], [(0, 16), (16, 30)], [[], [24]]),
    "the end is no whole page": ({"page": 4, "grid": 8}, [20], [(0, 18), (18, 30)], [[16], []]),
    "stored in the step itself": ({"page": 4, "grid": 1, "direct_hits": False}, [8], [(0, 8), (8, 9)], [[8], []]),
    "one token": ({"page": 4, "grid": 1, "direct_hits": False}, [8], [(0, 7), (7, 8), (8, 9)], [[], [], [8]]),
}


@pytest.mark.parametrize("case", CASES)
def test_M1_a_wanted_length_moves_down_to_what_the_forward_can_give(case: str) -> None:
    settings, wanted, chunks, expected = CASES[case]
    of = marks(**settings)
    of.start(1, [(at, "named") for at in wanted], chunks[0][0])
    assert [[length for _, length in due(of, chunk)] for chunk in chunks] == expected
    assert not of._coming and not of._ends


def test_lengths_that_are_asked_for_later_join_those_that_are_wanted() -> None:
    of = marks(page=4)
    of.start(1, [(8, "named"), (16, "prompt")], 0, prompt=18)
    assert due(of, (0, 8)) == []
    of.add(1, [4, 8, 12, 16], length=8, prompt=18)
    assert of._coming[1].wanted == [(12, "named"), (16, "prompt")]
    assert [due(of, chunk) for chunk in ((8, 12), (12, 16), (16, 18))] == [[(1, 8)], [(1, 12)], [(1, 16)]]
    of.add(1, [16], length=18, prompt=18)  # the row has passed 16
    of.add(2, [8], length=3, prompt=9)  # the first wanted length of this row
    assert 1 not in of._coming and of.chunk(2, 3, 9, 9) == 8


def test_M22_chunks_end_at_marks_where_the_grid_may_begin_anywhere() -> None:
    """Chunks end at marks without a grid, and with a grid of the packed batch above 1."""
    for grid, packed, end in ((0, False, 12), (1, False, 20), (8, False, 20), (1, True, 20), (8, True, 12)):
        of = marks(page=4, grid=grid, packed=packed)
        of.start(1, [(12, "named"), (16, "prompt")], 0, prompt=20)
        assert of.chunk(1, 0, 20, 20) == end and of.chunk(1, 0, 7, 20) == 4
        assert of.next(1, 12) == (16 if end == 12 else 0) and of.next(1, 16) == 0


def test_M2_multiples_count_from_the_start_of_the_packed_batch() -> None:
    """The batch has rows of 100 and 600 tokens.

    Length 512 of the second row is not on the packed batch's grid of 256.
    """
    for packed, second in ((True, 412), (False, 512)):
        of = marks(page=4, grid=256, packed=packed)
        of.start(2, [(512, "branch")], 0)
        assert due(of, (0, 100), (0, 600)) == [(2, second)]
    for page, expected in ((1, [Mark(2, 2, 255, 295, "branch")]), (5, [Mark(2, 2, 255, 295, "branch")]), (4, [])):
        of = marks(page, grid=256, packed=True)
        of.start(2, [(512, "branch")], 40)
        # padding takes no token of the batch, a row that decodes takes one
        assert of.due(np.array([0, 1, 2]), np.array([0, 300, 40]), np.array([0, 301, 540])) == expected


def test_M17_drafts_alone_keep_the_state_before_them_and_none_inside() -> None:
    of = marks()
    of.start(1, [(3, "named"), (5, "named"), (9, "named")], 0)
    assert due(of, (0, 3)) == []
    assert due(of, (3, 3)) == [(1, 3)]  # in a step of drafts alone, `after` equals `before`
    assert due(of, (7, 9)) == [] and due(of, (9, 9)) == [(1, 9)] and due(of, (9, 9)) == []


# settings, wanted lengths, tokens of the prompt, limit of a chunk in tokens, lengths kept with chunk(), without it
CHUNKS = {
    "a budget that is no page": ({"page": 16, "grid": 64}, [6992], 7000, 2047, [6992], [1984]),
    "a budget below a page": ({"page": 16, "grid": 64}, [992], 1000, 7, [944, 960, 976, 992], []),
    "a budget below the grid": ({"page": 16, "grid": 64}, [992], 1000, 16, [992], [992]),
    "a page and a half": ({"page": 16, "grid": 64}, [992], 1000, 24, [976], [960]),
    "no grid": ({"page": 16}, [96, 992], 1000, 100, [96, 992], []),
    "a grid from the start of the batch": ({"page": 16, "grid": 64, "packed": True}, [992], 1000, 2047, [992], [960]),
    "a grid that meets one page in three": ({"page": 4, "grid": 3, "direct_hits": False}, [12], 16, 8, [8], [8]),
}


@pytest.mark.parametrize("obey", [True, False])
@pytest.mark.parametrize("case", CHUNKS)
def test_M22_chunks_that_keep_to_whole_pages_lose_no_state(case: str, obey: bool) -> None:
    settings, wanted, prompt, most, best, blind = CHUNKS[case]
    of, length, kept = marks(**settings), 0, list[int]()
    of.start(1, [(at, "prompt") for at in wanted], 0, prompt)
    while length < prompt:
        end = min(length + most, prompt)
        end = of.chunk(1, length, end, prompt) if obey else end
        assert length < end <= length + most
        kept += [at for _, at in due(of, (length, end))]
        length = end
    kept += [at for _, at in due(of, (length, length + 1))]
    assert kept == (best if obey else blind)


def test_M8_the_most_valuable_marks_find_room() -> None:
    """Marks are ranked by kind, then by length.

    The chosen marks stay in the order of the batch; the others are counted.
    """
    of = marks()
    kinds = ["every", "prompt", "branch", "again", "named", "prompt", "named"]
    given = [Mark(entry, entry + 1, 8 * entry, 8 * entry, kind) for entry, kind in enumerate(kinds)]
    ranked = [6, 4, 3, 2, 5, 1, 0]
    for room in range(-1, 9):
        before = of.refused
        assert of.choose(given, room) == [given[at] for at in sorted(ranked[: max(0, room)])]
        assert of.refused - before == len(given) - min(len(given), max(0, room))
    assert RANKS == ("named", "again", "branch", "prompt")


def test_a_state_that_arrives_at_a_wanted_length_is_kept() -> None:
    of = marks(page=4)
    for row, wanted in ((1, [4, 8, 12]), (2, [4, 12]), (3, [8])):
        of.start(row, [(at, "prompt") for at in wanted], 0)
    of.arrived(np.array([1, 2]), np.array([8, 8]))
    assert due(of, (8, 12), (8, 12), (0, 4)) == [(1, 8)]
    assert due(of, (12, 13), (12, 13), (4, 8)) == [(1, 12), (2, 12)]


@pytest.mark.parametrize(
    ("given", "prompt", "expected"),
    [
        ((16, 8, 0, 8), 0, [8, 16]),
        ([], 0, []),
        ([7], 0, []),
        ([9, 15, 8, 31], 0, [8, 24]),
        ([8, 26, 27, 200], 26, [8, 24]),
        ([24, 25], 24, [24]),
        (range(5, 18, 6), 0, [8, 16]),
        (np.array([17, 9], np.uint8), 0, [8, 16]),
        ([np.int64(17), np.uint8(9)], 0, [8, 16]),
        (np.array([]), 9, []),
        ([2**31 - 1], 0, [2**31 - 8]),
    ],
)
def test_B29a_lengths_of_a_request_are_rounded_down_and_end_with_its_prompt(
    given: Any, prompt: int, expected: list[int]
) -> None:
    lengths = require_lengths("a", given, 8, prompt)
    assert lengths == expected and all(type(at) is int for at in lengths)


@pytest.mark.parametrize("prompt", [0, 4])
def test_B29a_what_is_no_sequence_of_lengths_is_refused(prompt: int) -> None:
    wrong: list[Any] = [8, "8", b"8", [8.0], [-8], [8, -1], [True], [np.True_], [2**31], [[8]], [None], None, {8}]
    wrong += [np.array([8.0]), np.array([[8]]), np.array(8), np.array([-8]), np.array([True]), iter([8])]
    for given in wrong:
        with pytest.raises(
            ms.InvalidArgument, match=r"request 'a': snapshot_at=.*: expected lengths in tokens such as"
        ):
            require_lengths("a", given, 8, prompt)


@script(strategy=("none", "redirect"), grid=8, page_size=4)
def test_M1_a_kept_live_state_is_near_the_lengths_after_it(play: Play) -> None:
    """The state of 8 tokens stands for the wanted 12, so that no length is missed."""
    (row,) = play.admit(None, length=16, snapshot_at=[12, 16])
    play.step([row], 8)
    play.step([row], 5)
    play.publish(row, handles=True)
    play.reached("published")


@script(strategy=ALL, handles=(False, True), overlap=True, prefix=True, grid=1)
def test_M18_states_at_marks_are_published_up_to_the_last_real_one(play: Play) -> None:
    (row,) = play.admit(list(range(15)), snapshot_at=[2, 4, 6, 8, 10])
    play.machine.texts[play.machine.handles[row]] = range(15)
    play.step([row], 5)
    step = play.step([row], 6, run=False)
    play.publish(row, handles=play.handles)
    play.launch(step)
    play.settle()
    play.publish(row, handles=play.handles)
    play.settle()
    play.end(row)
    play.reached("published")
