"""Tests trees of drafts: each branch has the bits of a run without a tree, and a row goes on from its accepted path as
from a chain.
"""

from typing import Any

import pytest
import torch

from memstate.kernels.dispatch import Backend
from tests.kernels.test_decode_steps import DTYPES, KINDS
from tests.kernels.test_tails import TAILED, WIDE, given_of, tailed, with_tail
from tests.support.decode_case import Row, same_bits
from tests.support.trees import drawn, lineage, parents_of

NODES = 6


@pytest.mark.sample
@pytest.mark.parametrize("kind", TAILED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("most", [2, 3, 5])
def test_T18_a_row_that_verifies_trees_has_the_bits_of_plain_decode(
    backend: Backend, generator: torch.Generator, kind: str, dtype: str, most: int
) -> None:
    """Rejected nodes are NaN, so a leak into another branch would show."""
    tailed(kind, backend, generator, dtype, most, trees=True).speculate()


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "settings"), WIDE, ids=str)
def test_T18_odd_sizes_groups_and_several_blocks(
    backend: Backend, generator: torch.Generator, kind: str, settings: dict[str, Any]
) -> None:
    tailed(kind, backend, generator, "fp32", 3, trees=True, **settings).speculate()


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", TAILED)
def test_T18_each_branch_is_as_if_it_ran_alone(
    backend: Backend, generator: torch.Generator, kind: str, dtype: str
) -> None:
    """Compares each branch with a second run of the step without a tree, whose tokens are only the nodes of this
    branch.
    """
    state, inputs = DTYPES[dtype]
    rows = [Row(slot, slot, tokens=NODES) for slot in (1, 2, 3)]
    given = {"rows": rows, "tokens": NODES, "state": state, "inputs": inputs}
    case = KINDS[kind].make(backend, generator, **(given | KINDS[kind].small))
    rings = with_tail(case, generator, 9, [1, 2, 3], [4, 0, 11], [2, 0, 1], [2, 0, -1])
    trees = [drawn(NODES, generator) for _ in rows]
    of_tree, before = case.twin(), [(ring, ring.clone()) for ring in rings]
    of_tree.shared = case.shared | {"parents": parents_of(trees, backend.device)}
    out = of_tree.step(backend)
    for node in range(NODES):
        alone = case.twin()
        ways = [lineage(tree.parents, node) for tree in trees]
        alone.rows = [row._replace(tokens=len(way)) for row, way in zip(rows, ways, strict=True)]
        alone.inputs = {name: torch.full_like(stream, torch.nan) for name, stream in case.inputs.items()}
        for name, stream in case.inputs.items():
            for row, way in enumerate(ways):
                alone.inputs[name][row, : len(way)] = stream[row, way]
        for ring, values in before:
            ring.copy_(values)
        chain_out = alone.step(backend)
        for row, way in enumerate(ways):
            assert same_bits(out[row, way], chain_out[row, : len(way)])
        assert same_bits(alone.memory.whole, of_tree.memory.whole)


@pytest.mark.parametrize("kind", ["conv", "gdn", "kda", "mamba2", "mamba1"])
def test_T18_parents_behind_a_rows_tokens_mean_nothing(backend: Backend, generator: torch.Generator, kind: str) -> None:
    """Rows have 0 to 2 tokens, none of them a draft, and store the state after these tokens.

    The entries of `parent` after these tokens are rubbish.
    """
    rows = [Row(slot, slot + 3, tokens=n) for slot, n in ((1, 1), (2, 2), (3, 0))]
    case = KINDS[kind].make(backend, generator, **({"rows": rows, "tokens": NODES} | KINDS[kind].small))
    with_tail(case, generator, 9, [1, 2, 3], [4, 0, 11], [2, 0, 1], [3, 2, 1])
    plain, of_tree = case.twin(), case.twin()
    parents = [[-1, *[-1] * 5], [-1, 0, -1, 0, 99, -5], [-1] * 6]
    of_tree.shared = case.shared | {"parents": torch.tensor(parents, dtype=torch.int32, device=backend.device)}
    assert same_bits(of_tree.step(backend), plain.step(backend))
    assert same_bits(of_tree.memory.whole, plain.memory.whole)


def test_G1_parents_need_a_tail(backend: Backend, generator: torch.Generator) -> None:
    op, given = given_of("gdn", backend, generator)
    nodes = torch.zeros((len(given["read"]), 3), dtype=torch.int32, device=backend.device)
    with pytest.raises(ValueError, match=r"^tail, cursor: .*and for parents"):
        op(**(given | {"tail": None, "cursor": None}), parents=nodes)
