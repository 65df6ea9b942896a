"""Figures through Prometheus's official client: over HTTP, from several managers, with every field."""

import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, is_dataclass
from socketserver import BaseServer
from typing import Any

import pytest
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

import memstate as ms
from memstate import metrics
from memstate.metrics.reading import ExportedManager, Reading
from memstate.metrics.steps import BOUNDS
from memstate.metrics.table import FIGURES
from memstate.stats import ChaosStats, PrefetchStats, PrefixStats, Stats, TierStats
from tests.support import inside
from tests.support.metered import get, manager, turn


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes servers check more often whether they must end."""
    monkeypatch.setattr(BaseServer.serve_forever, "__defaults__", (0.01,))


MAIN = frozenset({("manager", "main"), ("rank", "0")})
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scraped(url: str) -> tuple[Samples, dict[str, str]]:
    """Returns the samples at a URL, and the kind of each metric, as the official parser reads them."""
    families = list(text_string_to_metric_families(get(url)))
    kinds = {family.name: family.type for family in families}
    assert len(kinds) == len(families), "a metric twice"
    samples = [sample for family in families for sample in family.samples]
    by_labels = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(by_labels) == len(samples), "a sample twice"
    return by_labels, kinds


def values(samples: Samples, name: str, label: str, manager: str = "main") -> dict[str, float]:
    return {dict(has)[label]: n for (of, has), n in samples.items() if of == name and ("manager", manager) in has}


def test_a_scrape_over_http_has_every_figure_and_the_official_parser_reads_it() -> None:
    mem = manager(below=True, debug=True)  # debug mode refuses other threads
    ms.testing.Faults(ms.testing.Chaos(seed=3, admissions=0.1)).inject(mem)
    with metrics.serve(mem, 0, tenant=str, steps=True) as server:
        talk = mem.sessions.open("talk")
        for who in range(8):
            with suppress(ms.OutOfSlots):  # chaos refuses some requests
                turn(mem, who % 5, "a" if who % 2 else "b", session=talk if who == 3 else None)
        mem.prefetch([9] * 20)
        mem.poll()
        samples, kinds = scraped(server.url)
        stats = mem.stats()
    assert stats.prefix and stats.tiers and stats.tiers.prefetch
    # these have no samples: KV is the caller's, and there is no flaw and no failure
    kinds_left_out = ("pages", "tenant_pages", "storage_flaws", "storage_failures")
    silent = {f"memstate_{name}" for name in kinds_left_out}
    assert {figure.name for figure in FIGURES} - kinds.keys() <= silent
    assert {name: kind for name, kind in kinds.items() if kind == "unknown"} == {}
    assert all(kinds[figure.name] == figure.kind for figure in FIGURES if figure.name in kinds)
    assert all(figure.help.endswith(".") for figure in FIGURES)
    slots = values(samples, "memstate_slots", "owner")
    assert sum(slots.values()) == stats.capacity and slots["free"] == stats.free
    assert slots["cached"] == stats.prefix.states and slots["session"] == stats.held_by_sessions == 1
    lost = values(samples, "memstate_lost_tokens_total", "reason")
    hit, asked = (samples[f"memstate_{name}_tokens_total", MAIN] for name in ("hit", "prompt"))
    assert hit + sum(lost.values()) == asked == stats.prefix.prompt_tokens
    buckets = values(samples, "memstate_step_host_seconds_bucket", "le")
    counts = [count for _, count in sorted((float(bound), count) for bound, count in buckets.items())]
    assert len(counts) == len(BOUNDS) + 1 and counts == sorted(counts)
    assert samples["memstate_step_host_seconds_count", MAIN] == buckets["+Inf"] == mem._parts.stepping._log._serial
    assert {"plan", "settle", "admit", "poll"} <= values(samples, "memstate_call_seconds_total", "call").keys()
    assert set(values(samples, "memstate_tenant_slots", "tenant")) >= {"a", "b"}


class Noted:
    """A record that notes which of its fields are read."""

    def __init__(self, record: Any, seen: dict[type, set[str]]) -> None:
        self._record, self._seen = record, seen

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._record, name)
        self._seen[type(self._record)].add(name)
        return Noted(value, self._seen) if is_dataclass(value) else value


def test_O4_every_field_of_the_figures_is_exported() -> None:
    mem = ms.testing.Faults(ms.testing.Chaos()).inject(manager(below=True))
    reading = ExportedManager(mem, str, 3, True).read()
    assert isinstance(reading, Reading)
    seen: dict[type, set[str]] = defaultdict(set)
    for figure in FIGURES:
        figure.read(Noted(reading, seen))  # type: ignore[arg-type]
    sums = {"evicted_states"}  # this field is the sum of figures with a reason
    for record in (Stats, PrefixStats, TierStats, PrefetchStats, ChaosStats):
        assert {each.name for each in fields(record)} - seen[record] - sums == set()


def test_several_managers_share_a_scrape_and_one_that_is_gone_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"target": manager(), "draft": manager(slots=5)}
    turn(both["target"], 1)
    with metrics.serve(both, 0) as server:
        (gone,) = [source for name, source in server._collector._sources.items() if name == "draft"]
        samples, _ = scraped(server.url)
        assert sum(values(samples, "memstate_slots", "owner", "target").values()) == 12
        assert sum(values(samples, "memstate_slots", "owner", "draft").values()) == 5
        monkeypatch.setattr(gone, "_mem", lambda: None)
        samples, _ = scraped(server.url)
        assert not values(samples, "memstate_slots", "owner", "draft")
        assert values(samples, "memstate_slots", "owner", "target")


def test_a_rank_is_that_of_the_tiers() -> None:
    mem = manager(below=True)
    assert mem.tiers is not None
    object.__setattr__(mem.tiers.settings, "rank", 1)  # as if this were rank 1; there is no group of ranks
    assert next(iter(metrics.collector(mem).collect())).samples[0].labels["rank"] == "1"


def test_a_collector_goes_into_any_registry_once() -> None:
    mem = manager()
    registry = metrics.registry(mem)
    assert registry.get_sample_value("memstate_claims_total", {"manager": "main", "rank": "0"}) == 0
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(metrics.collector(mem))
    assert not [name for name in REGISTRY._names_to_collectors if name.startswith("memstate")]


def test_a_closed_server_leaves_port_and_calls_free() -> None:
    mem = manager()
    with metrics.serve(mem, 0, steps=True) as server:
        assert type(mem) is not ms.StateManager and repr(server) == f"FigureServer({server.url})"
        with pytest.raises(ms.InvalidArgument, match="timed already"):
            metrics.collector(mem, steps=True)
        with pytest.raises(ms.InvalidArgument, match=f"port={server.port}.*choose another"):
            metrics.serve(mem, server.port)
    assert type(mem) is ms.StateManager
    with metrics.serve(mem, server.port, steps=True) as other:
        server.close()  # the first server has ended already; this call must not end the second one
        turn(mem, 1)
        assert scraped(other.url)[0]["memstate_step_host_seconds_count", MAIN] > 0


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda mem: metrics.serve(mem, -1), "port=-1: expected 0 to 65535"),
        (lambda mem: metrics.serve(mem, 65536), "port=65536"),
        (lambda mem: metrics.serve(mem, 0, address=None, steps=True), "address=None: expected a text"),
        (lambda mem: metrics.serve(mem, 0, address="a" * 70, steps=True), "address='aaa.*choose another"),
        (lambda mem: metrics.collector({"\ud800": mem}, steps=True), "it has surrogates"),
        (lambda mem: metrics.collector(None), "None: expected a StateManager"),
        (lambda mem: metrics.collector({}), "expected a StateManager"),
        (lambda mem: metrics.collector({"a": mem, "b": 3}), "expected a StateManager"),
        (lambda mem: metrics.collector(mem, tenant="a"), "tenant='a': expected a function"),
        (lambda mem: metrics.collector(mem, top=0), "top=0: expected a number of tenants"),
        (lambda mem: metrics.collector({"a": mem, "b": mem}, steps=True), "timed already"),
    ],
)
def test_a_wrong_argument_is_refused_and_nothing_is_timed(call: Callable[[Any], object], says: str) -> None:
    mem = manager()
    with pytest.raises(ms.InvalidArgument, match=says):
        call(mem)
    assert type(mem) is ms.StateManager


def test_a_tenant_that_fails_costs_no_figure(caplog: pytest.LogCaptureFixture) -> None:
    names: dict[object, Callable[[], Any]] = {"fails": lambda: 1 / 0, "number": lambda: 7, "odd": lambda: '\ud800"\n'}
    mem = manager(slots=20)
    turn(mem, 1, "fails")  # this state is cached before the export begins
    with metrics.serve(mem, 0, tenant=lambda salt: names[salt]()) as server:
        turn(mem, 2, "number")
        turn(mem, 3, "odd")
        samples, _ = scraped(server.url)
    assert values(samples, "memstate_tenant_slots", "tenant") == {"unknown": 1, "7": 1, '\\ud800"\n': 1}
    (event,) = [record.memstate for record in caplog.records if hasattr(record, "memstate")]
    assert event == {"event": "tenant failed", "why": "ZeroDivisionError"}, "the salt stays here"


def test_a_broken_manager_is_exported_once_it_is_mended() -> None:
    mem = manager()
    with pytest.raises(KeyboardInterrupt), mem._parts.guard.changing("plan"):
        raise KeyboardInterrupt
    with pytest.raises(ms.Broken, match="recover"):
        metrics.collector(mem, steps=True)
    mem.recover()
    assert type(mem) is ms.StateManager and list(metrics.collector(mem).collect())


def test_a_missing_client_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(
        ms.ConfigurationError, match=r"metrics need prometheus_client: pip install '\.\[metrics\]' in a checkout"
    ):
        metrics.serve(manager(), 0)


def test_O2_a_scrape_asks_nothing_of_the_device() -> None:
    mem = manager(below=True)
    turn(mem, 1)
    mem.admit([ms.Request("waits", tokens=[1, 2, 3])])  # this call leaves a packet that is not sent
    registry = CollectorRegistry()
    before = mem.stats()
    registry.register(metrics.collector(mem, tenant=str, steps=True))
    for _ in range(3):
        list(registry.collect())
    assert mem.stats() == before and bool(inside.commands(mem).queue)
