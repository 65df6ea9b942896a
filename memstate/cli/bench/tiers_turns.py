"""Who is measured beside whom, in turns, and on how many bytes. Knows no store and no device's layout."""

import sys
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import NamedTuple

import numpy as np
import torch

from memstate.cli.bench.clock import Act, nothing
from memstate.cli.bench.entry import Figure
from memstate.cli.bench.task import Setting

KIB, MIB = 2**10, 2**20
CASES = ((1, 64 * KIB), (32, 64 * KIB), (1, MIB), (32, MIB), (1, 16 * MIB), (4, 16 * MIB), (1, 64 * MIB))
TOY_CASES = ((1, 4 * KIB), (3, 4 * KIB))  # records, bytes of each
ROUNDS, TOY_ROUNDS = 9, 2
COLD = 64 * MIB  # overwritten before every call, so that no side finds the bytes in a cache


def cases(setting: Setting) -> tuple[tuple[int, int], ...]:
    """Batches of records: how many, and bytes of each."""
    return TOY_CASES if setting.toy else CASES


def sized(records: int, nbytes: int) -> str:
    """The name of a batch."""
    return f"{records} x {nbytes // MIB} MiB" if nbytes >= MIB else f"{records} x {nbytes // KIB} KiB"


class Side(NamedTuple):
    """act: what is timed, until all its bytes have arrived. undo: comes behind it, and is not."""

    act: Act
    undo: Act = nothing


class Turns:
    """Sides take one call each, every round another one first: what disturbs the machine disturbs all."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.rounds = setting, TOY_ROUNDS if setting.toy else ROUNDS
        self._cold = np.zeros(0 if setting.toy else COLD, np.uint8)

    def rates(self, op: str, case: str, nbytes: int, ours: Side, peers: Mapping[str, Side]) -> list[Figure]:
        """Bytes a second, beside each peer that moves as many."""
        return self.entries(op, case, "bytes/s", lambda seconds: nbytes / seconds, ours, peers)

    def entries(
        self, op: str, case: str, unit: str, value: Callable[[float], float], ours: Side, peers: Mapping[str, Side]
    ) -> list[Figure]:
        """An entry for each peer that is wanted. value: of the seconds of a call, of which the median counts."""
        seconds = self._take(
            f"{op}, {case}", ours, {name: peers[name] for name in peers if self.setting.boundaries(name)}
        )
        mine = value(seconds.pop(""))
        alone = (op, self.setting.case(case), mine, unit)
        theirs = {name: value(each) for name, each in seconds.items()}
        return [Figure(*alone, name, other, mine / other) for name, other in theirs.items()] or [Figure(*alone)]

    def _take(self, what: str, ours: Side, peers: dict[str, Side]) -> dict[str, float]:
        """Median seconds by name, ours under ""; a peer that fails leaves."""
        sides, spent = {"": ours, **peers}, dict[str, list[float]]()
        for turn in range(1 + self.rounds):
            first = turn % len(sides)
            for name in [*sides][first:] + [*sides][:first]:
                try:
                    spent.setdefault(name, []).append(self._seconds(sides[name]))
                except Exception as error:
                    if not name:
                        raise
                    del sides[name]
                    told = f"raises {type(error).__name__}: {error}"
                    print(f"{what}: peer {name} {' '.join(told.split())[:300]}", file=sys.stderr)
        return {name: median(spent[name][1:]) for name in sides}

    def _seconds(self, side: Side) -> float:
        self._cold.fill(1)
        if self.setting.device.type == "cuda":
            torch.cuda.synchronize(self.setting.device)
        begin = time.perf_counter()
        side.act()
        end = time.perf_counter()
        side.undo()
        return end - begin
