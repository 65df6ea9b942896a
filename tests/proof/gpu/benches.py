"""Runs `memstate bench` alloc, copy, state and track, and writes bench.json into the folder of the result.

Host time and device time of an operation are two entries, with the units `host us` and `us`.
"""

import json
import time
from dataclasses import asdict
from importlib.util import find_spec

from memstate_tools.bench import BenchResult, run
from tests.proof.gpu.machine import Machine, Result, TimeIsUp

NAMES = ("alloc", "copy", "state", "track")
TOY_NAMES = NAMES[:3]  # without track, which takes 20 s interpreted; tests/tools/test_bench_timed.py runs it
LAST = 3.0  # seconds kept for one more measurement and the exit


def prove(machine: Machine, result: Result) -> None:
    """Measures as much as the time allows. If the part only compiles, measures nothing."""
    target = machine.beside("bench.json")
    result["fla"] = "beside the gated delta step" if find_spec("fla") and not machine.toy else "not here"

    def note(outcome: BenchResult) -> None:
        result["entries"], result["too_slow"] = len(outcome.entries), outcome.too_slow
        result["failures"] = [f"not measured, because it is wrong: {line}" for line in outcome.wrong]
        machine.keep(result)
        if not machine.compiling:
            text = json.dumps([asdict(entry) for entry in outcome.entries], indent=1)
            target.write_text(text + "\n", encoding="utf-8")

    outcome = run(
        machine.mine(TOY_NAMES if machine.toy else NAMES), "auto", str(machine.device), machine.toy, report=note,
        end=time.monotonic() + machine.left - LAST, measure=not machine.compiling,
    )  # fmt: skip
    said = [f"{len(outcome.entries)} entries"]
    said += [] if outcome.complete else ["time was up"]
    said += [f"not measured: {line}" for line in outcome.too_slow[:1]]
    if said[1:]:
        raise TimeIsUp("; ".join(said))
