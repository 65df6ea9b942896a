"""Compares documents with the code: examples run, behaviours have tests, links lead somewhere."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = (
    "README.md",
    "docs/guide.md",
    "docs/kinds.md",
    "docs/models.md",
    "docs/fewer_bits.md",
    "docs/park.md",
    "docs/own_blocks.md",
    "docs/prefill.md",
    "docs/sessions.md",
    "docs/speculation.md",
    "docs/capacity.md",
    "docs/check.md",
    "docs/inspector.md",
    "docs/events.md",
    "docs/metrics.md",
)
LINKED = sorted(
    str(path.relative_to(ROOT)) for folder in (".", "docs", "benchmarks") for path in (ROOT / folder).glob("*.md")
)

BLOCK = re.compile(r"```python\n(import .*?)```(?:\s*```text\n(.*?)```)?", re.DOTALL)  # other blocks are fragments
NUMBER = re.compile(r"[A-Z]\d+[a-z]?")

# Runs every program of a list in a namespace of its own, and prints the outputs as one list.
RUNNER = """
import contextlib, io, json, sys

printed = []
for program in json.load(sys.stdin):
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(program, {"__name__": "__main__"})
    printed.append(output.getvalue())
print(json.dumps(printed))
"""


def test_examples_run_and_print_what_the_page_says(tmp_path: Path) -> None:
    blocks = [(page, *block) for page in PAGES for block in BLOCK.findall((ROOT / page).read_text())]
    assert {page for page, _, _ in blocks} == set(PAGES)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)  # a reader's shell does not set this variable
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps([code for _, code, _ in blocks]),
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    for (page, code, output), text in zip(blocks, printed, strict=True):
        assert text.strip() == output.strip(), f"{page}:\n{code}"


def numbers_of_tests() -> set[str]:
    """Returns the numbers of behaviours in the names of tests, read from the sources: `test_B3_B4_...` has two."""
    names = {name for path in ROOT.glob("tests/**/*.py") for name in re.findall(r"def test_(\w+)", path.read_text())}
    return {part for name in names for part in name.split("_") if NUMBER.fullmatch(part)}


def test_behaviours_and_tests_have_the_same_numbers() -> None:
    lines = re.findall(r"^\* \*\*(\S+)\*\* (.+)$", (ROOT / "docs" / "behaviours.md").read_text(), re.MULTILINE)
    listed = [number for number, _ in lines]
    built = {number for number, line in lines if "*(not built yet)*" not in line}
    assert sorted(listed) == sorted(set(filter(NUMBER.fullmatch, listed))), "a number twice, or none"
    assert sorted(numbers_of_tests() - set(listed)) == [], "in the name of a test, and not in docs/behaviours.md"
    assert sorted(built - numbers_of_tests()) == [], "in docs/behaviours.md, and in the name of no test"


def anchors(text: str) -> set[str]:
    """Returns the anchors that links into a page can name: its headings, as GitHub turns them into anchors."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED)
def test_links_lead_somewhere(page: str) -> None:
    assert f"({page}" in (ROOT / "README.md").read_text() or not page.startswith("docs/"), "README links no such page"
    text, folder = (ROOT / page).read_text(), (ROOT / page).parent
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        path, _, anchor = link.partition("#")
        if path.startswith("http"):
            continue
        target = folder / path if path else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


@pytest.mark.parametrize("page", LINKED)
def test_pages_name_tests_that_exist(page: str) -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)", (ROOT / page).read_text()))
    assert [f"{path}::{test}" for path, test in sorted(named) if f"def {test}(" not in (ROOT / path).read_text()] == []


@pytest.mark.parametrize("page", LINKED)
def test_pictures_follow_dark_mode(page: str) -> None:
    shown = [(ROOT / page).parent / name for name in re.findall(r"!\[[^]]*\]\(([^)]*)\)", (ROOT / page).read_text())]
    assert [picture for picture in shown if "prefers-color-scheme" not in picture.read_text()] == []


def test_no_page_installs_the_package_of_another_project() -> None:
    """`memstate` on the package index is not this package."""
    wrong = r"pip install( -\S+)* [\\\"']*memstate(?![-\w])|(?<![-.\w])memstate\[\w+(,\w+)*\]"
    assert [page for page in LINKED if re.search(wrong, (ROOT / page).read_text())] == []


def test_paths_of_the_architecture_exist() -> None:
    """Looks for files that ARCHITECTURE names in code font, from the root and from memstate/."""
    text = re.sub(r"```.*?```", "", (ROOT / "ARCHITECTURE.md").read_text(), flags=re.DOTALL)
    named = set(re.findall(r"`((?:\w+/)+(?:\w+\.\w+)?)`", text)) - {"integrations/"}
    examples = {"kernels/x.py", "kernels/reference/x.py", "tests/kernels/test_x.py"}
    assert len(named) > 25
    there = {path for path in named if any((ROOT / folder / path).exists() for folder in (".", "memstate"))}
    assert sorted(named - examples - there) == []
