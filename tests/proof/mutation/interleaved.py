"""The kernels with one thing wrong each, made from their source; `tests.proof.test_interleave` must find them all.

`interleaved.txt` has a block for each: a name, the operation, and a word of `SAID`, or several joined by "or".
"""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from memstate.kernels.dispatch import OPS
from tests.proof.mutation.catalogue import parse

KERNELS = Path(__file__).parents[3] / "kernels"
OUTSIDE = "outside the tensors"
SAID = {
    "outside": OUTSIDE, "null": "in a null slot", "changed": "may not change", "differs": "other bytes",
    "conflict": r"program \d+ stores, program \d+", "unordered": "without a barrier between",
}  # fmt: skip


class Mutant(NamedTuple):
    """What to replace in the module of an operation, and a pattern for what is said of it."""

    op: str
    old: str
    new: str
    found: str


MUTANTS = {
    name: Mutant(op, old, new, "|".join(SAID[word] for word in said.split(" or ")))
    for (name, op, said), old, new, _ in parse(Path(__file__).with_name("interleaved.txt").read_text())
}


def mutated(op: str, folder: Path, *changes: tuple[str, str]) -> ModuleType:
    """The module of an operation with every occurrence of some text replaced, loaded beside the right one."""
    source = (KERNELS / f"{OPS[op]}.py").read_text()
    for old, new in changes:
        assert old in source, f"kernels/{OPS[op]}.py has no more {old!r}: mutate what stands there now"
        source = source.replace(old, new)
    path = folder / f"{OPS[op]}.py"
    path.write_text(source)
    spec = spec_from_file_location(f"memstate.kernels.mutated_{OPS[op]}", path)
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
