"""A decode loop that embeds memstate, and its comparison with a run without a cache."""

from memstate_tools.demo.config import DemoConfig
from memstate_tools.demo.report import DemoReport
from memstate_tools.demo.run import run
from memstate_tools.demo.sentences import sentences

__all__ = ["DemoConfig", "DemoReport", "run", "sentences"]
