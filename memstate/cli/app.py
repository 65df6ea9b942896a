"""The command line: each command parses its options in a module of `commands` and calls a function elsewhere.

Every command takes `--json PATH` (`-` for stdout, then nothing else goes there), shows the progress of long work, and
exits with one clear line and a non-zero status on bad input. torch is imported after the command line is parsed.
"""

import sys
from typing import Annotated, Any

try:
    import rich  # noqa: F401
    import typer
except ModuleNotFoundError as error:
    raise SystemExit(f"the command line needs {error.name}: pip install '.[cli]' in a checkout of memstate") from error

import memstate
from memstate.cli import beside, output
from memstate.cli.commands import capacity, inspect, replay, top

app = typer.Typer(
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: Rich would double the time that --help takes
    context_settings={"help_option_names": ["-h", "--help"]},
    help="memstate: a memory manager for the recurrent state of hybrid language models.",
)
OWN = (capacity.capacity, inspect.inspect, top.top, replay.replay)
for command in OWN:
    app.command()(command)
beside.add(app, [command.__name__ for command in OWN])


def _show_version(asked: bool) -> None:
    if asked:
        output.write_stdout(lambda: sys.stdout.write(f"memstate {memstate.__version__}\n"))
        raise typer.Exit


@app.callback()
def _options(
    asked: Annotated[
        bool,
        typer.Option("--version", metavar="", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Runs the command line: the entry point of `memstate` and `python -m memstate`."""
    usage_error: Any = typer.BadParameter.__base__
    try:
        status = app(sys.argv[1:] or ["--help"], prog_name="memstate", standalone_mode=False)
    except usage_error as error:
        output.complain(f"{' '.join(error.format_message().split())} (see --help)")
        raise SystemExit(2) from None
    except (typer.Abort, KeyboardInterrupt):
        raise SystemExit(130) from None
    raise SystemExit(status or 0)
