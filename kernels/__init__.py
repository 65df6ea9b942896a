"""Triton kernels with their launchers, and in `reference` every op again in plain torch.

This folder is imported as `memstate.kernels` and under no other name. A second copy would compile every kernel again,
and keep tables and counters of its own.
"""

if __name__ != "memstate.kernels":
    raise ImportError(f"import memstate.kernels, not {__name__}: a second copy would duplicate every kernel")
