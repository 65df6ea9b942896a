"""Files that repeat facts of the code: workflows, the citation, the changelog, the metadata."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from memstate.tiers.stores.mooncake_client import LIBRARIES
from tests.support.sources import ROOT

yaml = pytest.importorskip("yaml", reason="the extra `docs` is not installed")

METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = re.findall(r"Python :: (3\.\d+)", "\n".join(METADATA["classifiers"]))


def read(name: str) -> Any:
    """Returns the content of a YAML file."""
    return yaml.safe_load((ROOT / name).read_text())


def test_workflows_run_targets_that_exist_on_every_python() -> None:
    workflow = read(".github/workflows/test.yml")
    steps = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    targets = set(re.findall(r"make ([a-z-]+)", "\n".join(steps)))
    assert targets and targets <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert [workflow["jobs"][name]["strategy"]["matrix"]["python"] for name in ("test", "wheel")] == [PYTHONS] * 2


def test_one_list_of_libraries_is_installed_and_named() -> None:
    made = subprocess.run(
        ["make", "--no-print-directory", "libraries"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert made.stdout.split() == [*LIBRARIES]
    assert f"apt-get install {' '.join(LIBRARIES)} " in (ROOT / "docs" / "mooncake.md").read_text()


def test_skips_are_counted_by_reason_before_the_summary(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("""import pytest
@pytest.mark.parametrize("x", range(3))
def test_x(x): x and pytest.skip("no moon\\nand more")
""")
    (tmp_path / "test_file.py").write_text("import pytest; pytest.importorskip('nope', reason='no package')")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "xdist", "-n", "1", "-p", "tests.support.skips"]
    command += ["--rootdir", str(tmp_path), "-c", "/dev/null", str(tmp_path)]
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, check=True)
    *_, one, other, last = done.stdout.splitlines()
    assert (one, other) == ("skipped 2: no moon", "skipped 1: no package")
    assert re.fullmatch(r"1 passed, 3 skipped in .*s", last)


def test_every_python_of_the_metadata_is_allowed() -> None:
    assert METADATA["requires-python"] == f">={PYTHONS[0]}"
    assert "Typing :: Typed" in METADATA["classifiers"] and (ROOT / "memstate" / "py.typed").is_file()
