"""Tests `bench transformers` at toy sizes: its entries and peers, and that wrong answers are not measured."""

import pytest
import torch

pytest.importorskip("transformers")

from memstate_tools.bench import run, transformers_serve
from memstate_tools.bench.task import Setting

CPU = Setting("reference", torch.device("cpu"), toy=True)
SIZES = ("", ", 32 M parameters")


def test_steps_and_batches_stand_beside_the_own_cache_and_generate() -> None:
    outcome = run(["transformers"], "reference", toy=True)
    assert outcome.wrong == []
    compared = {(one.op, one.case, one.peer) for one in outcome.entries if one.peer}
    assert compared == {
        *(("step", f"toy R=2{size}{mode}", "own-cache") for size in SIZES for mode in ("", ", both in inference mode")),
        *(("batch", f"toy R=2, {kind} lengths{size}", "generate") for size in SIZES for kind in ("equal", "mixed")),
    }  # fmt: skip
    for one in outcome.entries:
        assert one.value > 0 and (one.peer is None) == (one.ratio is None), one


def test_other_tokens_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_serve.ServedSides, "generate", lambda self: [[0] * self.new] * 2)
    checks = {task.name: task.check() for task in transformers_serve.tasks(CPU)}
    assert set(checks.values()) == {"serve and generate choose other tokens"}
