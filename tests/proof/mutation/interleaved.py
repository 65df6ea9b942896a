"""Makes kernels that have one defect each. `tests.proof.test_interleave` must notice all of them.

`interleaved.txt` has a block for each defect: a name, the operation, and one or more words of `SAID` (what the tests
may complain about), joined by "or".
"""

import re
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
    """A change in the module of an operation. said: pattern of the complaint that the change must cause."""

    op: str
    old: str
    new: str
    said: str


MUTANTS = {
    name: Mutant(op, old, new, "|".join(SAID[word] for word in said.split(" or ")))
    for (name, op, said), old, new, _ in parse(Path(__file__).with_name("interleaved.txt").read_text())
}


def with_pieces(source: str) -> str:
    """Returns the source of a module with all of `memstate.kernels.pieces` in place of its import from there."""
    pieces = (KERNELS / "pieces.py").read_text()
    return re.sub(r"from memstate\.kernels\.pieces import .*\n", lambda _: pieces, source)


def mutated(op: str, folder: Path, *changes: tuple[str, str]) -> ModuleType:
    """Returns a second copy of the module of an operation, with some texts replaced, also those of `pieces`.

    changes: (old text, new text).
    """
    source = with_pieces((KERNELS / f"{OPS[op]}.py").read_text())
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
