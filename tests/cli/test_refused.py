"""Tests what commands refuse: status 2, one line on stderr that says why, and no file is made or changed.

The commands and the words of their lines are in refusals.txt.
"""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from memstate.cli.traces import form
from memstate_tools.traces.make import make
from tests.slots.test_inspect import busy
from tests.support.command import memstate

LINES = Path(__file__).with_name("refusals.txt").read_text("utf-8").splitlines()
ROWS = [[*line.split(" | "), ""][:3] for line in LINES if line and line[0] != "#"]
WORK = ("memstate.cli.replay.serving.Serving.turn", "memstate_tools.tuning.subject.Subject.workload")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the commands name."""
    folder = tmp_path_factory.mktemp("refused")
    form.write(folder / "talks.jsonl", [one for one in make("chat", 60, 1) if len(one.hash_ids) <= 30])
    (folder / "link.jsonl").symlink_to("talks.jsonl")
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "own.json").write_text('{"model_type": "own"}')
    for name in ("owners.json", "owners.html"):
        busy().save(folder / name)
    return folder


@pytest.fixture(autouse=True)
def here(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this folder the current one, and fails the test if a command begins to replay or to sweep."""
    monkeypatch.chdir(made)
    for work in WORK:
        monkeypatch.setattr(work, lambda *given, **more: pytest.fail("the work began"))


def require_refused(command: str, words: str) -> None:
    def content() -> dict[Path, bytes]:
        return {path: path.read_bytes() if path.is_file() else b"" for path in Path().iterdir()}

    before = content()
    done = memstate(*shlex.split(command))
    assert (done.status, done.out) == (2, "")
    assert re.search(".*".join(map(re.escape, words.split(" .. "))), done.err), done.err
    assert done.err.count("\n") == 1 and content() == before


@pytest.mark.parametrize(("command", "words", "file"), ROWS, ids=[command for command, *_ in ROWS])
def test_a_refusal_is_one_line_and_changes_nothing(command: str, words: str, file: str) -> None:
    Path("FILE").write_text(file.replace(r"\n", "\n"), "utf-8")
    require_refused(command, words)


@pytest.mark.parametrize(
    ("command", "package", "words"),
    [
        ("check --pool memstate", "hypothesis", "pip install '.[check]'"),
        ("bench transformers --toy", "memstate.integrations.transformers", "transformers: left out: "),
    ],
)
def test_a_package_that_is_missing_is_named(
    command: str, package: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    require_refused(command, words)
