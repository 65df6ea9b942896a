"""Files around the code that name what the code has: workflows, the citation, the changelog, the metadata."""

import re
import tomllib
from typing import Any

import pytest

from tests.support.sources import ROOT

yaml = pytest.importorskip("yaml", reason="the extra `docs` is not installed")

METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = re.findall(r"Python :: (3\.\d+)", "\n".join(METADATA["classifiers"]))


def read(name: str) -> Any:
    """A file in YAML."""
    return yaml.safe_load((ROOT / name).read_text())


def test_workflows_run_targets_that_exist_on_every_python() -> None:
    workflow = read(".github/workflows/test.yml")
    steps = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    targets = set(re.findall(r"make ([a-z-]+)", "\n".join(steps)))
    assert targets and targets <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert [workflow["jobs"][name]["strategy"]["matrix"]["python"] for name in ("test", "wheel")] == [PYTHONS] * 2


def test_every_python_of_the_metadata_is_allowed() -> None:
    assert METADATA["requires-python"] == f">={PYTHONS[0]}"
    assert "Typing :: Typed" in METADATA["classifiers"] and (ROOT / "memstate" / "py.typed").is_file()
