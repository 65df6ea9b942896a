"""Walks trees of drafts from token to token in a decode step, and closes the gaps of the accepted path.

The tokens of a step are the nodes of a tree, each behind its parent. A step runs the nodes in order. If a node is no
child of the node before it, the step goes back to the state in front of the tree, and runs the node's ancestors again:

    parents -1 0 1 0 3      node 0 1 2, back, 0 3 4      the states of 0-1-2 and 0-3-4

Token n has place n % ring in a ring, so rejected nodes leave gaps. `keep_path` closes the gaps.
"""

import triton
import triton.language as tl
from torch import Tensor

from memstate.kernels.checks import check_path
from memstate.kernels.copy import WORDS
from memstate.kernels.tables import RingMap, TailRecord

LANES = 256  # words: 16 bytes per thread, also in warps of 64 threads
WARPS = 1


@triton.jit
def parent_of(parents_ptr, node, nodes):
    """Returns the parent of a node, -1 for none. From `nodes` on, each token follows the token before it."""
    parent = tl.load(parents_ptr + node, mask=node < nodes, other=-1)
    parent = tl.maximum(tl.minimum(parent, node - 1), -1).to(tl.int32)  # clamp before the cast to 32 bits
    return tl.where(node < nodes, parent, node - 1)


@triton.jit
def next_node(parents_ptr, node, target, nodes):
    """Returns the node that follows `node` on the path to `target`; if `node` is -1, the first node of the path."""
    following = target
    parent = parent_of(parents_ptr, target, nodes)
    while parent > node:
        following = parent
        parent = parent_of(parents_ptr, parent, nodes)
    return following


@triton.jit
def walk_length(parents_ptr, tokens, nodes):
    """Returns how many nodes a walk through a tree of `tokens` nodes runs; a node counts each time that it runs."""
    visits = tokens
    for target in range(1, tl.minimum(tokens, nodes)):
        parent = parent_of(parents_ptr, target, nodes)
        if parent != target - 1:
            while parent >= 0:
                visits += 1
                parent = parent_of(parents_ptr, parent, nodes)
    return visits


@triton.jit
def behind(parents_ptr, node, target, tokens, nodes):
    """Returns how a walk goes on after it has run `node`: (node, next target, whether it goes back to the start).

    The returned node is the one after which the walk goes on, -1 at the start. The walk ends after the last of a row's
    `tokens`, whatever the parents of later nodes are.
    """
    arrived = node == target
    target = tl.where(arrived, target + 1, target)
    back = arrived & (target < tokens) & (parent_of(parents_ptr, target, nodes) != node)
    return tl.where(back, -1, node), target, back


@triton.jit
def either(first, second, wanted, COUNT: tl.constexpr):
    """Returns the tiles of `first` if the scalar `wanted` is true, otherwise those of `second`."""
    chosen = ()
    for tile in tl.static_range(COUNT):
        chosen += (tl.where(wanted, first[tile], second[tile]),)
    return chosen


@triton.jit(do_not_specialize=["rows", "depth"], do_not_specialize_on_alignment=["nodes_ptr"])
def _keep_path(
    rings, rows_ptr, lengths_ptr, accepted_ptr, nodes_ptr, rows, depth,
    UNIT: tl.constexpr, WORD: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0)
    row = tl.load(rows_ptr + entry)
    accepted = tl.minimum(tl.load(accepted_ptr + entry), depth)
    if (row > 0) & (row < rows):
        PER_UNIT: tl.constexpr = UNIT * 8 // WORD.primitive_bitwidth
        ring = rings + 4 * tl.program_id(1)
        size = tl.load(ring + 2)
        places = (tl.load(ring + 3) // size).to(tl.int32)
        start = tl.load(ring) + row.to(tl.int64) * tl.load(ring + 1)
        first = tl.maximum(tl.load(lengths_ptr + entry), 0) % places
        words = (size // UNIT * PER_UNIT).to(tl.int32)  # so the compiler sees that no mask below cuts a unit
        for at in range(0, words, LANES):
            index = at + tl.arange(0, LANES)
            for number in range(accepted):
                node = tl.load(nodes_ptr + entry.to(tl.int64) * depth + number)
                if node > number:
                    of = start + ((first + node) % places) * size
                    to = start + ((first + number) % places) * size
                    source = tl.multiple_of(of.to(tl.pointer_type(WORD)), UNIT)
                    target = tl.multiple_of(to.to(tl.pointer_type(WORD)), UNIT)
                    bits = tl.load(source + index, mask=index < words, other=0)
                    tl.store(target + index, bits, mask=index < words)


def keep_path(rings: RingMap, record: TailRecord, nodes: Tensor) -> None:
    """Launches the op; see `memstate.kernels.reference.trees.keep_path`."""
    check_path(rings.table.device, record, nodes)
    batch, depth = nodes.shape
    if nodes.numel() and len(rings.table):
        _keep_path[(batch, len(rings.table))](
            rings.table, record.rows, record.length, record.accepted, nodes, rings.blocks[0].shape[1], depth,
            UNIT=rings.unit, WORD=WORDS[rings.unit], LANES=LANES, num_warps=WARPS,
        )  # fmt: skip
