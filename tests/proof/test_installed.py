"""Tests the wheel in a new environment, with the requirements of the core and without extras."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.processes import ROOT, ran
from tests.test_docs import BLOCK

pytestmark = pytest.mark.proof
LEFT_OUT = ("jupyterlab", "matplotlib", "memstate_tools", "mooncake", "pytest", "rich", "transformers", "typer")


def run(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command in a folder outside of the checkout, without the checkout in PYTHONPATH."""
    return ran(*command, cwd=cwd, without=("PYTHONPATH", "TRITON_INTERPRET"))


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment, which has the wheel, and the torch of this environment."""
    folder = tmp_path_factory.mktemp("installed")
    done = run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder, ROOT, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    done = run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    assert done.returncode == 0, done.stderr
    interpreter = folder / "venv" / "bin" / "python"
    install = (interpreter, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt")
    done = run(*install, f"torch=={version('torch')}", cwd=folder)
    if done.returncode:
        pytest.skip(f"pip cannot install torch {version('torch')}: {done.stderr.strip().splitlines()[-1]}")
    done = run(*install, wheel, cwd=folder)
    assert done.returncode == 0, done.stderr
    return interpreter


def test_the_example_of_the_readme_runs(python: Path, tmp_path: Path) -> None:
    code, output = BLOCK.findall((ROOT / "README.md").read_text())[0]
    done = run(python, "-c", code, cwd=tmp_path)
    assert done.stdout == output, done.stderr


def test_it_is_the_installed_library_without_extras(python: Path, tmp_path: Path) -> None:
    code = """import sys, memstate; from importlib.util import find_spec
print(memstate.__file__, [name for name in sys.argv[1:] if find_spec(name)])"""
    done = run(python, "-c", code, *LEFT_OUT, cwd=tmp_path)
    file, extras = done.stdout.split(" ", 1)
    assert Path(file).is_relative_to(python.parents[1]), done.stderr
    assert extras.strip() == "[]"


def test_the_command_line_names_its_extra(python: Path, tmp_path: Path) -> None:
    done = run(python.parent / "memstate", "--version", cwd=tmp_path)
    assert done.returncode == 1
    assert "pip install '.[cli]' in a checkout of memstate" in done.stderr


def test_many_machines_run_on_it(python: Path, tmp_path: Path) -> None:
    done = run(python, ROOT / "examples" / "many_machines" / "run.py", tmp_path / "records", cwd=tmp_path)
    assert done.stdout.count("requests start at") == 5, done.stderr


def test_every_public_name_can_be_imported(python: Path, tmp_path: Path) -> None:
    done = run(python, "-c", "from memstate import *; print(StateManager.__name__, len(dir()))", cwd=tmp_path)
    assert done.stdout.startswith("StateManager "), done.stderr
