"""Sweeps launch configurations, of memstate's kernels and of one's own: from a notebook, a program or a command.

Each configuration is checked against a reference. Then it is timed on a GPU or, without one, ranked by compiled code.
"""

from memstate.kernels.own import Kernel
from memstate_tools.maker import Maker
from memstate_tools.tuning.outcome import Sweep
from memstate_tools.tuning.result import Trial
from memstate_tools.tuning.sweep import sweep

__all__ = ["Kernel", "Maker", "Sweep", "Trial", "sweep"]
