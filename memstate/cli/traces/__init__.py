"""Traces: requests with their times, their lengths and the prefixes they share.

The package uses no model, no engine and no cache; `memstate replay` measures what a trace costs.
"""

from memstate.cli.traces.form import BLOCK, TraceRequest

__all__ = ["BLOCK", "TraceRequest"]
