"""Checks or compiles configurations one by one, in this process or in a second one.

A process either interprets kernels or compiles them. Without a GPU, checks need a process that interprets, and
compiling needs one that does not. A process of the wrong kind starts a process of the other kind, which runs this file.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from memstate.errors import ConfigurationError
from memstate.kernels.configs import CONFIGS, Config
from memstate.kernels.dispatch import Backend
from memstate_tools.models import toy_of
from memstate_tools.tune.check import wrong
from memstate_tools.tune.cost import cost
from memstate_tools.tune.grid import model_for
from memstate_tools.worker import WorkerFailed, run_module, serve

Finding = dict[str, Any]


def check(config: Config, model: str) -> Finding:
    """Checks a configuration with the interpreter on states of a toy size. Returns {"why": what is wrong, or empty}."""
    kernel = config.kernel
    toy = toy_of(model_for(kernel, model)[1], kernel)
    return {"why": wrong(config, toy, Backend("interpreter"), torch.seed() % 2**31)}


def compiled(config: Config, model: str, target: str) -> Finding:
    """Returns the fields of `memstate_tools.tune.cost.Cost` for a configuration on states of a model."""
    return asdict(cost(config, model, target))


TASKS: dict[str, Callable[..., Finding]] = {"check": check, "compiled": compiled}


def findings(task: str, configs: Sequence[Config], *arguments: str) -> Iterator[Finding]:
    """Yields the result of a task for each configuration.

    Raises:
        ConfigurationError: The second process failed.
    """
    if not configs:
        return
    interpreted = Backend("auto").name == "interpreter"
    if interpreted == (task == "check"):
        for config in configs:
            yield TASKS[task](config, *arguments)
        return
    given = json.dumps([(config.kernel, asdict(config)) for config in configs])
    try:
        yield from run_module("memstate_tools.tune.tasks", task, given, *arguments, interpret=task == "check")
    except WorkerFailed as error:
        raise ConfigurationError(f"tune: the process for {task!r} of {len(configs)} configurations: {error}") from error


if __name__ == "__main__":
    name, asked, *given = sys.argv[1:]
    serve(lambda: (TASKS[name](CONFIGS[kernel](**config), *given) for kernel, config in json.loads(asked)))
