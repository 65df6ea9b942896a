"""A decode loop that embeds memstate, and the comparison with a run that caches nothing."""

from memstate.demo.config import DemoConfig
from memstate.demo.report import DemoReport
from memstate.demo.run import run

__all__ = ["DemoConfig", "DemoReport", "run"]
