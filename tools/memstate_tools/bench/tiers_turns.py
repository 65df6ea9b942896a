"""Measures the rates of two or more sides in turns, for batches of records. The module knows no store and no device."""

from collections import defaultdict
from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

import numpy as np

from memstate_tools.bench.clock import Act, host_seconds, nothing
from memstate_tools.bench.task import Measured, Setting, take_turns

KIB, MIB = 2**10, 2**20
CASES = ((1, 64 * KIB), (32, 64 * KIB), (1, MIB), (32, MIB), (1, 16 * MIB), (4, 16 * MIB), (1, 64 * MIB))
TOY_CASES = ((1, 4 * KIB), (3, 4 * KIB))  # (records, bytes of each)
ROUNDS, TOY_ROUNDS = 9, 2
COLD = 64 * MIB  # bytes that are overwritten before each call, so that no side finds its bytes in a cache


def cases(setting: Setting) -> tuple[tuple[int, int], ...]:
    """Returns the batches of records, as (number of records, bytes of each)."""
    return setting.sizes(CASES, TOY_CASES)


def sized(records: int, nbytes: int) -> str:
    """Returns the name of a batch: how many records, of how many bytes each."""
    return f"{records} x {nbytes // MIB} MiB" if nbytes >= MIB else f"{records} x {nbytes // KIB} KiB"


class TurnSide(NamedTuple):
    """A timed call, and the call that undoes it.

    Attributes:
        act: The call. It returns when all its bytes have arrived.
        undo: Called after `act`, not timed.
    """

    act: Act
    undo: Act = nothing


def rates(
    setting: Setting, op: str, case: str, nbytes: int, ours: TurnSide, peers: Mapping[str, TurnSide]
) -> list[Measured]:  # fmt: skip
    """Measures bytes per second of several sides. In each round, every side makes one call.

    Args:
        setting: The setting of the benchmark.
        op: Operation of the figures.
        case: Case of the figures.
        nbytes: Bytes that a call of any side moves.
        ours: The timed call of memstate, and its undo.
        peers: Sides of the peers, by name.

    Returns:
        A figure for each wanted peer that can run, or a single figure without a peer.

    Syncs: yes, on a GPU.
    """
    spent = defaultdict[str, list[float]](list)
    wanted = {name: peers[name] for name in peers if setting.compares(name)}
    cold = np.zeros(0 if setting.toy else COLD, np.uint8)

    def act(turn: int, name: str, side: TurnSide) -> None:
        cold.fill(1)
        spent[name].append(host_seconds(side.act, setting.device))
        side.undo()

    take_turns({"": ours}, wanted, 1 + setting.sizes(ROUNDS, TOY_ROUNDS), act, f"{op}, {case}")
    # the first round may compile, so it does not count
    value = {name: nbytes / median(spent[name][1:]) for name in ("", *wanted)}
    return setting.rows(op, case, value[""], "bytes/s", {name: value[name] for name in wanted})
