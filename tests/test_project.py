"""Files around the code that name what the code has: workflows, templates, the citation, the metadata."""

import re
import tomllib
from typing import Any

import pytest

import memstate
from tests.proof.gpu.needs import PACKAGES, needed
from tests.support.sources import ROOT

yaml = pytest.importorskip("yaml", reason="the extra `docs` is not installed")

METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = re.findall(r"Python :: (3\.\d+)", "\n".join(METADATA["classifiers"]))


def read(name: str) -> Any:
    """A file in YAML."""
    return yaml.safe_load((ROOT / name).read_text())


def test_the_citation_is_of_this_version() -> None:
    citation = read("CITATION.cff")
    assert (citation["version"], citation["license"]) == (memstate.__version__, METADATA["license"])
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert f"(package {METADATA['name']})" in citation["title"]


def test_the_changelog_has_this_version() -> None:
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest and memstate.__version__.startswith(newest[1])


def test_workflows_run_targets_that_exist_on_every_python() -> None:
    workflow = read(".github/workflows/test.yml")
    steps = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    targets = set(re.findall(r"make ([a-z-]+)", "\n".join(steps)))
    assert targets == {"test", "docs", "wheel"}
    assert targets <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert len(PYTHONS) == 3
    assert [workflow["jobs"][name]["strategy"]["matrix"]["python"] for name in ("test", "wheel")] == [PYTHONS] * 2


def test_a_workflow_collects_the_tests_for_a_gpu_with_the_packages_of_its_machine() -> None:
    steps = [step.get("run", "") for step in read(".github/workflows/test.yml")["jobs"]["gpu-collect"]["steps"]]
    install, collect = steps[-2:]
    listed = ROOT / install.split()[-1]
    assert not {"msgspec", "pyzmq", "fla-core", "mkdocs"} & needed(listed.read_text()) and listed == PACKAGES
    plugins = re.findall(r"-p (\S+)", collect)
    assert plugins == ["tests.proof.gpu.seeming", "tests.proof.gpu.collecting"] and " -m gpu " in collect


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_issue_templates_ask_for_something(name: str) -> None:
    template = read(f".github/ISSUE_TEMPLATE/{name}.yml")
    assert {"name", "description", "body"} <= template.keys()
    fields = [field for field in template["body"] if field["type"] != "markdown"]
    assert fields and len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)


def test_every_python_of_the_metadata_is_allowed() -> None:
    assert METADATA["requires-python"] == f">={PYTHONS[0]}"
    assert "Typing :: Typed" in METADATA["classifiers"] and (ROOT / "memstate" / "py.typed").is_file()
