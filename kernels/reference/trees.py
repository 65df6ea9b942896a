"""Trees of drafts on the host: the oracle of `memstate.kernels.trees` and the path without Triton."""

from torch import Tensor

from memstate.kernels.checks import check_path
from memstate.kernels.tables import RingMap, TailRecord


def keep_path(rings: RingMap, record: TailRecord, nodes: Tensor) -> None:
    """Moves what tails keep of the accepted nodes of trees to the places that the tokens of a chain have.

    The step of the record ran trees of drafts. Node n of a row lies behind the row's tokens at place length + n of its
    ring. Of the accepted nodes, number i of the path goes to place length + i, in all layers and rings. So from here on
    the accepted tokens are the next ones of the row, in order, like those of a step without a tree.

    Args:
        rings: the rings of all layers. They are changed.
        record: of the step, with `accepted` as the sampler has written it.
        nodes: the accepted nodes of each entry, ascending, int32 `batch depth`, contiguous. Only the first `accepted`
            of an entry count. One that lies at its place already, or before it, stays: so -1 stands for "no tree".

    Raises:
        ValueError: the nodes are no such tensor, or of more entries than the record has.

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
    """The token of a step before a token, -1 for none.

    Args:
        parents: of the step, int32 or int64 `batch node`; None: each token follows the one before it.
        row: entry of the batch.
        token: the token.

    Syncs: yes, off the CPU.
    """
    if parents is None or token >= parents.shape[1]:
        return token - 1
    return max(min(int(parents[row, token]), token - 1), -1)
