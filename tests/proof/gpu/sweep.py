"""A short sweep of launch configurations, whose file can be put into kernels/tuned/ as it is.

First the default and one more, then as many as fit the time; each outcome is written as soon as it is there.
"""

from tests.proof.gpu.machine import Machine, Result, choose_backend, main

if __name__ == "__main__":
    choose_backend()

import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from memstate.cli import tune as tuning

MODEL, TOY_MODEL = "qwen3_next", "lfm2"
MOST = 60  # configurations
SHARE = 0.7  # of the time left that the second sweep may take
FEW = 2
LAST = 4.0  # seconds that are left to write and leave


class TimeIsUp(Exception):
    """A sweep is given up."""


def stopwatch(act: object) -> float:
    """At toy sizes nothing is timed: every run is said to have taken as long."""
    act()  # type: ignore[operator]
    return 1e-3


def prove(machine: Machine, result: Result) -> None:
    """Sweeps; the content of the file is in `tuned`, its name in `file`."""
    toy = machine.toy

    def stop_in_time(done: int, total: int) -> None:
        if machine.left < LAST:
            raise TimeIsUp(f"{done} of {total} configurations")

    def sweep(limit: int) -> float:
        begun = time.monotonic()
        timer = {"device": machine.device, "stopwatch": stopwatch} if toy else {}
        outcome = tuning.sweep(TOY_MODEL if toy else MODEL, limit=limit, progress=stop_in_time, **timer)
        result["failures"] += [f"wrong: {trial.config}: {trial.why}" for trial in outcome.wrong]
        result["tried"], result["yardstick"] = len(outcome.trials), outcome.yardstick
        result["trials"] = tuning.document(outcome)["trials"]
        if outcome.best:
            with TemporaryDirectory() as folder:
                path = tuning.store(outcome, Path(folder))
                result["file"] = f"toy-{path.name}" if toy else path.name
                result["tuned"] = json.loads(path.read_text(encoding="utf-8"))
                result["tuned"]["timed"] &= not toy
        else:
            result["failures"].append("every configuration is excluded")
        machine.keep(result)
        return time.monotonic() - begun

    spent = sweep(1 if toy else FEW)
    fitting = int(SHARE * machine.left / (spent / FEW))
    if not toy and not result["failures"] and fitting > FEW:
        try:
            sweep(min(MOST, fitting))
        except TimeIsUp as reached:  # what the first sweep found stands
            result["cut_short"] = str(reached)


if __name__ == "__main__":
    main(prove)
