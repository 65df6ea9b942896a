"""The same figures through OpenTelemetry."""

import sys

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

import memstate as ms
from memstate import metrics
from memstate.metrics import otel
from memstate.metrics.reading import Source
from memstate.metrics.table import STEP
from tests.support.metered import manager, turn


def test_a_meter_has_the_figures_that_prometheus_has(monkeypatch: pytest.MonkeyPatch) -> None:
    mem, reads = manager(below=True, sessions=ms.SessionLimits(clock=lambda: 0.0)), list[Source]()
    turn(mem, 1, "a")
    own = Source.read
    reader = InMemoryMetricReader()
    meter = MeterProvider([reader]).get_meter("test")
    metrics.observe(mem, meter, tenant=str, steps=True)
    mem.settle(mem.plan(mem.admit([ms.Request("b", tokens=[1])])))
    monkeypatch.setattr(otel, "FRESH", 10.0)  # however slow the machine is
    monkeypatch.setattr(Source, "read", lambda source: reads.append(source) or own(source))
    collected = reader.get_metrics_data()
    assert collected is not None and len(reads) == 1, "one reading serves all instruments"
    found = {
        (metric.name, frozenset((point.attributes or {}).items())): point.value
        for metric in collected.resource_metrics[0].scope_metrics[0].metrics
        for point in metric.data.data_points
    }
    expected = {
        (family.name if family.type != "histogram" else sample.name, frozenset(sample.labels.items())): sample.value
        for family in metrics.collector(mem, tenant=str).collect()
        for sample in family.samples
    }
    of_steps = {name for name, _ in found} - {name for name, _ in expected}
    assert of_steps == {f"{STEP}_{ending}" for ending in ("bucket", "sum", "count")} | {"memstate_call_seconds"}
    assert {key: value for key, value in found.items() if key[0] not in of_steps} == expected
    common = {("manager", "main"), ("rank", "0")}
    assert (
        found[f"{STEP}_count", frozenset(common)] == found[f"{STEP}_bucket", frozenset({*common, ("le", "+Inf")})] == 1
    )


def test_without_opentelemetry_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ms.ConfigurationError, match="observe needs opentelemetry"):
        metrics.observe(manager())


def test_wrong_managers_and_meters_are_refused_and_nothing_is_timed() -> None:
    mem = manager()
    with pytest.raises(ms.InvalidArgument, match="meter='x': expected a Meter"):
        metrics.observe(mem, "x", steps=True)  # type: ignore[arg-type]
    assert type(mem) is ms.StateManager
    with pytest.raises(ms.InvalidArgument, match="expected a StateManager"):
        metrics.observe("mem")  # type: ignore[arg-type]
