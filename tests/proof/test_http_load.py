"""Tests the HTTP example under load, with a sample of `python -m tests.proof.http_load`."""

from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from tests.proof.http_load.__main__ import run
from tests.proof.http_load.load import prepare


@pytest.mark.proof
def test_answers_are_right_and_nothing_is_left(tmp_path: Path) -> None:
    assert run(str(tmp_path), prepare(tmp_path, cases=4, longest=30), clients=8, minutes=0.2, rounds=1) == 0
