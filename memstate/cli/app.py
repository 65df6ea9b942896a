"""The command line. Parses and prints; every command is a function elsewhere.

Every command takes `--json PATH` (`-` for stdout, then nothing else goes there), shows progress on a terminal, and
leaves with one clear line and a non-zero status on bad input.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ModuleNotFoundError as error:
    raise SystemExit(f"the command line needs {error.name}: pip install '.[cli]' in a checkout of memstate") from error

from memstate.errors import InvalidArgument, MemstateError

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="memstate: a memory manager for recurrent state",
)
stderr = Console(stderr=True)


def _writable(path: str | None) -> str | None:
    """Refuses a path for JSON before the work, not after it."""
    if path is None or path == "-":
        return path
    target = Path(path)
    try:
        at_fault = (
            (not path, "expected a path, or - for stdout"),
            (target.is_dir(), "is a directory"),
            (not target.parent.is_dir(), f"{target.parent} is no directory"),
            (not os.access(target if target.exists() else target.parent, os.W_OK), "cannot be written to"),
        )
        why = next((why for fault, why in at_fault if fault), None)
    except (OSError, ValueError) as error:  # a name that no file can have
        why = str(error)
    if why:
        raise typer.BadParameter(f"{path!r}: {why}")
    return path


def _file(path: str | None) -> str | None:
    """Like `_writable`, where stdout is no choice."""
    if path == "-":
        raise typer.BadParameter("'-': expected a path; stdout is for --json")
    return _writable(path)


Json = Annotated[
    str | None, typer.Option("--json", metavar="PATH", callback=_writable, help="write JSON here, - for stdout")
]
Report = Callable[[int, int], None]
WIDTH = 160  # of tables that go to a file or a pipe


class StrategyName(StrEnum):
    """Names of the tracking strategies."""

    none = "none"
    ping_pong = "ping-pong"
    lazy = "lazy"
    redirect = "redirect"


class BackendName(StrEnum):
    """Names of the backends."""

    auto = "auto"
    reference = "reference"
    interpreter = "interpreter"
    cuda = "cuda"


class ModelName(StrEnum):
    """Kinds of recurrent layers in the demo's model."""

    gdn = "gdn"
    mamba2 = "mamba2"
    kda = "kda"


class LayoutName(StrEnum):
    """Orders of the state planes."""

    layer_major = "layer-major"
    slot_major = "slot-major"


class EngineName(StrEnum):
    """Kinds of decode engine that the demo can be."""

    own = "own"
    in_place = "in-place"
    arena = "arena"


class StorageName(StrEnum):
    """What keeps states beyond the process."""

    none = "none"
    file = "file"
    mooncake = "mooncake"


class WriteName(StrEnum):
    """When states go to host memory."""

    through = "through"
    selective = "selective"
    back = "back"


class Sabotage(StrEnum):
    """What may be done to a snapshot to see the comparison fail."""

    swap = "swap"
    stale = "stale"


class BenchName(StrEnum):
    """Benchmarks."""

    all = "all"
    launches = "launches"
    host = "host"
    alloc = "alloc"
    track = "track"
    copy = "copy"
    prefix = "prefix"
    tiers = "tiers"


class TraceKind(StrEnum):
    """Kinds of synthetic traces."""

    chat = "chat"
    shared_prompt = "shared-prompt"
    agent = "agent"


def _show_version(asked: bool) -> None:
    if asked:
        _print(lambda: sys.stdout.write(f"memstate {version('memstate')}\n"))
        raise typer.Exit


@app.callback()
def _options(
    asked: Annotated[
        bool,
        typer.Option("--version", metavar="", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    strategy: Annotated[StrategyName, typer.Option(help="when snapshots are taken")] = StrategyName.redirect,
    backend: Annotated[BackendName, typer.Option(help="what carries out the kernels")] = BackendName.auto,
    requests: Annotated[int | None, typer.Option(help="turns of all conversations (default 20)")] = None,
    slots: Annotated[int | None, typer.Option(help="states that fit (default 12)")] = None,
    track_every: Annotated[int | None, typer.Option(help="tokens; a multiple of the page size (default 16)")] = None,
    fail_claims: Annotated[float, typer.Option(help="share of the optional claims that fail")] = 0.0,
    input: Annotated[Path | None, typer.Option(help='lines of {"system": "text", "turns": ["text", ..]}')] = None,
    model: Annotated[ModelName, typer.Option(help="kind of the model's recurrent layers")] = ModelName.gdn,
    layout: Annotated[LayoutName, typer.Option(help="order of the state planes")] = LayoutName.layer_major,
    engine: Annotated[
        EngineName,
        typer.Option(
            help="in-place: kernels know one slot a row; arena: the engine allocates states and KV in one block"
        ),
    ] = EngineName.own,
    overlap: Annotated[int, typer.Option(help="1: plan the next step before the last is settled", min=0, max=1)] = 1,
    snapshot: Annotated[
        str | None,
        typer.Option(metavar="PATH", callback=_file, help="write all owners after the last turn as JSON"),
    ] = None,
    sessions: Annotated[int, typer.Option(help="so many conversations keep their states between turns", min=0)] = 0,
    host_slots: Annotated[
        int | None, typer.Option(help="states that fit host memory (default: no host memory)")
    ] = None,
    storage: Annotated[StorageName, typer.Option(help="what keeps states beyond the process")] = StorageName.none,
    storage_path: Annotated[
        Path | None, typer.Option(metavar="DIR", help="of storage file (default: a folder that goes with the run)")
    ] = None,
    mooncake_master: Annotated[str, typer.Option(help="host:port, for storage mooncake")] = "127.0.0.1:50051",
    mooncake_segment: Annotated[int, typer.Option(help="bytes that this process gives to the store", min=0)] = 0,
    write: Annotated[WriteName, typer.Option(help="when states go to host memory")] = WriteName.through,
    pages: Annotated[int | None, typer.Option(help="KV pages (default: short now and then)")] = None,
    page_size: Annotated[int | None, typer.Option(help="tokens a page (default 8)")] = None,
    plant_leak: Annotated[
        bool, typer.Option("--plant-leak", metavar="", help="empty a register by hand: exits 0 when the audit names it")
    ] = False,
    sabotage: Annotated[Sabotage | None, typer.Option(help="exchange a snapshot; 0 if that is noticed")] = None,
    seed: Annotated[int, typer.Option(help="of conversations, arrivals and weights")] = 0,
    json_path: Json = None,
) -> None:
    """Run a decode loop over conversations, then every conversation alone and uncached, and compare."""
    _use_backend(backend)
    from memstate.cli.demo import DemoConfig, run  # after the backend is chosen: kernels are imported with it

    given = {
        "requests": requests,
        "slots": slots,
        "track_every": track_every,
        "pages": pages,
        "page_size": page_size,
        "input": input,
    }
    with _one_line_errors():
        config = DemoConfig(
            strategy=strategy.value,
            backend=backend.value,
            device=_device(backend),
            fail_claims=fail_claims,
            model=model.value,
            layout=layout.value,
            engine=engine.value,
            overlap=bool(overlap),
            sessions=sessions,
            host_slots=host_slots,
            storage=storage.value,
            storage_path=storage_path,
            mooncake_master=mooncake_master,
            mooncake_segment=mooncake_segment,
            write=write.value,
            snapshot=Path(snapshot) if snapshot else None,
            plant_leak=plant_leak,
            sabotage=sabotage.value if sabotage else None,
            seed=seed,
            **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
        )
        with _progress("demo") as report:
            result = run(config, report)
    _emit(json_path, result.to_json(), ("demo", ("figure", "value")), result.table())
    if not result.ok:
        stderr.print(result.failure(), style="red", highlight=False)
        raise typer.Exit(1)


@app.command("compile")
def compile_kernels(
    targets: Annotated[str, typer.Option(help="comma separated")] = "sm_80,sm_90,sm_100,gfx942",
    json_path: Json = None,
) -> None:
    """Compile every kernel for every target; no GPU needed."""
    from memstate.cli.compile import compile_all

    with _one_line_errors(), _progress("compile") as report:
        reports = compile_all(_names(targets), report)
    columns = tuple(field.name for field in fields(reports[0]))
    rows = [asdict(item) for item in reports]
    _emit(json_path, rows, ("compiled kernels", columns), [[_text(row[c]) for c in columns] for row in rows])
    bad = [f"{item.kernel} on {item.target}" for item in reports if not item.ok]
    if bad:
        stderr.print(f"not ok: {', '.join(bad)}", style="red", highlight=False)
        raise typer.Exit(1)


@app.command()
def bench(
    name: Annotated[BenchName, typer.Argument(help="which benchmark")],
    peer: Annotated[str | None, typer.Option(help="the only peer to compare with (default: all)")] = None,
    toy: Annotated[bool, typer.Option("--toy", help="go through it on a CPU; the times say nothing")] = False,
    backend: Annotated[BackendName, typer.Option(help="what carries out the kernels")] = BackendName.auto,
    json_path: Json = None,
) -> None:
    """Measure memstate; `launches` is exact on any machine, `alloc`, `track` and `copy` are times of a GPU."""
    if toy and backend is BackendName.auto:
        backend = BackendName.interpreter
    _use_backend(backend)
    from memstate.cli import bench

    device = "cpu" if toy else _device(backend)
    names: tuple[str, ...] = bench.NAMES if name is BenchName.all else (name.value,)
    if name is BenchName.all and device == "cpu" and not toy:
        names = tuple(one for one in names if one not in bench.NEED_DEVICE)
        stderr.print(f"left out, because device time needs a GPU: {', '.join(bench.NEED_DEVICE)}", highlight=False)
    with _one_line_errors(), _progress(name.value) as report:
        outcome = bench.run(names, backend.value, device, toy, peer, report)
    if name is BenchName.launches:
        title, (columns, rows) = "what an operation asks of the device", bench.by_unit(outcome.entries)
    else:
        title, (columns, rows) = f"bench {name.value}", bench.by_entry(outcome.entries)
    _emit(json_path, [asdict(entry) for entry in outcome.entries], (title, columns), rows)
    for line in outcome.wrong:
        stderr.print(f"not measured, because it is wrong: {line}", style="red", highlight=False, soft_wrap=True)
    if outcome.wrong:
        raise typer.Exit(1)


@app.command()
def tune(
    kernels: Annotated[str, typer.Option(help="comma separated")] = "copy",
    model: Annotated[str, typer.Option(help="preset whose states are copied")] = "qwen3_next",
    target: Annotated[str, typer.Option(help="what to compile for where there is no GPU to time on")] = "sm_90",
    limit: Annotated[int | None, typer.Option(help="configurations to try (default: all)")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", metavar="", help="store nothing")] = False,
    json_path: Json = None,
) -> None:
    """Check launch configurations, time them on a GPU or else rank compiled code, and store the best for the device.

    They are stored in $MEMSTATE_TUNED, or else in memstate/tuned under $XDG_CONFIG_HOME or ~/.config. What was timed is
    used by launches on that device; what was only ranked, without a GPU, is stored to be looked at and changes none.
    """
    from memstate.cli import tune as tuning

    stored, failure = None, ""
    with _one_line_errors(), _progress("tune") as report:
        if not dry_run:
            tuning.require_folder()
        outcome = tuning.sweep(model, _names(kernels), target=target, limit=limit, progress=report)
        data = tuning.document(outcome)
    if not dry_run and not outcome.wrong:
        try:
            stored = str(tuning.store(outcome))
        except (OSError, ValueError) as error:  # the sweep took long: what it found is shown all the same
            failure = f"nothing stored: {error}; MEMSTATE_TUNED names the folder"
    _emit(json_path, data | {"stored": stored}, *tuning.table(outcome, stored))
    if failure:
        _fail(" ".join(failure.split()))
    if outcome.wrong:
        stderr.print(f"not as the reference: {outcome.wrong[0].why}; nothing stored", style="red", highlight=False)
        raise typer.Exit(1)


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(help="requests in the format of the Mooncake traces, .jsonl or .jsonl.gz")],
    states: Annotated[str, typer.Option(help="states that fit; several: comma separated")] = "256",
    pages: Annotated[int, typer.Option(help="KV pages that fit, one for each block of 512 tokens")] = 50_000,
    policy: Annotated[str, typer.Option(help="a name, several comma separated, or all")] = "return-rate",
    start: Annotated[float, typer.Option("--from", help="fraction of the requests that only warm the cache up")] = 0.0,
    limit: Annotated[int | None, typer.Option(help="requests to read (default: all)")] = None,
    json_path: Json = None,
) -> None:
    """Replay a trace through the prefix cache: which share of its blocks need not be computed, under which policy."""
    from memstate.cli import replay as replaying
    from memstate.cli.traces.form import read

    with _one_line_errors(), _progress("replay") as report:
        requests = read(trace, limit)
        sizes = [_whole("--states", size) for size in _names(states)]
        names = replaying.NAMES if policy == "all" else tuple(_names(policy))
        replayed = replaying.compare(requests, sizes, pages, names, start, report)
    rows = [asdict(one) for one in replayed]
    columns, lines = replaying.table(replayed)
    title = f"{trace.name}: block hit rate, {pages} pages, {replayed[0].requests} requests"
    _emit(json_path, rows if len(rows) > 1 else rows[0], (title, columns), lines)


@app.command()
def trace(
    kind: Annotated[TraceKind, typer.Argument(help="what kind of work")],
    out: Annotated[Path, typer.Option(help="where to write it: .jsonl or .jsonl.gz")],
    requests: Annotated[int, typer.Option(help="how many")] = 10_000,
    seed: Annotated[int, typer.Option(help="the same trace for the same seed")] = 0,
) -> None:
    """Make a synthetic trace in the same format."""
    from memstate.cli.traces.form import write
    from memstate.cli.traces.make import make

    with _one_line_errors():
        write(out, make(kind.value, requests, seed))


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise InvalidArgument(f"{name} {text!r}: expected whole numbers") from error


def _use_backend(backend: BackendName) -> None:
    """Triton reads TRITON_INTERPRET when kernels are imported; a command chooses before that."""
    if backend is BackendName.interpreter:
        os.environ["TRITON_INTERPRET"] = "1"
    elif backend is BackendName.cuda:
        os.environ.pop("TRITON_INTERPRET", None)


def _device(backend: BackendName) -> str:
    import torch

    if backend is BackendName.cuda and not torch.cuda.is_available():
        _fail("backend 'cuda': no CUDA device here; use --backend reference or interpreter")
    return "cuda" if torch.cuda.is_available() and backend in (BackendName.cuda, BackendName.auto) else "cpu"


def _names(text: str) -> list[str]:
    """The names of a comma separated list, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _fail(line: str) -> None:
    stderr.print(line, style="red", highlight=False, soft_wrap=True)
    raise typer.Exit(2)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except (MemstateError, ValueError, OSError) as error:
        if not isinstance(error, (InvalidArgument, OSError, ValueError)):
            raise
        _fail(" ".join(str(error).split()))


@contextmanager
def _progress(title: str) -> Iterator[Report]:
    """A progress bar on a terminal; silence elsewhere."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr, disable=not stderr.is_terminal, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def _emit(path: str | None, data: Any, heading: tuple[str, Sequence[str]], rows: Sequence[Sequence[str]]) -> None:
    text = json.dumps(data, indent=2)
    if path == "-":
        _print(lambda: sys.stdout.write(text + "\n"))
        return
    if path is not None:
        try:
            Path(path).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            _fail(f"--json {path}: {error.strerror}")
    title, columns = heading
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*map(escape, row))  # a name such as plan[lazy] is no markup
    _print(lambda: Console(width=None if sys.stdout.isatty() else WIDTH).print(table))


def _print(write: Callable[[], object]) -> None:
    try:
        write()
        sys.stdout.flush()
    except OSError as error:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (nothing more can be written at exit)
        _fail(f"standard output: {error.strerror}")


def main() -> None:
    """Entry point of `memstate` and `python -m memstate`."""
    usage_error: Any = typer.BadParameter.__base__
    try:
        status = app(sys.argv[1:] or ["--help"], prog_name="memstate", standalone_mode=False)
    except usage_error as error:
        line = " ".join(error.format_message().split())
        stderr.print(f"{line} (memstate --help lists what there is)", style="red", highlight=False, soft_wrap=True)
        raise SystemExit(2) from None
    except (typer.Abort, KeyboardInterrupt):
        raise SystemExit(130) from None
    raise SystemExit(status or 0)
