"""The command `memstate demo`: runs a decode loop with and without memstate, and compares."""

from inspect import signature
from textwrap import fill
from typing import Annotated, Any

from typer import Option

from memstate.cli.options import Json
from memstate.cli.output import emit_text, fail, one_line_errors, progress
from memstate.tables import table, width
from memstate_tools.demo_options import DemoOptions
from memstate_tools.options import choose_backend, device_of

HINT = "All figures: --all, or --json PATH."
All = Annotated[bool, Option("--all", metavar="", help="Show all figures below the four sentences.")]


def demo(*, everything: All = False, json_path: Json = None, **options: Any) -> None:
    """Run with and without memstate, and compare.

    A decode loop of a small model serves conversations. Then each runs again without a cache, and tokens, logits and
    states must be the same, bit for bit. Four sentences say what came of it.
    """
    choose_backend(options["backend"])
    from memstate_tools.demo import (
        DemoConfig,
        run,
        sentences,
    )  # imported after the backend is chosen, because the choice decides how kernels are imported

    with one_line_errors():
        config = DemoConfig(device=device_of(options["backend"]), **options)
        with progress("demo", "requests") as report:
            result = run(config, report)
    columns = width()
    lines = [fill(each, columns, break_on_hyphens=False) for each in sentences(result)]
    figures = [{"figure": name, "value": text} for name, text in result.table().items()]
    lines += ["", *(table(figures, columns) if everything else [HINT])]
    emit_text(json_path, result.to_json(), "\n".join(lines))
    if not result.ok:
        fail(result.failure(), status=1)


# each field of DemoOptions is an option of the command
_parameters = [*signature(DemoOptions).parameters.values(), *list(signature(demo).parameters.values())[:-1]]
vars(demo).update(
    __signature__=signature(demo).replace(parameters=_parameters),
    __annotations__={each.name: each.annotation for each in _parameters},
)
