"""vLLM's own engine with a tiny model on a CPU, started again and again over one store. Each start is a process."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM cannot be imported: see docs/vllm.md", exc_type=ImportError)

from vllm.platforms import current_platform

from memstate.tiers.records import _FIXED, MAGIC

ROOT = Path(__file__).parents[2]
SHORT = 150  # tokens of the first prompt of each talk: its state and its KV are in front of what is damaged
TALKS = 2

if not current_platform.is_cpu():
    pytest.skip("vLLM is not built for a CPU: see docs/vllm.md", allow_module_level=True)

Serve = Callable[..., SimpleNamespace]


def run(*args: object) -> None:
    command = [sys.executable, "-m", "tests.support.vllm_restart", *map(str, args)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sets of weights, and a path that has the first of them."""
    made = tmp_path_factory.mktemp("restart")
    for seed, name in enumerate(("one", "two")):
        run("make", made / name, seed)
    shutil.copytree(made / "one", made / "model")
    return made


@pytest.fixture(scope="module")
def serve(folder: Path) -> Serve:
    """Starts an engine, and returns its answers and what its connector counted."""

    def start(model: str, *store: object) -> SimpleNamespace:
        run("serve", folder / model, folder / "answers.json", *store)
        return SimpleNamespace(**json.loads((folder / "answers.json").read_text()))

    return start


@pytest.fixture(scope="module")
def filled(folder: Path, serve: Serve) -> SimpleNamespace:
    """A store, and the right answers of the weights that filled it."""
    store, right = folder / "store", serve("one")
    first = serve("model", store)
    assert first.answers == right.answers
    assert first.counts["written"] > 20
    return SimpleNamespace(path=store, answers=right.answers)


def test_the_same_weights_find_what_they_left(serve: Serve, filled: SimpleNamespace) -> None:
    again = serve("model", filled.path)
    assert again.answers == filled.answers
    assert (again.counts["lost"], again.counts["fetched"] > 0) == (0, True)


def test_a_damaged_store_costs_no_answer_and_no_front(serve: Serve, filled: SimpleNamespace, folder: Path) -> None:
    store, spoiled = folder / "damaged", 0
    shutil.copytree(filled.path, store)
    for path in [path for path in store.rglob("*") if path.is_file()]:
        record = bytearray(path.read_bytes())
        if record.startswith(MAGIC) and _FIXED.unpack_from(record)[6] > SHORT:
            record[-len(record) // 2] ^= 1
            path.write_bytes(record)
            spoiled += 1
    again = serve("model", store, TALKS)  # the first prompts would bring the fronts to host memory
    assert again.answers == filled.answers[TALKS:]
    assert spoiled > again.counts["lost"] > 0
    assert again.counts["fetched"] > 0  # the state of a front


def test_new_weights_at_the_same_path_answer_as_without_a_store(
    serve: Serve, filled: SimpleNamespace, folder: Path
) -> None:
    right = serve("two")
    assert all(new != old for new, old in zip(right.answers, filled.answers, strict=True))
    shutil.copy(folder / "two" / "model.safetensors", folder / "model" / "model.safetensors")
    again = serve("model", filled.path)
    assert again.answers == right.answers
    assert again.counts["fetched"] == 0
