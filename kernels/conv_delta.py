"""Launches a convolution step and a gated delta step that overlap: the second begins before the first ends.

The second launch loads its tile of the state while the first computes q, k and v, and waits before it reads anything
else. The first waits for all earlier launches before it lets the second begin: so the state is complete.
"""

from typing import Any

from torch import Tensor

from memstate.kernels import conv as of_conv
from memstate.kernels import gated_delta as of_delta
from memstate.kernels.decode_checks import check_conv_delta
from memstate.kernels.warps import overlaps


def conv_delta_step(conv: tuple[Any, ...], delta: tuple[Any, ...]) -> Tensor:
    """Launches the op; see `memstate.kernels.reference.conv_delta.conv_delta_step`."""
    conv, delta, first, second = check_conv_delta(conv, delta)
    forms = ("ahead", "behind") if overlaps() else ("", "")
    of_conv.launched(first, conv, forms[0])
    return of_delta.launched(second, delta, forms[1])
