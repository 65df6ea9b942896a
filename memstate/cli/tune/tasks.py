"""What is done with configurations one by one, here or in a process that may do it. Judges nothing.

Kernels are interpreted in a process or compiled in it, never both: checking without a GPU needs the one kind, compiling
the other. A process that is not of the kind asks a second one, `python -m memstate.cli.tune`.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from memstate.cli.tune.check import wrong
from memstate.cli.tune.cost import cost
from memstate.cli.tune.grid import layout_of, toy
from memstate.errors import ConfigurationError
from memstate.kernels.dispatch import Backend
from memstate.kernels.tuned import CopyConfig

Finding = dict[str, Any]


def check(config: CopyConfig, model: str) -> Finding:
    """Interprets copies in planes of a toy size: `why` says what is wrong."""
    seed = torch.seed() % 2**31
    return {"why": wrong(config, toy(layout_of(model)), Backend("interpreter"), seed)}


def compiled(config: CopyConfig, target: str) -> Finding:
    """The fields of `memstate.cli.tune.cost.Cost`."""
    return asdict(cost(config, target))


TASKS: dict[str, Callable[[CopyConfig, str], Finding]] = {"check": check, "compiled": compiled}


def findings(task: str, argument: str, configs: Sequence[CopyConfig]) -> Iterator[Finding]:
    """What a task finds, configuration by configuration. Raises: ConfigurationError where the second process fails."""
    interpreted = Backend("auto").name == "interpreter"
    if interpreted == (task == "check"):
        for config in configs:
            yield TASKS[task](config, argument)
        return
    yield from _in_another_process(task, argument, configs)


def _in_another_process(task: str, argument: str, configs: Sequence[CopyConfig]) -> Iterator[Finding]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if task == "check":
        environment["TRITON_INTERPRET"] = "1"
    places = [str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    given = json.dumps([asdict(config) for config in configs])
    command = [sys.executable, "-m", "memstate.cli.tune", task, argument, given]
    with (
        tempfile.TemporaryFile("w+") as complaints,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, text=True, env=environment) as child,
    ):
        assert child.stdout is not None  # for the type checker: it is a pipe
        for line in child.stdout:
            yield json.loads(line)
        if child.wait():
            complaints.seek(0)
            reason = complaints.read().strip().rpartition("\n")[2] or f"exit status {child.returncode}"
            raise ConfigurationError(f"tune: the process for {task!r} of {len(configs)} configurations: {reason}")
