"""Sweeps the launch configurations of every kernel, and writes a file for kernels/tuned/.

The axis that is cheapest to sweep comes first, and every trial is written at once. If time is up, the sweep is
incomplete, and its best configurations so far count. With --short it takes three minutes: a kernel of one's own, decode
steps at four batches, states of two bytes, and one of four ranks; then it says what launches take.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate_tools import tuning
from memstate_tools.bench.clock import TooSlow
from memstate_tools.models import model_of
from memstate_tools.tuning.check import wrong
from memstate_tools.tuning.grid import axes_of, one_at_a_time
from memstate_tools.tuning.store import document
from memstate_tools.tuning.subject import subjects
from tests.proof.gpu.machine import Machine, Result, TimeIsUp
from tests.support.running_mean import running_mean

MODEL, TOY_MODEL, TOY_LIMIT = "qwen3_next", "lfm2", 2
BF16 = torch.bfloat16
LAST = 4.0  # seconds kept to write the result and exit


class Part(NamedTuple):
    """The arguments of one call of `sweep`."""

    kernels: Any
    states: str = MODEL
    options: dict[str, Any] = {}  # noqa: RUF012  (nobody writes to it)


WHOLE = (Part("pack_int8", MODEL, {"dtypes": (BF16,)}), Part("all"), Part("selective", "nemotron_h"))
SHORT = (
    Part(running_mean),
    Part("gated_delta", MODEL, {"batches": (1, 8, 64, 256), "dtypes": (None, BF16)}),
    Part(["pack_int8", "copy"], MODEL, {"dtypes": (BF16,)}),
    Part(["gather", "scatter", "copy", "pack"], MODEL, {"ranks": 4}),
)
TOY = (Part(["copy", "conv"], TOY_MODEL, {"limit": TOY_LIMIT}), Part(running_mean, TOY_MODEL, {"limit": TOY_LIMIT}))


def stopwatch(act: object) -> float:
    """Runs `act`, and returns a constant in place of its time, because toy sizes are not timed."""
    act()  # type: ignore[operator]
    return 1e-3


def launch_all(machine: Machine, result: Result, parts: tuple[Part, ...]) -> None:
    """Launches the configurations of the first round, to compile them. The second round depends on their results."""
    jobs = [
        (subject, config)
        for part in parts
        for subject in subjects(part.kernels, [model_of(part.states)])
        for config in one_at_a_time(subject.kind, axes_of(subject.kind, timed=True))
    ]
    for number, (subject, config) in enumerate(machine.mine(jobs[:1] if machine.toy else jobs)):
        machine.go_on(f"{number} configurations", LAST)
        bad = wrong(config, subject, (1,), Backend("auto", machine.device), machine.toy, torch.seed() % 2**31)
        result["failures"] += [f"{config}: {bad}"] if bad else []
        if not machine.toy:
            torch.cuda.empty_cache()


def swept(machine: Machine, result: Result, parts: tuple[Part, ...]) -> Iterator[tuning.Sweep]:
    """Yields the sweep of each part. Each trial is kept at once, because the process may be ended before the sweep."""

    def keep(trial: tuning.Trial) -> None:
        result["tried"] += 1
        result["failures"] += [] if trial.checked else [f"wrong: {trial.config}: {trial.why}"]
        machine.keep(result)

    here = {"device": machine.device, "stopwatch": stopwatch} if machine.toy else {}
    for part in parts:
        try:
            yield tuning.sweep(
                part.kernels, part.states, stop=lambda: machine.left < LAST, report=keep,
                file=machine.beside("trials.jsonl"), **here, **part.options,
            )  # fmt: skip
        except TooSlow as error:  # the device's own copy, the measure of all trials, is too slow
            raise TimeIsUp(f"{result['tried']} configurations; {error}") from error


def explained(parts: tuple[Part, ...], folder: Path) -> list[str]:
    """Returns what launches take for the states of each part: a line for each kernel."""
    os.environ["MEMSTATE_TUNED"] = str(folder)
    lines = []
    for part in parts:
        ranks, dtypes = part.options.get("ranks", 1), part.options.get("dtypes", (None,))
        for dtype in () if part.kernels is running_mean else dtypes:
            lines += [str(row) for row in ms.explain(part.states, 64, ranks=ranks, ssm_dtype=dtype)]
    return lines


def prove(machine: Machine, result: Result) -> None:
    """Runs the sweeps. The entry `tuned` of the result is the content of the file, and `file` is its name."""
    parts = TOY if machine.toy else SHORT if "--short" in sys.argv else WHOLE
    if machine.compiling:
        launch_all(machine, result, parts)
        return
    result |= {"tried": 0, "trials": [], "yardstick": {}}
    complete = True
    with TemporaryDirectory() as folder:
        for outcome in swept(machine, result, parts):
            result["trials"] += document(outcome)["trials"]
            result["yardstick"] |= outcome.yardstick
            complete &= outcome.complete
            if outcome.best and not outcome.wrong:
                path = outcome.store(Path(folder))
                result["file"] = f"toy-{path.name}" if machine.toy else path.name
                result["tuned"] = json.loads(path.read_text(encoding="utf-8"))
                result["tuned"]["timed"] &= not machine.toy
            machine.keep(result)
            if not complete:
                break
        result["explained"] = explained(parts, Path(folder))
    if complete and "tuned" not in result:
        result["failures"].append("every configuration is excluded")
    machine.keep(result)
    if not complete:
        raise TimeIsUp(f"{result['tried']} configurations")
