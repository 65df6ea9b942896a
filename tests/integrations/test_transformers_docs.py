"""The page about Transformers: what it shows runs, on tiny random models.

`python -m tests.integrations.test_transformers_docs` writes its table of families.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import memstate as ms
from tests.support.sources import ROOT
from tests.support.tiny_models import FAMILIES, HEADINGS, described, tiny

pytest.importorskip("transformers")
from transformers import GenerationConfig

import memstate.integrations.transformers as mst

PATH = ROOT / "docs" / "transformers.md"
PAGE = PATH.read_text()
TEXT = [5, 17, 40, 9, 33, 71, 8, 60, 4, 12, 88, 23, 51, 30, 7, 19, 90, 3]


def test_blocks_of_the_page_run_one_after_the_other(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names = {
        "ms": ms, "mst": mst, "torch": torch, "GenerationConfig": GenerationConfig, "model": tiny("qwen3_next"),
        "ids": torch.tensor([TEXT[:7], TEXT[7:14]]), "prompts": [TEXT, TEXT[:9]],
        "folder": tmp_path,
    }  # fmt: skip
    for block in blocks:
        exec(block, names)
    assert sorted(names["answers"]) == [0, 1]
    assert names["again"].shape == (2, 7 + 8 + 7 + 8)
    said = capsys.readouterr().out
    assert "Place(layer=0, kind='conv'" in said
    assert "length 16\n" in said  # the second request for this prompt
    assert "[16] tokens were there" in said.splitlines()
    assert [line[0] for line in said.splitlines()[-4:-1]] == ["0", "1", "2"]
    assert said.splitlines()[-1].endswith("guesses were right")
    assert any(path.is_file() for path in tmp_path.rglob("*"))  # states that a store keeps
    assert len(blocks) == 8


SERVED = """
import re
from functools import partial

import memstate as ms
import memstate.integrations.transformers as mst
from tests.support.tiny_models import tiny

(block,) = [one for one in re.findall("```python\\n(.*?)```", open(page).read(), re.DOTALL) if "store=" in one]
ms.Tiers = partial(ms.Tiers, clock=lambda: 0.0)  # a loaded machine is no slow storage
names = {"ms": ms, "mst": mst, "model": tiny("qwen3_next"), "folder": folder}
names["prompts"] = [[3 + number * number % 90 for number in range(700)]]
exec(block, names)
said = [[one.cached, one.prefetch, one.tokens] for one in names["done"]]
"""
PROCESS = f"import json, sys\npage, folder = sys.argv[1:]\n{SERVED}\nprint(json.dumps(said))"


def test_another_process_finds_what_the_page_has_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ms, "Tiers", ms.Tiers)  # as it is now, behind this test
    here: dict[str, Any] = {"page": str(PATH), "folder": str(tmp_path / "states")}
    exec(SERVED, here)
    command, env = [sys.executable, "-c", PROCESS, here["page"], here["folder"]], os.environ | {
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }  # fmt: skip
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    ((first, missed, answer),), ((second, complete, again),) = here["said"], json.loads(ended.stdout.splitlines()[-1])
    assert (first, missed, second, complete) == (0, "missed", 688, "complete")  # whole pages of 16 of 700 tokens
    assert answer == again and len(answer) == 20


def parts(page: str) -> tuple[str, str, str]:
    """What is before the lines of families, these lines, and what is behind them."""
    start = page.index(HEADINGS) + len(HEADINGS)
    end = page.index("\n\n", start) + 1
    return page[:start], page[start:end], page[end:]


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_page_has_the_line_of_a_family(family: str) -> None:
    assert described(family) in PAGE.splitlines()


def test_the_table_of_families_has_no_other_line() -> None:
    _, table, _ = parts(PAGE)
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == list(FAMILIES)


if __name__ == "__main__":
    before, _, behind = parts(PAGE)
    PATH.write_text("".join([before, *(f"{described(family)}\n" for family in FAMILIES), behind]))
