"""Leaves files that compile kernels to test_compiling.py, where this process interprets kernels."""

from memstate.kernels import interpreter

COMPILING = ["test_launches.py", "test_own_kernel.py", "test_sweep.py", "test_tune.py"]
collect_ignore = COMPILING if interpreter.interpreted() is not False else []
