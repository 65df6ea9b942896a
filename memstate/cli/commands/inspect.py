"""The command `memstate inspect`: writes an HTML page that shows who owns each slot."""

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

DEFAULT = Path("inspection.html")  # page written for --url


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
    """Show who owns each slot, as an HTML page."""
    if (file is None) == (url is None):
        raise typer.BadParameter("expected a FILE or --url, one of the two")
    if out == "-" and json_path is not None:
        raise typer.BadParameter("--out - and --json: stdout has the page, and there is no path to report")
    report = Path(json_path) if json_path not in (None, "-") else None
    with one_line_errors():
        target = Path(out) if out else file.with_suffix(".html") if file else DEFAULT
        written = None if out == "-" else target
        for name, path, replaced, other, remedy in (
            (f"{str(target)!r}: the page", written, "inspection", file, "--out"),
            (f"--json {json_path!r}", report, "inspection", file, "path"),
            (f"--json {json_path!r}", report, "page", target, "path"),
        ):
            if path and other and _same(path, other):
                raise InvalidArgument(f"{name} would replace the {replaced}; choose another {remedy}")
        if written:
            writable(str(target))
        inspection = _given(file, url)
        from memstate.viz.inspector import page

        content = page(inspection, file.name if file else url or "").encode()
        if written:
            try:
                atomic.write(target, content)
            except OSError as error:  # the error of a full disk does not name the file
                raise InvalidArgument(f"{str(target)!r}: {error.strerror or error}") from error
    if not written:
        write_stdout(lambda: sys.stdout.buffer.write(content))
        return
    from memstate.sizes import format_bytes

    faults = len(inspection.faults)
    data = {"page": str(target), "bytes": len(content), "capacity": inspection.capacity, "faults": faults}
    emit_text(
        json_path, data, f"{target}: {inspection.capacity:,} slots, {faults} faults, {format_bytes(len(content))}"
    )


def _same(one: Path, other: Path) -> bool:
    """Returns whether two paths name the same file. The file need not exist."""
    return one.resolve() == other.resolve() or (one.exists() and other.exists() and one.samefile(other))


def _given(file: Path | None, url: str | None) -> "Inspection":
    from memstate.slots.inspect import LARGEST, Inspection

    if file is not None:
        return Inspection.load(file)
    from memstate.cli.fetch import fetch

    return Inspection.parse(fetch(url or "", LARGEST), url or "")
