"""Describes what each shown object holds, as a `Sheet`, from what the host knows: no launch, no wait for the device."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from itertools import islice
from typing import Any, Final

from memstate.slots.audit import AuditReport
from memstate.slots.inspect import Inspection
from memstate.state.layout import StateLayout, format_bytes
from memstate.stats import PrefixStats, Stats, TierStats
from memstate.viz.kinds import KINDS, OTHERS
from memstate.viz.owners import holdings
from memstate.viz.sheet import MOST_ROWS, Bar, Part, Section, Sheet, bar, section, sheet

Describe = Callable[[Any], Sheet]
LOST: Final = {"no sharing": "lost_no_sharing", "evicted": "lost_evicted", "no snapshot": "lost_no_snapshot"}


def of(shown: object) -> Sheet:
    """Returns what an object shows of itself.

    Args:
        shown: An object of a class that inherits from `Shown`.
    """
    describe = next(DESCRIBE[base.__name__] for base in type(shown).__mro__ if base.__name__ in DESCRIBE)
    return describe(shown)


def _layout(layout: StateLayout) -> Sheet:
    return sheet(repr(layout), [_slot_bar(layout)], [_plane_table(layout)])


def _slot_bar(layout: StateLayout) -> Bar:
    rows = layout.table()
    planes = [_bytes(row.name, row.payload, f"plane {at}") for at, row in enumerate(rows)]
    return bar("one layer of one slot", [*planes, _bytes("padding", sum(row.padding for row in rows), "padding")])


def _plane_table(layout: StateLayout) -> Section:
    rows = [
        (row.name, f"{list(row.shape)} {str(row.dtype)[6:]}", f"{row.payload:,}", f"{row.padding:,}")
        for row in layout.table()
    ]
    return section("planes", ("plane", "shape", "bytes of a layer of a slot", "padding"), rows)


def _capacity(plan: Any) -> Sheet:
    found = Counter[str]()
    for part in plan.best.parts:
        found[part.name if part.name in OTHERS else "tables"] += part.nbytes
    parts = [_bytes(kind, nbytes, kind) for kind, nbytes in found.items()]
    sections = [section(title, heads, rows) for title, heads, rows in plan.tables()]
    first = str(plan).partition("\n")[0]
    title = f"the recommended split, {format_bytes(plan.best.nbytes)}"
    return sheet(first, [bar(title, parts)], sections, notes=[plan.recommendation])


def _planes(planes: Any) -> Sheet:
    layout: StateLayout = planes.layout
    null = planes.nbytes // (planes.slots + 1)
    payload = {plane.name: plane.nbytes * layout.layers * planes.slots for plane in layout.planes}
    parts = [_bytes(name, count, f"plane {at}") for at, (name, count) in enumerate(payload.items())]
    parts.append(_bytes("padding", planes.nbytes - null - sum(payload.values()), "padding"))
    parts.append(_bytes("null slot", null, "null slot"))
    moved = planes.traffic
    notes = ["The states sleep: their memory is released."] if planes.asleep else []
    notes.append(
        f"Copied {format_bytes(moved.copied)}, zeroed {format_bytes(moved.zeroed)} by memstate's own launches."
    )
    title = f"{planes.slots:,} slots of {format_bytes(layout.bytes_per_slot)} and the null slot"
    return sheet(repr(planes), [bar(title, parts)], [_plane_table(layout)], notes=notes)


def _manager(mem: Any) -> Sheet:
    seen, stats, each = mem._overview(), mem.stats(), mem.layout.bytes_per_slot
    owned = [Part(kind, seen["slots"].get(kind, 0), kind, _slots(seen["slots"].get(kind, 0), each)) for kind in KINDS]
    payload, null = mem.layout.payload_bytes_per_slot, mem.planes.nbytes // (stats.capacity + 1)
    memory = [
        _bytes("used", (stats.capacity - stats.free) * payload, "used"), _bytes("free", stats.free * payload, "free"),
        _bytes("padding", max(0, mem.planes.nbytes - null - stats.capacity * payload), "padding"),
        _bytes("null slot", null, "null slot"), _bytes("tables", seen["tables"], "tables"),
    ]  # fmt: skip
    notes = []
    if mem.planes.asleep:
        notes.append("The states sleep: their memory is released.")
    if seen["broken"]:
        notes.append(f"A call of {seen['broken']} was interrupted: call recover() or reset().")
    whole = format_bytes(mem.planes.nbytes + seen["tables"])
    bars = [
        bar(f"{stats.capacity:,} slots of {format_bytes(each)}", owned),
        bar(f"{whole} of states and tables on {mem.planes.device}", memory),
    ]
    sections = [
        section("requests", ("row", "request", "tokens", "confirmed", "unsettled", "slots"),
                [(r["row"], r["id"], f"{r['length']:,}", f"{r['confirmed']:,}", r["unsettled"], r["slots"])
                 for r in seen["rows"]], stats.rows_used),
        section("sessions", ("session", "tokens", "states at", "row", "KV pages"),
                [(s["id"], f"{s['tokens']:,}", ", ".join(f"{length:,}" for _, length in s["states"][:4]),
                  s["row"] or "", s["pages"]) for s in seen["sessions"]], seen["open_sessions"]),
    ]  # fmt: skip
    if stats.pages:
        bars.append(_pages(stats))
    if stats.prefix is not None:
        bars.append(_prompts(stats.prefix))
        sections.append(_figures("prefix cache", stats.prefix))
    if stats.tiers is not None:
        bars += _records(stats.tiers)
        sections.append(_figures("tiers", stats.tiers))
    sections.append(_figures("counters", stats))
    return sheet(repr(mem), bars, sections, notes=notes)


def _prefix(cache: Any) -> Sheet:
    stats = cache.stats()
    nodes = cache.inspect(MOST_ROWS)
    rows = [
        (
            node["salt"] or "",
            f"{node['start'] * cache.page_size:,} .. {node['end'] * cache.page_size:,}",
            "held" if node["register"] else "evicted" if node["evicted"] else "none",
            "ghost" if node["ghost"] else "held",
            node["uses"],
            node["leases"],
        )
        for node in nodes
    ]
    heads = ("salt", "tokens", "state", "KV", "uses", "leases")
    sections = [section("nodes", heads, rows, stats.nodes), _figures("figures", stats)]
    return sheet(repr(cache), [_prompts(stats)], sections)


def _tiers(tiers: Any) -> Sheet:
    stats: TierStats = tiers.stats()
    title = f"{type(tiers).__name__}({stats.host_states} of {stats.host_state_records} states in host memory)"
    found = _tier_stats(stats)
    notes = (*found.notes, "Closed: nothing is loaded or saved any more.") if tiers._closed else found.notes
    return found._replace(title=title, notes=notes)


def _inspection(seen: Inspection) -> Sheet:
    held: dict[str, int] = {}
    for kind, _ in holdings(seen):
        held[kind] = held.get(kind, 0) + 1
    each = int(seen.layout.get("bytes_per_slot", 0))
    owned = [Part(kind, held.get(kind, 0), kind, _slots(held.get(kind, 0), each)) for kind in KINDS]
    bars = [bar(f"{seen.capacity:,} slots", owned)]
    requests = [
        (row["row"], row["id"], f"{row['length']:,}", f"{row['confirmed']:,}", "finished" if row["finished"] else "")
        for row in seen.rows[:MOST_ROWS]
    ]
    sessions = [
        (one["id"], f"{one['tokens']:,}", len(one["states"]), one["pages"]) for one in seen.sessions[:MOST_ROWS]
    ]
    changes = [
        (one["serial"], one["submit"], one["what"], one["owner"], one["source_owner"], f"{one['label']:,}")
        for one in reversed(seen.changes[-MOST_ROWS:])
    ]
    planes = [
        (plane["name"], f"{plane['shape']} {plane['dtype']}", f"{plane['payload']:,}", f"{plane['padding']:,}")
        for plane in seen.layout.get("planes", [])[:MOST_ROWS]
    ]
    sections = [
        section("requests", ("row", "request", "tokens", "confirmed", ""), requests, len(seen.rows)),
        section("sessions", ("session", "tokens", "states", "KV pages"), sessions, len(seen.sessions)),
        section("changes of owners, newest first", ("change", "packet", "what", "owner", "from", "tokens"), changes,
                len(seen.changes)),
        section("planes", ("plane", "shape", "bytes of a layer of a slot", "padding"), planes,
                len(seen.layout.get("planes", []))),
        _figures("figures", seen.stats),
    ]  # fmt: skip
    return sheet(repr(seen), bars, sections, seen.faults)


def _report(report: AuditReport) -> Sheet:
    owned = report.owned_by_kind
    other = max(0, report.capacity - report.free - sum(owned.values()) - len(report.leaked))
    counts = {**owned, "by id": owned.get("group", 0), "leaked": len(report.leaked), "free": report.free}
    counts["unknown"] = owned.get("unknown", 0) + other
    parts = [Part(kind, counts.get(kind, 0), kind, f"{counts.get(kind, 0):,}") for kind in KINDS]
    twice = len(report.double_owned.keys() | report.owned_but_free.keys())
    title = f"{report.capacity:,} slots" + (f", {twice:,} of them counted more than once" if twice else "")
    return sheet(repr(report), [bar(title, parts)], faults=report.faults)


def _match(match: Any) -> Sheet:
    host = max(0, match.host_length - match.length)
    parts = [_tokens("by state", match.length, "hit")]
    parts += [
        _tokens(reason.replace("_", " "), count, reason.replace("_", " ")) for reason, count in match.lost.items()
    ]
    notes = [f"KV alone reaches {match.kv_length:,} tokens."]
    notes += [f"Host memory has a state {host:,} tokens further."] if host else []
    notes += [f"Reason: {match.reason.replace('_', ' ')}."] if match.reason else []
    return sheet(f"Match({match})", [bar(f"{match.tokens:,} tokens of the prompt", parts)], notes=notes)


def _stats(stats: Stats) -> Sheet:
    held = {
        "live": stats.held_by_live,
        "lane": stats.held_by_lanes,
        "snapshot": stats.held_by_snapshots - _cached(stats),
        "cached": _cached(stats),
        "session": stats.held_by_sessions,
        "free": stats.free,
    }
    held["by id"] = max(0, stats.capacity - sum(held.values()))
    names = {"snapshot": "snapshot or mark"}  # which stats does not tell apart
    parts = [Part(names.get(kind, kind), count, kind, f"{count:,}") for kind, count in held.items()]
    bars = [bar(f"{stats.capacity:,} slots", parts)]
    if stats.pages:
        bars.append(_pages(stats))
    sections = [_figures("counters", stats)]
    if stats.prefix is not None:
        bars.append(_prompts(stats.prefix))
        sections.append(_figures("prefix cache", stats.prefix))
    if stats.tiers is not None:
        bars += _records(stats.tiers)
        sections.append(_figures("tiers", stats.tiers))
    if stats.chaos is not None:
        sections.append(_figures("injected faults", stats.chaos))
    title = f"Stats({stats.free:,} of {stats.capacity:,} slots free, {stats.rows_used:,} of {stats.rows:,} rows used)"
    return sheet(title, bars, sections)


def _cached(stats: Stats) -> int:
    return min(stats.prefix.states, stats.held_by_snapshots) if stats.prefix is not None else 0


def _prefix_stats(stats: PrefixStats) -> Sheet:
    title = f"PrefixStats({stats.states:,} states, {stats.hit_tokens:,} of {stats.prompt_tokens:,} tokens hit)"
    return sheet(title, [_prompts(stats)], [_figures("figures", stats)])


def _tier_stats(stats: TierStats) -> Sheet:
    sections = [_figures("figures", stats)]
    if stats.prefetch is not None:
        sections.append(_figures("prefetches", stats.prefetch))
    wrong = [f"{stats.leaked_records} host records leaked"] if stats.leaked_records else []
    notes = [f"{format_bytes(stats.host_bytes)} of host memory, {format_bytes(stats.staging_bytes)} of staging."]
    title = f"TierStats({stats.host_states} of {stats.host_state_records} states in host memory)"
    return sheet(title, _records(stats), sections, wrong, notes)


def _other_stats(stats: Any) -> Sheet:
    found = _figures("figures", stats)
    return sheet(f"{type(stats).__name__}{'' if found.rows else ': all figures are 0'}", sections=[found])


def _pages(stats: Stats) -> Bar:
    return bar(f"{stats.pages:,} KV pages", _used(stats.pages - stats.pages_free, stats.pages))


def _prompts(stats: PrefixStats) -> Bar:
    parts = [_tokens("hit", stats.hit_tokens, "hit")]
    parts += [_tokens(reason, getattr(stats, name), reason) for reason, name in LOST.items()]
    return bar(f"{stats.prompt_tokens:,} prompt tokens of {stats.lookups:,} requests", parts)


def _records(stats: TierStats) -> list[Bar]:
    sizes = {
        "records of states in host memory": (stats.host_states, stats.host_state_records),
        "records of KV pages in host memory": (stats.host_pages, stats.host_page_records),
    }
    return [bar(f"{each:,} {what}", _used(used, each)) for what, (used, each) in sizes.items() if each]


def _used(used: int, of: int) -> list[Part]:
    return [Part("used", used, "used", f"{used:,}"), Part("free", of - used, "free", f"{of - used:,}")]


def _figures(title: str, stats: Any) -> Section:
    """The figures that are not 0, several to a line."""
    named: Mapping[str, Any] = stats if isinstance(stats, Mapping) else asdict(stats)
    found = [
        (name.replace("_", " "), f"{value:,}") for name, value in named.items() if isinstance(value, int) and value
    ]
    found += [
        (f"{name}: {what}", f"{count:,}")
        for name, value in named.items() if name == "flaws" and isinstance(value, Mapping)
        for what, count in islice(value.items(), MOST_ROWS)
    ]  # fmt: skip
    wide = min(3, len(found))
    found += [("", "")] * (-len(found) % max(1, wide))
    lines = [tuple(cell for pair in found[at : at + wide] for cell in pair) for at in range(0, len(found), wide or 1)]
    return section(title, (), lines)._replace(counted=False)


def _bytes(name: str, count: int, kind: str) -> Part:
    return Part(name, count, kind, format_bytes(count))


def _tokens(name: str, count: int, kind: str) -> Part:
    return Part(name, count, kind, f"{count:,} tokens")


def _slots(count: int, each: int) -> str:
    return f"{count:,}, {format_bytes(count * each)}" if each else f"{count:,}"


DESCRIBE: Final[Mapping[str, Describe]] = {
    "AuditReport": _report, "Capacity": _capacity, "Inspection": _inspection, "Match": _match, "Planes": _planes,
    "Contents": _prefix, "StateLayout": _layout, "StateManager": _manager, "TierManager": _tiers, "Stats": _stats,
    "PrefixStats": _prefix_stats, "TierStats": _tier_stats, "ChaosStats": _other_stats, "PrefetchStats": _other_stats,
}  # fmt: skip
