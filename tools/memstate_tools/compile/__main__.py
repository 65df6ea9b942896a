"""Compiles kernels in a process that does not interpret them, and writes one line of JSON per report.

The arguments are targets; targets that Triton does not know are left out. `--every-shape` compiles every shape that can
be launched, `--only=TEXT` only kernels with this text in their names.
"""

import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from memstate.errors import CompileFailed, ConfigurationError
from memstate_tools.calls import all_calls
from memstate_tools.compile.build import build, known_targets
from memstate_tools.launches import require_compiler
from memstate_tools.worker import serve


def work(arguments: list[str]) -> Iterator[dict[str, Any]]:
    """Yields {"total", "report"} for each kernel and target, or at the end {"failed"} or {"refused"}."""
    require_compiler()
    only = next((name.partition("=")[2] for name in arguments if name.startswith("--only=")), "")
    calls = [call for call in all_calls("--every-shape" in arguments) if only in call.name]
    known = known_targets([name for name in arguments if not name.startswith("--")])
    try:
        for call in calls:
            for target in known:
                yield {"total": len(calls) * len(known), "report": asdict(build(call, target))}
    except CompileFailed as failure:
        yield {"failed": vars(failure)}
    except ConfigurationError as error:
        yield {"refused": str(error)}


if __name__ == "__main__":
    serve(lambda: work(sys.argv[1:]))
