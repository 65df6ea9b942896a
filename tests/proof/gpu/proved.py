"""Puts those operations first that no committed run has proved on a GPU, because time may be short.

The runs in benchmarks/results say which operations are proved, so nobody has to keep a list.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from memstate.kernels.dispatch import OPS
from tests.support.op_case import every

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def newest_first(results: Path = RESULTS) -> list[str]:
    """Returns all operations: first those that no committed run names, then the others, each in its order."""
    named = set(_named(results))
    return sorted(every(), key=lambda op: op in named or _plain(op) in named)


@cache
def newest_files() -> tuple[str, ...]:
    """Returns the test files of modules with an operation that no committed run names."""
    named = set(_named(RESULTS))
    modules = dict.fromkeys(OPS[op] for op in OPS if op not in named and _plain(op) not in named)
    return tuple(f"tests/kernels/test_{module}.py" for module in modules)


def _plain(op: str) -> str:
    """Returns the name of an operation in benchmarks: `gated delta` for gated_delta_step."""
    return op.removesuffix("_slots").removesuffix("_step").replace("_", " ")


def _named(results: Path) -> Iterator[str]:
    for path in sorted(results.glob("*/bench.json")):
        yield from (str(entry["op"]) for entry in _read(path))
    for path in sorted(results.glob("*/proofs.json")):
        proofs = _read(path)
        yield from proofs.get("sanitizer", {}).get("touched", [])
        yield from proofs.get("determinism", {}).get("repeated", [])


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
