"""What a cache holds, and how it is released where a forward failed, was interrupted or the cache was forgotten."""

from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from memstate.engine.manager import StateManager
from memstate.errors import InvalidArgument, StaleHandle
from memstate.requests.handles import Row, Snapshot
from memstate.requests.steps import Step


class Left(NamedTuple):
    """What a cache leaves behind.

    Attributes:
        rows: its rows; some may have ended.
        snapshots: its snapshots; some may have been dropped.
        step: the step that was not settled, or None.
    """

    rows: list[Row]
    snapshots: list[Snapshot | None]
    step: Step | None


def end_rows(mem: StateManager, rows: Iterable[Row]) -> None:
    """Ends those of some rows that still run. Syncs: no."""
    for row in rows:
        with suppress(StaleHandle):
            mem.end([row])


def release(mem: StateManager, left: Left) -> bool:
    """Cancels the step, ends the rows and drops the snapshots. After an interrupt it can be called again.

    Args:
        mem: the manager.
        left: what to release.

    Returns:
        Whether nothing is left. If not, an older step of another caller comes first: call it again after that.

    Syncs: no.
    """
    done = left.step is None or _settled(mem, left.step, left.rows)
    end_rows(mem, left.rows)
    for one in left.snapshots:
        with suppress(StaleHandle):
            mem.drop([one])
    return done


def _settled(mem: StateManager, step: Step, rows: list[Row]) -> bool:
    """Cancels a step, or settles it without its rows where a later step was planned. False: older ones come first."""
    with suppress(StaleHandle):  # it was settled
        try:
            mem.cancel(step)
        except InvalidArgument:
            end_rows(mem, rows)
            try:
                mem.settle(step) if step.batch.drafts is None else mem.accept(step, [0] * len(step.numbers))
            except InvalidArgument:
                return False
    return True
