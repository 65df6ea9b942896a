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


def write_talks(path: Path, lengths: Sequence[int]) -> Path:
    """Writes conversations of two turns. lengths: characters of each first prompt; all begin with the same text."""
    talks = [{"system": TEXT[:6], "turns": [TEXT[6:length], TEXT[: 9 + i % 3]]} for i, length in enumerate(lengths)]
    path.write_text("\n".join(json.dumps(talk) for talk in talks))
    return path
