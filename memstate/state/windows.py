"""Refuses the bytes of a speculative step that do not fit the planes. Knows no row.

states   layer batch step ...              the state after each of the step's tokens
inputs   layer batch tap-1+step channel    for a convolution: every input once; the state after a tokens is a : a+tap-1
"""

from torch import Tensor

from memstate.errors import InvalidArgument
from memstate.state.layout import Plane
from memstate.state.planes import Planes, holds_states
from memstate.state.regions import require_no_grad


def require(planes: Planes, windows: dict[str, Tensor], batch: int, tokens: int) -> None:
    """Refuses windows that are not one fitting tensor a plane.

    Args:
        planes: what the windows are scattered to.
        windows: plane name -> states or inputs.
        batch: entries of the step.
        tokens: the most tokens of an entry.

    Raises:
        InvalidArgument: naming the plane and the numbers.
    """
    needed = {plane.name: plane for plane in planes.layout.planes}
    if set(windows) != set(needed):
        raise InvalidArgument(f"windows of planes {sorted(windows)}: every plane needs one, {sorted(needed)}")
    for name, window in windows.items():
        plane = needed[name]
        if not isinstance(window, Tensor) or window.device != planes.device:
            where = window.device if isinstance(window, Tensor) else repr(window)
            raise InvalidArgument(f"window of plane {name} on {where}: expected a tensor on {planes.device}")
        require_no_grad(f"window of plane {name}", window)
        held = (planes.layout.layers_of(plane), batch)
        if holds_states(plane, window):
            fits = window.shape[:2] == held and window.shape[2] >= tokens and window.shape[3:] == plane.shape
        else:
            taps, channels = _taps_and_channels(plane, window)
            fits = window.shape[:2] == held and window.shape[2] >= taps + tokens and window.shape[3] == channels
        if not fits or window.dtype != plane.dtype or not window.is_contiguous():
            raise InvalidArgument(
                f"window of plane {name}: {window.dtype} {tuple(window.shape)} with strides {window.stride()}; "
                f"expected contiguous {plane.dtype}, {(*held, tokens, *plane.shape)} or more steps, or the inputs of "
                "a convolution, `layer batch tap-1+step channel`"
            )


def _taps_and_channels(plane: Plane, window: Tensor) -> tuple[int, int]:
    """How a plane of conv inputs is laid out: the taps it keeps and its channels. Raises: InvalidArgument."""
    if len(plane.shape) != 2 or window.dim() != 4:
        raise InvalidArgument(
            f"window of plane {plane.name}: {tuple(window.shape)} for a state of {plane.shape}: expected one more axis "
            "for the step, or for a convolution `layer batch tap-1+step channel`"
        )
    first, second = plane.shape
    return (first, second) if window.shape[3] == second else (second, first)
