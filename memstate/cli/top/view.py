"""Draws a summary in the terminal. Names from the process cannot change the layout or control the terminal."""

from collections.abc import Mapping
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from memstate.cli.output import printable
from memstate.cli.units import duration, measured

WIDTH = 30  # characters of a bar
AGES = {"row_age": "request", "row_idle": "standstill of one", "session_age": "session", "session_idle": "idle session"}
COLOURS = {
    "live": "green", "lane": "cyan", "mark": "blue", "cached": "magenta", "session": "yellow", "snapshot": "red",
    "by_id": "bright_red", "free": "bright_black", "hit": "green", "no_sharing": "bright_black", "evicted": "red",
    "no_snapshot": "yellow", "used": "green",
}  # fmt: skip


def draw(summary: Mapping[str, Any], url: str) -> RenderableType:
    """Returns the screen of `memstate top`.

    Args:
        summary: the figures of all managers, as `summary` returns them.
        url: URL of the figures.
    """
    seconds = summary["seconds"]
    since = "since the start of the process" if seconds is None else f"in the last {duration(seconds)}"
    return Group(_text(f"{url}   counters {since}", style="dim"), *(_manager(each) for each in summary["managers"]))


def _manager(of: Mapping[str, Any]) -> RenderableType:
    title = f"{of['manager']}, rank {of['rank']}: memstate {of['version']}, {of['strategy']}"
    parts: list[RenderableType] = [_bars(f"{sum(of['slots'].values()):,} slots", of["slots"])]
    lines = [
        _used("rows", of["rows"]), _used("KV pages", of["pages"]), _counts("refused for lack of", of["refusals"]),
        _counts("snapshots", of["snapshots"]), _counts("snapshots not kept", of["degradations"]),
        _counts("sessions", of["sessions"]),
        ("oldest", ", ".join(f"{name} {duration(age)}" for what, name in AGES.items() if (age := of["ages"][what]))),
    ]  # fmt: skip
    if prompts := of["prompts"]:
        rate = "-" if prompts["hit_rate"] is None else f"{prompts['hit_rate']:.1%}"
        name = f"{prompts['tokens']:,} prompt tokens of {prompts['requests']:,} requests, hit rate {rate}"
        parts.append(_bars(name, {"hit": prompts["hit"], **prompts["lost"]}))
        lines += [_counts("cached states that went", of["evictions"]), _counts("hit tokens from", prompts["hit_below"])]
    if of["tiers"]:
        lines += _tiers(of["tiers"])
    if of["steps"]:
        lines += _steps(of["steps"])
    parts.append(_table(lines))
    if of["tenants"]:
        parts.append(_tenants(of["tenants"]))
    parts += [_text(f"! {line}", style="yellow") for line in of["advice"]]
    return Panel(Group(*parts), title=_text(title), title_align="left", border_style="red" if of["interrupted"] else "")


def _bars(title: str, counts: Mapping[str, int]) -> RenderableType:
    """Returns a title, and below it a bar for each part that is not 0. Each bar is a share of the sum."""
    whole = sum(counts.values())
    table = Table.grid(padding=(0, 1))
    for name, count in counts.items():
        if count:
            share = count / whole
            bar = _text("█" * max(1, round(WIDTH * share)), style=COLOURS.get(name, "white"))
            table.add_row(_text(f"  {name}"), bar, _text(f"{count:,}", justify="right"), _text(f"{share:.0%}"))
    return Group(_text(title, style="bold"), table)


def _used(name: str, counts: Mapping[str, int]) -> tuple[str, str]:
    whole = sum(counts.values())
    return name, f"{counts.get('used', 0):,} of {whole:,} used" if whole else ""


def _counts(name: str, counts: Mapping[str, int]) -> tuple[str, str]:
    return name, ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)


def _tiers(tiers: Mapping[str, Any]) -> list[tuple[str, str]]:
    lines = [_used(f"records, {name}", records) for name, records in tiers["records"].items()]
    for direction in ("out", "in"):
        copied = (f"{measured(n, 'bytes')} of {kind}s" for kind, n in tiers["bytes"][direction].items() if n)
        lines.append((f"copied {direction}", ", ".join(copied)))
    writes = {"wait": tiers["writes_pending"], **tiers["writes"], "evicted by the store": tiers["evicted"]}
    ends = tiers["prefetches"] | {
        "late": tiers["late"], "truncated": tiers["truncated"], "under way": tiers["in_flight"],
    }  # fmt: skip
    return [
        *lines, _counts("writes to storage", writes), _counts("storage failed", tiers["failures"]),
        _counts("prefetches", ends), _counts("flaws", tiers["flaws"]),
        _counts("saves lost", tiers["lost_saves"]),
    ]  # fmt: skip


def _steps(steps: Mapping[str, Any]) -> list[tuple[str, str]]:
    def shown(seconds: float | None) -> str:
        return "more than 400 ms" if seconds is None else duration(seconds)

    whole = sum(steps["calls"].values()) or 1.0
    calls = ", ".join(f"{call} {seconds / whole:.0%}" for call, seconds in steps["calls"].items() if seconds)
    times = f"mean {shown(steps['mean_seconds'])}, half within {shown(steps['p50_seconds'])}"
    return [
        ("host time of a step", f"{times}, 99 of 100 within {shown(steps['p99_seconds'])}; {steps['count']:,} steps"),
        ("host time by call", calls),
    ]


def _table(lines: list[tuple[str, str]]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for name, value in lines:
        if value:
            table.add_row(_text(name, style="bold"), _text(value))
    return table


def _tenants(tenants: Mapping[str, Mapping[str, int]]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("tenant", "slots", "pages", "tokens"):
        table.add_column(name, justify="left" if name == "tenant" else "right")
    for tenant, held in tenants.items():
        table.add_row(_text(tenant), *(f"{held[what]:,}" for what in ("slots", "pages", "tokens")))
    return table


def _text(words: str, style: str = "", justify: Literal["left", "right"] = "left") -> Text:
    """Returns a text for the terminal. A name can come from any client, so control characters are replaced."""
    return Text(printable(words), style=style, justify=justify)
