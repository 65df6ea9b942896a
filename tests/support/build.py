"""Builds a manager from plain keywords, so that tests can vary one setting at a time."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import proxy

from memstate import Forward, Pages, Prefix, StateLayout, StateManager, Tracking
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import REGISTERS_PER_ROW, ROW_CODE
from memstate.prefix.match import Match
from memstate.prefix.placement import Ends
from memstate.slots.commands import CommandBuffer
from memstate.testing import Faults
from tests.support import inside

PAGES = {"pages": "count", "page_size": "size", "pages_per_row": "per_row"}
FORWARD = ("in_place", "direct_hits", "grid", "packed", "pad", "tail")


class Whole(Ends):
    """A placement that keeps the state after the last token of a prompt of whole pages.

    `Ends` keeps it one page earlier. Tests that follow one state use `Whole`, so that its length is that of the prompt.
    """

    def marks(self, match: Match, page_size: int) -> dict[int, str]:
        """Returns the marks that `Ends` would give if the prompt had one more token."""
        return super().marks(replace(match, tokens=match.tokens + 1) if page_size > 1 else match, page_size)


def build(layout: StateLayout, **given: Any) -> StateManager:
    """Returns a manager. The keywords in PAGES become `Pages`, and those in FORWARD become `Forward`.

    With a prefix cache, prompts also keep states at multiples of `every`, unless `ends` is given. With `whole`, prompts
    of whole pages keep a state after their last token. `chaos`: random faults for calls of the manager.
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
    check_recorded(inside.commands(mem))
    return mem


def check_recorded(commands: CommandBuffer) -> None:
    """Makes a command buffer check the registers and cells of each record: all exist, and none is named twice."""
    mine, file = proxy(commands), commands.registers  # no cycle, so that a manager frees memory at once

    def checked(
        section: int, first: list[int], second: list[int], regs: list[int], sources: Sequence[int] = ()
    ) -> None:
        named = [*regs, *sources]
        least, end = (ROW_CODE - file.rows, ROW_CODE) if named[0] < 0 else (REGISTERS_PER_ROW, file.count)
        assert {*map(type, named)} == {int} and min(named) >= least and max(named) < end, named
        assert len(first) == len(second) and len({*regs}) == len(regs) and {*regs}.isdisjoint(sources), named
        CommandBuffer._record(mine, section, first, second, regs, sources)

    def written(cells: list[int], values: list[int]) -> None:
        size = file.cells.numel()
        assert len(cells) == len(values) and all(0 <= cell < size for cell in cells), f"{cells} of {size}"
        assert all(abs(value) < 2**31 for value in values), values
        CommandBuffer.write(mine, cells, values)

    commands._record, commands.write = checked, written  # type: ignore[method-assign]


def on(backend: Backend, layout: StateLayout, **given: Any) -> StateManager:
    """Returns a manager on the device of a backend. given: as for `build`."""
    return build(layout, backend=backend.name, device=backend.device, **given)
