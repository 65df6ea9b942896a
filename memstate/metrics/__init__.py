"""Figures of running managers for Prometheus, and a Grafana dashboard of them.

serve, registry, collector    Prometheus (extra `metrics`)
FIGURES                       the table of all figures that are exported; docs/metrics.md explains each

Export costs the loop of a manager nothing: a scrape reads counts of the host, in the scraper's thread. It launches
nothing and never waits for the device. Only `steps=True` adds to each call: two looks at the clock.
"""

from memstate.metrics.prometheus import Collector, FigureServer, collector, registry, serve
from memstate.metrics.table import FIGURES, Figure

__all__ = ["FIGURES", "Collector", "Figure", "FigureServer", "collector", "registry", "serve"]
