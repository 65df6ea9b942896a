"""Recorded work: requests with their times, their lengths and which prefixes they share, read from files or made up.

Knows no model, no engine and no cache: what a trace costs is for others to find out.
"""

from memstate.cli.traces.form import BLOCK, TraceRequest

__all__ = ["BLOCK", "TraceRequest"]
