"""What is installed: the kernels are in it, and nothing else is."""

import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parent.parent


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs Python in a folder, which `-c` and `-m` put on its path before anything installed."""
    return subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist of this checkout and the wheel built from that sdist, offline."""
    folder = tmp_path_factory.mktemp("built")
    done = run("-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT), cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> ZipFile:
    """The wheel."""
    (path,) = built.glob("*.whl")
    return ZipFile(path)


def kernel_files() -> set[str]:
    """The files under kernels/, as names inside the package."""
    return {f"memstate/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "kernels").rglob("*.py")}


def test_wheel_contains_the_package_and_nothing_else(wheel: ZipFile) -> None:
    names = set(wheel.namelist())
    assert {"memstate/__init__.py", "memstate/py.typed", "memstate/kernels/tables.py"} <= names
    assert kernel_files() <= names
    package = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert {name.split("/")[0] for name in package} == {"memstate"}
    kinds = {Path(name).suffix for name in package if not name.startswith("memstate/viz/inspector/")}
    assert kinds - {".json"} == {".py", ".typed"}  # .json: tuned configurations
    assert not [name for name in package if "test" in Path(name).name or "__pycache__" in name]


def test_wheel_contains_the_parts_of_the_page(wheel: ZipFile, tmp_path: Path) -> None:
    folder = ROOT / "memstate" / "viz" / "inspector"
    parts = {
        path.relative_to(ROOT).as_posix() for kind in ("css", "html", "js", "py") for path in folder.rglob(f"*.{kind}")
    }
    assert {name for name in wheel.namelist() if name.startswith("memstate/viz/inspector/")} == parts
    wheel.extractall(tmp_path)
    code = """import torch, memstate as ms; from memstate.viz.inspector import page
layout = ms.StateLayout((ms.Plane("ssm", (2,), torch.float32),), 1)
print(len(page(ms.StateManager(layout, slots=4, max_requests=2, backend="reference").inspect())))"""
    done = run("-c", code, cwd=tmp_path)
    assert int(done.stdout) > 10_000, done.stderr


def test_wheel_carries_the_licence(wheel: ZipFile) -> None:
    assert [name for name in wheel.namelist() if name.endswith("/LICENSE")]


def test_sdist_contains_files_where_the_checkout_has_a_link(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        members = {member.name.split("/", 1)[1]: member for member in archive.getmembers()}
    assert kernel_files() <= members.keys()
    assert all(member.isfile() for member in members.values())


def test_unpacked_wheel_imports_its_own_kernels(wheel: ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    code = "import memstate.kernels.tables as t; print(t.__file__)"
    done = run("-c", code, cwd=tmp_path)
    assert Path(done.stdout.strip()) == tmp_path / "memstate" / "kernels" / "tables.py", done.stderr
