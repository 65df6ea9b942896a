"""The tracking rules, row by row: what a plan, an accept and a settle change in the columns of a register file.

The reference kernels apply them to slot ids. The host's mirror applies them to flags, which say whether a register
holds a slot. So a "slot" is an id or True here, and 0 or False is none. The rules only read and write the columns.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from memstate.kernels.tables import REGISTERS_PER_ROW, Rules, Strategy

Claim = Callable[[], int]  # takes one more slot, 0 where the budget is spent


class Columns(NamedTuple):
    """The columns that the rules read and write.

    Args:
        slots: of each register, a slot or none, `register`.
        labels: of each register, `register`.
        tracked: the length of each row's newest snapshot, `row`.
        snapshot_at: another length at which a snapshot of the row is due, 0 for none, `row`.
        source: the register that the row's first step reads, 0 for none, `row`.
    """

    slots: Any
    labels: Any
    tracked: Any
    snapshot_at: Any
    source: Any


def last_boundary(length: int, reach: int, every: int, snapshot_at: int) -> int:
    """Returns the largest boundary in length + 1 .. reach, 0 for none."""
    return max((mark for mark in (reach // every * every, snapshot_at) if length < mark <= reach), default=0)


def plan_snapshot(columns: Columns, rules: Rules, row: int, length: int, after: int, claim: Claim) -> int:
    """Finds the lane for the snapshot of a step, and labels it.

    Args:
        columns: changed.
        rules: of the strategy.
        row: the row.
        length: tokens before the step.
        after: tokens after the step.
        claim: takes one more slot.

    Returns:
        The lane's register; 0 where no snapshot is due, or no slot is left for it.
    """
    if rules.strategy == Strategy.REDIRECT:
        return _keep_old(columns, rules, row, length, claim)
    if rules.strategy in (Strategy.PING_PONG, Strategy.LAZY) and _due(columns, rules, row, after):
        return _write_lane(columns, rules, row, after, claim)
    return 0


def accept_snapshot(
    columns: Columns, rules: Rules, row: int, length: int, after: int, claim: Claim
) -> tuple[int, int]:  # fmt: skip
    """Finds the lane for the snapshot of a window, and labels it.

    Redirect leaves a boundary at the very end of the window to the next step. Where the window crosses no boundary, it
    keeps the state at the window's start, as a plan does.

    Args:
        columns: changed.
        rules: of the strategy.
        row: the row.
        length: tokens before the window.
        after: tokens after the accepted ones; all up to here are real.
        claim: takes one more slot.

    Returns:
        The lane's register, 0 for none, and the boundary inside the window that its snapshot stands for, 0 for none.
    """
    redirect = rules.strategy == Strategy.REDIRECT
    mark = last_boundary(length, after - redirect, rules.every, int(columns.snapshot_at[row]))
    if not redirect:
        return (_write_lane(columns, rules, row, mark, claim) if mark and rules.lanes else 0), mark
    if not mark:
        return _keep_old(columns, rules, row, length, claim), 0
    lane = REGISTERS_PER_ROW * row + 1
    slot = columns.slots[lane] or claim()
    if not slot:
        return 0, mark
    columns.slots[lane], columns.labels[lane] = slot, mark
    columns.tracked[row] = mark
    return lane, mark


def needs_claim(columns: Columns, rules: Rules, row: int, length: int, window: bool) -> bool:
    """Returns whether a snapshot of a row at a boundary takes one more slot.

    Args:
        columns: only read.
        rules: of the strategy.
        row: the row.
        length: tokens before the step.
        window: whether the boundary may lie inside the step.
    """
    first = REGISTERS_PER_ROW * row + 1
    lanes = range(first, first + rules.lanes)
    if rules.strategy == Strategy.REDIRECT:
        return not columns.slots[first] and (window or _new(columns, row, length))
    unused = any(columns.slots[lane] and not columns.labels[lane] for lane in lanes)
    return not unused and not all(columns.slots[lane] for lane in lanes)


def superseded(columns: Columns, row: int, known: int) -> list[int]:
    """Empties the lanes whose snapshots are older than the newest real one.

    Args:
        columns: changed.
        row: the row.
        known: length up to which the row is real.

    Returns:
        Their slots, to release.
    """
    slots, labels = columns.slots, columns.labels
    lanes = (REGISTERS_PER_ROW * row + 1, REGISTERS_PER_ROW * row + 2)
    top = max((int(labels[lane]) for lane in lanes if labels[lane] <= known), default=0)
    released = []
    for lane in lanes:
        if slots[lane] and labels[lane] < top:
            released.append(int(slots[lane]))
            slots[lane] = labels[lane] = 0
    return released


def _due(columns: Columns, rules: Rules, row: int, length: int) -> bool:
    return bool(length % rules.every == 0 or length == columns.snapshot_at[row])


def _new(columns: Columns, row: int, length: int) -> bool:
    """Returns whether the state at `length` is not a snapshot yet, and not the one that the row started from."""
    return bool(length > columns.tracked[row] and not columns.source[row])


def _keep_old(columns: Columns, rules: Rules, row: int, length: int, claim: Claim) -> int:
    """Makes the old slot the snapshot, if one is due and the row has a slot to continue in."""
    if not (_due(columns, rules, row, length) and _new(columns, row, length)):
        return 0
    slots, live = columns.slots, REGISTERS_PER_ROW * row
    fresh = slots[live + 1] or claim()
    if not fresh:
        return 0
    slots[live + 1], slots[live] = slots[live], fresh
    columns.labels[live + 1] = length
    columns.tracked[row] = length
    return live + 1


def _write_lane(columns: Columns, rules: Rules, row: int, mark: int, claim: Claim) -> int:
    """Takes the lane that the step writes its snapshot to as well."""
    first = REGISTERS_PER_ROW * row + 1
    lane = choose_lane(columns, list(range(first, first + rules.lanes)), claim, rules.in_place)
    if lane:
        columns.labels[lane] = mark
    return lane


def choose_lane(columns: Columns, lanes: list[int], claim: Claim, in_place: bool) -> int:
    """Returns the lane that takes a snapshot, 0 for none.

    It is a held lane without a snapshot, else an empty one with a new slot, else the one with the older snapshot.
    """
    slots, labels = columns.slots, columns.labels
    held = [lane for lane in lanes if slots[lane]]
    for lane in held:
        if labels[lane] == 0:
            return lane
    if len(held) == len(lanes):
        return min(held, key=lambda lane: int(labels[lane]))
    if slot := claim():
        lane = next(lane for lane in lanes if not slots[lane])
        slots[lane] = slot
        return lane
    return held[0] if in_place and held else 0
