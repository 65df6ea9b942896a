"""Helps engines test themselves: faults on purpose, a clock that a test turns, a store in a dictionary.

chaos       Chaos and Faults: claims, admissions, stores and polls that fail
clock       Clock: seconds that pass when the test says so
store       MemoryStore: records in a dictionary, with faults of single records
comparison  compare: an engine, with what it computes where it serves each prompt alone
watch       what compares its states and answers
check       check: the behaviours of any pool of slots; it needs hypothesis
pools       what such a pool has
"""

from memstate.testing.chaos import Chaos, Faults
from memstate.testing.clock import Clock
from memstate.testing.comparison import Comparison, compare
from memstate.testing.store import MemoryStore
from memstate.testing.watch import EngineDiffers

__all__ = ["Chaos", "Clock", "Comparison", "EngineDiffers", "Faults", "MemoryStore", "compare"]
