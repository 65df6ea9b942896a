"""Makes the table of docs/models.md: rule, bytes and kernel of each model whose fields are in docs/site/models.json.

Fields are those that decide the state. Adapters are those of memstate whose engine serves the model.
"""

import json
from pathlib import Path
from typing import Any

from memstate.errors import InvalidArgument
from memstate.state.presets import from_config, rule

HERE = Path(__file__).parent
MODELS: dict[str, dict[str, Any]] = json.loads((HERE / "models.json").read_text("utf-8"))
PAGE = HERE.parent / "models.md"
RANKS = (1, 4, 8)
# rule -> kernel of its decode step, beside that of its convolutions. For other rules the step is the caller's.
KERNELS = {
    **dict.fromkeys(
        (
            "gated delta rule", "gated delta rule of dynamic convolutions", "Kimi's delta rule", "delta rule",
            "gated delta product", "RWKV-7", "linear attention",
        ),
        "gated_delta_step",
    ),
    **dict.fromkeys(("Mamba-2", "Mamba", "Mamba with heads", "lightning attention"), "selective_step"),
    **dict.fromkeys(("short convolution", "short convolutions"), "conv_step"),
    "Mamba-3": "mamba3_step",
}  # fmt: skip


def bytes_on(config: dict[str, Any], ranks: int) -> str:
    """Returns the bytes of a slot on one of several ranks, "-" if the ranks do not divide the model."""
    try:
        return f"{from_config(config, ranks=ranks).bytes_per_slot}"
    except InvalidArgument:
        return "-"


def page(text: str) -> str:
    """Returns docs/models.md with a new table in place of its own, which ends the page."""
    table = ["| model | type | rule | bytes of a slot: 1 rank | 4 ranks | 8 ranks | kernel | adapters |"]
    table.append("| --- " * table[0].count(" | ") + "| --- |")
    for name, model in MODELS.items():
        config, named = model["config"], rule(model["config"])
        sizes = " | ".join(bytes_on(config, ranks) for ranks in RANKS)
        kernel = f"`{KERNELS[named]}`" if named in KERNELS else "yours"
        table.append(
            f"| {name} | `{config['model_type']}` | {named} | {sizes} | {kernel} | {model['adapters'] or '-'} |"
        )
    return text.partition("| model |")[0] + "\n".join(table) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
