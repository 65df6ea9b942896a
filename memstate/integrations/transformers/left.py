"""Releases the rows, snapshots and step of a cache whose forward failed or that was deleted without `close`."""

from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from memstate.engine.manager import StateManager
from memstate.errors import InvalidArgument, StaleHandle
from memstate.requests.handles import Row, Snapshot
from memstate.requests.steps import Step


class Left(NamedTuple):
    """Rows, snapshots and step of a cache that nobody has released.

    Attributes:
        rows: the cache's rows; some may have ended.
        snapshots: the cache's snapshots; some may have been dropped.
        step: the cache's open step, or None.
    """

    rows: list[Row]
    snapshots: list[Snapshot | None]
    step: Step | None


def end_rows(mem: StateManager, rows: Iterable[Row]) -> None:
    """Ends the rows that still run. Syncs: no."""
    for row in rows:
        with suppress(StaleHandle):
            mem.end([row])


def release(mem: StateManager, left: Left) -> bool:
    """Cancels the step, ends the rows and drops the snapshots. Can be called again after an interrupt.

    Args:
        mem: the manager.
        left: the rows, snapshots and step to release.

    Returns:
        Whether all is released. If not, another caller must first settle an older step; call this again after it.

    Syncs: no.
    """
    done = left.step is None or _settled(mem, left.step, left.rows)
    end_rows(mem, left.rows)
    for one in left.snapshots:
        with suppress(StaleHandle):
            mem.drop([one])
    return done


def _settled(mem: StateManager, step: Step, rows: list[Row]) -> bool:
    """Cancels a step. If a later one is planned, ends the rows and settles it. False: an older step is still open."""
    with suppress(StaleHandle):  # the step was settled already
        try:
            mem.cancel(step)
        except InvalidArgument:
            end_rows(mem, rows)
            try:
                mem.settle(step) if step.batch.drafts is None else mem.accept(step, [0] * len(step.numbers))
            except InvalidArgument:
                return False
    return True
