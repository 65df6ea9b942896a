"""Runs the demo in tests, and writes conversations of given lengths, which are the same on every Python."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memstate_tools.demo import DemoConfig, DemoReport, run
from memstate_tools.demo.sizes import ModelSize
from tests.support.sampling import PROOF

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom"
REQUESTS = 10 if PROOF else 7
TINY = ModelSize(recurrent_layers=1, heads=1, hidden=32)


def demo(**settings: Any) -> DemoReport:
    """Runs the demo with a small model on the reference backend."""
    return run(DemoConfig(**{"backend": "reference", "requests": REQUESTS, "size": TINY} | settings))


def right(**settings: Any) -> DemoReport:
    """Runs the demo, checks that the run is right, and returns the report."""
    return require_right(demo(**settings))


def require_right(report: DemoReport) -> DemoReport:
    """Checks what holds for every run without sabotage and without a planted leak, and returns the report."""
    assert report.ok and report.identical, report.failure()
    figures, prefix = report.to_json(), report.stats.prefix
    assert figures["identical_to_uncached"] and figures["logits_identical"] and figures["states_identical"]
    assert (figures["leaked_slots"], figures["double_owned_slots"], figures["leaked_pages"]) == (0, 0, 0)
    assert (prefix.lookups, prefix.prompt_tokens) == (figures["admissions"], figures["prompt_tokens"])
    assert prefix.hit_tokens == figures["prefix_hit_tokens"] >= figures["session_hit_tokens"]
    lost = figures["hit_tokens_lost_by_reason"]
    assert set(lost) == {"no_sharing", "evicted", "no_snapshot"}
    assert sum(lost.values()) == figures["prompt_tokens"] - figures["prefix_hit_tokens"]
    assert figures["sessions"] == min(report.config.sessions, figures["conversations"])
    assert json.loads(json.dumps(figures)) == figures
    return report


def write_talks(path: Path, lengths: Sequence[int]) -> Path:
    """Writes conversations of two turns. lengths: characters of each first prompt; all begin with the same text."""
    talks = [{"system": TEXT[:6], "turns": [TEXT[6:length], TEXT[: 9 + i % 3]]} for i, length in enumerate(lengths)]
    path.write_text("\n".join(json.dumps(talk) for talk in talks))
    return path
