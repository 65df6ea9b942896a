"""Benchmarks, for `memstate bench`.

launches                counts calls of the device: exact, the same on every machine
host, prefix, tiers     host time: ratios can be compared between machines
transformers            a served model, compared with the model's own cache and with `generate`
alloc, track, copy      device time: needs a GPU
state                   device time of each kernel that moves or computes state: needs a GPU
"""

from memstate_tools.bench.launches import by_unit, launches
from memstate_tools.bench.suite import NAMES, NEED_DEVICE, run
from memstate_tools.bench.task import PEERS, BenchResult, Measured

__all__ = ["NAMES", "NEED_DEVICE", "PEERS", "BenchResult", "Measured", "by_unit", "launches", "run"]
