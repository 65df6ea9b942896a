"""Benchmarks. `launches` counts what the library asks of a device and is exact on every machine."""

from memstate.bench.entry import Entry
from memstate.bench.launches import by_unit, launches

__all__ = ["Entry", "by_unit", "launches"]
