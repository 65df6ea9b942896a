"""Checks arguments: the checks that ops share, and the checks of ops on registers. Knows no Triton.

Kernel and reference call the same checks before any byte moves, so both refuse the same arguments. Checks are plain
comparisons of attributes, because every call of an op runs them and a microsecond counts. They read no device memory.
The checks of whole ops are in `decode_checks` (decode steps) and `move_checks` (gather, scatter, records).
"""

from collections.abc import Mapping
from operator import itemgetter

import torch
from torch import Tensor

from memstate.kernels.blocks import PlaneBlocks, tokens_of
from memstate.kernels.tables import HEADER_INTS, Registers, Rules, StepMarks, StepRecord, TailRecord

INTS = (torch.int32, torch.int64)
INT32 = (torch.int32,)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_tensors(tensors: Mapping[str, Tensor | None], *optional: str) -> None:
    """Refuses arguments that are not tensors.

    Args:
        tensors: the arguments by name.
        optional: names of arguments that may be None.

    Raises:
        ValueError: names the first argument that is not a tensor.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) and (tensor is not None or name not in optional):
            raise ValueError(f"{name}: expected a tensor, got {type(tensor).__name__}")


def check_memory(name: str, tensor: Tensor, device: torch.device) -> None:
    """Refuses a tensor on another device, and a negated or conjugated view."""
    if tensor.device != device:
        raise ValueError(f"{name}: expected on {device}, got {tensor.device}")
    if tensor.is_neg() or tensor.is_conj():
        raise ValueError(f"{name}: a negated or conjugated view: use .resolve_neg() or .resolve_conj()")


def check_written(tensors: Mapping[str, Tensor | None], *names: str) -> None:
    """Refuses a tensor that the op writes if it requires grad: autograd would not see the change.

    Args:
        tensors: the arguments by name.
        names: names of the tensors that the op writes.

    Raises:
        ValueError: names the first tensor that requires grad.
    """
    for name in names:
        tensor = tensors[name]
        if tensor is not None and tensor.requires_grad:
            raise ValueError(f"{name}: requires grad, and the op writes to it: use .detach()")


def check_shape(name: str, tensor: Tensor, pattern: str, shape: tuple[int, ...]) -> None:
    """Refuses a tensor of another shape; `pattern` has the axes in einops letters."""
    if tensor.shape != shape:
        raise ValueError(f"{name}: expected `{pattern}` = {shape}, got {tuple(tensor.shape)}")


def check_contiguous(name: str, tensor: Tensor, pattern: str) -> None:
    """Refuses a tensor that is not contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: `{pattern}` must be contiguous, got strides {tensor.stride()}: use .contiguous()")


def check_float(name: str, tensor: Tensor) -> None:
    """Refuses a tensor whose dtype the kernels do not compute with."""
    if tensor.dtype not in FLOATS:
        raise ValueError(f"{name}: expected one of {FLOATS}, got {tensor.dtype}")


def check_sizes(**sizes: int) -> None:
    """Refuses a size below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}: expected a size of at least 1, got {size}")


def check_columns(
    device: torch.device, batch: int | None, kinds: tuple[torch.dtype, ...] = INTS, axis: str = "`batch`", /,
    **columns: Tensor,
) -> None:  # fmt: skip
    """Refuses columns that are not one integer per entry, contiguous and on the device.

    Args:
        device: the device on which the columns must be.
        batch: number of entries that each column must have; None: as many as the first column has.
        kinds: allowed dtypes.
        axis: name of the axis of entries, for errors.
        columns: the arguments by name.

    Raises:
        ValueError: names the first column that does not fit.
    """
    for name, column in columns.items():
        if not isinstance(column, Tensor):
            raise ValueError(f"{name}: expected a tensor of integers, got {type(column).__name__}")
        batch = column.numel() if batch is None else batch
        fits = column.shape == (batch,) and column.is_contiguous() and column.device == device
        if not fits or column.dtype not in kinds:
            known = " or ".join(str(kind).removeprefix("torch.") for kind in kinds)
            raise ValueError(
                f"{name}: expected contiguous {known} {axis} = ({batch},) on {device}, got "
                f"{column.dtype} {tuple(column.shape)} with strides {column.stride()} on {column.device}"
            )


def check_nodes(name: str, nodes: Tensor, device: torch.device, batch: int | None) -> None:
    """Refuses nodes of trees that are not contiguous integers `batch node` on the device.

    Args:
        name: name of the argument.
        nodes: `batch node`.
        device: device of the step.
        batch: entries of the step; None allows any number.

    Raises:
        ValueError: shows what the nodes are instead.
    """
    check_tensors({name: nodes})
    if nodes.dim() != 2 or nodes.shape[0] != (len(nodes) if batch is None else batch) or nodes.dtype not in INTS:
        raise ValueError(
            f"{name}: expected integers `batch node`{'' if batch is None else f' of {batch} entries'}, got "
            f"{nodes.dtype} {tuple(nodes.shape)}"
        )
    check_contiguous(name, nodes, "batch node")
    check_memory(name, nodes, device)


def check_path(device: torch.device, record: TailRecord, nodes: Tensor) -> None:
    """Refuses accepted nodes that do not fit the step in `record`; see `check_nodes`."""
    check_nodes("nodes", nodes, device, None)
    if len(nodes) > len(record.rows):
        raise ValueError(f"nodes: {len(nodes)} entries, the largest batch has {len(record.rows)}")


def check_plan(
    registers: Registers, packet: Tensor, record: StepRecord, marks: StepMarks, rules: Rules, tails: TailRecord | None
) -> None:  # fmt: skip
    """Refuses a plan with a column that does not fit the other columns, or with a packet that is too short for them."""
    if not registers.trusted:
        if not (rules.tail > 0) == (tails is not None) == (registers.pending is not None):
            raise ValueError(f"tails: expected them, and pending tokens of rows, beside rules.tail={rules.tail} alone")
        if tails is not None and registers.pending is not None and registers.newest is not None:
            *columns, batch = tails
            rows = registers.source.numel()
            check_columns(registers.cells.device, 1, INT32, batch=batch)
            check_columns(registers.cells.device, rows, INT32, pending=registers.pending, newest=registers.newest)
            check_columns(registers.cells.device, None, INT32, **dict(zip(TailRecord._fields, columns, strict=False)))
            if tails.rows.numel() < record.rows.numel():
                raise ValueError(f"tails: {tails.rows.numel()} entries for a batch of {record.rows.numel()}")
        check_columns(registers.cells.device, None, INT32, **record._asdict())
        check_marks(registers.cells.device, marks)
        check_batch(registers, packet, 2 * -(-record.rows.numel() // 4) * 4)


def check_marks(device: torch.device, marks: StepMarks) -> None:
    """Refuses marks whose columns do not have the same length, or whose count is not one int32."""
    check_columns(device, 1, INT32, count=marks.count)
    check_columns(device, None, INT32, entry=marks.entry, offset=marks.offset, slot=marks.slot)


def check_batch(registers: Registers, packet: Tensor, ints: int) -> None:
    """Refuses a packet without room for a header and `ints` int32 of a batch."""
    check_columns(registers.cells.device, None, INT32, packet=packet)
    if packet.numel() < HEADER_INTS + ints:
        raise ValueError(f"packet: expected {HEADER_INTS + ints} int32 or more for this batch, got {packet.numel()}")


def check_resolve(registers: Registers, wanted: Tensor, out: Tensor) -> None:
    """Refuses register numbers and an output that are not int32 columns of one length on the registers' device."""
    if not registers.trusted:
        check_columns(registers.cells.device, None, INT32, wanted=wanted, out=out)


def check_audit(registers: Registers, out: Tensor) -> None:
    """Refuses an output of an audit that is not int32 with `capacity + 1` entries, one for each slot and slot 0."""
    if not registers.trusted:
        check_columns(registers.cells.device, registers.capacity + 1, INT32, out=out)


def check_count(n: int) -> None:
    """Refuses a number of slots below 0."""
    if n < 0:
        raise ValueError(f"n: expected at least 0 slots to claim, got {n}")


def check_distinct(name: str, blocks: PlaneBlocks) -> None:
    """Refuses a plane whose blocks overlap: a store to one slot would change another. It has one or two axes."""
    size, shared = blocks.size, False
    for count, stride in blocks.axes:
        shared |= count > 1 and stride < size
    if len(blocks.axes) == 2 and not shared:
        (inner, near), (outer, far) = sorted(blocks.axes, key=itemgetter(1))
        if inner > 1 and outer > 1 and far < (inner - 1) * near + size:  # inner blocks reach beyond the outer stride
            shared = any(
                0 < j < inner and abs(i * far - j * near) < size
                for i in range(1, outer)
                for j in (i * far // near, i * far // near + 1)
            )
    if shared and all(count for count, _ in blocks.axes):
        raise ValueError(
            f"{name}: slots share bytes: blocks of {size} bytes lie {blocks.axes} (count, bytes apart): use .clone()"
        )


def check_apart(name: str, blocks: PlaneBlocks, others: Mapping[str, Tensor | None], *written: str) -> None:
    """Refuses a plane that shares bytes with another tensor, and a tensor that the op writes and that does so.

    The programs of a launch run in any order, so one program could read or overwrite what another program stores.

    Args:
        name: name of the plane.
        blocks: the bytes of the plane.
        others: name -> tensor or None; the plane itself may be among them and is skipped. A tensor is contiguous, or
            `batch token ..` with equal distances between tokens and no gaps inside a token.
        written: names of tensors in `others` that the op writes.

    Raises:
        ValueError: names both tensors and their addresses.
    """
    low, high = blocks.start, blocks.end()
    stores = []
    for out in written:
        if (tensor := others[out]) is not None:
            end = tensor.data_ptr() + tensor.nbytes if tensor.is_contiguous() else tokens_of(tensor).end()
            stores.append((out, tensor.data_ptr(), end))
    for other, tensor in others.items():
        if tensor is None or other == name:
            continue
        start = tensor.data_ptr()
        end = start + tensor.nbytes if tensor.is_contiguous() else tokens_of(tensor).end()
        if start < high and low < end and _meet(blocks, tensor):
            _refuse(other, (start, end), name, (low, high))
        for out, first, last in stores:
            if start < last and first < end and start < end and first < last and other != out:
                stored = others[out]
                if stored is not None and _meet(tokens_of(stored), tensor):
                    _refuse(out, (first, last), other, (start, end))


def _meet(blocks: PlaneBlocks, tensor: Tensor) -> bool:
    """Returns whether a tensor shares bytes with `blocks`; gaps between its tokens do not count."""
    tokens = tokens_of(tensor)
    (count, stride), first = tokens.axes[0], tokens.start
    return not fill_gaps(blocks, tokens) and any(
        blocks.meets(start, start + tokens.size) for start in range(first, first + count * stride, stride)
    )


def fill_gaps(blocks: PlaneBlocks, others: PlaneBlocks) -> bool:
    """Returns whether others lie in the gaps of blocks that are as far apart, as planes of a slot-major arena do."""
    stride = blocks.axes[0][1]
    alike = len(blocks.axes) == 1 and 0 < stride == others.axes[0][1]
    return alike and blocks.size <= (others.start - blocks.start) % stride <= stride - others.size


def _refuse(name: str, span: tuple[int, int], other: str, its: tuple[int, int]) -> None:
    raise ValueError(
        f"{name}: bytes {span[0]:#x}..{span[1]:#x} are shared with {other} at {its[0]:#x}..{its[1]:#x}: "
        f"give {name} memory of its own"
    )
