"""Figures of running managers for Prometheus, and a Grafana dashboard of them.

serve, registry, collector    Prometheus (extra `metrics`)
FIGURES                       the one table of figures that it reads; docs/metrics.md explains each

A manager that is not exported pays nothing. One that is pays at each scrape, not in its steps: a scrape reads counts of
the host in its own thread. It launches nothing and never waits for the device. Only `steps=True` adds to each call: two
looks at the clock.
"""

from memstate.metrics.prometheus import Collector, Server, collector, registry, serve
from memstate.metrics.table import FIGURES, Figure

__all__ = ["FIGURES", "Collector", "Figure", "Server", "collector", "registry", "serve"]
