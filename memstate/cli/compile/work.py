"""What one row of a batch takes from a decode kernel: programs and bytes, from the constants of its launch."""

from collections.abc import Callable
from math import ceil
from typing import Any, NamedTuple

from memstate.kernels.catalog import CompileCase

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


class Work(NamedTuple):
    """What one row of a batch takes: programs, bytes of state read and written, bytes of inputs and outputs."""

    programs: int
    state: int
    tokens: int


def work_of(case: CompileCase) -> Work | None:
    """Returns what a row with one token takes; None unless the case is an ordinary launch of a decode kernel.

    Ordinary are launches that store to slots, of a state in fp32 or bf16.
    """
    if case.rare or "fp16" in case.name or case.name.endswith(("_window", "_marks")):
        return None
    size = {name: BYTES[kind[1:]] for name, kind in case.signature.items() if kind[1:] in BYTES}
    return next((of(case.constexprs, size) for name, of in WORK.items() if case.name.startswith(name)), None)


Sizes = dict[str, Any]


def _delta(sizes: Sizes, size: dict[str, int]) -> Work:
    """One row of the gated delta step."""
    heads, key, value = sizes["HEADS"], sizes["KEY"], sizes["VALUE"]
    rates = heads * (key if sizes["PER_KEY"] else 1)
    keys = sizes["KEY_HEADS"] * key
    tokens = keys * (size["q_ptr"] + size["k_ptr"]) + heads * value * (size["v_ptr"] + size["out_ptr"])
    tokens += rates * size["decay_ptr"] + heads * size["beta_ptr"]
    return Work(heads * ceil(value / sizes["BLOCK_V"]), 2 * heads * key * value * size["state_ptr"], tokens)


def _selective(sizes: Sizes, size: dict[str, int]) -> Work:
    """One row of the selective step."""
    heads, dim, state = sizes["HEADS"], sizes["DIM"], sizes["STATE"]
    tokens = heads * dim * (size["x_ptr"] + size["z_ptr"] + size["out_ptr"])
    tokens += heads * (1 if sizes["TIED"] else dim) * size["dt_ptr"]
    tokens += sizes["GROUPS"] * state * (size["b_ptr"] + size["c_ptr"])
    return Work(heads * ceil(dim / sizes["BLOCK_D"]), 2 * heads * dim * state * size["state_ptr"], tokens)


def _conv(sizes: Sizes, size: dict[str, int]) -> Work:
    """One row of the convolution step."""
    channels = sizes["CHANNELS"]
    state = 2 * channels * (sizes["TAPS"] - 1) * size["state_ptr"]
    return Work(ceil(channels / sizes["BLOCK"]), state, channels * (size["x_ptr"] + size["out_ptr"]))


WORK: dict[str, Callable[[Sizes, dict[str, int]], Work]] = {  # how the names of cases begin -> what a row takes
    "gated_delta_step_": _delta, "selective_step_": _selective, "conv_step_": _conv,
}  # fmt: skip
