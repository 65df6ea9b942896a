"""Computes a hit rate that no policy exceeds: the optimum of a linear program that knows the whole trace.

A depth is a number of blocks of a prompt. A request can hit at a depth if an earlier request passed this depth, and if
the cache has held a state at this depth, and the KV up to it, since the last such request. The program chooses what the
cache holds at any time. It may hold a fraction of a state or of KV, which a real cache cannot:

    variables    for request i and depth d: `hit`, the fraction of i that starts from depth d or deeper; `kv`, the
                 fraction of the blocks between the previous depth and d whose KV i finds
    limits       held states and pages at any time; a running request also needs its own pages;
                 1 >= hit >= hit of the next depth; the same for kv; hit >= kv
    maximised    blocks whose KV is found

The program assumes one request at a time, in the order of the trace, and that each request leaves a state at every
depth. So no policy exceeds the bound, but perhaps none reaches it.
"""

import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memstate.cli.replay.requests import UnitRequest
from memstate.errors import ConfigurationError

Ints = npt.NDArray[np.int64]


class Chances(NamedTuple):
    """Depths at which requests can hit, ordered by request, then by depth. All arrays have one entry per depth.

    Attributes:
        since: The last earlier request that passed this depth.
        until: The request that can hit.
        blocks: Blocks between the previous depth and this one.
        inner: Whether the previous entry belongs to the same request.
    """

    since: Ints
    until: Ints
    blocks: Ints
    inner: npt.NDArray[np.bool_]


def chances(requests: Sequence[UnitRequest], per_block: int, first: int = 0) -> Chances:
    """Returns the depths at which requests can hit.

    If the same earlier request was the last to pass several of these depths, only the deepest is kept.

    Args:
        requests: The requests of the trace, in its order.
        per_block: Units of a block.
        first: Index of the first request that counts. Earlier requests can hit nowhere.
    """
    last, entries = dict[int, int](), list[tuple[int, int, int, bool]]()
    for request in requests:
        path = (request.tokens[per_block - 1 :: per_block] // per_block).tolist()
        # the last token of a prompt is always computed
        most = min(request.known, max(0, request.prompt - 1) // per_block)
        most = most if request.at >= first else 0
        passers = np.array([last[block] for block in path[:most]], np.int64)
        ends = np.flatnonzero(np.diff(passers, append=-1)) + 1
        sizes = np.diff(ends, prepend=0)
        entries += [
            (passers[end - 1], request.at, size, n > 0) for n, (end, size) in enumerate(zip(ends, sizes, strict=True))
        ]
        last.update(dict.fromkeys(path, request.at))
    since, until, blocks, inner = zip(*entries, strict=True) if entries else ((), (), (), ())
    return Chances(
        np.array(since, np.int64), np.array(until, np.int64), np.array(blocks, np.int64), np.array(inner, bool)
    )


def require_scipy() -> None:
    """Requires scipy, which solves the program.

    Raises:
        ConfigurationError: scipy is not installed.
    """
    if importlib.util.find_spec("scipy") is None:
        raise ConfigurationError("the bound needs scipy: pip install '.[bound]' in a checkout")


def most_hits(requests: Sequence[UnitRequest], per_block: int, states: int, pages: int, first: int = 0) -> float:
    """Returns the largest number of blocks that the requests from `first` on can hit.

    Args:
        requests: The requests of the trace, in its order.
        per_block: Units of a block.
        states: States that fit.
        pages: Pages that fit; a page is one block.
        first: Index of the first request that counts.

    Raises:
        ConfigurationError: scipy is missing, or the program was not solved.
    """
    require_scipy()
    from scipy.optimize import linprog
    from scipy.sparse import block_array, coo_array, eye_array

    since, until, blocks, inner = chances(requests, per_block, first)
    n, times, each = len(since), len(requests), np.arange(len(since))
    if not n:
        return 0.0

    def sparse(rows: Ints, columns: Ints, values: npt.NDArray[Any], height: int) -> Any:
        return coo_array((values, (rows, columns)), shape=(height, n))

    # held after request t = held before t + holds that start at t - holds that end at t
    # A hit that goes deeper needs no state at the previous depth.
    deeper, ones = each[inner], np.ones(n)
    ends = sparse(until[~inner], each[~inner], ones[~inner], times)
    starts = sparse(since, each, ones, times) - sparse(since[deeper - 1], deeper, ones[inner], times)
    kv_starts, kv_ends = (sparse(when, each, blocks, times) for when in (since, until))
    rows, one = np.arange(len(deeper)), sparse(each, each, ones, n)
    order = sparse(rows, deeper, ones[inner], len(deeper)) - sparse(rows, deeper - 1, ones[inner], len(deeper))
    here, step = eye_array(times), eye_array(times) - eye_array(times, k=-1)
    flows = block_array([[ends - starts, None, step, None], [None, kv_ends - kv_starts, None, step]])
    limits = block_array([
        [order, None, None, None], [None, order, None, None], [-one, one, None, None],
        [None, -kv_starts, coo_array((times, times)), here],
    ])  # fmt: skip
    own = [-(-len(request.tokens) // per_block) for request in requests]
    most = np.concatenate([np.zeros(limits.shape[0] - times), pages - np.array(own, float)])
    top = np.concatenate([np.ones(2 * n), np.full(times, states), np.full(times, pages)])
    worth = np.concatenate([np.zeros(n), blocks, np.zeros(2 * times)])
    solved = linprog(
        -worth, A_ub=limits, b_ub=most, A_eq=flows, b_eq=np.zeros(2 * times),
        bounds=np.stack([np.zeros(len(top)), top], 1), method="highs",
    )  # fmt: skip
    if not solved.success:
        raise ConfigurationError(f"the bound was not solved: {solved.message}")
    return float(-solved.fun)
