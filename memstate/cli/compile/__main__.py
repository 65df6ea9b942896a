"""Compiles for the targets named as arguments, one line of JSON per report: the process that has no interpreter.

The first argument says which shapes, see `SHAPES`. Targets that Triton does not know are left out.
"""

import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from memstate.cli.compile import SHAPES, cases_of, compile_cases
from memstate.cli.compile.build import known_targets
from memstate.cli.worker import serve
from memstate.errors import CompileFailed


def work(arguments: list[str]) -> Iterator[dict[str, Any]]:
    """Yields {"done", "total", "report"} per kernel and target, or {"failed"} at the first that does not compile."""
    (shapes,), done = [known for known in SHAPES if known == arguments[0]], 0
    cases, targets = cases_of(shapes), known_targets(arguments[1:])
    try:
        for case in cases:
            for report in compile_cases([case], targets):
                done += 1
                yield {"done": done, "total": len(cases) * len(targets), "report": asdict(report)}
    except CompileFailed as failure:
        yield {"failed": {"kernel": failure.kernel, "target": failure.target, "reason": failure.reason}}


if __name__ == "__main__":
    serve(lambda: work(sys.argv[1:]))
