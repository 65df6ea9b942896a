"""Tests that examples/many_machines prints the lines of docs/machines.md, over a folder and over Mooncake."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mooncake_server import running_master
from tests.support.sources import ROOT

pytestmark = pytest.mark.proof
(SAID,) = re.findall(r"many_machines/run.py records\n(.*?)```", (ROOT / "docs" / "machines.md").read_text(), re.DOTALL)


@pytest.fixture(params=["folder", "mooncake"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path / "records")
        return
    with running_master() as master:
        yield f"mooncake://{master.settings().master}"


def run(place: str, folder: Path) -> list[str]:
    """Returns the lines that the program prints. They are sorted, because ranks print in any order."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "many_machines" / "run.py"), place],
        cwd=folder, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


def test_the_program_prints_what_the_page_says(place: str, tmp_path: Path) -> None:
    assert run(place, tmp_path) == sorted(SAID.splitlines())


def test_a_second_run_over_the_folder_starts_where_the_first_ended(tmp_path: Path) -> None:
    place = str(tmp_path / "records")
    run(place, tmp_path)
    starts = re.findall(r"requests start at \[([^\]]*)\]", "\n".join(run(place, tmp_path)))
    assert len(starts) == 5 and set(", ".join(starts).split(", ")) == {"32"}
