"""A decode loop that embeds memstate, and the comparison with a run that caches nothing."""

from memstate.cli.demo.config import DemoConfig
from memstate.cli.demo.report import DemoReport
from memstate.cli.demo.run import run
from memstate.cli.demo.sentences import sentences

__all__ = ["DemoConfig", "DemoReport", "run", "sentences"]
