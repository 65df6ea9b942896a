"""Runs the installed memstate outside the checkout: `python -P installed.py ROOT FOLDER`.

It prints the path of memstate, and runs every program of examples/ on a tiny model in FOLDER, in one process.
"""

import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Final

# program -> (its arguments after the model, texts that its output must contain)
EXAMPLES: Final[Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "transformers_generate": (("w5 w6 w7", "w9 w10 w11 w12 w13"), ("slots free", "w5 w6 w7 w")),
    "transformers_serve": (
        (" ".join(f"w{n}" for n in range(3, 53)), "w9 w8", "w4"),
        ("w9 w8: w", "(48 tokens of", "hit_tokens=96"),
    ),
}


def save(folder: Path, model: object) -> None:
    """Writes a model and a tokenizer of 97 words to a folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(97)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2").save_pretrained(folder)
    model.save_pretrained(folder)  # type: ignore[attr-defined]


def show() -> None:
    """Prints the path of memstate. Then makes the page of the inspector, which needs installed data files."""
    import torch

    import memstate as ms
    import memstate.kernels.tables
    from memstate.viz.inspector import page

    layout = ms.StateLayout((ms.Plane("ssm", (2,), torch.float32),), 1)
    made = page(ms.StateManager(layout, slots=4, max_requests=2, backend="reference").inspect())
    print("memstate", memstate.kernels.tables.__file__, len(made))


def main(root: str, folder: str) -> None:
    """Saves a tiny model, then runs `show` and all examples."""
    show()
    support = SimpleNamespace(**runpy.run_path(f"{root}/tests/support/tiny_models.py"))
    save(Path(folder), support.tiny("qwen3_next"))
    for name, (arguments, _) in EXAMPLES.items():
        print("==", name)
        sys.argv = [name, folder, *arguments]
        with support.without_gpu_kernels():
            runpy.run_path(f"{root}/examples/{name}.py", run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
