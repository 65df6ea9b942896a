"""Says why a request was refused: it can never fit, others have the room, or it is wrong."""

from math import inf
from typing import Final

from memstate.engine.manager import StateManager
from memstate.errors import MemstateError, OutOfPages, OutOfRows, OutOfSlots
from memstate.integrations.transformers.prompts import Reason
from memstate.integrations.transformers.running import Asked, Running

BACK_PRESSURE: Final = (OutOfSlots, OutOfRows, OutOfPages)


def refusal(error: MemstateError, one: Asked | Running, mem: StateManager) -> Reason:
    """Returns the kind of a refusal.

    Args:
        error: what the manager raised.
        one: the request, or its row if other samples lack room. The row still runs.
        mem: the manager.
    """
    asked = one if isinstance(one, Asked) else one.asked
    pages, length = mem.pages, len(asked.prompt.tokens) + asked.samplers[0].most - 1
    if pages.count and length > min(pages.per_row, pages.count) * pages.size:
        return "too_large"
    row = mem.info(one.row) if isinstance(one, Running) else None
    if not isinstance(error, BACK_PRESSURE):
        return "no_room" if row else "invalid"  # samples lack a register for the state that they share
    has = {OutOfSlots: row.slots, OutOfRows: 1, OutOfPages: -(-length // pages.size)}[type(error)] if row else 0
    there = next((most for name in ("capacity", "rows", "pages") if (most := getattr(error, name, None))), inf)
    return "too_large" if error.requested + has > there else "no_room"


def why(error: MemstateError, mem: StateManager) -> str:
    """Returns the error of a request that was refused while nothing of its server runs, and what to do.

    Args:
        error: what the manager raised.
        mem: the manager.
    """
    others = len(mem.rows)
    if not others or not isinstance(error, BACK_PRESSURE):
        return str(error)
    return (
        f"{error}; {others} rows of the manager are not this server's: close the caches and servers that they "
        "belong to, or call the manager's recover() if there are none"
    )
