"""Agreement between ranks: words and bits, and real processes in a gloo group that take the same decisions."""

import json
from pathlib import Path

import numpy as np
import pytest

from memstate.errors import ConfigurationError
from memstate.tiers.prefetch.agreement import Ranks, pack, unpack
from tests.support.agreement_rank import SCENARIOS
from tests.support.processes import run_ranks


@pytest.mark.parametrize("size", [0, 1, 64, 65, 1000])
def test_bits_go_into_words_and_come_out_again(size: int) -> None:
    seed = np.random.SeedSequence().entropy
    print(f"seed {seed}")
    mine, others = np.random.default_rng(seed).integers(0, 2, (2, size)).astype(bool)
    words = pack(mine)
    assert words.dtype == np.int64 and words.size == -(-size // 64)
    assert unpack(words & pack(others), size).tolist() == (mine & others).tolist()


def test_ranks_without_a_group_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="init_process_group"):
        Ranks()


EXPECTED = {
    "plain": (592, "complete", "complete"),
    "short of memory": (512, "complete", "complete"),  # of both prefetches the second: see the test
    "out of memory": (0, "disagreed", "no_room"),
    "slow": (592, "complete", "complete"),
    "failing": (0, "disagreed", "failed"),
    "in want of time": (0, "stopped", "stopped"),
}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.proof)])
def test_processes_take_the_same_decisions_in_the_same_polls(ranks: int, tmp_path: Path) -> None:
    """And a rank that goes away in the end is noticed by all others."""
    outputs = run_ranks("tests.support.agreement_rank", ranks, tmp_path / "meeting")
    said = [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out, _ in outputs]
    assert [len(rank) for rank in said] == [2] * (ranks - 1) + [1], "\n".join(error for _, error in outputs)
    for scenario in SCENARIOS:
        found = [rank[0][scenario] for rank in said]
        print(scenario, found)
        length, elsewhere, last = EXPECTED[scenario]
        for rank in found:
            for same in ("ended", "length", "found", "rounds"):
                assert rank[same] == found[0][same]
            assert None not in rank["ended"] and rank["rounds"] > 0
            assert rank["length"][0] == length if scenario != "short of memory" else 592
        assert {rank["outcome"][0] for rank in found[:-1]} == {elsewhere} and found[-1]["outcome"][0] == last
    assert [rank[1] for rank in said[:-1]] == [{"lost": 1, "outcome": "lost", "free": 200}] * (ranks - 1)
