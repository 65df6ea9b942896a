"""Pictures of layouts and of slot owners: functions of plain data, which launch nothing and wait for no device.

The arithmetic (`blocks`, `runs`, `touched`, `holdings`, `holdings_over`, `free_words`, `sections`) needs nothing more;
the pictures need the extra `viz`.
"""

from memstate.viz.bits import bitmap, free_words
from memstate.viz.charts import bars, slot
from memstate.viz.moments import occupancy
from memstate.viz.owners import Span, holdings, holdings_over
from memstate.viz.plots import lines, stacked
from memstate.viz.stepwise import PlannedStep, curves, steps
from memstate.viz.strips import arena, pages
from memstate.viz.touch import Block, blocks, joined, runs, shares, touched
from memstate.viz.tracks import timeline
from memstate.viz.uploads import PacketSection, packet, sections

__all__ = [
    "Block",
    "PacketSection",
    "PlannedStep",
    "Span",
    "arena",
    "bars",
    "bitmap",
    "blocks",
    "curves",
    "free_words",
    "holdings",
    "holdings_over",
    "joined",
    "lines",
    "occupancy",
    "packet",
    "pages",
    "runs",
    "sections",
    "shares",
    "slot",
    "stacked",
    "steps",
    "timeline",
    "touched",
]
