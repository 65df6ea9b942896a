"""`memstate replay` and `memstate trace`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from memstate.cli import names
from memstate.cli.options import Json, split_names
from memstate.cli.output import emit, emit_text, one_line_errors, progress
from memstate.errors import InvalidArgument


def replay(
    trace: Annotated[Path, Argument(help="Requests in the format of the Mooncake traces: .jsonl or .jsonl.gz.")],
    states: Annotated[str, Option(help="Cached states that fit; comma separated to compare several.")] = "256",
    pages: Annotated[int, Option(help="KV pages that fit; a page is a block of 512 tokens.")] = 50_000,
    policy: Annotated[
        str,
        Option(
            help="Eviction policies, comma separated: names, or module:class of your own; one that is not known is "
            "answered with all names. Or all. "
            "bound: what none exceeds, for one request at a time; the others get their share of it (needs scipy)."
        ),
    ] = "return-rate",
    start: Annotated[
        float, Option("--from", help="Share of the requests that warm the cache up and are not counted.")
    ] = 0.0,
    limit: Annotated[int | None, Option(help="Requests to read. Default: all.")] = None,
    chunk: Annotated[int, Option(help="Tokens of a prefill chunk at most.")] = 8192,
    every: Annotated[int, Option(help="Tokens between two states of decode, a multiple of 512.")] = 512,
    placement: Annotated[str, Option(help="Where prompts leave states: ends, ends-only, every-N or nowhere.")] = "ends",
    running: Annotated[int, Option(help="Requests that run at a time.")] = 1,
    json_path: Json = None,
) -> None:
    """Replay a trace, and report the hit rates.

    The prefix cache serves it as in an engine, but without a model, under each policy and with each number of states.
    """
    from memstate.cli import replay as replaying
    from memstate.cli.traces.form import read

    with one_line_errors(), progress("replay", "requests") as report:
        requests = read(trace, limit)
        sizes = [_whole("--states", size) for size in split_names(states)]
        names = [name for each in split_names(policy) for name in (replaying.NAMES if each == "all" else [each])]
        policies = list(dict.fromkeys(names))
        loop = replaying.Loop(chunk=chunk, every=every, placement=placement, running=running)
        replayed = replaying.compare(requests, sizes, pages, policies, start, report, loop)
    rows = [asdict(one) for one in replayed]
    title = f"{trace.name}: block hit rate, {pages:,} pages, {replayed[0].requests:,} requests"
    if len(rates := dict.fromkeys(one.states for one in replayed)) > 1:
        title += f"; other figures: with {list(rates)[-1]} states"
    emit(json_path, rows if len(rows) > 1 else rows[0], title, replaying.table(replayed))


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
    from memstate.cli.traces import convert, logs
    from memstate.cli.traces.form import write
    from memstate.cli.traces.make import make

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


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise InvalidArgument(f"{name} {text!r}: expected whole numbers") from error
