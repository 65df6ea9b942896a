"""A manager from plain keywords, so that tests can vary one setting at a time."""

from dataclasses import replace
from typing import Any

from memstate import Forward, Pages, Prefix, StateLayout, StateManager, Tracking
from memstate.kernels.dispatch import Backend
from memstate.prefix.match import Match
from memstate.prefix.placement import Ends
from memstate.testing import Faults
from tests.support import inside

PAGES = {"pages": "count", "page_size": "size", "pages_per_row": "per_row"}
FORWARD = ("in_place", "speculation", "direct_hits", "grid", "packed", "pad")


class Whole(Ends):
    """Prompts of whole pages keep the state behind their last token, as a caller may who knows that they go on.

    `Ends` keeps it a page before. This one is for tests of what becomes of a state, which say where it lies.
    """

    def marks(self, match: Match, page_size: int) -> dict[int, str]:
        """The lengths that `Ends` names for one more token."""
        return super().marks(replace(match, tokens=match.tokens + 1) if page_size > 1 else match, page_size)


def build(layout: StateLayout, **given: Any) -> StateManager:
    """A manager; pages, page_size and pages_per_row become `Pages`, what the forward can do becomes `Forward`.

    With a prefix cache, prompts keep states at the multiples of `every` as well, unless `ends` is given. With `whole`,
    those of whole pages keep one behind their last token. `chaos`: the faults that its calls meet.
    """
    prefix, tracking, placement = given.get("prefix"), given.get("tracking"), Whole if given.pop("whole", 0) else Ends
    if not given.pop("ends", False) and isinstance(prefix, Prefix) and isinstance(tracking, Tracking):
        given["prefix"] = replace(prefix, placement=placement(tracking.every))
    pages = {PAGES[name]: given.pop(name) for name in tuple(given) if name in PAGES}
    forward = {name: given.pop(name) for name in tuple(given) if name in FORWARD}
    if pages or given.get("prefix") is not None:
        given["pages"] = Pages(**({"size": 1} | pages))
    if forward:
        given["forward"] = Forward(**forward)
    chaos, tiers = given.pop("chaos", None), given.get("tiers")
    faults = Faults(chaos) if chaos is not None else None
    if faults is not None and tiers is not None and tiers.store is not None:
        given["tiers"] = replace(tiers, store=faults.store(tiers.store))
    mem = StateManager(layout, **given)
    if faults is not None:
        faults.inject(mem)
    inside.commands(mem).checked = True  # what the library computed is right, in every test
    return mem


def on(backend: Backend, layout: StateLayout, **given: Any) -> StateManager:
    """The same on a backend."""
    return build(layout, backend=backend.name, device=backend.device, **given)
