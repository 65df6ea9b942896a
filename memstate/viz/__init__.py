"""Pictures of layouts and of slot owners, drawn from plain data. Nothing here launches a kernel or waits for a device.

The functions that compute (`blocks`, `runs`, `touched`, `compare_layouts`, `holdings`, `holdings_over`, `free_words`,
`sections`) need no extra package. The pictures need the extra `viz`, and load when they are first used.
"""

# ruff: isort: skip_file
from typing import TYPE_CHECKING

from memstate.lazy import exports
from memstate.viz.bits import free_words
from memstate.viz.costs import compare_layouts
from memstate.viz.owners import OwnerSpan, holdings, holdings_over
from memstate.viz.touch import ByteRange, blocks, joined, runs, shares, touched
from memstate.viz.uploads import PacketSection, sections

if TYPE_CHECKING:
    from memstate.viz.charts import bars as bars, curves as curves, lines as lines, stacked as stacked
    from memstate.viz.memory import arena as arena, pages as pages, slot as slot
    from memstate.viz.stepwise import PlannedStep as PlannedStep, occupancy as occupancy, steps as steps
    from memstate.viz.tracks import timeline as timeline
    from memstate.viz.words import bitmap as bitmap, packet as packet

_pictures: list[str] = []
if not TYPE_CHECKING:  # type checkers see the imports above instead, and report unknown names
    __getattr__, _pictures = exports(__name__)
__all__ = [
    "ByteRange", "OwnerSpan", "PacketSection", "blocks", "compare_layouts", "free_words", "holdings", "holdings_over",
    "joined", "runs", "sections", "shares", "touched", *_pictures,
]  # fmt: skip
