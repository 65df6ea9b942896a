"""The causal convolution step over read, write and snapshot slots. Knows no register, no strategy and no other layer.

One program advances a block of channels of one row through all tokens, with the window of inputs in registers between
one load and one store, so it may write the slot that it read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from memstate.kernels.catalog import CompileCase
from memstate.kernels.decode_inputs import ACCESS_BYTES, stride_unit
from memstate.kernels.reference.conv import check_arguments

if not __name__.startswith("memstate."):
    raise ImportError("import memstate.kernels.conv, not kernels.conv: a second copy would duplicate every kernel")

# Held by one warp: four taps of 16 bytes for each of 64 lanes, the widest warp there is. More would spill.
WINDOW_BYTES = 4096
OPTIONS = {"enable_fp_fusion": False}  # rounding as written, whatever the Triton version


@triton.jit(do_not_specialize=["read_ptr", "write_ptr", "snapshot_ptr", "tokens_ptr", "max_tokens", "stride_units"])
def _conv_step(
    x_ptr, weight_ptr, bias_ptr, state_ptr, out_ptr, read_ptr, write_ptr, snapshot_ptr, tokens_ptr,
    max_tokens, stride_units,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, UNIT: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS

    write = tl.maximum(tl.load(write_ptr + row), 0).to(tl.int64)
    real = write > 0
    read = tl.where(real, tl.maximum(tl.load(read_ptr + row), 0).to(tl.int64), 0)
    snapshot = tl.where(real, tl.maximum(tl.load(snapshot_ptr + row), 0).to(tl.int64), 0)
    count = tl.where(real, tl.minimum(tl.load(tokens_ptr + row).to(tl.int32), max_tokens), 0)

    # A multiple of UNIT that the compiler can see to be one: otherwise the accesses to the state become narrow.
    slot_stride = stride_units.to(tl.int64) * UNIT
    # The narrowest type that holds inputs and window exactly: registers are what limits the block.
    held: tl.constexpr = x_ptr.dtype.element_ty if x_ptr.dtype == state_ptr.dtype else tl.float32
    # Masks of a block and a scalar by `where`: `&` of the two is no mask in the interpreter of Triton 3.9.
    window_ptr = state_ptr + channel
    window = ()
    weights = ()
    for tap in tl.static_range(TAPS):
        weights += (tl.load(weight_ptr + channel * TAPS + tap, mask=inside, other=0.0),)
        if tap < TAPS - 1:
            old = tl.load(
                window_ptr + read * slot_stride + tap * CHANNELS, mask=tl.where(read > 0, inside, False), other=0.0
            )
            window += (old.to(held),)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    else:
        bias = tl.zeros([BLOCK], tl.float32)

    for t in range(count):
        at = (row * max_tokens + t) * CHANNELS + channel
        window += (tl.load(x_ptr + at, mask=inside, other=0.0).to(held),)
        y = bias
        for tap in tl.static_range(TAPS):
            y = y + weights[tap].to(tl.float32) * window[tap].to(tl.float32)
        if SILU:
            y = y / (1 + tl.exp(-y))
        tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=inside)
        window = window[1:]

    for t in range(tl.maximum(count, 0), max_tokens):
        at = (row * max_tokens + t) * CHANNELS + channel
        tl.store(out_ptr + at, 0.0, mask=inside)

    for tap in tl.static_range(TAPS - 1):
        new = window[tap].to(state_ptr.dtype.element_ty)
        tl.store(window_ptr + write * slot_stride + tap * CHANNELS, new, mask=tl.where(real, inside, False))
        tl.store(window_ptr + snapshot * slot_stride + tap * CHANNELS, new, mask=tl.where(snapshot > 0, inside, False))


def block_channels(channels: int, taps: int, itemsize: int) -> int:
    """Channels of one program, a power of two."""
    return min(triton.next_power_of_2(channels), max(1, WINDOW_BYTES // (triton.next_power_of_2(taps) * itemsize)))


def conv_step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    read: Tensor,
    write: Tensor,
    snapshot: Tensor,
    tokens: Tensor,
    activation: str | None = "silu",
    out: Tensor | None = None,
) -> Tensor:
    """Advances the window of every row by its tokens, in order, and returns the convolution at each of them.

    Per token: y[t] = activation(bias + sum over w of weight[w] x[t - (tap - 1) + w]), each channel on its own, added up
    from the bias on with the oldest input first (the short causal convolution in the block of Mamba: Gu, Dao 2023,
    arXiv:2312.00752).

    x: `batch token channel`; weight: `channel tap`, at least 2 taps; bias: `channel` or None; all contiguous.
    state: one layer, `slot tap-1 channel`, the last inputs with the oldest first, fp32, bf16 or fp16, slots any stride
    apart. Arithmetic is fp32, and inputs are rounded to the dtype of the state once, when it is stored: with a state
    that holds them exactly, the bits do not depend on how a prompt is cut into chunks.
    read, write, snapshot: slots, int32 `batch`. The window is read at `read`, and stored at `write` and, unless that is
    null, at `snapshot`. 0 or negative is null: a null read is zeros, a row with a null write changes nothing and its
    output is zeros. They may coincide within a row; across rows the slots stored are distinct, and none is another
    row's `read`.
    tokens: int32 `batch`; row b has tokens[b] <= token real tokens and the output of the others is zeros; none copies
    the window through.
    activation: "silu" or None. out: where the output goes, `batch token channel`; given, nothing is allocated.

    Returns `out`. Changes: state. Syncs: no. Raises: ValueError where a shape, dtype or stride does not fit.
    """
    check_arguments(x, weight, bias, state, read, write, snapshot, tokens, activation, out)
    out = torch.empty_like(x) if out is None else out
    batch, max_tokens, channels = x.shape
    if batch == 0:
        return out
    unit = stride_unit(state)
    block = block_channels(channels, weight.shape[1], state.element_size())
    _conv_step[(triton.cdiv(channels, block), batch)](
        x, weight, bias, state, out, read, write, snapshot, tokens, max_tokens, state.stride(0) // unit,
        CHANNELS=channels, TAPS=weight.shape[1], UNIT=unit, SILU=activation == "silu", BLOCK=block,
        num_warps=1, **OPTIONS,
    )  # fmt: skip
    return out


def compile_cases() -> list[CompileCase]:
    """The launches to compile ahead: 8192 channels, 4 taps, bf16 inputs, one case per dtype of the state."""
    inputs = ("x_ptr", "weight_ptr", "bias_ptr", "out_ptr")
    signature = (
        dict.fromkeys(inputs, "*bf16")
        | dict.fromkeys(("read_ptr", "write_ptr", "snapshot_ptr", "tokens_ptr"), "*i32")
        | {"max_tokens": "i32", "stride_units": "i32"}
    )
    shape = {"CHANNELS": 8192, "TAPS": 4, "SILU": True}
    return [
        CompileCase(
            f"conv_step_{dtype}", _conv_step, signature | {"state_ptr": f"*{dtype}"},
            shape | {"UNIT": ACCESS_BYTES // itemsize, "BLOCK": block_channels(8192, 4, itemsize)},
            (*inputs, "state_ptr"), 1, ("state_ptr",), OPTIONS,
        )
        for dtype, itemsize in (("fp32", 4), ("bf16", 2), ("fp16", 2))
    ]  # fmt: skip
