"""Writes the Grafana dashboard of the figures: `python -m memstate.metrics.dashboard > grafana.json`.

Grafana asks for the Prometheus data source when it imports the file. Variables choose managers and ranks. To change the
dashboard, edit it in Grafana and export it to `grafana.json` beside this file.
"""

import sys
from pathlib import Path
from typing import Final

DASHBOARD: Final = Path(__file__).with_name("grafana.json")

if __name__ == "__main__":
    sys.stdout.write(DASHBOARD.read_text("utf-8"))
