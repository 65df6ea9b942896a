"""The ranking alone, beside a dictionary that is sorted at every look."""

import random
from itertools import count

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memstate.prefix.ranking import Ranking
from memstate.prefix.tree import Node

MOVES = st.lists(
    st.tuples(st.sampled_from(["place", "place", "remove", "part", "eat"]), st.integers(0, 9), st.integers(-3, 3)),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(MOVES, st.integers(0, 2**32))
@example([("place", 0, 1), ("place", 1, 1), ("part", 1, 0), ("place", 0, 1)], 0)
def test_the_ranking_is_a_sorted_dictionary(moves: list[tuple[str, int, int]], seed: int) -> None:
    nodes = [Node(None, b"", [], 0) for _ in range(10)]
    ranking, naive, serial, chance = Ranking(), dict[Node, tuple[int, int]](), count(), random.Random(seed)
    for move, which, rank in moves:
        node = nodes[which]
        if move == "place":
            ranking.place(node, rank)
            naive[node] = (rank, next(serial))
        elif move == "remove":
            ranking.remove(node)
            naive.pop(node, None)
        else:  # a look that stops early, with or without taking what it saw
            for seen, found in enumerate(ranking.ascending()):
                if move == "eat" and chance.random() < 0.5:
                    ranking.remove(found)
                    del naive[found]
                if seen >= which:
                    break
        assert len(ranking) == len(naive) and all((node in ranking) == (node in naive) for node in nodes)
        expected = sorted(naive, key=lambda node: naive[node])
        assert list(ranking.ascending()) == expected
        assert [ranking.rank(node) for node in expected] == [naive[node][0] for node in expected]
        assert ranking.least() is (expected[0] if expected else None)


def test_the_ranking_does_not_keep_what_is_old() -> None:
    nodes, ranking = [Node(None, b"", [], 0) for _ in range(5)], Ranking()
    for serial in range(3000):
        ranking.place(nodes[serial % 5], serial % 1000 - serial)
    assert len(ranking) == 5 and len(ranking._heap) <= 2 * 5 + 64
    expected = sorted((serial % 1000 - serial, serial) for serial in range(2995, 3000))
    assert list(ranking.ascending()) == [nodes[serial % 5] for _, serial in expected]


@pytest.mark.parametrize("placed", [1, 10, 200])
def test_a_node_placed_during_a_look_comes_once_more_and_others_once(placed: int) -> None:
    """As when a leaf is given up and what led to it becomes one."""
    nodes, ranking = [Node(None, b"", [], 0) for _ in range(6)], Ranking()
    for rank, node in enumerate(nodes[:5]):
        ranking.place(node, rank)
    seen = []
    for node in ranking.ascending():
        if node is nodes[1] and node not in seen:
            for _ in range(placed):
                ranking.place(nodes[5], 2.5)
        seen.append(node)
    assert seen == [*nodes[:3], nodes[5], *nodes[3:5]] == list(ranking.ascending())
