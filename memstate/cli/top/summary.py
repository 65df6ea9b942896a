"""Turns scrapes into plain data: gauges of the last scrape, and the growth of counters between two scrapes."""

from typing import Any

from memstate.cli.top.advice import advice
from memstate.cli.top.scrape import Figures, Scrape

STEP = "memstate_step_host_seconds"


def summary(now: Scrape, before: Scrape | None = None) -> dict[str, Any]:
    """Returns the figures of all managers as plain data.

    Args:
        now: the last scrape.
        before: an earlier scrape. None: counters count since the start of the process, and there are no rates.

    Returns:
        "seconds": time between the scrapes, or None. "managers": a list with the result of `_of` for each manager.
    """
    seconds = now.at - before.at if before is not None else None
    managers = []
    for (manager, rank), figures in now.managers.items():
        earlier = before.managers.get((manager, rank), Figures()) if before is not None else Figures()
        managers.append({"manager": manager, "rank": rank, **_of(figures, figures.since(earlier))})
    return {"seconds": seconds, "managers": managers}


def _of(now: Figures, grown: Figures) -> dict[str, Any]:
    """Returns the figures of one manager: gauges from `now`, counters from `grown`."""
    whole: dict[str, Any] = {
        "version": now.label("memstate_info", "version"),
        "strategy": now.label("memstate_info", "strategy"),
        "age_seconds": now.total("memstate_reading_age_seconds"),
        "interrupted": bool(now.total("memstate_interrupted")),
        "slots": now.counts("memstate_slots", "owner"),
        "rows": now.counts("memstate_rows", "state"),
        "pages": now.counts("memstate_pages", "state"),
        "sessions": {"open": now.count("memstate_sessions"), "emptied": grown.count("memstate_sessions_emptied_total")},
        "ages": {
            what: now.total(f"memstate_{what}_seconds")
            for what in ("row_age", "row_idle", "session_age", "session_idle")
        },
        "refusals": grown.counts("memstate_refusals_total", "reason"),
        "claims": grown.count("memstate_claims_total"),
        "snapshots": {
            "taken": grown.count("memstate_snapshots_total"),
            "published": grown.count("memstate_snapshots_published_total"),
            "dropped": grown.count("memstate_snapshots_dropped_total"),
        },
        "degradations": grown.counts("memstate_degradations_total", "reason"),
        "prompts": _prompts(now, grown),
        "evictions": grown.counts("memstate_prefix_evictions_total", "reason"),
        "tiers": _tiers(now, grown),
        "steps": _steps(grown),
        "tenants": {
            tenant: {
                what: now.count(f"memstate_tenant_{what}", tenant=tenant) for what in ("slots", "pages", "tokens")
            }
            for tenant in now.by("memstate_tenant_slots", "tenant")
        },
    }  # fmt: skip
    return whole | {"advice": advice(whole)}


def _prompts(now: Figures, grown: Figures) -> dict[str, Any] | None:
    if not now.by("memstate_prefix_lookups_total", "rank"):
        return None
    tokens, hit = grown.total("memstate_prompt_tokens_total"), grown.total("memstate_hit_tokens_total")
    return {
        "requests": grown.count("memstate_prefix_lookups_total"),
        "tokens": int(tokens), "hit": int(hit), "hit_rate": hit / tokens if tokens else None,
        "lost": grown.counts("memstate_lost_tokens_total", "reason"),
        "hit_below": grown.counts("memstate_tier_hit_tokens_total", "place"),
        "cached_states": now.count("memstate_prefix_states"),
    }  # fmt: skip


def _tiers(now: Figures, grown: Figures) -> dict[str, Any] | None:
    kinds = [
        (place, kind)
        for place in now.by("memstate_tier_records", "place")
        for kind in now.by("memstate_tier_records", "kind", place=place)
    ]
    if not kinds:
        return None
    records = {
        f"{place} {kind}": now.counts("memstate_tier_records", "state", place=place, kind=kind) for place, kind in kinds
    }
    return {
        "records": records,
        "bytes": {
            direction: grown.counts("memstate_tier_copied_bytes_total", "kind", direction=direction)
            for direction in ("out", "in")
        },
        "lost_saves": grown.counts("memstate_tier_lost_saves_total", "reason"),
        "leaked_records": now.count("memstate_tier_leaked_records"),
        "writes": grown.counts("memstate_storage_writes_total", "outcome"),
        "writes_pending": now.count("memstate_storage_writes_pending"),
        "unwritten": now.count("memstate_storage_writes_total", outcome="failed"),
        "failures": {name: n for name, n in grown.counts("memstate_storage_failures_total", "reason").items() if n},
        "evicted": grown.count("memstate_storage_evictions_total"),
        "flaws": grown.counts("memstate_storage_flaws_total", "flaw"),
        "prefetches": {name: n for name, n in grown.counts("memstate_prefetches_total", "outcome").items() if n},
        "late": grown.count("memstate_prefetches_late_total"),
        "truncated": grown.count("memstate_prefetches_truncated_total"),
        "in_flight": now.count("memstate_prefetches_in_flight"),
    }


def _steps(grown: Figures) -> dict[str, Any] | None:
    if not (count := grown.total(f"{STEP}_count")):
        return None
    buckets = sorted((float(bound), n) for bound, n in grown.by(f"{STEP}_bucket", "le").items())
    calls = grown.by("memstate_call_seconds_total", "call")
    return {
        "count": int(count), "mean_seconds": grown.total(f"{STEP}_sum") / count,
        **{f"p{round(100 * share)}_seconds": _within(buckets, share * count) for share in (0.5, 0.99)},
        "calls": dict(sorted(calls.items(), key=lambda each: -each[1])),
    }  # fmt: skip


def _within(buckets: list[tuple[float, float]], wanted: float) -> float | None:
    """Returns the smallest bound that at least `wanted` steps do not exceed; None if that is infinity."""
    bound = next((bound for bound, count in buckets if count >= wanted), float("inf"))
    return bound if bound < float("inf") else None
