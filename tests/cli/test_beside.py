"""Tests commands that other distributions add by entry points, and the messages if such a command cannot run."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer

import memstate
from memstate.cli import app as cli
from memstate.cli import beside
from tests import TOOLS
from tests.support import offered
from tests.support.command import memstate as command
from tests.support.processes import ran

PROJECT = tomllib.loads((TOOLS / "pyproject.toml").read_text())["project"]
OTHER = """
import typer

def check(word: str):
    '''Say a word.'''
    print("other", word)

def bench(): ...
capacity = demo = bench
number = 5
app = typer.Typer()
app.command()(bench)
click = typer.main.get_command(app)
def unknown(word: "Nothing"): ...
def unread(word: int | str): ...
"""


def names(text: str) -> dict[str, str]:
    """Returns command -> description, from the text of `--help`."""
    return dict(line.split(maxsplit=1) for line in text.partition("Commands:\n")[2].splitlines())


def run(*arguments: str, path: tuple[Path, ...]) -> subprocess.CompletedProcess[str]:
    """Runs `memstate ...` with the folders `path` on Python's path, as if this environment lacked the tools."""
    hidden = """import runpy, sys, importlib.metadata as metadata
real, own = metadata.distributions, sys.argv.pop(1)
metadata.distributions = lambda **given: [each for each in real(**given) if each.name != own]
runpy.run_module("memstate", run_name="__main__")"""
    own, paths = "none" if TOOLS in path else PROJECT["name"], os.pathsep.join(map(str, (*path, TOOLS.parent)))
    return ran(sys.executable, "-c", hidden, own, *arguments, cwd=TOOLS.parent / "docs", PYTHONPATH=paths)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A folder with a distribution of somebody else, without entry points yet."""
    (tmp_path / "other_1.py").write_text(OTHER)
    (tmp_path / "other-1.dist-info").mkdir()
    (tmp_path / "other-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.4\nName: other\nVersion: 1\n")
    return tmp_path


def offer(folder: Path, *lines: str) -> None:
    (folder / "other-1.dist-info" / "entry_points.txt").write_text("\n".join(("[memstate.commands]", *lines)))


def test_the_tools_have_the_version_and_the_commands_that_memstate_knows() -> None:
    assert PROJECT["version"] == memstate.__version__
    assert PROJECT["dependencies"] == [f"recurrent-memstate[cli]=={memstate.__version__}"]
    assert tuple(PROJECT["entry-points"][beside.GROUP]) == beside.TOOLS


def test_help_lists_all_commands() -> None:
    listed = names(command("--help").out)
    assert list(listed) == ["capacity", "inspect", "top", "replay", *beside.TOOLS]
    assert not [said for said in listed.values() if "installed" in said or "broken" in said]


def test_without_the_tools_their_commands_say_what_to_install() -> None:
    for arguments in ("bench", "bench launches --json - -x", "check --pool mine:factory", "demo"):
        done = run(*arguments.split(), path=())
        said = f"{arguments.split()[0]}: not installed: pip install ./tools in a checkout of memstate\n"
        assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
    done = run("--help", path=())
    assert {name for name, said in names(done.stdout).items() if said.startswith("not installed: ")} == {*beside.TOOLS}
    assert run("capacity", "--help", path=()).returncode == 0


def test_a_broken_command_is_named_and_the_others_run(other: Path) -> None:
    offer(other, "check = other_1:check", "bench = no_such_module:bench", "tune = other_1:number", "demo = other_1:no")
    listed = names(run("--help", path=(other,)).stdout)
    assert listed["check"] == "Say a word." and listed["capacity"].startswith("Plan")
    assert run("check", "hello", path=(other,)).stdout == "other hello\n"
    why = {
        "bench": "other is broken, ModuleNotFoundError: No module named 'no_such_module'",
        "tune": "other is broken: other_1:number is no function",
        "demo": "other is broken, AttributeError: module 'other_1' has no attribute 'no'",
    }
    for name, said in why.items():
        done = run(name, path=(other,))
        assert (done.returncode, done.stderr) == (2, f"{name}: {said}\n")


def test_what_is_no_function_of_options_is_broken_and_the_others_run(other: Path) -> None:
    (other / "other_2.py").write_text("raise KeyboardInterrupt")
    why = {
        "app": "other_1:app is no function", "click": "other_1:click is no function",
        "dict": "builtins:dict is no function", "unknown": "name 'Nothing' is not defined",
        "unread": "AssertionError", "stopped": "other is broken, KeyboardInterrupt",
    }  # fmt: skip
    lines = [f"{name} = other_1:{name}" for name in ("app", "click", "unknown", "unread")]
    offer(other, *lines, "dict = builtins:dict", "stopped = other_2:x", "= other_1:bench", "check = other_1:check")
    listed = names(run("--help", path=(other,)).stdout)
    assert listed["check"] == "Say a word." and len(listed) == 4 + len(beside.TOOLS) + len(why)
    for name, said in why.items():
        done = run(name, path=(other,))
        assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("content", [b"[other]\nno equals sign\n", b"[other]\nb\xe9 = a:b\n"])
def test_a_distribution_that_cannot_be_read_hides_no_command(other: Path, tmp_path: Path, content: bytes) -> None:
    (bad := tmp_path / "bad-1.dist-info").mkdir()
    (bad / "entry_points.txt").write_bytes(content)
    (other / "other-1.dist-info" / "METADATA").unlink()
    offer(other, "more = other_1:check", "broken = other_1:no")
    listed = names(run("--help", path=(other,)).stdout)
    assert listed["more"] == "Say a word." and listed["broken"].startswith("other_1:no is broken, AttributeError")


def test_equal_entries_of_a_name_count_as_one(other: Path) -> None:
    """An upgrade that pip could not complete leaves a second copy of the metadata."""
    offer(other, "bench = other_1:check", "bench = other_1:check")
    shutil.copytree(other / "other-1.dist-info", other / "~ther-1.dist-info")
    assert run("bench", "hello", path=(other,)).stdout == "other hello\n"


def test_one_name_in_two_distributions_runs_neither_and_names_both(other: Path, tmp_path: Path) -> None:
    """A distribution cannot replace a command of memstate itself."""
    offer(other, "bench = other_1:bench", "capacity = other_1:capacity", "more = other_1:check")
    offered.write(tmp_path)
    done = run("bench", path=(other, TOOLS))
    both = {"other and recurrent-memstate-tools", "recurrent-memstate-tools and other"}
    assert done.returncode == 2
    assert done.stderr in {f"bench: offered by {one}: uninstall one of them\n" for one in both}
    listed = names(run("--help", path=(other, TOOLS)).stdout)
    assert listed["capacity"].startswith("Plan") and listed["more"] == "Say a word."
    assert listed["demo"] == "Run with and without memstate, and compare."


def test_an_app_of_typer_gets_each_command_once() -> None:
    app = typer.Typer()
    beside.add(app, ["demo"])
    commands = [command.name for command in app.registered_commands]
    assert commands == [name for name in beside.TOOLS if name != "demo"]
    assert len({each.name or each.callback.__name__ for each in cli.app.registered_commands}) == 10
