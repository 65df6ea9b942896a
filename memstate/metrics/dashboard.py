"""Writes a Grafana dashboard of the figures as JSON: `python -m memstate.metrics.dashboard > grafana.json`.

Grafana asks for the Prometheus data source when it imports the file. Variables choose managers and ranks.
"""

import json
import sys
from typing import Any, Final, NamedTuple

WHERE: Final = 'manager=~"$manager",rank=~"$rank"'
WIDTH, HEIGHT, COLUMNS = 8, 8, 24  # of a panel and of the page, in Grafana's units
SOURCE: Final = {"type": "prometheus", "uid": "${source}"}


class Panel(NamedTuple):
    """One graph.

    Attributes:
        title: what it shows.
        unit: Grafana's name of the unit.
        queries: PromQL, in which `$w` stands for the chosen managers, and the name of a line.
        says: what a reader learns from it.
        stacked: whether its lines add up to something.
    """

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    says: str
    stacked: bool = False


RATE: Final = "$__rate_interval"
SECTIONS: Final[dict[str, tuple[Panel, ...]]] = {
    "Slots": (
        Panel(
            "Slots by owner", "short", (("sum by (owner) (memstate_slots{$w})", "{{owner}}"),),
            "Adds up to all slots. `snapshot` that only grows: handles that nobody drops. `by_id`: pool.claim.", True,
        ),
        Panel(
            "Rows and KV pages in use", "percentunit",
            (
                ('sum(memstate_rows{$w,state="used"}) / sum(memstate_rows{$w})', "rows"),
                ('sum(memstate_pages{$w,state="used"}) / sum(memstate_pages{$w})', "KV pages"),
            ),
            "The one at 100 % is what requests wait for.",
        ),
        Panel(
            "Refused for lack of room", "ops",
            ((f"sum by (reason) (rate(memstate_refusals_total{{$w}}[{RATE}]))", "{{reason}}"),),
            "Back-pressure: admissions, forks and extensions that the engine has to repeat.",
        ),
        Panel(
            "Claims and snapshots", "ops",
            (
                (f"sum(rate(memstate_claims_total{{$w}}[{RATE}]))", "slots claimed"),
                (f"sum(rate(memstate_snapshots_total{{$w}}[{RATE}]))", "snapshots taken"),
                (f"sum(rate(memstate_snapshots_published_total{{$w}}[{RATE}]))", "published"),
                (f"sum(rate(memstate_snapshots_dropped_total{{$w}}[{RATE}]))", "dropped"),
            ),
            "Published far above dropped for long: something keeps snapshots.",
        ),
        Panel(
            "Snapshots that were not kept", "ops",
            ((f"sum by (reason) (rate(memstate_degradations_total{{$w}}[{RATE}]))", "{{reason}}"),),
            "Each costs a later request a hit.",
        ),
        Panel(
            "Sessions", "short",
            (
                ("sum(memstate_sessions{$w})", "open"),
                ('sum(memstate_slots{$w,owner="session"})', "slots held"),
                (f"sum(rate(memstate_sessions_emptied_total{{$w}}[{RATE}]))", "emptied per second"),
            ),
            "Sessions that are emptied start their next turn from the cache.",
        ),
        Panel(
            "Age of the oldest", "s",
            (
                ("max(memstate_row_age_seconds{$w})", "request"),
                ("max(memstate_row_idle_seconds{$w})", "standstill of a request"),
                ("max(memstate_session_age_seconds{$w})", "session"),
                ("max(memstate_session_idle_seconds{$w})", "idle session"),
            ),
            "A standstill of minutes: a row that the engine has forgotten.",
        ),
    ),
    "Prefix cache": (
        Panel(
            "Hit rate of prompt tokens", "percentunit",
            (
                (
                    f"sum(rate(memstate_hit_tokens_total{{$w}}[{RATE}])) / "
                    f"sum(rate(memstate_prompt_tokens_total{{$w}}[{RATE}]))",
                    "hit",
                ),
            ),
            "The graph beside it says where the rest goes.",
        ),
        Panel(
            "Prompt tokens that were lost", "short",
            ((f"sum by (reason) (rate(memstate_lost_tokens_total{{$w}}[{RATE}]))", "{{reason}}"),),
            "evicted: too little room. no_snapshot: no state was kept there. no_sharing: new to all.", True,
        ),
        Panel(
            "Cached states that went", "ops",
            ((f"sum by (reason) (rate(memstate_prefix_evictions_total{{$w}}[{RATE}]))", "{{reason}}"),),
            "room: slots are short. pages: KV pages are. limit: most_states. superseded and taken are no loss.", True,
        ),
        Panel(
            "States that came to the cache", "ops",
            (
                (f"sum by (outcome) (rate(memstate_prefix_insertions_total{{$w}}[{RATE}]))", "{{outcome}}"),
                (f"sum(rate(memstate_prefix_loads_total{{$w}}[{RATE}]))", "loaded from below"),
            ),
            "refused: no register was free; raise snapshots=.",
        ),
        Panel(
            "Slots by tenant", "short", (("sum by (tenant) (memstate_tenant_slots{$w})", "{{tenant}}"),),
            "With tenant= only.", True,
        ),
        Panel(
            "Tokens by tenant", "short", (("sum by (tenant) (memstate_tenant_tokens{$w})", "{{tenant}}"),),
            "With tenant= only.", True,
        ),
    ),
    "Host memory and storage": (
        Panel(
            "Hit tokens from below", "short",
            ((f"sum by (place) (rate(memstate_tier_hit_tokens_total{{$w}}[{RATE}]))", "{{place}}"),),
            "What the tiers are worth.", True,
        ),
        Panel(
            "Traffic between device and host", "Bps",
            (
                (
                    f"sum by (kind, direction) (rate(memstate_tier_copied_bytes_total{{$w}}[{RATE}]))",
                    "{{kind}} {{direction}}",
                ),
            ),
            "Far more out than in: states go down that no request reads.",
        ),
        Panel(
            "Records in use", "percentunit",
            (
                (
                    'sum by (place, kind) (memstate_tier_records{$w,state="used"}) / '
                    "sum by (place, kind) (memstate_tier_records{$w})",
                    "{{place}} {{kind}}",
                ),
            ),
            "One full and the other not is a wrong split.",
        ),
        Panel(
            "Is storage keeping up?", "short",
            (
                ("sum(memstate_storage_writes_pending{$w})", "writes that wait"),
                (f"sum by (outcome) (rate(memstate_storage_writes_total{{$w}}[{RATE}]))", "{{outcome}} per second"),
            ),
            "A number that wait that only grows, or missed above 0: no.",
        ),
        Panel(
            "Prefetches by end", "ops",
            (
                (f"sum by (outcome) (rate(memstate_prefetches_total{{$w}}[{RATE}]))", "{{outcome}}"),
                (f"sum(rate(memstate_prefetches_late_total{{$w}}[{RATE}]))", "late"),
                (f"sum(rate(memstate_prefetches_truncated_total{{$w}}[{RATE}]))", "truncated"),
            ),
            "stopped and late: storage is slower than the wait for it. failed: it does not answer.",
        ),
        Panel(
            "Lost on the way down", "ops",
            (
                (f"sum by (reason) (rate(memstate_tier_lost_saves_total{{$w}}[{RATE}]))", "{{reason}}"),
                (f"sum by (flaw) (rate(memstate_storage_flaws_total{{$w}}[{RATE}]))", "flaw: {{flaw}}"),
                (f"sum by (reason) (rate(memstate_storage_failures_total{{$w}}[{RATE}]))", "storage: {{reason}}"),
                (f"sum(rate(memstate_storage_evictions_total{{$w}}[{RATE}]))", "evicted by the store"),
            ),
            "no_staging: a larger staging=. no_room: host memory is too small, or pinned.",
        ),
    ),
    "Cost and faults": (
        Panel(
            "Host time of a step", "s",
            tuple(
                (
                    f"histogram_quantile({share}, sum by (le) (rate(memstate_step_host_seconds_bucket{{$w}}[{RATE}])))",
                    f"p{share[2:]:0<2}",
                )
                for share in ("0.5", "0.9", "0.99")
            ),
            "With steps=True only.",
        ),
        Panel(
            "Host time by call", "percentunit",
            ((f"sum by (call) (rate(memstate_call_seconds_total{{$w}}[{RATE}]))", "{{call}}"),),
            "Share of one core.", True,
        ),
        Panel(
            "Launches, uploads, waits", "ops",
            tuple(
                (f"sum(rate(memstate_{name}_total{{$w}}[{RATE}]))", name)
                for name in ("launches", "uploads", "packets", "syncs", "upload_waits")
            ),
            "syncs and upload_waits should stay at 0 in a decode loop.",
        ),
        Panel(
            "Bytes that memstate moves", "Bps",
            (
                (f"sum by (how) (rate(memstate_moved_bytes_total{{$w}}[{RATE}]))", "{{how}}"),
                (f"sum(rate(memstate_uploaded_bytes_total{{$w}}[{RATE}]))", "uploaded"),
            ),
            "States copied on the device: 0 under Redirect without in-place kernels.",
        ),
        Panel(
            "Faults", "short",
            (
                ("max(memstate_interrupted{$w})", "interrupted"),
                ("sum(memstate_tier_leaked_records{$w})", "leaked host records"),
                (f"sum by (kind) (rate(memstate_injected_faults_total{{$w}}[{RATE}]))", "chaos: {{kind}}"),
            ),
            "interrupted: every call raises Broken until recover or reset.",
        ),
        Panel(
            "Age of the figures", "s", (("max(memstate_reading_age_seconds{$w})", "age"),),
            "Above 0: the loop is always inside of a call.",
        ),
    ),
}  # fmt: skip


def dashboard() -> dict[str, Any]:
    """Returns the dashboard as plain data, as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, section in SECTIONS.items():
        panels.append(
            {"type": "row", "title": title, "id": len(panels) + 1, "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1}}
        )
        y += 1
        for at, panel in enumerate(section):
            x = at * WIDTH % COLUMNS
            panels.append(_graph(panel, len(panels) + 1, x, y + at * WIDTH // COLUMNS * HEIGHT))
        y += -(-len(section) * WIDTH // COLUMNS) * HEIGHT
    return {
        "title": "memstate", "uid": "memstate", "schemaVersion": 39, "tags": ["memstate"], "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"}, "panels": panels,
        "templating": {
            "list": [
                {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"},
                *(_variable(name) for name in ("manager", "rank")),
            ]
        },
    }  # fmt: skip


def queries() -> list[str]:
    """Returns the PromQL of all panels, as Grafana sends it."""
    return [_query(query) for section in SECTIONS.values() for panel in section for query, _ in panel.queries]


def _query(query: str) -> str:
    return query.replace("$w", WHERE)


def _variable(name: str) -> dict[str, Any]:
    return {
        "name": name, "label": name, "type": "query", "datasource": SOURCE, "includeAll": True, "multi": True,
        "query": f"label_values(memstate_info, {name})", "refresh": 2, "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip


def _graph(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    custom = {"fillOpacity": 20, "stacking": {"mode": "normal" if panel.stacked else "none"}}
    return {
        "type": "timeseries", "id": number, "title": panel.title, "description": panel.says, "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + at), "expr": _query(query), "legendFormat": legend, "datasource": SOURCE}
            for at, (query, legend) in enumerate(panel.queries)
        ],
    }  # fmt: skip


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dashboard(), indent=1) + "\n")
