"""Figures of running managers for Prometheus, and a Grafana dashboard of them.

serve, registry, collector    Prometheus (extra `metrics`)
FIGURES                       the table of all exported figures; docs/metrics.md explains them

Export costs the loop of a manager no time: another thread reads counts of the host when Prometheus asks. It launches
nothing and never waits for the device. Only `steps=True` makes each call slower, by reading the clock twice.
"""

from memstate.metrics.prometheus import Collector, FigureServer, collector, registry, serve
from memstate.metrics.table import FIGURES, Figure

__all__ = ["FIGURES", "Collector", "Figure", "FigureServer", "collector", "registry", "serve"]
