"""Fetches the figures of a process, and parses them with the parser of Prometheus's official client."""

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from memstate.cli.fetch import fetch
from memstate.errors import ConfigurationError, InvalidArgument

LARGEST = 16 << 20  # bytes of one scrape
MOST = 1e18  # largest figure that is accepted: far above any real count, and sums of such figures stay finite
Labels = frozenset[tuple[str, str]]


@dataclass
class Figures:
    """The samples of one manager.

    Attributes:
        values: value of each sample by its name and labels; the labels `manager` and `rank` are left out.
    """

    values: dict[tuple[str, Labels], float] = field(default_factory=dict)

    def total(self, name: str, **labels: str) -> float:
        """Returns the sum over all samples of a name that have these labels.

        Args:
            name: name of the samples.
            labels: labels and their values.
        """
        return sum(self.by(name, "", **labels).values())

    def count(self, name: str, **labels: str) -> int:
        """Returns `total` as a whole number."""
        return int(self.total(name, **labels))

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Returns the sums over all samples of a name, for each value of a label.

        Args:
            name: name of the samples.
            label: name of the label whose values separate the sums.
            labels: other labels that the samples must have.
        """
        sums: defaultdict[str, float] = defaultdict(float)
        wanted = set(labels.items())
        for (of, has), value in self.values.items():
            if of == name and wanted <= has:
                sums[dict(has).get(label, "")] += value
        return dict(sums)

    def counts(self, name: str, label: str, **labels: str) -> dict[str, int]:
        """Returns `by` as whole numbers."""
        return {value: int(total) for value, total in self.by(name, label, **labels).items()}

    def label(self, name: str, label: str) -> str:
        """Returns the value of a label in the first sample of a name; empty if there is no such sample."""
        return next((dict(has).get(label, "") for of, has in self.values if of == name), "")

    def since(self, before: "Figures") -> "Figures":
        """Returns how much each sample has grown. A counter that was reset counts from 0.

        Args:
            before: an earlier scrape.
        """
        was = {key: before.values.get(key, 0.0) for key in self.values}
        return Figures({key: value - was[key] if value >= was[key] else value for key, value in self.values.items()})


@dataclass(frozen=True)
class Scrape:
    """The samples of one scrape.

    Attributes:
        at: time of the scrape, in seconds of a monotonic clock.
        managers: figures of each manager, by the pair (name of the manager, rank).
    """

    at: float
    managers: Mapping[tuple[str, str], Figures]


def parse(text: str, source: str, at: float = 0.0) -> Scrape:
    """Parses the text of a scrape.

    Args:
        text: what the process exports, in Prometheus's text format.
        source: URL of the text, for errors.
        at: time of the scrape, in seconds of a monotonic clock.

    Raises:
        ConfigurationError: the official client is not installed.
        InvalidArgument: the text has another format, or has no figures of memstate.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"memstate top needs {error.name}: pip install '.[cli,metrics]' in a checkout of memstate"
        ) from error
    managers: defaultdict[tuple[str, str], Figures] = defaultdict(Figures)
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = dict(sample.labels)
                name = labels.pop("manager", ""), labels.pop("rank", "")
                if sample.name.startswith("memstate_"):
                    if not 0 <= sample.value < MOST:
                        raise ValueError(f"{sample.name} is {sample.value}, expected a number from 0 to {MOST:.0e}")
                    managers[name].values[sample.name, frozenset(labels.items())] = sample.value
    except (ValueError, KeyError, IndexError) as error:
        raise InvalidArgument(f"{source!r}: not the text format of Prometheus: {error}") from error
    if not managers:
        raise InvalidArgument(
            f"{source!r}: no figures of memstate there; export them with memstate.metrics.serve(mem), and name its URL"
        )
    return Scrape(at, dict(sorted(managers.items())))


def scrape(url: str) -> Scrape:
    """Fetches and parses the figures at a URL.

    Args:
        url: the URL, such as http://127.0.0.1:9470/metrics.

    Raises:
        ConfigurationError: the official client is not installed.
        InvalidArgument: the URL cannot be fetched, or does not have figures of memstate.
    """
    body = fetch(url, LARGEST)
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{url!r}: not the text format of Prometheus: {error}") from error
    return parse(text, url, time.monotonic())
