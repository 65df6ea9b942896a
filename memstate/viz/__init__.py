"""Pictures of layouts and of slot owners: functions of plain data, which launch nothing and wait for no device.

The arithmetic (`blocks`, `runs`, `touched`, `holdings`, `holdings_over`, `free_words`, `sections`) needs nothing more;
the pictures need the extra `viz`, and are loaded when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from memstate.viz.bits import free_words
from memstate.viz.owners import Span, holdings, holdings_over
from memstate.viz.touch import Block, blocks, joined, runs, shares, touched
from memstate.viz.uploads import PacketSection, sections

if TYPE_CHECKING:
    from memstate.viz.charts import bars, curves, lines, stacked
    from memstate.viz.memory import arena, pages, slot
    from memstate.viz.stepwise import PlannedStep, occupancy, steps
    from memstate.viz.tracks import timeline
    from memstate.viz.words import bitmap, packet

__all__ = [
    "Block", "PacketSection", "PlannedStep", "Span", "arena", "bars", "bitmap", "blocks", "curves", "free_words",
    "holdings", "holdings_over", "joined", "lines", "occupancy", "packet", "pages", "runs", "sections", "shares",
    "slot", "stacked", "steps", "timeline", "touched",
]  # fmt: skip

PICTURES: Final = {
    "stepwise": ("PlannedStep", "occupancy", "steps"),
    "charts": ("bars", "curves", "lines", "stacked"),
    "memory": ("arena", "pages", "slot"),
    "tracks": ("timeline",),
    "words": ("bitmap", "packet"),
}

if not TYPE_CHECKING:  # a type checker reads the imports above, and reports a name that is not among them

    def __getattr__(name: str) -> Any:
        """Loads the module of a picture when it is first used."""
        for module, names in PICTURES.items():
            if name in names:
                import_module(f"{__name__}.figure")  # without matplotlib it says what to install
                return getattr(import_module(f"{__name__}.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
