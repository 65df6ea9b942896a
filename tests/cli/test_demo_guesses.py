"""The decode loop with guessed tokens in the tails of rows: the uncached run's tokens, logits and states."""

from typing import Any

import pytest

import memstate as ms
from memstate.cli.demo.config import ENGINES, MODELS, STRATEGIES, DemoConfig
from tests.support.demo_talks import demo

WITH: dict[str, dict[str, Any]] = {
    "slots alone": {},
    "sessions": {"sessions": 3},
    "storage": {"storage": "file", "host_slots": 8, "slots": 8},
    "an arena": {"engine": "arena", "layout": "slot-major"},
    "claims that fail": {"fail_claims": 0.5},
    "few pages": {"pages": 40, "chunk": 24},
    "kernels in place": {"engine": "in-place"},
    "deferred states": {"tail": 5},
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("with_", WITH)
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_T6_guesses_change_nothing(strategy: str, model: str, overlap: int, with_: str) -> None:
    report = demo(strategy=strategy, model=model, overlap=overlap, speculate=1 + len(with_) % 4, **WITH[with_])
    assert report.ok, report.failure()
    assert report.config.speculate == 1 or 0 < report.meter.right < report.meter.guessed


def test_T6_takes_fewer_steps() -> None:
    plain, guessing = (demo(speculate=n, overlap=0) for n in (0, 4))
    assert plain.ok and guessing.ok and plain.answers == guessing.answers
    assert guessing.meter.steps < 0.7 * plain.meter.steps


@pytest.mark.sample
@pytest.mark.parametrize("tail", [1, 4])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_T16_deferred_states_change_nothing(strategy: str, engine: str, tail: int) -> None:
    report = demo(strategy=strategy, engine=engine, tail=tail)
    assert report.ok, report.failure()


def test_T5_refuses_more_guesses_than_a_chunk_has_tokens() -> None:
    with pytest.raises(ms.InvalidArgument, match="speculate 4 with chunk 3: a chunk has at least as many"):
        DemoConfig(speculate=4, chunk=3)
