"""Sides that are measured in turns, and on how many bytes. Knows no store and no device's layout."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from statistics import median
from typing import NamedTuple

import numpy as np
import torch

from memstate.cli.bench.clock import Act, nothing
from memstate.cli.bench.task import Figure, Setting, take_turns

KIB, MIB = 2**10, 2**20
CASES = ((1, 64 * KIB), (32, 64 * KIB), (1, MIB), (32, MIB), (1, 16 * MIB), (4, 16 * MIB), (1, 64 * MIB))
TOY_CASES = ((1, 4 * KIB), (3, 4 * KIB))  # records, bytes of each
ROUNDS, TOY_ROUNDS = 9, 2
COLD = 64 * MIB  # overwritten before every call, so that no side finds the bytes in a cache


def cases(setting: Setting) -> tuple[tuple[int, int], ...]:
    """Returns batches of records: how many, and the bytes of each."""
    return TOY_CASES if setting.toy else CASES


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


class Turns:
    """Sides take one call each in every round."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.rounds = setting, TOY_ROUNDS if setting.toy else ROUNDS
        self._cold = np.zeros(0 if setting.toy else COLD, np.uint8)

    def rates(self, op: str, case: str, nbytes: int, ours: Side, peers: Mapping[str, Side]) -> list[Figure]:
        """Returns bytes a second, beside each peer that moves as many."""
        return self.entries(op, case, "bytes/s", lambda seconds: nbytes / seconds, ours, peers)

    def entries(
        self, op: str, case: str, unit: str, value: Callable[[float], float], ours: Side, peers: Mapping[str, Side]
    ) -> list[Figure]:
        """Returns an entry for each peer that is wanted; `value` is of the median seconds of a call."""
        sides, spent = {"": ours}, defaultdict[str, list[float]](list)
        wanted = {name: peers[name] for name in peers if self.setting.compares(name)}

        def act(turn: int, name: str, side: Side) -> None:
            spent[name].append(self._seconds(side))

        take_turns(sides, wanted, 1 + self.rounds, act, f"{op}, {case}")
        values = {name: value(median(spent[name][1:])) for name in ("", *wanted)}
        mine = values.pop("")
        alone = (op, self.setting.case(case), mine, unit)
        return [Figure(*alone, name, other, mine / other) for name, other in values.items()] or [Figure(*alone)]

    def _seconds(self, side: Side) -> float:
        self._cold.fill(1)
        if self.setting.device.type == "cuda":
            torch.cuda.synchronize(self.setting.device)
        begin = time.perf_counter()
        side.act()
        end = time.perf_counter()
        side.undo()
        return end - begin
