"""The command `memstate check`: checks which behaviours a pool of slots has."""

import os
from dataclasses import asdict
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from typer import Option

from memstate.cli.options import Json, split_names
from memstate.cli.output import emit_text, one_line_errors, progress
from memstate.tables import width


def check(
    pool: Annotated[
        str, Option(help="memstate, sglang, memstate.sglang, vllm, or module:factory; the factory returns a new pool.")
    ],
    only: Annotated[str, Option(help="Numbers of behaviours, such as B5,B9. Default: all.")] = "",
    examples: Annotated[int, Option(help="Programs of calls to try for each behaviour.", min=1)] = 100,
    seed: Annotated[int, Option(help="Start of the random numbers.")] = 0,
    json_path: Json = None,
) -> None:
    """Check which behaviours a pool of slots has.

    It can be a pool of your own. For a behaviour that it has not, it shows the shortest calls that break it.
    """
    from memstate.testing.check import check as checked
    from memstate_tools.check import factory_of, text

    with one_line_errors(), TemporaryDirectory() as folder, progress("check", "behaviours") as report:
        # hypothesis would make a folder in the current one
        os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", folder)
        findings = checked(factory_of(pool), split_names(only), examples=examples, seed=seed, report=report)
    emit_text(json_path, [asdict(each) for each in findings], text(findings, width()))
    if any(each.broken for each in findings):
        raise typer.Exit(1)
