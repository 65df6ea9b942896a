"""What `import memstate` and `memstate --help` load, and the names that both offer."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import memstate
from memstate.cli import bench, names
from memstate.cli.demo.mixers import MIXERS
from memstate.cli.traces.logs import READERS
from memstate.cli.traces.make import KINDS
from memstate.engine.capacity import STRATEGIES
from memstate.kernels.dispatch import NAMES
from memstate.tiers.settings import Write
from tests.support.command import memstate as command

ROOT = Path(__file__).parents[2]


def run(code: str, **environment: str) -> str:
    """Runs code in a fresh process; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


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


def test_what_a_type_checker_reads_is_what_is_loaded() -> None:
    tree = ast.parse((ROOT / "memstate" / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    read = {
        node.module: {alias.name for alias in node.names} for node in block.body if isinstance(node, ast.ImportFrom)
    }
    assert read == {module: set(listed.split()) for module, listed in memstate._MODULES.items()}
    assert set.union(*read.values()) | {"__version__"} == set(memstate.__all__)


# -- the command line ------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", ["-h", "demo --help", "--version", "demo --strategy sometimes"])
def test_parsing_loads_no_torch(arguments: str) -> None:
    code = (
        f"import sys; sys.argv = ['memstate', *{arguments.split()}]\n"
        "from memstate.cli.app import main\n"
        "try: main()\n"
        "except SystemExit: print('loaded:', {'torch', 'numpy', 'triton'} & set(sys.modules))"
    )
    assert run(code).endswith("loaded: set()\n")


def test_choices_are_what_the_code_knows() -> None:
    assert get_args(names.Strategy) == tuple(STRATEGIES)
    assert get_args(names.Backend) == ("auto", *NAMES)
    assert get_args(names.Model) == tuple(MIXERS)
    assert get_args(names.Write) == get_args(Write)
    assert set(get_args(names.Benchmark)) == {"all", *bench.NAMES}
    assert get_args(names.TraceKind) == (*KINDS, *READERS)


# -- completion ------------------------------------------------------------------------------------


def completed(words: str, patch: pytest.MonkeyPatch) -> str:
    """What bash is told when the cursor stands after these words."""
    patch.setenv("_MEMSTATE_COMPLETE", "complete_bash")
    patch.setenv("COMP_WORDS", words)
    patch.setenv("COMP_CWORD", str(words.count(" ")))
    return command().out


@pytest.mark.parametrize(
    ("words", "found"),
    [("memstate cap", "capacity"), ("memstate bench --pe", "--peer"), ("memstate bench lau", "launches")],
)
def test_shells_complete(words: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found in completed(words, monkeypatch)
    assert found not in completed("memstate replay ", monkeypatch)
