"""Compares the host's functions of the tracking rules with plain code for one row at a time."""

import random

import numpy as np
import pytest

from memstate.kernels.rules import Columns, needs_claim, superseded
from memstate.kernels.tables import Rules, Strategy

ROWS = 40
LANES = {Strategy.REDIRECT: 1, Strategy.PING_PONG: 2, Strategy.LAZY: 2}


def columns(rng: random.Random, lanes: int) -> Columns:
    """Returns rows with all kinds of lanes: without a slot, with a slot but no snapshot, and with snapshots of a few
    lengths.
    """
    slots, labels = np.zeros(3 * ROWS + 3, np.int32), np.zeros(3 * ROWS + 3, np.int32)
    for register in range(3, len(slots)):
        if register % 3 <= lanes and (held := rng.choice((False, True, True))):
            slots[register], labels[register] = held * register, rng.choice((0, 1, 2, 3, 4))
    source = np.array([0, *(rng.choice((0, 0, 1, 200)) for _ in range(ROWS))], np.int32)
    return Columns(slots, labels, np.zeros(ROWS + 1, np.int32), source)


def lanes_of(file: Columns, row: int, lanes: int) -> list[tuple[bool, int]]:
    """Returns for each lane (whether it holds a slot, its label)."""
    return [(bool(file.slots[3 * row + 1 + at]), int(file.labels[3 * row + 1 + at])) for at in range(lanes)]


@pytest.mark.parametrize("strategy", LANES)
def test_B24_a_snapshot_takes_a_slot_where_no_lane_can_have_it(strategy: Strategy) -> None:
    rng = random.Random(strategy)
    for lanes in {1, LANES[strategy]}:
        file, rows = columns(rng, lanes), np.array(rng.sample(range(1, ROWS + 1), ROWS))
        claims = needs_claim(file, Rules(strategy, lanes, 4, False), rows)
        for row, needs in zip(rows.tolist(), claims.tolist(), strict=True):
            held = lanes_of(file, row, lanes)
            told = not all(there for there, _ in held) and not any(there and not label for there, label in held)
            if strategy == Strategy.REDIRECT:  # a state that the row reads directly does not belong to the row
                told = not held[0][0] and not file.source[row]
            assert needs == told, (row, held, int(file.source[row]))


def test_B23_lanes_older_than_the_newest_real_snapshot_are_superseded() -> None:
    rng = random.Random(3)
    file, rows = columns(rng, 2), np.arange(1, ROWS + 1)
    known = np.array([rng.choice((0, 1, 2, 3, 9)) for _ in range(ROWS)])
    released = set(superseded(file, rows, known).tolist())
    for row, real in zip(rows.tolist(), known.tolist(), strict=True):
        held = lanes_of(file, row, 2)
        newest = max((label for _, label in held if 1 <= label <= real), default=0)
        told = {3 * row + 1 + at for at, (there, label) in enumerate(held) if there and label < newest}
        assert released & {3 * row + 1, 3 * row + 2} == told, (row, held, real)
