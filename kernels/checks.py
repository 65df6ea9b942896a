"""The words of all argument checks, and the checks of the ops on registers. Knows no Triton.

Kernel and reference refuse the same arguments, by these functions, before anything moves. The checks are plain
comparisons of attributes, because each op runs them once and a microsecond counts. They read nothing from a device.
The checks of whole ops are in `decode_checks` (decode steps) and `move_checks` (gather, scatter, records).
"""

from collections.abc import Mapping
from operator import itemgetter

import torch
from torch import Tensor

from memstate.kernels.blocks import Blocks, tokens_of
from memstate.kernels.tables import HEADER_INTS, Marks, Registers, Rules, StepRecord, TailRecord

INTS = (torch.int32, torch.int64)
INT32 = (torch.int32,)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_tensors(tensors: Mapping[str, Tensor | None], *optional: str) -> None:
    """Refuses what is no tensor.

    Args:
        tensors: the arguments by name.
        optional: names of tensors that can be None.

    Raises:
        ValueError: naming the first.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) and (tensor is not None or name not in optional):
            raise ValueError(f"{name}: expected a tensor, got {type(tensor).__name__}")


def check_memory(name: str, tensor: Tensor, device: torch.device) -> None:
    """Refuses a tensor of another device, or one whose values are not those that its memory holds."""
    if tensor.device != device:
        raise ValueError(f"{name}: expected on {device}, got {tensor.device}")
    if tensor.is_neg() or tensor.is_conj():
        raise ValueError(f"{name}: a negated or conjugated view: use .resolve_neg() or .resolve_conj()")


def check_written(tensors: Mapping[str, Tensor | None], *names: str) -> None:
    """Refuses a tensor that the op writes and that autograd follows: it would not see the change.

    Args:
        tensors: the arguments by name.
        names: tensors that the op writes.

    Raises:
        ValueError: naming the first.
    """
    for name in names:
        tensor = tensors[name]
        if tensor is not None and tensor.requires_grad:
            raise ValueError(f"{name}: requires grad, and the op writes to it: use .detach()")


def check_shape(name: str, tensor: Tensor, pattern: str, shape: tuple[int, ...]) -> None:
    """Refuses a tensor of another shape; pattern: the axes in einops letters."""
    if tensor.shape != shape:
        raise ValueError(f"{name}: expected `{pattern}` = {shape}, got {tuple(tensor.shape)}")


def check_contiguous(name: str, tensor: Tensor, pattern: str) -> None:
    """Refuses a tensor that is not contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: `{pattern}` must be contiguous, got strides {tensor.stride()}: use .contiguous()")


def check_float(name: str, tensor: Tensor) -> None:
    """Refuses a dtype that the kernels do not compute with."""
    if tensor.dtype not in FLOATS:
        raise ValueError(f"{name}: expected one of {FLOATS}, got {tensor.dtype}")


def check_sizes(**sizes: int) -> None:
    """Refuses a size of 0: there would be nothing to compute."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}: expected a size of at least 1, got {size}")


def check_columns(
    device: torch.device, batch: int | None, kinds: tuple[torch.dtype, ...] = INTS, axis: str = "`batch`", /,
    **columns: Tensor,
) -> None:  # fmt: skip
    """Refuses columns that are not one integer per entry, contiguous and on the device.

    Args:
        device: where the columns have to be.
        batch: entries, None for as many as the first column has.
        kinds: dtypes that are allowed.
        axis: names the entries in errors.
        columns: the arguments by name.

    Raises:
        ValueError: naming the first.
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
    """Refuses nodes of trees that are not one row of integers an entry, contiguous and on the device.

    Args:
        name: of the argument.
        nodes: `batch node`.
        device: of the step.
        batch: entries of the step; None for any number.

    Raises:
        ValueError: with what was given.
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
    """Refuses accepted nodes that do not fit the step of a record; see `check_nodes`."""
    check_nodes("nodes", nodes, device, None)
    if len(nodes) > len(record.rows):
        raise ValueError(f"nodes: {len(nodes)} entries, the largest batch has {len(record.rows)}")


def check_plan(
    registers: Registers, packet: Tensor, record: StepRecord, marks: Marks, rules: Rules, tails: TailRecord | None
) -> None:  # fmt: skip
    """Refuses a plan with a column that does not fit the others, or a packet that is too short for them."""
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


def check_marks(device: torch.device, marks: Marks) -> None:
    """Refuses marks with a column that does not fit the others, or a count that is not one int32."""
    check_columns(device, 1, INT32, count=marks.count)
    check_columns(device, None, INT32, entry=marks.entry, offset=marks.offset, slot=marks.slot)


def check_batch(registers: Registers, packet: Tensor, ints: int) -> None:
    """Refuses a packet without room for a header and so many int32 of a batch."""
    check_columns(registers.cells.device, None, INT32, packet=packet)
    if packet.numel() < HEADER_INTS + ints:
        raise ValueError(f"packet: expected {HEADER_INTS + ints} int32 or more for this batch, got {packet.numel()}")


def check_resolve(registers: Registers, wanted: Tensor, out: Tensor) -> None:
    """Refuses register numbers, or an output, that are not int32 of one length beside the registers."""
    if not registers.trusted:
        check_columns(registers.cells.device, None, INT32, wanted=wanted, out=out)


def check_audit(registers: Registers, out: Tensor) -> None:
    """Refuses an output of an audit that has not one int32 per slot and one more."""
    if not registers.trusted:
        check_columns(registers.cells.device, registers.capacity + 1, INT32, out=out)


def check_count(n: int) -> None:
    """Refuses a number of slots below 0."""
    if n < 0:
        raise ValueError(f"n: expected at least 0 slots to claim, got {n}")


def check_distinct(name: str, blocks: Blocks) -> None:
    """Refuses blocks along one or two axes that share bytes: what one slot stores would change another."""
    size, shared = blocks.size, False
    for count, stride in blocks.axes:
        shared |= count > 1 and stride < size
    if len(blocks.axes) == 2 and not shared:
        (inner, near), (outer, far) = sorted(blocks.axes, key=itemgetter(1))
        if inner > 1 and outer > 1 and far < (inner - 1) * near + size:  # no axis fits into one stride of the other
            shared = any(
                0 < j < inner and abs(i * far - j * near) < size
                for i in range(1, outer)
                for j in (i * far // near, i * far // near + 1)
            )
    if shared and all(count for count, _ in blocks.axes):
        raise ValueError(
            f"{name}: slots share bytes: blocks of {size} bytes lie {blocks.axes} (count, bytes apart): use .clone()"
        )


def check_apart(name: str, blocks: Blocks, others: Mapping[str, Tensor | None], *written: str) -> None:
    """Refuses a plane that shares bytes with another tensor, and a written tensor that shares some with any other.

    Programs run in any order: what one of them stores there, another may read, or may have stored already.

    Args:
        name: of the plane.
        blocks: the bytes of the plane.
        others: tensors by name, the plane itself, or None; contiguous, or `batch token ..` with what belongs to a token
            contiguous and tokens at equal distances.
        written: names of those among them that are written.

    Raises:
        ValueError: naming both tensors and their addresses.
    """
    low, high = blocks.start, blocks.end()
    stores = []
    for out in written:
        tensor = others[out]
        if tensor is not None:
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


def _meet(blocks: Blocks, tensor: Tensor) -> bool:
    """Whether a tensor, whose tokens may lie apart, shares bytes with blocks."""
    its = tokens_of(tensor)
    (count, stride), size = its.axes[0], its.size
    return any(blocks.meets(start, start + size) for start in range(its.start, its.start + count * stride, stride))


def _refuse(name: str, span: tuple[int, int], other: str, its: tuple[int, int]) -> None:
    raise ValueError(
        f"{name}: bytes {span[0]:#x}..{span[1]:#x} are shared with {other} at {its[0]:#x}..{its[1]:#x}: "
        f"give {name} memory of its own"
    )
