"""Sweeps the launch configurations of every kernel, and writes a file for kernels/tuned/.

The axis that is cheapest to sweep comes first, and every trial is written at once. If time is up, the sweep is
incomplete, and its best configurations so far count.
"""

import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from memstate.kernels.dispatch import Backend
from memstate_tools import tune as tuning
from memstate_tools.bench.clock import TooSlow
from memstate_tools.models import toy_of
from memstate_tools.tune.check import wrong
from memstate_tools.tune.grid import model_for, one_at_a_time
from tests.proof.gpu.machine import Machine, Result, TimeIsUp, main

MODEL, TOY_MODEL = "qwen3_next", "lfm2"
TOY_KERNELS, TOY_LIMIT = ("copy", "gated_delta"), 2
LAST = 4.0  # seconds kept to write the result and exit


def stopwatch(act: object) -> float:
    """Runs `act`, and returns a constant in place of its time, because toy sizes are not timed."""
    act()  # type: ignore[operator]
    return 1e-3


class Kept:
    """Writes each trial at once, because the part may be ended before the sweep."""

    def __init__(self, machine: Machine, result: Result) -> None:
        result |= {"tried": 0, "trials": []}
        self._machine, self._result = machine, result

    def add(self, trial: tuning.TuneTrial) -> None:
        """Adds a trial to the result, and its fault to the failures."""
        result = self._result
        result["tried"] += 1
        result["trials"].append(asdict(trial))
        result["failures"] += [] if trial.checked else [f"wrong: {trial.config}: {trial.why}"]
        self._machine.keep(result)


def launch_all(machine: Machine, result: Result) -> None:
    """Launches the configurations of the first round, to compile them. The second round depends on their results."""
    jobs = [(kernel, config) for kernel in tuning.KERNELS for config in one_at_a_time(kernel, timed=True)]
    if machine.toy:
        jobs = jobs[:1]
    for number, (kernel, config) in enumerate(machine.mine(jobs)):
        machine.go_on(f"{number} configurations", LAST)
        model = model_for(kernel, MODEL)[1]
        states = toy_of(model, kernel) if machine.toy else model
        bad = wrong(config, states, Backend("auto", machine.device), torch.seed() % 2**31)
        result["failures"] += [f"{config}: {bad}"] if bad else []
        if not machine.toy:
            torch.cuda.empty_cache()


def prove(machine: Machine, result: Result) -> None:
    """Runs the sweep. The entry `tuned` of the result is the content of the file, and `file` is its name."""
    if machine.compiling:
        launch_all(machine, result)
        return
    toy = machine.toy
    given = {"device": machine.device, "stopwatch": stopwatch, "limit": TOY_LIMIT} if toy else {}
    kept = Kept(machine, result)
    try:
        outcome = tuning.sweep(
            TOY_MODEL if toy else MODEL, TOY_KERNELS if toy else tuning.KERNELS, stop=lambda: machine.left < LAST,
            report=kept.add, **given,
        )  # fmt: skip
    except TooSlow as error:  # the device's own copy, the measure of all trials, is too slow
        raise TimeIsUp(f"{result['tried']} configurations; {error}") from error
    result["yardstick"], result["trials"] = outcome.yardstick, tuning.document(outcome)["trials"]
    if outcome.best and not outcome.wrong:
        with TemporaryDirectory() as folder:
            path = tuning.store(outcome, Path(folder))
            result["file"] = f"toy-{path.name}" if toy else path.name
            result["tuned"] = json.loads(path.read_text(encoding="utf-8"))
            result["tuned"]["timed"] &= not toy
    elif outcome.complete:
        result["failures"].append("every configuration is excluded")
    machine.keep(result)
    if not outcome.complete:
        raise TimeIsUp(f"{len(outcome.trials)} configurations")


if __name__ == "__main__":
    main(prove)
