"""The timed benchmarks: `memstate bench` alloc, copy, state and track, in bench.json beside the part's own file.

Host time and device time of each operation are entries of their own, `host us` and `us`.
"""

from tests.proof.gpu.machine import Machine, Result, choose_backend, main

if __name__ == "__main__":
    choose_backend()

import json
import time
from dataclasses import asdict
from importlib.util import find_spec

from memstate.cli.bench import BenchResult, run

NAMES = ("alloc", "copy", "state", "track")
TOY_NAMES = NAMES[:3]  # the last one takes an interpreter 20 seconds; tests/cli/test_bench_timed.py goes through it
LAST = 3.0  # seconds that one measurement may take, and leaving


def prove(machine: Machine, result: Result) -> None:
    """Whatever fits the time. In a run that only compiles nothing is measured."""
    target = machine.beside("bench.json")

    result["fla"] = "beside the gated delta step" if find_spec("fla") and not machine.toy else "not here"
    entries = 0
    for name in machine.mine(TOY_NAMES if machine.toy else NAMES):
        machine.go_on(f"{entries} entries; not begun: {name}", LAST)
        done: list[str] = result.setdefault("done", [])
        before = json.loads(target.read_text(encoding="utf-8")) if target.exists() and done else []

        def found(outcome: BenchResult, before: list[object] = before) -> None:
            text = json.dumps([*before, *map(asdict, outcome.entries)], indent=1)
            target.write_text(text + "\n", encoding="utf-8")

        outcome = run(
            [name], "auto", str(machine.device), machine.toy, found=None if machine.compiling else found,
            end=time.monotonic() + machine.left - LAST, measure=not machine.compiling,
        )  # fmt: skip
        entries += len(outcome.entries)
        result["failures"] += [f"not measured, because it is wrong: {line}" for line in outcome.wrong]
        done.append(name)
        machine.keep(result | {"entries": entries})
        if not outcome.complete:
            result["incomplete"] = f"{entries} entries; time was up in {name}"
            break
    result["entries"] = entries


if __name__ == "__main__":
    main(prove)
