"""The radix tree and the ranking, each compared with plain dictionaries."""

import random
import tracemalloc
from array import array
from collections.abc import Hashable
from itertools import count

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memstate.prefix.ranking import Ranking
from memstate.prefix.tree import Node, Tree
from memstate.requests.handles import Snapshot
from memstate.requests.pages import NO_PAGES
from memstate.tokens import BYTES, Key, SaltedTokens, Wide, encode, ids, joined

UNIT = 2 * BYTES  # bytes of a page of two tokens
WIDE = 16  # the same with 64 bits for each token, as the model has it
# the first two begin with the same token; the last two are wide, and one has the lower halves of the first
PAGES = [encode(page) for page in ((0, 0), (0, 1), (1, 0), (0, 2**32), (-1, 0))]
Prefix = tuple[Hashable, bytes]


def wide(key: Key) -> bytes:
    return ids(key).tobytes()


def below(node: Node) -> bytes:
    return wide(joined(step.key for step in reversed(list(node.path()))))


class Naive:
    """A tree and its model: dicts with the page and the state of each prefix, and the set of prefixes that lost their
    state.
    """

    def __init__(self) -> None:
        self.tree = Tree(UNIT)
        self.pages: dict[Prefix, int] = {}
        self.ghost: set[Prefix] = set()
        self.states: dict[Prefix, Snapshot] = {}
        self.evicted: set[Prefix] = set()
        self.leases: list[Node] = []
        self.next = count(1)

    def prefixes(self, key: bytes, salt: Hashable) -> list[Prefix]:
        """Returns the prefixes of a key in whole pages, shortest first."""
        return [(salt, key[:end]) for end in range(WIDE, len(key) + 1, WIDE)]

    def insert(self, key: Key, salt: Hashable, at: int) -> Node:
        """Inserts a key in two calls, the second from page `at` on, as an insert with a state in the middle does."""
        mine = [next(self.next) for _ in range(len(key) // UNIT)]
        prefixes = self.prefixes(wide(key), salt)
        there = [prefix in self.pages for prefix in prefixes]
        start = (
            self.tree.insert(SaltedTokens(key[: at * UNIT], salt), array("q", mine[:at]))[0]
            if 0 < at < len(mine)
            else None
        )
        longer = SaltedTokens(key + PAGES[at % len(PAGES)], salt)  # only the pages of `key` are inserted
        node, had = self.tree.insert(longer, array("q", [*mine, 0]), start, len(mine))
        assert had == max(sum(there), at if start else 0) and there == sorted(there, reverse=True)
        for prefix, page in zip(prefixes, mine, strict=True):
            self.pages.setdefault(prefix, page)
            self.ghost.discard(prefix)
        assert below(node) == wide(key) and node.end == len(key) // UNIT
        assert list(self.tree.pages_to(node)) == [self.pages[prefix] for prefix in prefixes]
        return node

    def give(self, node: Node, salt: Hashable) -> None:
        where = (salt, below(node))
        node.snapshot = self.states[where] = Snapshot(len(self.states), next(self.next), node.end)
        node.evicted = False
        self.evicted.discard(where)

    def evict(self, node: Node, salt: Hashable) -> None:
        if node.snapshot:
            where = (salt, below(node))
            del self.states[where]
            self.evicted.add(where)
            node.snapshot, node.evicted = None, True

    def empty(self, node: Node, salt: Hashable, at: int) -> None:
        """Removes KV from the end of a node below which no node has KV."""
        if node.carriers or node.leases or node.ghost:
            return
        self.evict(node, salt)
        size = len(node.pages)
        gone = self.prefixes(below(node), salt)[-(1 + at % size) :]
        assert list(self.tree.ghost(node, len(gone))) == [self.pages.pop(prefix) for prefix in gone]
        assert (node.ghost, list(node.pages), len(node.key) // UNIT) == (True, [], len(gone))
        self.ghost |= set(gone)

    def remove(self, node: Node, salt: Hashable) -> None:
        if node.children or node.leases:
            return
        key = below(node)
        for prefix in self.prefixes(key, salt)[-(len(node.key) // UNIT) :]:
            self.pages.pop(prefix, None)
            self.ghost.discard(prefix)
        self.states.pop((salt, key), None)
        self.evicted.discard((salt, key))
        self.tree.remove(node)

    def check(self) -> None:
        tree, nodes = self.tree, list(self.tree.walk())
        assert len(nodes) == tree.nodes == len({id(node) for _, node in nodes})
        assert tree.total_pages == len(self.pages) == sum(len(node.pages) for _, node in nodes)
        assert tree.ghost_pages == len(self.ghost)
        assert set(tree.roots) == {salt for salt, _ in [*self.pages, *self.ghost]}  # a root without nodes is removed
        for memory in (0, len(self.ghost) // 2, len(self.ghost)):
            node = tree.forgettable(memory)
            assert (node is None) == (len(self.ghost) <= memory) and (node is None or not node.children)
            assert node is None or node.ghost
        seen, ghost = {}, set[Prefix]()
        for salt, node in nodes:
            key, size = below(node), len(node.key) // UNIT
            assert node.key and len(node.pages) == (0 if node.ghost else size) and node.end * WIDE == len(key)
            assert node.carriers == sum(not child.ghost for child in node.children.values())
            assert all(child.parent is node and first == child.key[:UNIT] for first, child in node.children.items())
            seen |= dict(zip(self.prefixes(key, salt)[-size:], node.pages, strict=not node.ghost))
            ghost |= set(self.prefixes(key, salt)[-size:] if node.ghost else ())
            assert node.snapshot is self.states.get((salt, key))
            assert node.evicted == ((salt, key) in self.evicted)
            assert node.leases == sum(node in lease.path() for lease in self.leases)
        assert seen == self.pages and ghost == self.ghost
        leased = {id(step): len(step.pages) for lease in self.leases for step in lease.path()}
        assert tree.leased_pages == sum(leased.values())

    def find(self, key: Key, salt: Hashable) -> None:
        hit, prefixes = self.tree.find(SaltedTokens(key, salt)), self.prefixes(wide(key), salt)
        there = [prefix for prefix in prefixes if prefix in self.pages]
        known = [prefix for prefix in prefixes if prefix in self.pages or prefix in self.ghost]
        stated = [prefix for prefix in there if prefix in self.states]
        reach = len(stated[-1][1]) if stated else 0
        gone = [prefix for prefix in there if prefix in self.evicted and len(prefix[1]) > reach]
        assert hit.kv == len(there)
        assert (hit.stated.snapshot if hit.stated else None) == (self.states[stated[-1]] if stated else None)
        assert (below(hit.evicted) if hit.evicted else None) == (gone[-1][1] if gone else None)
        # the node in which the longest of the prefixes ends
        for node, prefix in (
            (self.entered(key, salt), known),
            (hit.reach, there),
        ):
            path = below(node)
            assert path.startswith(prefix[-1][1] if prefix else b"") and not (path and not prefix)
            assert len(path) - len(wide(node.key)) < len(prefix[-1][1] if prefix else b" ")
        assert wide(key).startswith(below(hit.known))
        for end in range(len(prefixes)) if salt in self.tree.roots else ():
            assert self.tree.find(SaltedTokens(key, salt), end) == self.tree.find(SaltedTokens(key[: end * UNIT], salt))
        for start in self.leases:
            if self.tree.salt(start) == salt and start.end and wide(key).startswith(below(start)):
                further = self.tree.find(SaltedTokens(key, salt), None, start)
                assert further._replace(evicted=None) == hit._replace(evicted=None)

    def entered(self, key: Key, salt: Hashable) -> Node:
        """Returns the deepest node that a key leads into."""
        known = self.tree.find(SaltedTokens(key, salt)).known
        at = known.end * self.tree.page
        return known.children.get(key[at : at + self.tree.page], known)


ACTIONS = ["insert", "insert", "insert", "state", "evict", "empty", "empty", "remove", "lease", "unlease"]
CALLS = st.tuples(
    st.sampled_from(ACTIONS), st.lists(st.sampled_from(PAGES), min_size=1, max_size=6), st.sampled_from("ab"),
    st.integers(0, 5),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(CALLS, max_size=40))
def test_the_tree_is_a_dictionary_of_prefixes(calls: list[tuple[str, list[Key], str, int]]) -> None:
    naive = Naive()
    for action, pages, salt, at in calls:
        key = joined(pages)
        node = naive.entered(key, salt)
        if action == "insert":
            naive.insert(key, salt, at)
        elif action == "state":
            naive.give(naive.insert(key, salt, 0), salt)
        elif action == "lease":
            naive.leases.append(naive.insert(key, salt, at))
            naive.tree.lease(naive.leases[-1])
        elif action == "unlease" and naive.leases:
            naive.tree.unlease(naive.leases.pop(at % len(naive.leases)))
        elif action == "evict" and not node.is_root:
            naive.evict(node, salt)
        elif action == "empty" and not node.is_root:
            naive.empty(node, salt, at)
        elif action == "remove" and not node.is_root:
            naive.remove(node, salt)
        naive.check()
        for cut in (0, BYTES):  # a page that is filled in part is not found
            naive.find(key[: len(key) - cut], salt)
    for lease in naive.leases:
        naive.tree.unlease(lease)
    naive.leases = []
    while node := naive.tree.forgettable(0):  # children go before their parents
        naive.remove(node, next(salt for salt, other in naive.tree.walk() if other is node))
        naive.check()
    while leaves := [(salt, node) for salt, node in naive.tree.walk() if not node.children]:
        naive.remove(leaves[0][1], leaves[0][0])
        naive.check()
    assert not naive.tree.roots and not naive.tree.nodes and not naive.tree.total_pages


def key_of(*pages: int) -> Key:
    return joined(encode([page, page]) for page in pages)


def test_a_prompt_computed_bit_by_bit_is_one_node() -> None:
    tree = Tree(UNIT)
    first, _ = tree.insert(SaltedTokens(key_of(1), None), array("q", [1]))
    tree.lease(first)
    for n in range(2, 6):
        node, had = tree.insert(SaltedTokens(key_of(*range(1, n + 1)), None), array("q", range(1, n + 1)))
        assert node is first and had == n - 1
    assert (tree.nodes, tree.total_pages, tree.leased_pages) == (1, 5, 5)
    assert list(tree.pages_to(first)) == [1, 2, 3, 4, 5]
    tree.unlease(first)
    assert tree.leased_pages == 0


def test_B43_the_upper_part_of_a_split_node_has_no_state_and_the_lower_one_keeps_it() -> None:
    tree = Tree(UNIT)
    node, _ = tree.insert(SaltedTokens(key_of(1, 2, 3, 4), "salt"), array("q", [1, 2, 3, 4]))
    snapshot = node.snapshot = Snapshot(7, 1, 8)
    node.uses = 3
    tree.lease(node)
    other, had = tree.insert(SaltedTokens(key_of(1, 2, 5), "salt"), array("q", [11, 12, 13]))
    upper = node.parent
    assert had == 2 and upper is not None and upper is other.parent and not upper.is_root
    assert (upper.snapshot, upper.evicted, upper.uses, upper.leases, [*upper.pages]) == (None, False, 0, 1, [1, 2])
    assert (node.snapshot, node.uses, node.leases, [*node.pages], node.end) == (snapshot, 3, 1, [3, 4], 4)
    assert ([*other.pages], other.leases, tree.leased_pages, tree.nodes) == ([13], 0, 4, 3)
    hit = tree.find(SaltedTokens(key_of(1, 2, 3, 4, 9), "salt"))
    assert hit.stated is node and list(tree.pages_to(node)) == [1, 2, 3, 4]
    assert tree.find(SaltedTokens(key_of(1, 2, 3), "salt")).stated is None


def test_a_node_of_1024_tokens_takes_little_more_than_four_bytes_a_token() -> None:
    """With policy, ranking and registers, a cached prompt of 1024 tokens takes 5.5 kB."""
    tree, nodes = Tree(16 * BYTES), 256
    tracemalloc.start()
    for n in range(nodes):
        key = encode(np.arange(1024 * n, 1024 * (n + 1)))
        tree.insert(SaltedTokens(key, None), array("q", range(64)))
    spent, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert tree.nodes == nodes and spent <= 5200 * nodes


def test_an_image_makes_only_the_node_that_has_it_wide() -> None:
    tree, image, text = Tree(UNIT), [2**40] * 16, range(1024)
    for tokens in ([*text, *image, *image], [*text, *image, *text], text):
        tree.insert(SaltedTokens(encode(tokens), None), NO_PAGES)
    nodes = {node.end: node.key for _, node in tree.walk()}
    assert {end: type(key) for end, key in nodes.items()} == {512: bytes, 520: Wide, 528: Wide, 1032: bytes}
    assert ids(joined(map(nodes.__getitem__, (512, 520, 528)))).tolist() == [*text, *image, *image]


MOVES = st.lists(
    st.tuples(st.sampled_from(["place", "place", "remove", "part", "eat"]), st.integers(0, 9), st.integers(-3, 3)),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(MOVES, st.integers(0, 2**32))
@example([("place", 0, 1), ("place", 1, 1), ("part", 1, 0), ("place", 0, 1)], 0)
def test_the_ranking_is_a_sorted_dictionary(moves: list[tuple[str, int, int]], seed: int) -> None:
    nodes = [Node(None, b"") for _ in range(10)]
    ranking, naive, serial, chance = Ranking(), dict[Node, tuple[int, int]](), count(), random.Random(seed)
    for move, which, rank in moves:
        node = nodes[which]
        if move == "place":
            ranking.place(node, rank)
            naive[node] = (rank, next(serial))
        elif move == "remove":
            ranking.remove(node)
            naive.pop(node, None)
        else:  # an iteration stops early; with "eat", some of its nodes are removed meanwhile
            for seen, ranked in enumerate(ranking.ascending()):
                if move == "eat" and chance.random() < 0.5:
                    ranking.remove(ranked)
                    del naive[ranked]
                if seen >= which:
                    break
        assert len([*ranking]) == len(naive) and all((node in ranking) == (node in naive) for node in nodes)
        expected = sorted(naive, key=lambda node: naive[node])
        assert list(ranking.ascending()) == expected
        assert [ranking.rank(node) for node in expected] == [naive[node][0] for node in expected]


def test_the_ranking_does_not_keep_what_is_old() -> None:
    nodes, ranking = [Node(None, b"") for _ in range(5)], Ranking()
    for serial in range(3000):
        ranking.place(nodes[serial % 5], serial % 1000 - serial)
    assert len([*ranking]) == 5 and len(ranking._heap) <= 2 * 5 + 64
    expected = sorted((serial % 1000 - serial, serial) for serial in range(2995, 3000))
    assert list(ranking.ascending()) == [nodes[serial % 5] for _, serial in expected]


@pytest.mark.parametrize("placed", [1, 10, 200])
def test_a_node_placed_during_a_look_comes_once_more_and_others_once(placed: int) -> None:
    """Nodes are placed during an iteration: for example, a leaf is removed, and its parent becomes a leaf."""
    nodes, ranking = [Node(None, b"") for _ in range(6)], Ranking()
    for rank, node in enumerate(nodes[:5]):
        ranking.place(node, rank)
    seen = []
    for node in ranking.ascending():
        if node is nodes[1] and node not in seen:
            for _ in range(placed):
                ranking.place(nodes[5], 2.5)
        seen.append(node)
    assert seen == [*nodes[:3], nodes[5], *nodes[3:5]] == list(ranking.ascending())
