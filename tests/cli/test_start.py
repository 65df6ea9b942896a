"""What `import memstate` and `memstate --help` load, and the names that both offer."""

import ast
import os
import subprocess
import sys
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import get_args

import pytest
from typer.testing import CliRunner

import memstate
from memstate.cli import app as cli
from memstate.cli import bench, names
from memstate.cli.commands import demo
from memstate.cli.demo import DemoConfig
from memstate.cli.demo.engines import ENGINES, TRACKING
from memstate.cli.demo.mixers import MIXERS
from memstate.cli.traces.make import KINDS
from memstate.kernels.dispatch import NAMES
from memstate.tiers.settings import Write

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


def test_the_shell_completes_commands_and_choices() -> None:
    code = "import sys; sys.argv = ['memstate']; from memstate.cli.app import main; main()"
    for typed, offered in (("memstate ", "replay"), ("memstate demo --strategy ", "ping-pong")):
        given = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
        assert offered in run(code, _MEMSTATE_COMPLETE="complete_bash", **given).split()


def test_choices_are_what_the_code_knows() -> None:
    assert get_args(names.Strategy) == tuple(TRACKING)
    assert get_args(names.Backend) == ("auto", *NAMES)
    assert get_args(names.Model) == tuple(MIXERS)
    assert get_args(names.Engine) == tuple(ENGINES)
    assert get_args(names.Write) == get_args(Write)
    assert set(get_args(names.Benchmark)) == {"all", *bench.NAMES}
    assert get_args(names.TraceKind) == KINDS


def test_every_setting_of_the_demo_has_an_option_with_its_default() -> None:
    options = {name: each.default for name, each in signature(demo.demo).parameters.items()}
    for field in fields(DemoConfig):
        if field.name not in ("device", "batch", "size"):  # no options of their own
            assert options.pop(field.name) == field.default, field.name
    assert options == {"json_path": None}


def test_help_is_written_for_every_option() -> None:
    for command in ("demo", "compile", "bench", "tune", "replay", "trace"):
        done = CliRunner().invoke(cli.app, [command, "--help"])
        assert done.exit_code == 0 and "--help" in done.stdout
