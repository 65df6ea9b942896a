"""Counts of the connector, as vLLM's connector statistics and as Prometheus metrics."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

HELP = {
    "saved": "Blocks that reached host memory",
    "refused": "Blocks that host memory had no room for, or that vLLM gave to others before they were packed",
    "loaded": "Blocks that came up, with those from the store",
    "fetched": "Blocks that came up from the store",
    "lost": "Loads that failed: vLLM computes what did not come",
    "written": "Blocks that the store was given",
}


class Statistics(KVConnectorStats):
    """Counts since the last report, under the names of `scheduler.ConnectorCounts`."""

    def reset(self) -> None:
        """Sets all counts to 0."""
        self.data: dict[str, int] = {}

    def aggregate(self, other: KVConnectorStats) -> "Statistics":
        """Adds counts of a later interval."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """Returns name -> count, with the names that vLLM's log shows."""
        return {f"memstate {name}": count for name, count in self.data.items()}

    def is_empty(self) -> bool:
        """Returns whether all counts are 0."""
        return not any(self.data.values())


class PrometheusCounts(KVConnectorPromMetrics):
    """The counters `vllm:memstate_..._total` of each engine.

    Args:
        vllm_config: vLLM's configuration.
        metric_types: vLLM's classes of metrics.
        labelnames: Names of the labels that all metrics of vLLM have.
        per_engine_labelvalues: Engine -> values of these labels.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counters = {name: self._counter_cls(f"vllm:memstate_{name}", text, labelnames) for name, text in HELP.items()}
        self._counters = {
            engine: {name: counter.labels(*values) for name, counter in counters.items()}
            for engine, values in per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds the counts of an interval."""
        for name, count in transfer_stats_data.items():
            self._counters[engine_idx][name].inc(count)
