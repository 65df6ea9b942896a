"""Computes a convolution step, then a gated delta step, in plain torch."""

from typing import Any

from torch import Tensor

from memstate.kernels.decode_checks import check_conv_delta
from memstate.kernels.reference.conv import conv_step
from memstate.kernels.reference.gated_delta import gated_delta_step


def conv_delta_step(conv: tuple[Any, ...], delta: tuple[Any, ...]) -> Tensor:
    """Does `conv_step(*conv)`, then `gated_delta_step(*delta)`, with the same bits.

    q, k and v of the second step are slices of `out` of the first. Call this op where nothing else runs between the two
    steps. It makes two launches. On NVIDIA's devices from sm_90 on, the second launch begins before the first ends, and
    loads states meanwhile. Both steps are checked before a byte changes.

    Args:
        conv: arguments of `conv_step`, in order, with `out`. Optional ones at the end may be left out.
        delta: arguments of `gated_delta_step`, in order, of the same step: `read`, `write`, `snapshot`, `tokens` and
            `marks` are the same tensors as in `conv`.

    Returns:
        `out` of the gated delta step. Changes: both states, both tails, and `out` of the convolution.

    Raises:
        ValueError: one of the two ops refuses its arguments; the steps have different columns or marks; q, k or v is no
            slice of `out`; or the state of the gated delta step shares bytes with what the convolution writes.

    Syncs: no (the reference: yes, it reads the slots).
    """
    conv, delta, *_ = check_conv_delta(conv, delta)
    conv_step(*conv)
    return gated_delta_step(*delta)
