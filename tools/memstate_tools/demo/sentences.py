"""Describes a demo run in four sentences. A sentence says so if its claim does not hold."""

from memstate.cli.units import measured, several
from memstate_tools.demo.report import DemoReport


def sentences(report: DemoReport) -> list[str]:
    """Returns the sentences: what was served, whether it is right, what memstate saved, and whether anything leaked."""
    return [_served(report), _equals(report), _saved(report), _leaked(report)]


def _served(report: DemoReport) -> str:
    sessions = f", {report.sessions:,} of them as sessions" if report.sessions else ""
    m, parked = report.meter, ""
    if report.config.park:
        where = f"{m.parked_inside_a_page:,} inside a page, {m.parked_behind_the_fence:,} behind a forward to come"
        parked = f"; it parked requests {several(m.parked, 'time')}, {where}" if m.parked else "; it parked NO request"
    return (
        f"memstate served {several(report.requests, 'request')} of {several(report.conversations, 'conversation')}"
        f"{sessions}, and generated {several(m.generated_tokens, 'token')}{parked}."
    )


def _equals(report: DemoReport) -> str:
    c = report.comparison
    replaced = f"sabotage replaced {several(report.strikes, 'state')}" if report.config.sabotage else ""
    if report.identical:
        what = f"{several(c.tokens, 'token')}, their logits and {several(c.states, 'state')}"
        return f"It equals the uncached run bit for bit: {what}{', although ' * bool(replaced)}{replaced}."
    if not (c.wrong_tokens or c.wrong_logits or c.wrong_states):
        return "It was NOT compared with the uncached run: there is no token."
    wrong = (
        f"{c.wrong_tokens:,} of {several(c.tokens, 'token')}, {c.wrong_logits:,} of {c.logits:,} logits and "
        f"{c.wrong_states:,} of {several(c.states, 'state')} differ"
    )
    return f"It does NOT equal the uncached run: {wrong}{', as ' * bool(replaced)}{replaced}."


def _saved(report: DemoReport) -> str:
    asked, hit = several(report.meter.prompt_tokens, "prompt token"), report.meter.prefix_hit_tokens
    computed = f"{hit:,} of {asked} were not computed: memstate had their states" if hit else f"It computed all {asked}"
    copied = report.snapshot_bytes_copied
    how = f"{measured(copied, 'bytes')} were copied" if copied else "nothing was copied"
    return f"{computed}; {how} to keep {several(report.stats.published, 'state')}."


def _leaked(report: DemoReport) -> str:
    if wrong := report.left():
        return f"It does NOT end clean: {wrong}."
    if report.planted is not None:
        return f"Slot {report.planted} leaked, as planted, and the audit names its owner; nothing else leaked."
    s = report.stats
    return (
        f"Nothing leaked: each of {several(s.capacity, 'slot')}, {several(s.pages, 'KV page')} and "
        f"{several(s.rows, 'row')} has an owner or is free."
    )
