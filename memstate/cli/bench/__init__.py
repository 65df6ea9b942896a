"""Benchmarks.

`launches` counts what the library asks of a device and is exact on every machine. `host`, `prefix` and `tiers` are host
time, whose ratios mean something on any machine. `alloc`, `track` and `copy` are device time and need a GPU.
"""

from memstate.cli.bench.launches import by_unit, launches
from memstate.cli.bench.suite import NAMES, NEED_DEVICE, by_entry, run
from memstate.cli.bench.task import PEERS, BenchResult, Figure

__all__ = ["NAMES", "NEED_DEVICE", "PEERS", "BenchResult", "Figure", "by_entry", "by_unit", "launches", "run"]
