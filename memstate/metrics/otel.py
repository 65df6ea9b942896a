"""Exports figures through OpenTelemetry, where it is installed: an observable instrument for each of the table."""

import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from memstate.errors import ConfigurationError, InvalidArgument
from memstate.metrics.prometheus import Managers, read_all, sources_of
from memstate.metrics.reading import Reading
from memstate.metrics.steps import StepTimes
from memstate.metrics.table import COMMON, FIGURES, Figure, Sample

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter

FRESH = 0.1  # seconds for which one reading serves the instruments of one collection
HISTOGRAM: Mapping[str, tuple[tuple[str, ...], Callable[[StepTimes], list[Sample]]]] = {  # counter -> labels, samples
    "bucket": (("le",), lambda times: [((bound,), count) for bound, count in times.cumulative]),
    "sum": ((), lambda times: [((), times.total)]),
    "count": ((), lambda times: [((), sum(times.buckets))]),
}


def observe(
    mem: Managers, meter: "Meter | None" = None, *, tenant: Callable[[Hashable], str] | None = None, top: int = 10,
    steps: bool = False,
) -> None:  # fmt: skip
    """Adds the figures of managers to a meter of OpenTelemetry, under the names that they have in Prometheus.

    Counters have no ending `_total`; exporters add it. OpenTelemetry has no histogram that is read, so that of the
    steps is three counters: `memstate_step_host_seconds_bucket` by `le`, `_sum` and `_count`.

    Instruments cannot be taken back: the figures, and the timing of calls, last as long as the manager.

    Args:
        mem: as for `collector`.
        meter: the meter; None: that of the global provider, under the name "memstate".
        tenant: as for `collector`.
        top: as for `collector`.
        steps: as for `collector`.

    Raises:
        ConfigurationError: OpenTelemetry is not installed.
        InvalidArgument: as for `collector`, or this is no meter.
        Broken: as for `collector`.

    Syncs: no.
    """
    try:
        from opentelemetry import metrics
        from opentelemetry.metrics import Meter, Observation
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"observe needs {error.name}: pip install opentelemetry-sdk") from error
    meter = meter if meter is not None else metrics.get_meter("memstate")
    if not isinstance(meter, Meter):
        raise InvalidArgument(f"meter={meter!r}: expected a Meter of OpenTelemetry, such as provider.get_meter(name)")
    sources, found, at = sources_of(mem, tenant, top, steps), list[tuple[tuple[str, str], Reading]](), -FRESH

    def readings() -> list[tuple[tuple[str, str], Reading]]:
        """Reads each manager once for all instruments of a collection."""
        nonlocal found, at
        if time.monotonic() - at > FRESH:
            found, at = read_all(sources), time.monotonic()
        return found

    def callback(names: Iterable[str], read: Callable[[Reading], Iterable[Sample]]) -> list[Callable[[Any], Any]]:
        labels = (*COMMON, *names)

        def observed(options: Any) -> Iterable[Any]:
            return [
                Observation(value, dict(zip(labels, (*common, *values), strict=True)))
                for common, reading in readings()
                for values, value in read(reading)
            ]

        return [observed]

    for figure in FIGURES:
        if figure.kind != "histogram":
            create = meter.create_observable_gauge if figure.kind == "gauge" else meter.create_observable_counter
            create(figure.name, callback(figure.labels, figure.read), _unit(figure), figure.help)
            continue
        for ending, (names, of) in HISTOGRAM.items():
            read = partial(_timed, of)
            meter.create_observable_counter(f"{figure.name}_{ending}", callback(names, read), description=figure.help)


def _timed(of: Callable[[StepTimes], list[Sample]], reading: Reading) -> list[Sample]:
    return of(reading.steps) if reading.steps is not None else []


def _unit(figure: Figure) -> str:
    return "s" if "seconds" in figure.name else "By" if "bytes" in figure.name else "1"
