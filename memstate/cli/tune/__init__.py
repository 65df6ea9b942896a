"""Finds launch configurations: each is checked against the reference, then timed, or ranked by compiled cost."""

from memstate.cli.tune.record import document, require_folder, store, table
from memstate.cli.tune.trials import KERNELS, SweepResult, Trial, sweep

__all__ = ["KERNELS", "SweepResult", "Trial", "document", "require_folder", "store", "sweep", "table"]
