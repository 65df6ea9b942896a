"""The wheel: it has the files of the package and nothing else, and the examples run on it.

`make wheel` runs these tests, and so does `make proof`.
"""

import json
import subprocess
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.support.installed import EXAMPLES
from tests.support.processes import ran

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.proof


def run(*command: str, cwd: Path, path: str = "") -> subprocess.CompletedProcess[str]:
    """Runs Python in a folder, with the packages of `path` before the installed ones."""
    return ran(sys.executable, *command, cwd=cwd, without=["TRITON_INTERPRET"], PYTHONPATH=path)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist of this checkout and the wheel built from that sdist, offline."""
    folder = tmp_path_factory.mktemp("built")
    done = run("-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT), cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> ZipFile:
    (path,) = built.glob("*.whl")
    return ZipFile(path)


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    """The wheel of the tools."""
    folder = tmp_path_factory.mktemp("tools")
    done = run("-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), str(ROOT / "tools"), cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return ZipFile(path)


def files(*kinds: str) -> set[str]:
    """Returns the files of the package in the checkout, by their names in the package."""
    folders = {"memstate": ROOT / "memstate", "memstate/kernels": ROOT / "kernels"}  # rglob does not follow the link
    paths = {
        f"{name}/{path.relative_to(folder).as_posix()}"
        for name, folder in folders.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    return {name for name in paths if not kinds or name.endswith(kinds)}


def test_wheel_contains_every_file_of_the_package_and_nothing_else(wheel: ZipFile) -> None:
    names = {name for name in wheel.namelist() if not name.split("/")[0].endswith(".dist-info")}
    assert names == files()
    data = {"memstate/py.typed", "memstate/kernels/tables.py", "memstate/viz/inspector/page.html"}
    assert data <= names and files(".js") and files(".css")
    assert {Path(name).suffix for name in names} - {".json"} == {
        ".py",
        ".typed",
        ".html",
        ".css",
        ".js",
    }  # .json: tuned settings of devices
    assert not [name for name in names if "test" in Path(name).name or "memstate_tools" in name]


def test_wheel_of_the_tools_contains_their_files_alone(tools: ZipFile) -> None:
    names = {name for name in tools.namelist() if not name.split("/")[0].endswith(".dist-info")}
    folder = ROOT / "tools"
    there = {path for path in (folder / "memstate_tools").rglob("*") if path.is_file()}
    assert names == {path.relative_to(folder).as_posix() for path in there if "__pycache__" not in path.parts}
    (metadata,) = (name for name in tools.namelist() if name.endswith(".dist-info/METADATA"))
    said = tools.read(metadata).decode()
    assert "\nName: recurrent-memstate-tools\n" in said and "\nRequires-Dist: recurrent-memstate[cli]==" in said
    (licence,) = (name for name in tools.namelist() if name.endswith("/LICENSE"))
    assert tools.read(licence).decode() == (ROOT / "LICENSE").read_text()


def test_installed_tools_are_commands_of_memstate(wheel: ZipFile, tools: ZipFile, tmp_path: Path) -> None:
    """Processes that these commands start find both packages too."""
    for archive in (wheel, tools):
        archive.extractall(tmp_path)
    done = run("-P", "-m", "memstate", "bench", "launches", "--json", "-", cwd=tmp_path, path=str(tmp_path))
    assert done.returncode == 0 and len(json.loads(done.stdout)) > 10, done.stderr
    where = "import json, memstate, memstate_tools as tools; print(json.dumps([memstate.__file__, tools.__file__]))"
    (tmp_path / "where.py").write_text(where)
    code = """import sys; sys.path.insert(0, sys.argv[1])
from memstate_tools.worker import run_module
print(*next(run_module("where", interpret=False)))"""
    done = run("-P", "-c", code, str(tmp_path), cwd=tmp_path.parent)
    assert len(places := done.stdout.split()) == 2, done.stderr
    assert all(Path(file).is_relative_to(tmp_path) for file in places), places


def test_examples_run_outside_the_checkout_on_an_unpacked_wheel(wheel: ZipFile, tmp_path: Path) -> None:
    """The wheel makes the inspector's page, too."""
    if find_spec("transformers") is None:  # an import of it would take seconds
        pytest.skip("Transformers is not installed")
    there = {path.stem for path in (ROOT / "examples").glob("*.py")}
    # sglang_pool needs SGLang. The two engines have tests of their own.
    assert there == {*EXAMPLES, "sglang_pool", "engine", "own_blocks"}
    script = str(ROOT / "tests" / "support" / "installed.py")
    installed = tmp_path / "unpacked"
    wheel.extractall(installed)
    done = run("-P", script, str(ROOT), str(tmp_path / "model"), cwd=tmp_path, path=str(installed))
    assert done.returncode == 0, done.stdout + done.stderr
    first, *said = done.stdout.split("== ")
    _, tables, page = first.split()
    assert Path(tables) == installed / "memstate" / "kernels" / "tables.py"
    assert int(page) > 10_000
    for text, (name, (_, expected)) in zip(said, EXAMPLES.items(), strict=True):
        assert text.startswith(name) and all(each in text for each in expected), text


def test_wheel_carries_the_licence(wheel: ZipFile) -> None:
    assert [name for name in wheel.namelist() if name.endswith("/LICENSE")]


def test_sdist_contains_files_where_the_checkout_has_a_link(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        members = {member.name.split("/", 1)[1]: member for member in archive.getmembers()}
    assert files() <= members.keys()
    assert all(member.isfile() for member in members.values())


# Files of another project's package called memstate; two files of ours have the same names.
THEIRS = ("__init__", "backends/__init__", "constants", "exceptions", "integrations/__init__", "storage")
IMPORTS = (
    "import memstate",
    "import memstate.errors",
    "from memstate.engine import manager",
    "import memstate.cli.app",
)


def test_the_distribution_has_a_name_of_its_own(built: Path, wheel: ZipFile) -> None:
    assert {path.name.split("-")[0] for path in built.iterdir()} == {"recurrent_memstate"}
    (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    assert "\nName: recurrent-memstate\n" in wheel.read(metadata).decode()
    assert files() & {f"memstate/{name}.py" for name in THEIRS} == {
        "memstate/__init__.py",
        "memstate/integrations/__init__.py",
    }


@pytest.mark.parametrize("replaced", [False, True])
def test_files_of_another_package_of_this_name_are_refused(replaced: bool, wheel: ZipFile, tmp_path: Path) -> None:
    """Covers both orders of installation: the later package has replaced files of the earlier one."""
    wheel.extractall(tmp_path)
    assert run("-c", IMPORTS[0], cwd=tmp_path, path=str(tmp_path)).returncode == 0
    for name in THEIRS:
        path = tmp_path / "memstate" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        if replaced or not path.is_file():
            path.write_text("'''Of the other package.'''\n")
    for code in IMPORTS[replaced:]:
        done = run("-c", code, cwd=tmp_path, path=str(tmp_path))
        said = done.stderr.splitlines()[-1]
        assert done.returncode == 1 and said.startswith("ImportError: ") and "pip uninstall memstate" in said, code
        assert "another package called memstate: backends/__init__.py, constants.py, exceptions.py, storage.py" in said
