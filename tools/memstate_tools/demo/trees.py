"""Trees of guesses on the host and on the device: the parent of each token of a step.

The tokens of a row in a step are known tokens, then guesses after the last known token, which is node 0:

    token   k k 0 1 2 3 4 5 6       0 - 1 - 3 - 6
    node    0 0 0 1 2 3 4 5 6         |   ` 4
    depth   0 0 0 1 1 2 2 2 3         ` 2 - 5

A chain of guesses is also a tree.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from memstate.errors import InvalidArgument

MOST = 64  # largest number of nodes of a chain


@dataclass(frozen=True)
class DraftTree:
    """A tree whose nodes are ordered by depth: any number of its first nodes is a tree as well.

    Args:
        parents: Parent of each node; -1 for node 0.
        sides: For each node, which guess for its position it is: 0 for the first guess, 1 for the second, and so on.
            Nodes with the same parent have different sides.
    """

    parents: tuple[int, ...]
    sides: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Node -> the nodes from node 0 down to it."""
        paths: list[tuple[int, ...]] = []
        for node, parent in enumerate(self.parents):
            paths.append((*(paths[parent] if node else ()), node))
        return tuple(paths)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Node -> number of guesses from node 0 down to it."""
        return tuple(len(path) - 1 for path in self.paths)

    @property
    def depth(self) -> int:
        """Largest number of guesses that one step can accept."""
        return self.depths[-1]

    @property
    def branches(self) -> bool:
        """Whether the tree is not a chain."""
        return self.depth < len(self) - 1

    def fit(self, most: int, depth: int) -> int:
        """Returns how many guesses a row gets: at most `most`, and none deeper than `depth`."""
        return max(0, min(most, bisect_right(self.depths, depth) - 1))

    def walk(self, guesses: Sequence[int], sampled: Sequence[int]) -> list[int]:
        """Returns node 0 and the nodes of the accepted guesses.

        Args:
            guesses: Guesses of the nodes from node 1 on.
            sampled: The token that was sampled after each node.
        """
        path = [0]
        for node, guess in enumerate(guesses, 1):
            if self.parents[node] == path[-1] and guess == sampled[path[-1]]:
                path.append(node)
        return path


def chain(nodes: int) -> DraftTree:
    """Returns a tree in which each node follows the previous one."""
    return DraftTree((*range(-1, nodes - 1),), (0,) * nodes)


ALONE = chain(1)
FORKED = DraftTree((-1, 0, 0, 1, 1, 2, 3), (0, 0, 1, 0, 1, 0, 0))


def tree_of(speculate: str) -> DraftTree:
    """Returns the tree of an option.

    Raises:
        InvalidArgument: The option names no tree.
    """
    if speculate == "tree":
        return FORKED
    if speculate not in map(str, range(MOST + 1)):
        raise InvalidArgument(f"speculate {speculate!r}: expected a number of tokens from 0 to {MOST}, or tree")
    return chain(max(1, int(speculate)))


class DeviceTree:
    """A tree on the device.

    Attributes:
        branches: Whether the tree is not a chain.
        nodes: Numbers of the nodes, int64 `node`.
        parents: Parent of each node: `node`.
        depths: Number of guesses from node 0 down to each node: `node`.
        sides: For each node, which guess for its position it is, from 0 on: `node`.
        paths: The nodes from node 0 down to each node, then zeros: `node depth`.
        below: Whether the path from node 0 to a node contains another node: `node other`.
    """

    def __init__(self, tree: DraftTree, device: torch.device) -> None:
        self.branches, nodes = tree.branches, range(len(tree))
        self.nodes, self.parents, self.depths, self.sides = (
            torch.tensor(numbers, device=device) for numbers in (nodes, tree.parents, tree.depths, tree.sides)
        )
        padded = [(*path, *(0,) * (1 + tree.depth - len(path))) for path in tree.paths]
        self.paths = torch.tensor(padded, device=device)
        self.below = torch.tensor([[node in path for node in nodes] for path in tree.paths], device=device)

    def walk(self, guesses: Tensor, sampled: Tensor, drafts: Tensor) -> Tensor:
        """Returns the last of the nodes that `DraftTree.walk` returns: `batch`.

        Args:
            guesses: Guessed token of each node, `batch node`; that of node 0 is ignored.
            sampled: Token sampled after each node, `batch node`.
            drafts: Number of guesses of each row.

        Syncs: no.
        """
        right = guesses == sampled.gather(1, self.parents.clamp(min=0).expand_as(guesses))
        right &= self.nodes <= drafts[:, None]
        reached = (right[:, None] | ~self.below | (self.nodes == 0)).all(2)
        return torch.where(reached, self.nodes, 0).amax(1)


class StepTree(NamedTuple):
    """The tree of each row of a step.

    Args:
        tree: The tree of a decode step. A row may have only its first nodes.
        root: Index of the token that is node 0, int64 `batch`.
    """

    tree: DeviceTree
    root: Tensor

    def tokens(self, width: int) -> Tensor:
        """Returns the token index of each node: `batch node`. Nodes that a row lacks get an index below `width`.

        Syncs: no.
        """
        return (self.root[:, None] + self.tree.nodes).clamp(max=width - 1)

    def nodes(self, tokens: Tensor) -> Tensor:
        """Returns the node of each token, 0 for tokens up to the root: `batch token`.

        Syncs: no.
        """
        return (tokens - self.root[:, None]).clamp(0, len(self.tree.nodes) - 1)

    def spread(self, numbers: Tensor, tokens: Tensor) -> Tensor:
        """Returns the parent or depth of each token, from numbers that nodes have: `batch token`.

        Syncs: no.
        """
        return torch.minimum(tokens, self.root[:, None]) + numbers[self.nodes(tokens)]

    def follow(self, tokens: Tensor, others: Tensor) -> Tensor:
        """Returns, for each token and other, whether the token is the other or descends from it: `batch token other`.

        Syncs: no.
        """
        below = self.tree.below[self.nodes(tokens)[:, :, None], self.nodes(others)[:, None]]
        return below & (others[:, None] <= tokens[:, None])

    def path(self, last: Tensor) -> Tensor:
        """Returns the tokens from node 0 to a node of each row, as `mem.device.keep_path` takes them: `batch node`.

        Syncs: no.
        """
        tree = self.tree
        behind = (tree.nodes - self.root[:, None]).clamp(0, tree.paths.shape[1] - 1)
        return (torch.minimum(tree.nodes, self.root[:, None]) + tree.paths[last].gather(1, behind)).int()
