"""Computes what a plan and a settle change in the columns of a register file: the rules of tracking.

The reference kernels apply the rules to slot ids. The mirror on the host applies them to flags that say whether a
register holds a slot. So a "slot" is an id or True here, and 0 or False is none. The rules only read and write the
columns. All rows of a call are distinct, and every argument has one entry for each row.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memstate.kernels.tables import REGISTERS_PER_ROW, Rules, Strategy

DRAFTS = 1 << 16  # a packet has n tokens with d drafts as -(DRAFTS * d + n)
FOLD = -(DRAFTS * (DRAFTS // 2 - 1))  # number in a packet for a row that reads no token, and whose tail is folded
Longs = NDArray[np.int64]
Flags = NDArray[np.bool_]
Claim = Callable[[Flags], NDArray[Any]]  # (which entries need a slot) -> their slots, in order; 0 beyond the budget


class Columns(NamedTuple):
    """The columns that the rules read and write.

    Args:
        slots: slot that each register holds, or none, `register`.
        labels: label of each register, `register`.
        tracked: length of each row up to which no boundary is due any more, `row`.
        source: the register that the row's first step reads, 0 for none, `row`.
    """

    slots: NDArray[Any]
    labels: NDArray[np.integer]
    tracked: NDArray[np.int32]
    source: NDArray[np.int32]


def last_boundary(length: Longs, reach: Longs, every: int) -> Longs:
    """Returns the largest boundary in length + 1 .. reach, 0 for none."""
    mark = reach // every * every
    return np.where(mark > length, mark, 0)


def plan_snapshots(columns: Columns, rules: Rules, rows: Longs, length: Longs, after: Longs, claim: Claim) -> Longs:
    """Finds the lanes for the snapshots of a step, and labels them.

    Args:
        columns: the columns; slots, labels and `tracked` change.
        rules: rules of the strategy.
        rows: numbers of the rows.
        length: tokens before the step.
        after: tokens after the step.
        claim: returns one more slot for each entry that needs one.

    Returns:
        The register of the lane of each row; 0 if no snapshot is due, or no slot is left for it.
    """
    if rules.strategy == Strategy.REDIRECT:
        return _keep_old(columns, rows, length, due(columns, rules, rows, length), claim)
    if rules.strategy in (Strategy.PING_PONG, Strategy.LAZY):
        return _write_lane(columns, rules, rows, after, due(columns, rules, rows, after), claim)
    return np.zeros(len(rows), np.int64)


class Folded(NamedTuple):
    """What a step does with the tails of its rows; each field has one number per row.

    Args:
        store: number of tokens, first of the tail, then of the step, after which the state is stored; -1: never.
        after: tokens of the row's state after the step.
        pending: real tokens that the step leaves in the tail.
        newest: tokens of the step that go to the tail, behind the pending ones.
    """

    store: Longs
    after: Longs
    pending: Longs
    newest: Longs

    def due(self, label: Longs) -> tuple[Longs, Longs]:
        """Returns the lengths at which a snapshot can be due, before and after the step.

        The length before it is the label, or 0 if the step stores no state. The length after it is `after`, or 0 if the
        step stores no state with new tokens.
        """
        return np.where(self.store >= 0, label, 0), np.where(self.store > 0, self.after, 0)


def drafted(tokens: Longs) -> tuple[Longs, Longs]:
    """Returns (tokens, drafts) of each entry, from the numbers in a packet: n, or -(`DRAFTS * drafts + n`).

    An entry of `FOLD` has 0 tokens, and more drafts than tokens.
    """
    drafts = np.where(tokens < 0, -tokens // DRAFTS, 0)
    return np.where(tokens < 0, -tokens % DRAFTS, tokens), drafts


def fold(
    columns: Columns, rules: Rules, rows: Longs, label: Longs, pending: Longs, tokens: Longs, drafts: Longs,
    defer: int = 0,
) -> Folded:  # fmt: skip
    """Decides how far a step folds the tails of its rows.

    A row without drafts folds all of its tokens into its state. A row with drafts folds its pending tokens, and the
    tokens of the step go to the tail. If a boundary lies inside the pending tokens, the step folds up to the boundary,
    so that the state there can be kept; the other tokens stay in the tail. Otherwise, a row whose tail and step have
    fewer than `defer` tokens folds nothing.

    Args:
        columns: the columns, only read.
        rules: rules of the strategy.
        rows: numbers of the rows.
        label: tokens of the state that the step reads.
        pending: real tokens in the tail.
        tokens: tokens of the step.
        drafts: tokens of the step that may be rejected.
        defer: fewest tokens, pending and new, for which a state is stored.
    """
    mark = np.zeros_like(label)
    if rules.strategy != Strategy.NONE:
        mark = last_boundary(np.maximum(label, columns.tracked[rows]), label + pending, rules.every)
    waits = (tokens > 0) & (pending + tokens < defer)
    kept = ((drafts > 0) | (mark > 0) | waits) & (tokens <= rules.tail)
    store = np.where(kept, np.where(mark > 0, mark - label, np.where(waits, 0, pending)), pending + tokens)
    store = np.where((store == 0) & (columns.source[rows] == 0), -1, store)
    after = label + np.maximum(store, 0)
    return Folded(store, after, np.where(kept, label + pending - after, 0), np.where(kept, tokens, 0))


def needs_claim(columns: Columns, rules: Rules, rows: Longs) -> Flags:
    """Returns which rows must claim one more slot if a snapshot is due.

    Args:
        columns: the columns, only read.
        rules: rules of the strategy.
        rows: numbers of the rows.
    """
    first = rows * REGISTERS_PER_ROW + 1
    slots, labels = columns.slots, columns.labels
    empty: Flags = slots[first] == 0
    if rules.strategy == Strategy.REDIRECT:
        empty &= columns.source[rows] == 0
        return empty
    idle: Flags = ~empty & (labels[first] == 0)
    for lane in range(1, rules.lanes):
        empty = empty | (slots[first + lane] == 0)
        idle |= (slots[first + lane] != 0) & (labels[first + lane] == 0)
    return empty & ~idle


def superseded(columns: Columns, rows: Longs, known: NDArray[np.integer]) -> Longs:
    """Returns the lanes whose snapshot is older than the newest real snapshot of their row.

    Args:
        columns: the columns, only read.
        rows: numbers of the rows.
        known: confirmed length of each row: the number of its tokens that are known to be real.
    """
    lanes = rows[:, None] * REGISTERS_PER_ROW + np.array([1, 2])
    labels = columns.labels[lanes]
    newest = np.where(labels <= known[:, None], labels, 0).max(axis=1, initial=0)
    old: Longs = lanes[(columns.slots[lanes] != 0) & (labels < newest[:, None])]
    return old


def due(columns: Columns, rules: Rules, rows: Longs, length: Longs) -> Longs:
    """Returns the entries whose lengths are boundaries beyond `tracked`: multiples of `every`."""
    at: Longs = (length % rules.every == 0).nonzero()[0]
    return at[length[at] > columns.tracked[rows[at]]] if at.size else at


def _keep_old(columns: Columns, rows: Longs, label: Longs, at: Longs, claim: Claim) -> Longs:
    """Turns the live slots of rows into snapshots, if another slot is left in which the row can go on.

    Returns the register of the lane of each row, 0 for none.

    Args:
        columns: the columns; slots, labels and `tracked` change.
        rows: numbers of the rows.
        label: label of each row's snapshot.
        at: entries for which a snapshot is due.
        claim: returns one more slot for each entry that needs one.
    """
    lanes = np.zeros(len(rows), np.int64)
    if at.size:
        at = at[columns.source[rows[at]] == 0]  # a row that reads a source has its snapshot: the source
    if not at.size:
        return lanes
    slots, live = columns.slots, rows[at] * REGISTERS_PER_ROW
    fresh = slots[live + 1]
    if (need := fresh == 0).any():
        fresh = np.where(need, claim(need), fresh)
    if not (turn := fresh != 0).all():
        at, live, fresh = at[turn], live[turn], fresh[turn]
    slots[live + 1], slots[live] = slots[live], fresh
    columns.labels[live + 1] = columns.tracked[rows[at]] = label[at]
    lanes[at] = live + 1
    return lanes


def _write_lane(columns: Columns, rules: Rules, rows: Longs, label: Longs, at: Longs, claim: Claim) -> Longs:
    """Chooses the lane that takes each row's snapshot, labels it, and returns its register, 0 for none.

    The lane is the first of these: a lane with a slot and label 0; an empty lane, which gets a claimed slot; if both
    lanes hold a slot, the one with the older snapshot; with `in_place`, the only lane with a slot.
    """
    lanes = np.zeros(len(rows), np.int64)
    if not at.size:
        return lanes
    slots, labels = columns.slots, columns.labels
    a = rows[at] * REGISTERS_PER_ROW + 1
    b = a + (rules.lanes - 1)  # if rows have one lane, b is lane a again
    slot_a, slot_b, label_a, label_b = slots[a], slots[b], labels[a], labels[b]
    idle_a = (slot_a != 0) & (label_a == 0)
    idle = idle_a | ((slot_b != 0) & (label_b == 0))
    empty = (slot_a == 0) | (slot_b == 0)
    first = np.where(idle, idle_a, np.where(empty, slot_a == 0, label_a <= label_b))
    chosen = np.where(first, slot_a, slot_b)
    if (need := empty & ~idle).any():
        claimed = claim(need)
        if rules.in_place:
            alone = need & (claimed == 0) & ((slot_a != 0) | (slot_b != 0))
            first = np.where(alone, slot_a != 0, first)
        chosen = np.where(first, slot_a, slot_b)
        chosen = np.where(need & (chosen == 0), claimed, chosen)
    take = chosen != 0
    lane = np.where(first, a, b)[take]
    slots[lane], labels[lane] = chosen[take], label[at][take]
    lanes[at[take]] = lane
    return lanes
