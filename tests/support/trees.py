"""Draws trees of drafts, each with the path of nodes that is accepted."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import RingMap, Tail, TailRecord


class Tree(NamedTuple):
    """A tree of drafts. parents: the parent of each node, -1 for a root. path: the accepted nodes, from a root on."""

    parents: list[int]
    path: list[int]


def chain(nodes: int) -> Tree:
    """Returns a tree in which each node follows the one before it, with all nodes accepted."""
    return Tree(list(range(-1, nodes - 1)), list(range(nodes)))


def lineage(parents: Sequence[int], node: int) -> list[int]:
    """Returns the path from the root to `node`."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def drawn(nodes: int, generator: torch.Generator) -> Tree:
    """Draws any tree, perhaps with several roots. Either no node or the path to a random node is accepted."""
    parents = [int(torch.randint(-1, node, (1,), generator=generator)) if node else -1 for node in range(nodes)]
    last = int(torch.randint(-1, nodes, (1,), generator=generator)) if nodes else -1
    return Tree(parents, lineage(parents, last))


def drawn_behind(real: int, drafts: int, generator: torch.Generator, branches: bool) -> Tree:
    """Draws drafts after a chain of real tokens, which are all accepted. branches: whether the drafts are a tree."""
    parents = [*range(-1, real + drafts - 1)]
    for node in range(real, real + drafts) if branches else ():
        parents[node] = int(torch.randint(real - 1, node, (1,), generator=generator))
    last = int(torch.randint(real - 1, real + drafts, (1,), generator=generator))
    return Tree(parents, lineage(parents, last))


def nodes_of(paths: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Returns the accepted nodes of a step, `batch depth`. Shorter paths are filled up with -1."""
    depth = max(1, *map(len, paths)) if paths else 1
    padded = [[*path, *[-1] * (depth - len(path))] for path in paths]
    return torch.tensor(padded, dtype=torch.int32, device=device).view(len(paths), depth)


def parents_of(trees: Sequence[Tree], device: torch.device) -> Tensor:
    """Returns the parents of a step, `batch node`. Smaller trees are filled up with rubbish."""
    most = max(1, *(len(tree.parents) for tree in trees))
    padded = [tree.parents + [(-1, 0, 99)[n % 3]] * (most - len(tree.parents)) for n, tree in enumerate(trees)]
    return torch.tensor(padded, dtype=torch.int32, device=device)


def keep(backend: Backend, tail: Tail, record: Sequence[Sequence[int]], paths: Sequence[Sequence[int]]) -> None:
    """Runs `keep_path` on the rings of one layer. record: the columns of a `TailRecord`."""
    rings = [ring for ring in tail if ring is not None]
    blocks = tuple(ring.flatten(1).view(torch.uint8).unsqueeze(0) for ring in rings)
    rows = [
        (ring.data_ptr(), ring.stride(0) * ring.element_size(), ring[0, 0].nbytes, ring[0].nbytes) for ring in rings
    ]
    unit = next(unit for unit in (16, 8, 4, 2, 1) if not any(number % unit for row in rows for number in row))
    table = torch.tensor(rows, dtype=torch.int64, device=rings[0].device)
    columns = (torch.tensor(column, dtype=torch.int32, device=table.device) for column in record)
    backend.keep_path(
        RingMap(table, blocks, tuple(ring.shape[1] for ring in rings), unit), TailRecord(*columns),
        nodes_of(paths, table.device),
    )  # fmt: skip
