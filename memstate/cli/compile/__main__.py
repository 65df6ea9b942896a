"""Compiles for the targets named as arguments, one line of JSON per report: the process that has no interpreter."""

import json
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import Any

from memstate.cli.compile import compile_cases
from memstate.errors import CompileFailed
from memstate.kernels.catalog import all_cases


def main(targets: list[str]) -> int:
    """Writes {"done", "total", "report"} per kernel and target, or {"failed"} at the first that does not compile."""
    lines = sys.stdout

    def write(**message: Any) -> None:
        lines.write(json.dumps(message) + "\n")
        lines.flush()

    with redirect_stdout(sys.stderr):  # where a tool fails Triton prints its complaints
        cases = all_cases()
        total = len(cases) * len(targets)
        done = 0
        try:
            for case in cases:
                for report in compile_cases([case], targets):
                    done += 1
                    write(done=done, total=total, report=asdict(report))
        except CompileFailed as failure:
            write(failed={"kernel": failure.kernel, "target": failure.target, "reason": failure.reason})
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
