"""Which modules may call which operations of a backend, read from the source: only few modules hand out slots."""

import re

from memstate.kernels.dispatch import OPS
from tests.support.sources import ROOT, sources

# The operations claim, ownership and plan hand out slots.
MODEL = (
    "memstate_tools.demo.mixers", "memstate_tools.bench.decode", "memstate_tools.workload",
    "integrations.transformers.on_slots",
)  # fmt: skip
CALLERS = {
    ("slots.allocator",): "claim release",
    ("slots.registers",): "ownership resolve audit plan",
    ("state.planes",): "copy_slots zero_slots run_data run_rows keep_path gather_slots scatter_slots scatter_states",
    MODEL: "conv_step gated_delta_step selective_step",
    ("memstate_tools.workload",): "mamba3_step",
    ("memstate_tools.bench.forward",): "conv_delta_step",
    ("tiers.host.packing",): "pack_slots unpack_slots pack_int8 unpack_int8",
}
ALLOWED = {(module, op) for modules, ops in CALLERS.items() for op in ops.split() for module in modules}
ASKS = re.compile(rf"backend(?:\([^()]*\))?\.({'|'.join(OPS)})\b", re.IGNORECASE)


def named(pattern: re.Pattern[str]) -> set[tuple[str, str]]:
    """Returns (module, word) of each match outside the kernels; memstate/tiers/keys.py is the module `tiers.keys`."""
    paths = [*sources("memstate"), *sources("tools")]
    texts = {".".join(path.with_suffix("").parts[1:]): (ROOT / path).read_text() for path in paths}
    return {(name, word) for name, text in texts.items() for word in pattern.findall(text)}


def test_operations_are_asked_for_where_they_belong() -> None:
    asked = named(ASKS)
    assert sorted(asked - ALLOWED) == []
    assert {op for _, op in asked} == {op for _, op in ALLOWED}, "an operation has no caller"


def test_bits_and_counts_of_free_slots_are_not_changed_by_hand() -> None:
    touched = {name for name, _ in named(re.compile(r"\w\.(bitmap|counters)\b"))}
    assert touched <= {"slots.allocator", "slots.registers"}
