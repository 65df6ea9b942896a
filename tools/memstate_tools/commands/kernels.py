"""The commands `memstate compile`, `memstate bench` and `memstate tune`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from memstate.cli.names import StateDtype
from memstate.cli.options import Json, split_names
from memstate.cli.output import complain, emit, fail, one_line_errors, progress
from memstate_tools import names
from memstate_tools.options import BackendOption, choose_backend, device_of, output_file, whole_numbers


def compile_kernels(
    targets: Annotated[str, Option(help="Comma separated GPU targets.")] = "sm_80,sm_90,sm_100,sm_120,gfx942,gfx950",
    every_shape: Annotated[
        bool, Option("--every-shape", help="Also compile every other shape that can be launched; takes minutes.")
    ] = False,
    json_path: Json = None,
) -> None:
    """Compile every kernel for every target.

    Takes about ten minutes, and needs no GPU. Targets that this Triton does not know are left out. JSON has more
    figures.
    """
    from memstate_tools.compile import compile_all

    wanted = split_names(targets)
    with one_line_errors(), progress("compile", "kernels") as report:
        reports = compile_all(wanted, report, every_shape)
    if unknown := [name for name in wanted if name not in {item.target for item in reports}]:
        complain(f"left out, because this Triton does not know them: {', '.join(unknown)}")
        if not reports:
            raise typer.Exit(1)
    emit(
        json_path,
        [asdict(item) for item in reports],
        "compiled kernels",
        [each.row() for each in reports],
        grouped=True,
    )
    if bad := [f"{item.kernel} on {item.target}" for item in reports if not item.ok]:
        fail(f"not ok: {', '.join(bad)}", status=1)


def bench(
    name: Annotated[names.Benchmark, Argument(help="Benchmark to run.")],
    peer: Annotated[str | None, Option(help="Compare with this peer only. Default: all peers.")] = None,
    case: Annotated[str, Option(help="Measure only cases with this text, such as online; a whole case alone.")] = "",
    toy: Annotated[bool, Option("--toy", help="Run at tiny sizes on a CPU; the times mean nothing.")] = False,
    backend: BackendOption = "auto",
    json_path: Json = None,
) -> None:
    """Measure memstate.

    `launches` is exact on any machine; `alloc`, `track`, `copy` and `state` need a GPU. Beside a value stands the same
    work done by a peer, as far as it is installed, with its value and the ratio of the two.
    """
    if toy and backend == "auto":
        backend = "interpreter"
    choose_backend(backend)
    from memstate_tools import bench

    device = "cpu" if toy else device_of(backend)
    chosen: tuple[str, ...] = bench.NAMES if name == "all" else (name,)
    if name == "all" and device == "cpu" and not toy:
        chosen = tuple(one for one in chosen if one not in bench.NEED_DEVICE)
        complain(f"left out, because device time needs a GPU: {', '.join(bench.NEED_DEVICE)}")
    with one_line_errors(), progress(f"bench {name}", "sizes" if name == "launches" else "measurements") as report:
        outcome = bench.run(chosen, backend, device, toy, peer, report, case=case)
    if not (outcome.entries or outcome.unmeasured):
        raise typer.Exit(2)  # what was left out has said why
    counts = name == "launches"
    rows = bench.by_unit(outcome.entries) if counts else [entry.row() for entry in outcome.entries]
    emit(json_path, [asdict(entry) for entry in outcome.entries], f"bench {name}", rows, grouped=not counts)
    for line in outcome.unmeasured:
        complain(line)
    if outcome.wrong:
        raise typer.Exit(1)


def tune(
    kernels: Annotated[
        str, Option(help="Comma separated kernels, module:name of a Kernel of your own, or all of the model.")
    ] = "all",
    model: Annotated[str, Option(help="Preset or config.json whose states the kernels run on.")] = "qwen3_next",
    layout: Annotated[Path | None, Option(help="Instead of a model: a JSON file with a layout of your own.")] = None,
    tp: Annotated[int, Option(help="Tensor-parallel ranks; states are those of one.")] = 1,
    dtype: Annotated[StateDtype | None, Option(help="Type of the ssm planes. Default: the model's.")] = None,
    batches: Annotated[str, Option(callback=whole_numbers, help="Comma separated numbers of rows.")] = "1,8,64",
    target: Annotated[str, Option(help="Target to compile for where there is no GPU.")] = "sm_90",
    limit: Annotated[int | None, Option(help="Configurations to try of each kernel. Default: all.")] = None,
    file: Annotated[
        Path | None, Option(help="Keep each trial here; an interrupted sweep with the same file goes on.")
    ] = None,
    plot: Annotated[
        str | None, Option(callback=output_file, help="Draw the result into this file (.svg, .png or .pdf).")
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", metavar="", help="Store nothing.")] = False,
    json_path: Json = None,
) -> None:
    """Find the best launches of each kernel.

    Each launch configuration is checked against the reference first. A GPU times them; without a GPU they are ranked by
    compiled cost. One axis at a time is changed first, the cheapest axis first; then the best values are combined.
    Results are stored in $MEMSTATE_TUNED, or in memstate/tuned under $XDG_CONFIG_HOME or ~/.config. Launches on this
    device use what was timed. What was only ranked is stored to be looked at, and changes none.
    """
    import torch

    from memstate.cli.layouts import read as read_layout
    from memstate.cli.own import own
    from memstate_tools import tuning
    from memstate_tools.tuning import plot as drawing
    from memstate_tools.tuning import store

    stored, failure = None, ""
    with one_line_errors(), progress("tune", "configurations") as report:
        if not dry_run:
            store.require_folder()
        if plot:
            drawing.require_plot(Path(plot))
        wanted: list[Any] = [
            own("kernel", name, "module:name") if ":" in name else name for name in split_names(kernels)
        ]
        outcome = tuning.sweep(
            wanted, read_layout(layout) if layout else model, ranks=tp, dtypes=[dtype and getattr(torch, dtype)],
            batches=[int(number) for number in split_names(batches)], target=target, limit=limit, file=file,
            progress=report,
        )  # fmt: skip
        data = store.document(outcome)
    if not dry_run and not outcome.wrong:
        try:
            stored = str(outcome.store())
        except (OSError, ValueError) as error:  # a sweep takes long, so its result is shown even if it cannot be stored
            advice = "; set MEMSTATE_TUNED to another folder" if isinstance(error, OSError) else ""
            failure = f"nothing stored: {error}{advice}"
    title = f"{outcome.title}; {f'stored in {stored}' if stored else 'nothing stored'}"
    rows = [row | {"kernel": f"{row['kernel']}, {row.pop('key')}"} for row in outcome.table()]
    emit(json_path, data | {"stored": stored}, title, rows, grouped=True)
    if plot:
        with one_line_errors():
            outcome.plot().savefig(plot)
    if failure:
        fail(failure)
    if outcome.wrong:
        fail(f"differs from the reference: {outcome.wrong[0].why}; nothing stored", status=1)
