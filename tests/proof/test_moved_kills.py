"""Tests that requests survive the processes that run them, with a sample of `python -m tests.proof.moved_kills`."""

import os
import random
import re

from tests.support.processes import python
from tests.support.sampling import PROOF


def test_H3_a_process_that_is_killed_or_stopped_costs_a_recompute_and_nothing_else() -> None:
    """Runs in a new process, because only a process without threads can fork. MEMSTATE_SEED repeats a run."""
    seed = int(os.environ.get("MEMSTATE_SEED", random.SystemRandom().randrange(2**31)))
    most = 300 if PROOF else 40
    said = python("-m", "tests.proof.moved_kills", "--kills", most, "--seed", seed, OMP_NUM_THREADS="1")
    figures = re.search(
        r"(\d+) kills and (\d+) stops in \d+ runs, at (\d+) of \d+ lines, .*, nothing wrong$", said.strip()
    )
    assert figures, said
    kills, stops, lines = map(int, figures.groups())
    assert kills + stops == most and min(kills, stops) > most // 5 and lines > most // 3, said
