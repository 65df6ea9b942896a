"""Adds commands of other distributions: entry points of the group `memstate.commands`, such as those of the tools.

A command that cannot run is listed too. When called, it says why it cannot run.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from importlib.metadata import EntryPoint, entry_points
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
    points: dict[str, list[EntryPoint]] = defaultdict(list)
    for point in entry_points(group=GROUP):
        points[point.name].append(point)
    for name in dict.fromkeys((*TOOLS, *sorted(points))):
        if name not in own:
            command = _loaded(points[name])
            if isinstance(command, str):
                app.command(name, help=command, context_settings=ANY_ARGUMENTS)(_failing(f"{name}: {command}"))
            else:
                app.command(name)(command)


def _loaded(points: Sequence[EntryPoint]) -> Callable[..., Any] | str:
    """Returns the function of a command, or a text that says why there is none."""
    if not points:
        return "not installed: pip install ./tools in a checkout of memstate"
    homes = " and ".join(point.dist.name if point.dist else point.value for point in points)
    if len(points) > 1:
        return f"offered by {homes}: uninstall one of them"
    try:
        command = points[0].load()
    except (Exception, SystemExit) as error:
        return f"{homes} is broken, {type(error).__name__}: {error}"
    return command if callable(command) else f"{homes} is broken: {points[0].value} cannot be called"


def _failing(why: str) -> Callable[[], None]:
    return lambda: fail(why)
