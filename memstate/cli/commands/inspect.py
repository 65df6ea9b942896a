"""`memstate inspect`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from memstate import atomic
from memstate.cli.options import Json, writable
from memstate.cli.output import emit_text, one_line_errors, write_stdout
from memstate.errors import InvalidArgument

if TYPE_CHECKING:
    from memstate.slots.inspect import Inspection

DEFAULT = Path("inspection.html")  # for what comes from a URL


def inspect(
    file: Annotated[
        Path | None, Argument(help="What `mem.inspect().save(path)` or `memstate demo --inspect` wrote.")
    ] = None,
    url: Annotated[str | None, Option(help="Fetch the inspection from http:// or https:// instead.")] = None,
    out: Annotated[
        str | None,
        Option(
            metavar="PAGE",
            callback=writable,
            help="Page to write; - writes it to stdout. Default: FILE with .html; inspection.html for --url.",
        ),
    ] = None,
    json_path: Json = None,
) -> None:
    """Show who owns each slot: write one HTML page of a saved inspection."""
    if (file is None) == (url is None):
        raise typer.BadParameter("expected a FILE or --url, one of the two")
    if out == "-" and json_path is not None:
        raise typer.BadParameter("--out - and --json: stdout has the page, and there is no path to report")
    with one_line_errors():
        target = Path(out) if out else file.with_suffix(".html") if file else DEFAULT
        report = None if json_path in (None, "-") else Path(json_path)
        if out != "-":
            writable(str(target))
            if file is not None and _same(target, file):
                raise InvalidArgument(f"{str(target)!r}: the page would replace the inspection; choose another --out")
        if report is not None and file is not None and _same(report, file):
            raise InvalidArgument(f"--json {json_path!r} would replace the inspection; choose another path")
        if report is not None and _same(report, target):
            raise InvalidArgument(f"--json {json_path!r} would replace the page; choose another path")
        inspection, name = _given(file, url)
        from memstate.viz.inspector import page

        content = page(inspection, name).encode()
        if out != "-":
            _write(target, content)
    if out == "-":
        write_stdout(lambda: sys.stdout.buffer.write(content))
        return
    faults = len(inspection.faults)
    found = {"page": str(target), "bytes": len(content), "capacity": inspection.capacity, "faults": faults}
    said = f"{target}: {inspection.capacity} slots, {faults} faults, {len(content)} bytes"
    emit_text(json_path, found, said)


def _same(one: Path, other: Path) -> bool:
    """Whether two paths name one file, which need not exist."""
    return one.resolve() == other.resolve() or (one.exists() and other.exists() and one.samefile(other))


def _write(target: Path, content: bytes) -> None:
    """Writes the page. Raises: InvalidArgument with its name; the error of a full disk has none."""
    try:
        atomic.write(target, content)
    except OSError as error:
        raise InvalidArgument(f"{str(target)!r}: {error.strerror or error}") from error


def _given(file: Path | None, url: str | None) -> "tuple[Inspection, str]":
    """Returns the inspection and a name for it."""
    from memstate.slots.inspect import LARGEST, Inspection

    if file is not None:
        return Inspection.load(file), file.name
    assert url is not None
    from memstate.cli.fetch import fetch

    return Inspection.parse(fetch(url, LARGEST), url), url
