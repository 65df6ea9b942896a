"""Helps engines test themselves: injected faults, a clock that a test moves, a store in a dictionary, comparisons.

chaos       Chaos and Faults: claims, admissions, stores and polls that fail
clock       Clock: seconds that pass when the test says so
store       MemoryStore: records in a dictionary, with faults of single records
comparison  compare: all prompts of an engine together, against each prompt alone
watch       compares the states and answers of two runs
check       check: the behaviours of any pool of slots; it needs hypothesis
pools       protocols: the methods of a pool that `check` calls
"""

from memstate.testing.chaos import Chaos, Faults
from memstate.testing.clock import Clock
from memstate.testing.comparison import Comparison, compare
from memstate.testing.store import MemoryStore
from memstate.testing.watch import EngineDiffers

__all__ = ["Chaos", "Clock", "Comparison", "EngineDiffers", "Faults", "MemoryStore", "compare"]
