"""Pictures of layouts and of slot owners: functions of plain data, which launch nothing and wait for no device.

The arithmetic (`blocks`, `runs`, `touched`, `holdings`) needs nothing more; the pictures need the extra `viz`.
"""

from memstate.viz.charts import bars, slot
from memstate.viz.plots import lines, stacked
from memstate.viz.strips import arena, pages
from memstate.viz.timeline import holdings, occupancy
from memstate.viz.touch import Block, blocks, joined, runs, shares, touched

__all__ = [
    "Block",
    "arena",
    "bars",
    "blocks",
    "holdings",
    "joined",
    "lines",
    "occupancy",
    "pages",
    "runs",
    "shares",
    "slot",
    "stacked",
    "touched",
]
