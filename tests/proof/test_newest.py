"""Tests, with a made-up package, that `make newest` names the tests that no longer pass with a newer release."""

import sys
from pathlib import Path

import pytest

from tests.proof.newest import ROOT, TESTS, Side, lost, main, named, pins

TEST = """
import pytest
madeup = pytest.importorskip("madeup", exc_type=ImportError)
def test_kept(): assert madeup.one() == 1
def test_changed(): assert madeup.two() == 2
def test_never(): assert madeup.one() == 3
"""
OLD = "def one(): return 1\ndef two(): return 2\n"


def run(folder: Path, newer: str) -> dict[str, str]:
    """Returns the tests that no longer pass with release `newer` of `madeup`."""
    (folder / "test_madeup.py").write_text(TEST)
    outcomes = []
    for name, source in (("old", OLD), ("new", newer)):
        (folder / name).mkdir()
        (folder / name / "madeup.py").write_text(source)
        side = Side(sys.executable, {"PYTHONPATH": str(folder / name)})
        outcomes.append(side.outcomes(["test_madeup.py", f"--rootdir={folder}"], folder))
    return lost(*outcomes)


def test_a_test_that_fails_beside_a_newer_release_is_lost_and_one_that_fails_on_both_is_not(tmp_path: Path) -> None:
    assert run(tmp_path, OLD.replace("return 2", "return 3")) == {"test_madeup::test_changed": "failed"}


def test_a_release_that_cannot_be_imported_loses_all_that_passed(tmp_path: Path) -> None:
    assert run(tmp_path, "import nowhere") == {
        f"test_madeup::test_{name}": "not collected" for name in ("kept", "changed")
    }


def test_the_same_release_loses_nothing(tmp_path: Path) -> None:
    assert run(tmp_path, OLD) == {}


def test_pytest_that_does_not_run_is_no_success(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="pytest did not run"):
        Side(sys.executable).outcomes(["--no-such-option"], tmp_path)


def test_a_comparison_of_nothing_is_no_success() -> None:
    with pytest.raises(SystemExit, match="no test passes with the pinned versions"):
        lost({"one": "failed"}, {"one": "passed"})


def test_every_package_that_an_adapter_names_is_pinned_and_every_test_exists(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert {"transformers", "fla-core", "mamba-ssm", "msgspec"} <= set(named()) and not set(named()) - set(pins())
    assert all((ROOT / path).exists() for path in TESTS)
    with pytest.raises(SystemExit) as ended:
        main(["torch"])
    assert ended.value.code == 2 and "no adapter names ['torch']" in capsys.readouterr().err
