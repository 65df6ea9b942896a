"""Tests which modules `import memstate` and `memstate --help` load, and the names of the package and the commands."""

import ast
from functools import partial
from pathlib import Path
from typing import get_args
from zipfile import ZipFile

import pytest

import memstate
from memstate.engine.capacity import STRATEGIES
from memstate.kernels.dispatch import NAMES
from memstate.tiers.settings import Write
from memstate_tools import bench
from memstate_tools import names as tools
from memstate_tools.demo.mixers import MIXERS
from memstate_tools.traces.logs import READERS
from memstate_tools.traces.make import KINDS
from tests.support.command import memstate as command
from tests.support.processes import python

ROOT = Path(__file__).parents[2]


run = partial(python, "-c")


# -- the package -----------------------------------------------------------------------------------


def test_the_package_loads_a_name_or_a_layer_when_it_is_used() -> None:
    code = """import sys, memstate as ms
print("torch" in sys.modules); ms.StateManager; print("torch" in sys.modules)
print(ms.tokens.encode([1])[0], ms.viz.bars.__name__, hasattr(ms, "layers"))"""
    assert run(code).split() == ["False", "True", "1", "bars", "False"]


def test_dir_shows_the_public_names_and_each_of_them_is_there() -> None:
    assert dir(memstate) == sorted(memstate.__all__)
    for name in memstate.__all__:
        assert getattr(memstate, name) is not None
    assert memstate.policies.__name__ == "memstate.prefix.policies"
    with pytest.raises(AttributeError, match="module 'memstate' has no attribute 'StateManger'"):
        memstate.StateManger  # type: ignore[attr-defined]  # noqa: B018


def test_a_type_checker_knows_each_name_that_is_loaded_later() -> None:
    """Type checkers see all lazy names, and report unknown names, because `__getattr__` is hidden from them."""
    for package in (memstate, memstate.events, memstate.viz):
        tree = ast.parse(Path(package.__file__).read_text())
        blocks = {ast.unparse(node.test): node.body for node in tree.body if isinstance(node, ast.If)}
        read = [node for node in blocks["TYPE_CHECKING"] if isinstance(node, ast.ImportFrom)]
        names = {alias.asname for node in read for alias in node.names}
        assert None not in names and names <= set(package.__all__), package
        assert "__getattr__" in ast.unparse(blocks["not TYPE_CHECKING"][0])
        for name in names:
            assert getattr(package, name).__name__.split(".")[-1] == name


SOURCELESS = """
import importlib.abc, importlib.util, sys
class Loader(importlib.abc.Loader):
    def exec_module(self, module): from memstate.lazy import exports; exports(module.__name__)
    {method}
spec = importlib.util.spec_from_loader("bare", Loader())
module = importlib.util.module_from_spec(spec)
sys.modules["bare"] = module
try: spec.loader.exec_module(module)
except ImportError as error: print(error)
"""


@pytest.mark.parametrize("method", ["", "def get_source(self, name): return None"])
def test_a_package_without_a_source_says_so(method: str) -> None:
    said = run(SOURCELESS.format(method=method))
    assert said == "bare reads its own source, and there is none; install it with its .py files\n"


def test_names_are_loaded_without_docstrings_and_from_an_archive(tmp_path: Path) -> None:
    """Names come from the source of the package. Python's -OO and zip archives keep the source."""
    (package := tmp_path / "kept").mkdir()
    (package / "__init__.py").write_text(
        "from typing import TYPE_CHECKING\nfrom memstate.lazy import exports\n"
        "if TYPE_CHECKING:\n    from kept.later import late as late\n__getattr__, __all__ = exports(__name__)\n"
    )
    (package / "later.py").write_text("def late(): return 'loaded'\n")
    archive = tmp_path / "kept.zip"
    with ZipFile(archive, "w") as file:
        for path in package.iterdir():
            file.write(path, f"kept/{path.name}")
    code = "import sys; sys.path[:0] = [{!r}, '.']; import kept; print(kept.late(), kept.__all__, kept.later.__name__)"
    for place in (tmp_path, archive):
        assert run(code.format(str(place)), PYTHONOPTIMIZE="2") == "loaded ['late'] kept.later\n"


def test_an_archive_of_memstate_says_that_it_needs_files_on_disk(tmp_path: Path) -> None:
    with ZipFile(archive := tmp_path / "memstate.zip", "w") as file:
        for name in ("__init__", "alone", "errors", "lazy", "kernels/tables"):
            file.write(ROOT / f"memstate/{name}.py", f"memstate/{name}.py")
    code = "import sys; sys.path.insert(0, {!r})\ntry: import memstate\nexcept ImportError as error: print(error)"
    assert run(code.format(str(archive))).startswith("memstate needs its .py files on disk")


def test_a_name_is_returned_although_a_reloader_has_removed_its_package() -> None:
    code = "import sys, memstate.requests.tracking; print(sys.modules.pop('memstate').Redirect.__name__)"
    assert run(code) == "Redirect\n"


# -- the command line ------------------------------------------------------------------------------


def test_parsing_loads_no_torch() -> None:
    code = """import sys
from memstate.cli.app import main
for arguments in ("-h", "demo --help", "--version", "demo --strategy sometimes"):
    sys.argv = ["memstate", *arguments.split()]
    try: main()
    except SystemExit: print("loaded:", {"torch", "numpy", "triton"} & set(sys.modules))"""
    assert run(code).count("loaded: set()\n") == 4


def test_the_version_is_that_of_the_package() -> None:
    assert command("--version") == (0, f"memstate {memstate.__version__}\n", "")


def test_choices_are_what_the_code_knows() -> None:
    assert get_args(tools.Strategy) == tuple(STRATEGIES)
    assert get_args(tools.Backend) == ("auto", *NAMES)
    assert get_args(tools.Model) == tuple(MIXERS)
    assert get_args(tools.Write) == get_args(Write)
    assert set(get_args(tools.Benchmark)) == {"all", *bench.NAMES}
    assert get_args(tools.TraceKind) == (*KINDS, *READERS)


# -- completion ------------------------------------------------------------------------------------


def completed(words: str, patch: pytest.MonkeyPatch) -> str:
    """Returns the completions that bash gets if the cursor is after these words."""
    patch.setenv("_MEMSTATE_COMPLETE", "complete_bash")
    patch.setenv("COMP_WORDS", words)
    patch.setenv("COMP_CWORD", str(words.count(" ")))
    return command().out


@pytest.mark.parametrize(
    ("words", "word"),
    [("memstate cap", "capacity"), ("memstate bench --pe", "--peer"), ("memstate bench lau", "launches")],
)
def test_shells_complete(words: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert word in completed(words, monkeypatch)
    assert word not in completed("memstate replay ", monkeypatch)
