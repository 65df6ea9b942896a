"""Trees of guesses: what a step's tokens follow, on the host and on the device. Knows no request.

The tokens of a row in a step are those that are known, and guesses behind the last of them, which is node 0:

    token   k k 0 1 2 3 4 5 6       0 - 1 - 3 - 6
    node    0 0 0 1 2 3 4 5 6         |   ` 4
    depth   0 0 0 1 1 2 2 2 3         ` 2 - 5

A chain of guesses is a tree as well.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from memstate.errors import InvalidArgument

MOST = 64  # nodes of a chain


@dataclass(frozen=True)
class Tree:
    """Nodes by depth, so that the first few of them are a tree as well.

    Args:
        parents: The node before each node; -1 before node 0.
        sides: Which of the guesses for its position each node is. Nodes with the same parent differ in it.
    """

    parents: tuple[int, ...]
    sides: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """The nodes down to each node, itself the last."""
        found: list[tuple[int, ...]] = []
        for node, parent in enumerate(self.parents):
            found.append((*(found[parent] if node else ()), node))
        return tuple(found)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """How many guesses lie on the way to each node."""
        return tuple(len(path) - 1 for path in self.paths)

    @property
    def depth(self) -> int:
        """Guesses that one step can find right."""
        return self.depths[-1]

    @property
    def branches(self) -> bool:
        """Whether it is no chain."""
        return self.depth < len(self) - 1

    def fit(self, most: int, depth: int) -> int:
        """Returns how many guesses a row has that may have `most`, of at most this depth."""
        return max(0, min(most, bisect_right(self.depths, depth) - 1))

    def walk(self, guesses: Sequence[int], sampled: Sequence[int]) -> list[int]:
        """Returns node 0 and the guesses that are right.

        Args:
            guesses: Of node 1 and those behind it.
            sampled: The token that was sampled behind each node.
        """
        path = [0]
        for node, guess in enumerate(guesses, 1):
            if self.parents[node] == path[-1] and guess == sampled[path[-1]]:
                path.append(node)
        return path


def chain(nodes: int) -> Tree:
    """Each node behind the one before it."""
    return Tree((*range(-1, nodes - 1),), (0,) * nodes)


ALONE = chain(1)
FORKED = Tree((-1, 0, 0, 1, 1, 2, 3), (0, 0, 1, 0, 1, 0, 0))


def tree_of(speculate: str) -> Tree:
    """Returns the tree that an option names.

    Raises:
        InvalidArgument: It names none.
    """
    if speculate == "tree":
        return FORKED
    if speculate not in map(str, range(MOST + 1)):
        raise InvalidArgument(f"speculate {speculate!r}: expected a number of tokens from 0 to {MOST}, or tree")
    return chain(max(1, int(speculate)))


class DeviceTree:
    """A tree on the device.

    Attributes:
        branches: Whether it is no chain.
        nodes: Their numbers, int64 `node`.
        parents: `node`.
        depths: `node`.
        sides: `node`.
        paths: The nodes down to each node, and 0 behind them: `node depth`.
        below: Whether the way to each node leads over the other one: `node other`.
    """

    def __init__(self, tree: Tree, device: torch.device) -> None:
        self.branches, nodes = tree.branches, range(len(tree))
        self.nodes, self.parents, self.depths, self.sides = (
            torch.tensor(numbers, device=device) for numbers in (nodes, tree.parents, tree.depths, tree.sides)
        )
        padded = [(*path, *(0,) * (1 + tree.depth - len(path))) for path in tree.paths]
        self.paths = torch.tensor(padded, device=device)
        self.below = torch.tensor([[node in path for node in nodes] for path in tree.paths], device=device)

    def walk(self, guesses: Tensor, sampled: Tensor, drafts: Tensor) -> Tensor:
        """Returns the last of the nodes that `Tree.walk` returns: `batch`.

        Args:
            guesses: `batch node`; that of node 0 is ignored.
            sampled: `batch node`.
            drafts: Guesses of each row.

        Syncs: no.
        """
        right = guesses == sampled.gather(1, self.parents.clamp(min=0).expand_as(guesses))
        right &= self.nodes <= drafts[:, None]
        reached = (right[:, None] | ~self.below | (self.nodes == 0)).all(2)
        return torch.where(reached, self.nodes, 0).amax(1)


class StepTree(NamedTuple):
    """The tree of each row of a step.

    Args:
        tree: The tree, of which a row may have the first nodes alone.
        root: The token that is node 0, int64 `batch`.
    """

    tree: DeviceTree
    root: Tensor

    def tokens(self, width: int) -> Tensor:
        """Returns the token that each node is, of so many; any for nodes that a row lacks: `batch node`.

        Syncs: no.
        """
        return (self.root[:, None] + self.tree.nodes).clamp(max=width - 1)

    def nodes(self, tokens: Tensor) -> Tensor:
        """Returns the nodes that tokens are, 0 up to the root: `batch token`.

        Syncs: no.
        """
        return (tokens - self.root[:, None]).clamp(0, len(self.tree.nodes) - 1)

    def spread(self, numbers: Tensor, tokens: Tensor) -> Tensor:
        """Returns parents or depths of nodes as those of tokens: `batch token`.

        Syncs: no.
        """
        return torch.minimum(tokens, self.root[:, None]) + numbers[self.nodes(tokens)]

    def follow(self, tokens: Tensor, others: Tensor) -> Tensor:
        """Returns whether each token is one of the others, or comes behind it: `batch token other`.

        Syncs: no.
        """
        below = self.tree.below[self.nodes(tokens)[:, :, None], self.nodes(others)[:, None]]
        return below & (others[:, None] <= tokens[:, None])

    def path(self, last: Tensor) -> Tensor:
        """Returns the tokens down to a node of each row, as `mem.device.keep_path` takes them: `batch node`.

        Syncs: no.
        """
        tree = self.tree
        behind = (tree.nodes - self.root[:, None]).clamp(0, tree.paths.shape[1] - 1)
        return (torch.minimum(tree.nodes, self.root[:, None]) + tree.paths[last].gather(1, behind)).int()
