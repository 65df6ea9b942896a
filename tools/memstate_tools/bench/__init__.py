"""Benchmarks, for `memstate bench`.

launches                counts what the library asks of a device: exact, the same on every machine
host, prefix, tiers     host time: the ratios mean something on any machine
transformers            a served model beside its own cache and beside `generate`
alloc, track, copy      device time: needs a GPU
"""

from memstate_tools.bench.launches import by_unit, launches
from memstate_tools.bench.suite import NAMES, NEED_DEVICE, run
from memstate_tools.bench.task import PEERS, BenchResult, Figure

__all__ = ["NAMES", "NEED_DEVICE", "PEERS", "BenchResult", "Figure", "by_unit", "launches", "run"]
