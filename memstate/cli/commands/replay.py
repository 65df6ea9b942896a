"""The command `memstate replay`: replays a trace and reports the hit rates."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from memstate.cli.options import Json, split_names
from memstate.cli.output import emit, one_line_errors, progress
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


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise InvalidArgument(f"{name} {text!r}: expected whole numbers") from error
