"""Tests docs/transformers.md: its examples run on tiny random models, and its table has all families.

`python -m tests.integrations.test_transformers_docs` writes its table of families.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import memstate as ms
from tests.support.chats import TEMPLATES
from tests.support.sources import ROOT
from tests.support.tiny_models import FAMILIES, HEADINGS, described, tiny
from tests.support.tiny_tokenizers import byte_level

pytest.importorskip("transformers")
from transformers import GenerationConfig

import memstate.integrations.transformers as mst

PATH = ROOT / "docs" / "transformers.md"
PAGE = PATH.read_text()
TEXT = [5, 17, 40, 9, 33, 71, 8, 60, 4, 12, 88, 23, 51, 30, 7, 19, 90, 3]


def test_blocks_of_the_page_run_one_after_the_other(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names = {
        "ms": ms, "mst": mst, "torch": torch, "GenerationConfig": GenerationConfig, "replace": replace,
        "model": tiny("qwen3_next", changes=(("vocab_size", 300),)), "tokenizer": byte_level(),
        "ids": torch.tensor([TEXT[:7], TEXT[7:14]]), "prompts": [TEXT, TEXT[:9]],
        "folder": tmp_path,
    }  # fmt: skip
    names["tokenizer"].chat_template = TEMPLATES["thinks"]
    for block in blocks:
        exec(block, names)
    assert sorted(names["answers"]) == [0, 1]
    assert names["again"].shape == (2, 7 + 8 + 7 + 8)
    said = capsys.readouterr().out
    assert "Place(layer=0, kind='conv'" in said
    assert "length 16\n" in said  # the second request hits the cache
    assert "[16] tokens were there" in said.splitlines()
    assert [line[0] for line in said.splitlines()[-4:-1]] == ["0", "1", "2"]
    assert said.splitlines()[-1].endswith("guesses were right")
    assert any(path.is_file() for path in tmp_path.rglob("*"))  # the store has written files
    assert len(names["prompt"].snapshot_at) == 2
    assert len(blocks) == 12


def parts(page: str) -> tuple[str, str, str]:
    """Returns the text of a page before the lines of families, these lines, and the text after them."""
    start = page.index(HEADINGS) + len(HEADINGS)
    end = page.index("\n\n", start) + 1
    return page[:start], page[start:end], page[end:]


def rows(table: str) -> dict[str, str]:
    """Returns family -> the text of its line; a line can name several families."""
    split = [line[2:].partition(" | ") for line in table.splitlines()]
    return {family: said for names, _, said in split for family in re.findall(r"`(\w+)`", names)}


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_page_has_the_line_of_a_family(family: str) -> None:
    _, table, _ = parts(PAGE)
    assert rows(table)[family] == rows(described(family))[family]


def test_the_table_has_no_other_family() -> None:
    _, table, _ = parts(PAGE)
    assert sorted(rows(table)) == sorted(FAMILIES)


if __name__ == "__main__":
    before, _, behind = parts(PAGE)
    said = rows("\n".join(map(described, FAMILIES)))
    alike = {line: [f"`{family}`" for family in said if said[family] == line] for line in said.values()}
    PATH.write_text("".join([before, *(f"| {', '.join(names)} | {line}\n" for line, names in alike.items()), behind]))
