"""Sides that are measured in turns, and on how many bytes. Knows no store and no device's layout."""

from collections import defaultdict
from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

import numpy as np

from memstate_tools.bench.clock import Act, host_seconds, nothing
from memstate_tools.bench.task import Figure, Setting, take_turns

KIB, MIB = 2**10, 2**20
CASES = ((1, 64 * KIB), (32, 64 * KIB), (1, MIB), (32, MIB), (1, 16 * MIB), (4, 16 * MIB), (1, 64 * MIB))
TOY_CASES = ((1, 4 * KIB), (3, 4 * KIB))  # records, bytes of each
ROUNDS, TOY_ROUNDS = 9, 2
COLD = 64 * MIB  # overwritten before every call, so that no side finds the bytes in a cache


def cases(setting: Setting) -> tuple[tuple[int, int], ...]:
    """Returns batches of records: how many, and the bytes of each."""
    return setting.sizes(CASES, TOY_CASES)


def sized(records: int, nbytes: int) -> str:
    """Returns the name of a batch."""
    return f"{records} x {nbytes // MIB} MiB" if nbytes >= MIB else f"{records} x {nbytes // KIB} KiB"


class Side(NamedTuple):
    """What is timed.

    Attributes:
        act: The call, until all its bytes have arrived.
        undo: Called after it, not timed.
    """

    act: Act
    undo: Act = nothing


def rates(
    setting: Setting, op: str, case: str, nbytes: int, ours: Side, peers: Mapping[str, Side]
) -> list[Figure]:  # fmt: skip
    """Measures bytes a second of sides that take one call each in every round.

    Args:
        setting: Of the benchmark.
        op: Operation of the figures.
        case: Case of the figures.
        nbytes: Bytes that a call of any side moves.
        ours: What memstate does.
        peers: What it is compared with, by name.

    Returns:
        A figure for each peer that is wanted and can do it, or one beside no peer.

    Syncs: yes, on a GPU.
    """
    spent = defaultdict[str, list[float]](list)
    wanted = {name: peers[name] for name in peers if setting.compares(name)}
    cold = np.zeros(0 if setting.toy else COLD, np.uint8)

    def act(turn: int, name: str, side: Side) -> None:
        cold.fill(1)
        spent[name].append(host_seconds(side.act, setting.device))
        side.undo()

    take_turns({"": ours}, wanted, 1 + setting.sizes(ROUNDS, TOY_ROUNDS), act, f"{op}, {case}")
    value = {name: nbytes / median(spent[name][1:]) for name in ("", *wanted)}  # the first round may compile
    return setting.rows(op, case, value[""], "bytes/s", {name: value[name] for name in wanted})
