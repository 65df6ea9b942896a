"""The timed benchmarks: `memstate bench` alloc, copy, state and track, in bench.json beside the part's own file.

Host time and device time of each operation are entries of their own, `host us` and `us`.
"""

import json
import time
from dataclasses import asdict
from importlib.util import find_spec

from memstate_tools.bench import BenchResult, run
from tests.proof.gpu.machine import Machine, Result, TimeIsUp, main

NAMES = ("alloc", "copy", "state", "track")
TOY_NAMES = NAMES[:3]  # the last one takes an interpreter 20 seconds; tests/tools/test_bench_timed.py goes through it
LAST = 3.0  # seconds that one measurement may take, and leaving


def prove(machine: Machine, result: Result) -> None:
    """Whatever fits the time. In a run that only compiles nothing is measured."""
    target = machine.beside("bench.json")
    result["fla"] = "beside the gated delta step" if find_spec("fla") and not machine.toy else "not here"

    def found(outcome: BenchResult) -> None:
        result["entries"], result["too_slow"] = len(outcome.entries), outcome.too_slow
        result["failures"] = [f"not measured, because it is wrong: {line}" for line in outcome.wrong]
        machine.keep(result)
        if not machine.compiling:
            text = json.dumps([asdict(entry) for entry in outcome.entries], indent=1)
            target.write_text(text + "\n", encoding="utf-8")

    outcome = run(
        machine.mine(TOY_NAMES if machine.toy else NAMES), "auto", str(machine.device), machine.toy, report=found,
        end=time.monotonic() + machine.left - LAST, measure=not machine.compiling,
    )  # fmt: skip
    said = [f"{len(outcome.entries)} entries"]
    said += [] if outcome.complete else ["time was up"]
    said += [f"not measured: {line}" for line in outcome.too_slow[:1]]
    if said[1:]:
        raise TimeIsUp("; ".join(said))


if __name__ == "__main__":
    main(prove)
