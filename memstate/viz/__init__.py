"""Pictures of layouts and of slot owners: functions of plain data, which launch nothing and wait for no device.

The arithmetic (`blocks`, `runs`, `touched`, `holdings`, `holdings_over`) needs nothing more; the pictures need the
extra `viz`.
"""

from memstate.viz.charts import bars, slot
from memstate.viz.moments import occupancy
from memstate.viz.owners import Span, holdings, holdings_over
from memstate.viz.strips import arena, pages
from memstate.viz.touch import Block, blocks, joined, runs, shares, touched
from memstate.viz.tracks import timeline

__all__ = [
    "Block",
    "Span",
    "arena",
    "bars",
    "blocks",
    "holdings",
    "holdings_over",
    "joined",
    "occupancy",
    "pages",
    "runs",
    "shares",
    "slot",
    "timeline",
    "touched",
]
