"""Tests that examples/many_machines prints the lines of docs/machines.md, over a folder, S3 and Mooncake."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mooncake_server import running_master
from tests.support.object_server import running_server
from tests.support.processes import ROOT, python

pytestmark = pytest.mark.proof
PAGE = (ROOT / "docs" / "machines.md").read_text()
(SAID,) = re.findall(r"many_machines/run.py records\n(.*?)```", PAGE, re.DOTALL)
(MOVED,) = re.findall(r"many_machines/moves.py records\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(params=["folder", "s3", "mooncake"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path / "records")
        return
    if request.param == "s3":
        with running_server() as server:
            for name, value in server.environment().items():
                monkeypatch.setenv(name, value)
            yield "s3://bucket/records"
        return
    with running_master() as master:
        yield f"mooncake://{master.settings().master}"


def run(place: str, folder: Path, program: str = "run") -> list[str]:
    """Returns the lines that a program prints. They are sorted, because ranks print in any order."""
    return sorted(python(ROOT / "examples" / "many_machines" / f"{program}.py", place, cwd=folder).splitlines())


def test_the_program_prints_what_the_page_says(place: str, tmp_path: Path) -> None:
    assert run(place, tmp_path) == sorted(SAID.splitlines())


def test_a_second_run_over_the_folder_starts_where_the_first_ended(tmp_path: Path) -> None:
    place = str(tmp_path / "records")
    run(place, tmp_path)
    starts = re.findall(r"requests start at \[([^\]]*)\]", "\n".join(run(place, tmp_path)))
    assert len(starts) == 5 and set(", ".join(starts).split(", ")) == {"32"}


def test_H4_requests_that_move_have_the_tokens_of_undisturbed_runs(place: str, tmp_path: Path) -> None:
    assert run(place, tmp_path, "moves") == sorted(MOVED.splitlines())
