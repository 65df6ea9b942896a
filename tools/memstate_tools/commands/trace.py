"""The command `memstate trace`: makes a synthetic trace, or a trace of a server's log."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from memstate.cli.options import Json
from memstate.cli.output import emit_text, one_line_errors, progress
from memstate.cli.units import several
from memstate.errors import InvalidArgument
from memstate_tools import names


def trace(
    kind: Annotated[names.TraceKind, Argument(help="Kind of workload to make, or of log to read.")],
    out: Annotated[Path, Option(help="File to write: .jsonl or .jsonl.gz.")],
    requests: Annotated[int, Option(help="Number of requests to make.")] = 10_000,
    seed: Annotated[int, Option(help="The same seed makes the same trace.")] = 0,
    tail: Annotated[
        int, Option(help="Tokens at the end of each prompt that the next turn lacks, as chat templates add them.")
    ] = 0,
    thoughts: Annotated[
        int,
        Option(help="Tokens at the start of each answer that the next question lacks; tool calls keep them till then."),
    ] = 0,
    log: Annotated[
        Path | None,
        Option("--from", help="Log to read: of vLLM, of SGLang, or JSON lines in the form of OpenAI's API; also .gz."),
    ] = None,
    tokenizer: Annotated[
        str | None, Option(help="Folder or name of a tokenizer for texts. Default: 4 bytes of text are a token.")
    ] = None,
    json_path: Json = None,
) -> None:
    """Make a trace for `replay`.

    It is synthetic, or made of a server's log without what the log says.
    """
    from memstate.cli.traces.form import write
    from memstate_tools.traces import convert, logs
    from memstate_tools.traces.make import make

    with one_line_errors(), progress("trace", "requests" if log is None else "bytes") as report:
        if (kind in logs.READERS) != (log is not None):
            raise InvalidArgument(f"{kind} needs --from FILE" if log is None else f"--from {log}: {kind} reads no log")
        if log and (tail or thoughts):
            raise InvalidArgument(f"{kind} reads a log, whose prompts are as they are: leave out --tail and --thoughts")
        if log and out.exists() and out.samefile(log):
            raise InvalidArgument(f"--out {out}: this is the log itself: name another file")
        summary = convert.Summary(0 if log else requests)
        if log is None:
            write(out, make(kind, requests, seed, report, tail=tail, thoughts=thoughts))
        else:
            tokens = logs.tokenized(tokenizer) if tokenizer else logs.guessed
            write(out, convert.convert(log, kind, summary, tokens, report))
    if log or json_path:
        emit_text(json_path, asdict(summary), str(summary))
    else:
        sys.stderr.write(f"{out}: {several(requests, 'request')}\n")
