"""Which operations a committed run has proved on a GPU already: where time is short, the others come first.

A run that is put into benchmarks/results moves what it proved to the end; nobody keeps a list.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from memstate.kernels.dispatch import OPS

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def newest_first(results: Path = RESULTS) -> list[str]:
    """All operations, those that no committed run has named first; otherwise in the order of `OPS`."""
    named = set(_named(results))
    return sorted(OPS, key=lambda op: op in named or _plain(op) in named)


@cache
def newest_files() -> tuple[str, ...]:
    """The test files of modules that have an operation of those."""
    named = set(_named(RESULTS))
    modules = dict.fromkeys(OPS[op] for op in OPS if op not in named and _plain(op) not in named)
    return tuple(f"tests/kernels/test_{module}.py" for module in modules)


def _plain(op: str) -> str:
    """Its name in benchmarks: `gated delta` for gated_delta_step."""
    return op.removesuffix("_slots").removesuffix("_step").replace("_", " ")


def _named(results: Path) -> Iterator[str]:
    for path in sorted(results.glob("*/bench.json")):
        yield from (str(entry["op"]) for entry in _read(path))
    for path in sorted(results.glob("*/proofs.json")):
        found = _read(path)
        yield from found.get("sanitizer", {}).get("touched", [])
        yield from found.get("determinism", {}).get("repeated", [])


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
