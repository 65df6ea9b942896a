"""Exports figures through OpenTelemetry, where it is installed: an observable instrument for each of the table."""

import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from memstate.errors import ConfigurationError, InvalidArgument
from memstate.metrics.prometheus import Managers, sources_of
from memstate.metrics.reading import Reading, Source
from memstate.metrics.steps import BOUNDS
from memstate.metrics.table import COMMON, FIGURES, STEP, Figure, Sample

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter

FRESH = 0.1  # seconds for which one reading serves the instruments of one collection
NO_HISTOGRAM = (("le",), (), ())  # labels of `_bucket`, `_sum` and `_count`


class Readings:
    """Reads each manager once for all instruments of a collection.

    Args:
        sources: what reads each manager, by name.
    """

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources, self._at = sources, -FRESH
        self._found: list[tuple[tuple[str, str], Reading]] = []

    def now(self) -> list[tuple[tuple[str, str], Reading]]:
        """Returns the readings of all managers that there still are, each with the values of `COMMON`."""
        if time.monotonic() - self._at > FRESH:
            read = [((name, source.rank), source.read()) for name, source in self._sources.items()]
            self._found = [(labels, reading) for labels, reading in read if reading is not None]
            self._at = time.monotonic()
        return self._found


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
    readings = Readings(sources_of(mem, tenant, top, steps))

    def callback(names: Iterable[str], read: Callable[[Reading], Iterable[Sample]]) -> list[Callable[[Any], Any]]:
        labels = (*COMMON, *names)

        def observed(options: Any) -> Iterable[Any]:
            return [
                Observation(value, dict(zip(labels, (*common, *values), strict=True)))
                for common, reading in readings.now()
                for values, value in read(reading)
            ]

        return [observed]

    for figure in FIGURES:
        if figure.name == STEP:
            for ending, names in zip(("bucket", "sum", "count"), NO_HISTOGRAM, strict=True):
                meter.create_observable_counter(
                    f"{STEP}_{ending}", callback(names, _HISTOGRAM[ending]), description=figure.help
                )
            continue
        create = meter.create_observable_gauge if figure.kind == "gauge" else meter.create_observable_counter
        create(figure.name, callback(figure.labels, figure.read), _unit(figure), figure.help)


def _unit(figure: Figure) -> str:
    return "s" if "seconds" in figure.name else "By" if "bytes" in figure.name else "1"


def _buckets(reading: Reading) -> Iterable[Sample]:
    if reading.steps is None:
        return []
    bounds = [*map(str, BOUNDS), "+Inf"]
    return [((bound,), count) for bound, count in zip(bounds, accumulate(reading.steps.buckets), strict=True)]


def _sum(reading: Reading) -> Iterable[Sample]:
    return [((), reading.steps.total)] if reading.steps is not None else []


def _count(reading: Reading) -> Iterable[Sample]:
    return [((), sum(reading.steps.buckets))] if reading.steps is not None else []


_HISTOGRAM: Mapping[str, Callable[[Reading], Iterable[Sample]]] = {"bucket": _buckets, "sum": _sum, "count": _count}
