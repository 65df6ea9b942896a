"""Closes the gaps of accepted paths on the host, in plain torch.

Tests compare `memstate.kernels.trees` with this reference, which replaces the kernels where Triton is missing.
"""

from torch import Tensor

from memstate.kernels.checks import check_path
from memstate.kernels.tables import RingMap, TailRecord


def keep_path(rings: RingMap, record: TailRecord, nodes: Tensor) -> None:
    """Moves the accepted nodes of trees to the places in the tails that they would have without a tree.

    The step of the record ran trees of drafts. Node n of a row has place length + n in its rings, behind the row's
    tokens. Node i of the accepted path moves to place length + i, in all layers and rings. After that, the accepted
    tokens follow the row's tokens in order, as after a step without a tree.

    Args:
        rings: the rings of all layers. They are changed.
        record: record of the step, with `accepted` from the sampler.
        nodes: the accepted nodes of each entry, ascending, int32 `batch depth`, contiguous. Only the first `accepted`
            nodes of an entry count. Node i of the path stays if its number is at most i, so -1 stands for "no tree".

    Raises:
        ValueError: `nodes` has another shape, dtype or device, or more entries than the record.

    Syncs: no (the reference: yes, off the CPU).
    """
    check_path(rings.table.device, record, nodes)
    columns = (column[: len(nodes)].tolist() for column in (record.rows, record.length, record.accepted))
    moves = [
        (row, max(length, 0), number, node)
        for row, length, count, path in zip(*columns, nodes.tolist(), strict=True)
        for number, node in enumerate(path[: max(count, 0)])
        if node > number
    ]
    for block, places in zip(rings.blocks, rings.places, strict=True):
        whole = block.unflatten(2, (places, -1))  # layer row place byte
        for row, length, number, node in moves:
            if 0 < row < whole.shape[1]:
                whole[:, row, (length + number) % places] = whole[:, row, (length + node) % places]


def lineage(parents: Tensor | None, row: int, token: int) -> int:
    """Returns the parent of a token: the token of the step that it follows, -1 for none.

    Args:
        parents: parents of the step, int32 or int64 `batch node`; None if each token follows the token before it.
        row: entry of the batch.
        token: number of the token in the step.

    Syncs: yes, off the CPU.
    """
    if parents is None or token >= parents.shape[1]:
        return token - 1
    return max(min(int(parents[row, token]), token - 1), -1)
