"""Adds commands of other distributions: entry points of the group `memstate.commands`, such as those of the tools.

A command that cannot run is listed too. When called, it says why it cannot run.
"""

from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import suppress
from importlib.metadata import EntryPoint, distributions
from inspect import isfunction
from typing import Any, Final

import typer

from memstate.cli.output import fail

GROUP: Final = "memstate.commands"
TOOLS: Final = ("demo", "compile", "bench", "tune", "check", "trace")  # the commands of tools/pyproject.toml
ANY_ARGUMENTS: Final = {"allow_extra_args": True, "ignore_unknown_options": True}


def add(app: typer.Typer, own: Collection[str]) -> None:
    """Adds the commands of other distributions, and a stand-in for each command of the tools that is missing.

    Args:
        app: The application that gets the commands.
        own: Names of memstate's own commands. They are never replaced.
    """
    offers: dict[str, list[tuple[str, EntryPoint]]] = defaultdict(list)  # command -> (distribution, entry point)
    for distribution in distributions():
        with suppress(Exception):  # metadata that are not UTF-8, or a line without "="
            for point in distribution.entry_points.select(group=GROUP):
                offers[point.name].append((distribution.name or point.value, point))
    for name in dict.fromkeys((*TOOLS, *sorted(offers))):
        if name and name not in own:
            command = _loaded(offers[name])
            if isinstance(command, str):
                app.command(name, help=command, context_settings=ANY_ARGUMENTS)(_failing(f"{name}: {command}"))
            else:
                app.command(name)(command)


def _loaded(offers: list[tuple[str, EntryPoint]]) -> Callable[..., Any] | str:
    """Returns the function of a command, or a text that says why there is none."""
    if not offers:
        return "not installed: pip install ./tools in a checkout of memstate"
    homes, (home, point) = " and ".join(dict(offers)), offers[0]  # the first copy of a distribution on the path counts
    if homes != home and len({each.value for _, each in offers}) > 1:
        return f"offered by {homes}: uninstall one of them"
    try:
        command: Callable[..., Any] = point.load()
        if not isfunction(command):
            return f"{homes} is broken: {point.value} is no function"
        trial = typer.Typer(add_completion=False)
        trial.command()(command)
        typer.main.get_command(trial)  # raises for a parameter that typer cannot read
    except BaseException as error:  # a module can raise KeyboardInterrupt, too
        return f"{homes} is broken, {type(error).__name__}: {error}"
    return command


def _failing(why: str) -> Callable[[], None]:
    return lambda: fail(why)
