"""Finds launch configurations: checks each against the reference, then times it or ranks it by its compiled code."""

from memstate_tools.tune.record import document, require_folder, store, table
from memstate_tools.tune.trials import KERNELS, SweepResult, TuneTrial, sweep

__all__ = ["KERNELS", "SweepResult", "TuneTrial", "document", "require_folder", "store", "sweep", "table"]
