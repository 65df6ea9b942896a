"""Tests when `make compiled` fails. No kernel runs here."""

import subprocess
from types import SimpleNamespace

import pytest

from tests.proof import compiled_run


@pytest.mark.parametrize(
    ("status", "said", "code"), [(0, "all 22 operations", 0), (1, "", 1), (0, "never launched: plan", 1)]
)
def test_every_run_must_pass_and_launch_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int, said: str, code: int
) -> None:
    """The first run has this status and output; the others pass."""
    runs: list[tuple[str, tuple[str, ...]]] = []

    def ran(command: list[str], *, env: dict[str, str], **_: object) -> SimpleNamespace:
        runs.append((env["MEMSTATE_COMPILED"], tuple(command[2:])))
        return SimpleNamespace(returncode=status * (len(runs) == 1), stdout=f"{said}\n" * (len(runs) == 1))

    monkeypatch.setattr(subprocess, "run", ran)
    assert compiled_run.main(["installed", "--workers", "1"]) == code
    assert runs == list(compiled_run.RUNS)
    assert capsys.readouterr().out.count("FAILED") == code
    runs.clear()
    assert compiled_run.main(["installed", "--workers", "1", "--whole"]) == code
    assert runs == list(compiled_run.WHOLE)
    path, _, test = runs[-1][1][-1].partition("::")
    assert f"def {test}(" in (compiled_run.ROOT / path).read_text()
