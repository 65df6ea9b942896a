"""Pictures of layouts and of slot owners: functions of plain data, which launch nothing and wait for no device.

The arithmetic (`blocks`, `runs`, `touched`, `holdings`, `free_words`, `sections`) needs nothing more; the pictures need
the extra `viz`.
"""

from memstate.viz.bits import bitmap, free_words
from memstate.viz.charts import bars, slot
from memstate.viz.stepwise import PlannedStep, curves, steps
from memstate.viz.strips import arena, pages
from memstate.viz.timeline import holdings, occupancy
from memstate.viz.touch import Block, blocks, joined, runs, shares, touched
from memstate.viz.uploads import PacketSection, packet, sections

__all__ = [
    "Block",
    "PacketSection",
    "PlannedStep",
    "arena",
    "bars",
    "bitmap",
    "blocks",
    "curves",
    "free_words",
    "holdings",
    "joined",
    "occupancy",
    "packet",
    "pages",
    "runs",
    "sections",
    "shares",
    "slot",
    "steps",
    "touched",
]
