"""Finds launch configurations: each is checked against the reference, then timed, or ranked by what it compiles to."""

from memstate.cli.tune.record import document, require_folder, store, table
from memstate.cli.tune.trials import KERNELS, Outcome, Trial, sweep

__all__ = ["KERNELS", "Outcome", "Trial", "document", "require_folder", "store", "sweep", "table"]
