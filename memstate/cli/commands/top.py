"""The command `memstate top`: watches a process that exports metrics."""

import time
from typing import Annotated

import typer
from typer import Argument, Option

from memstate.cli.options import Json
from memstate.cli.output import emit_text, one_line_errors, write_stdout
from memstate.tables import width

URL = "http://127.0.0.1:9470/metrics"


def top(
    url: Annotated[str, Argument(help="Where a process exports its figures: memstate.metrics.serve(mem).url.")] = URL,
    every: Annotated[
        float,
        Option(min=0.0, max=86400.0, help="Seconds between two scrapes. 0: one scrape, with counts since the start."),
    ] = 2.0,
    once: Annotated[bool, Option("--once", metavar="", help="Show one frame and end.")] = False,
    json_path: Json = None,
) -> None:
    """Watch a process that exports metrics.

    It shows slots, hits, tiers, the host time of steps, and what to look at.
    """
    from rich.console import Console
    from rich.live import Live

    from memstate.cli.top.scrape import scrape
    from memstate.cli.top.summary import summary
    from memstate.cli.top.view import draw

    if every == 0 and not once and json_path is None:
        raise typer.BadParameter("--every 0 needs --once: there is nothing to repeat")
    with one_line_errors():
        now = scrape(url)
        figures = summary(now)
        if once or json_path is not None:
            if every:
                time.sleep(every)
                figures = summary(scrape(url), now)
            if json_path is not None:
                emit_text(json_path, figures, f"{url}: {len(figures['managers'])} managers")
            else:
                write_stdout(lambda: Console(width=width()).print(draw(figures, url)))
            return
        with Live(draw(figures, url), auto_refresh=False) as live:
            while True:
                time.sleep(every)
                before, now = now, scrape(url)
                live.update(draw(summary(now, before), url), refresh=True)
