"""What the decode ops ask of their arguments, checked at the door by kernel and reference alike. Knows no Triton.

Plain comparisons rather than parsed patterns: these run once per layer and step, where a microsecond counts.
"""

import math

import torch
from torch import Tensor

from memstate.kernels.checks import Blocks, check_distinct, check_memory, is_dense

if not __name__.startswith("memstate."):
    raise ImportError(
        "import memstate.kernels.decode_inputs, not kernels.decode_inputs: a second copy would duplicate it"
    )

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ACCESS_BYTES = 16  # the widest load or store of one lane


def check(name: str, tensor: Tensor, pattern: str, shape: tuple[int, ...], device: torch.device) -> None:
    """Raises: ValueError unless the tensor is contiguous, of a known dtype, on a device, and has `shape`."""
    if tensor.shape != shape:
        raise ValueError(f"{name}: expected `{pattern}` = {shape}, got {tuple(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: `{pattern}` must be contiguous, got strides {tensor.stride()}: use .contiguous()")
    if tensor.dtype not in FLOATS:
        raise ValueError(f"{name}: expected one of {FLOATS}, got {tensor.dtype}")
    if tensor.device != device or tensor.is_neg():
        check_memory(name, tensor, device)


def check_state(state: Tensor, pattern: str, shape: tuple[int, ...]) -> Blocks:
    """Where the slots lie. Raises: ValueError unless every slot has `shape`, is contiguous and shares no byte."""
    if state.shape[1:] != shape:
        raise ValueError(f"state: expected `{pattern}` = {('slots', *shape)}, got {tuple(state.shape)}")
    if not is_dense(shape, state.stride()[1:]):
        raise ValueError(f"state: one slot of `{pattern}` must be contiguous, got strides {state.stride()}")
    return check_slots(state, shape)


def check_slots(state: Tensor, shape: tuple[int, ...]) -> Blocks:
    """Where slots lie that are known to be dense. Raises: ValueError for a dtype, or where two slots share bytes."""
    if state.dtype not in FLOATS:
        raise ValueError(f"state: expected one of {FLOATS}, got {state.dtype}")
    if state.is_neg():
        check_memory("state", state, state.device)
    size = state.element_size()
    slots = Blocks(state.data_ptr(), math.prod(shape) * size, ((state.shape[0], state.stride(0) * size),))
    check_distinct("state", slots)
    return slots


def check_window(window: Tensor, state: Tensor, pattern: str, tokens: tuple[int, int]) -> None:
    """Raises: ValueError unless the window holds one state for each of `batch token`, as the slots do."""
    check("window", window, pattern, (*tokens, *state.shape[1:]), state.device)
    if window.dtype != state.dtype:
        raise ValueError(f"window: expected the dtype of the state, {state.dtype}, got {window.dtype}")
    check_address("window", window)


def check_address(name: str, tensor: Tensor) -> None:
    """Raises: ValueError unless lanes can move 16 bytes at a time from the tensor's first element on."""
    if tensor.data_ptr() % ACCESS_BYTES:
        raise ValueError(
            f"{name}: expected to begin at a multiple of {ACCESS_BYTES} bytes, got address {tensor.data_ptr():#x}: "
            "use .clone()"
        )


def stride_unit(state: Tensor) -> int:
    """Elements that one lane may move at a time: the most, up to 16 bytes, that divide the slot stride."""
    return math.gcd(state.stride(0), ACCESS_BYTES // state.element_size())
