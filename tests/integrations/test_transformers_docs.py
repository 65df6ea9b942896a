"""The page about Transformers and its examples: what they show runs, on tiny random models."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

import memstate as ms
from tests.support.sources import ROOT
from tests.support.tiny_models import FAMILIES, HEADINGS, described, tiny, without_gpu_kernels

pytest.importorskip("transformers")
from transformers import GenerationConfig, PreTrainedTokenizerFast

import memstate.integrations.transformers as mst

PAGE = (ROOT / "docs" / "transformers.md").read_text()
TEXT = [5, 17, 40, 9, 33, 71, 8, 60, 4, 12, 88, 23, 51, 30, 7, 19, 90, 3]


def test_blocks_of_the_page_run_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names = {
        "ms": ms, "mst": mst, "torch": torch, "GenerationConfig": GenerationConfig, "model": tiny("qwen3_next"),
        "ids": torch.tensor([TEXT[:7], TEXT[7:14]]), "prompts": [TEXT, TEXT[:9]],
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
    assert len(blocks) == 7


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_page_has_the_line_of_a_family(family: str) -> None:
    assert described(family) in PAGE.splitlines()


def test_the_table_of_families_has_no_other_line() -> None:
    table = PAGE[PAGE.index(HEADINGS) + len(HEADINGS) :].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == list(FAMILIES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and a tokenizer of 97 words."""
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("model")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(97)}, unk_token="w3"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2").save_pretrained(path)
    tiny("qwen3_next").save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("name", "texts", "said"),
    [
        ("transformers_generate", ["w5 w6 w7", "w9 w10 w11 w12 w13"], ["slots free", "w5 w6 w7 w"]),
        ("transformers_serve", [" ".join(f"w{n}" for n in range(3, 53)), "w9 w8", "w4"], ["w9 w8: w", "(48 tokens of"]),
    ],
)
def test_examples_run_as_written(
    name: str, texts: list[str], said: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = ROOT / "examples" / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path), str(folder), *texts])
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with without_gpu_kernels():
        runpy.run_path(str(path), run_name="__main__")
    out = capsys.readouterr().out
    assert all(text in out for text in said), out
    assert len(path.read_text().splitlines()) < 40
