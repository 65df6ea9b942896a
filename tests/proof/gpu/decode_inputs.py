"""Makes the arguments of decode steps for `decode`, and says what a step of whole numbers has to store.

Shapes are those of a layer of Qwen3-Next and of Mamba-2, with all that their layers give to a kernel: gates, norms,
biases. On a CPU, shapes are small.
"""

import inspect
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memstate.kernels import gated_delta
from memstate.kernels.dispatch import Backend
from memstate.kernels.reference.scaled import TOP, draws, loaded, stored
from memstate.kernels.tables import Cursor, DeltaTail
from memstate_tools.drafted import BRANCHES, DRAFTS, PENDING
from tests.proof.mutation.interleaved import with_pieces

BF16 = torch.bfloat16
DELTA, TOY_DELTA = (32, 16, 128, 128), (1, 1, 16, 32)  # heads, key heads, keys, values
MAMBA, TOY_MAMBA = (128, 8, 64, 128), (1, 1, 16, 16)  # heads, groups, dims, states
TAPS = 4
LENGTH = 1000  # tokens of the first row's state
SEED = 7
Arguments = dict[str, Any]


class Inputs:
    """Makes arguments. Row r reads slot r + 1, and writes slot r + 1 + rows, or the one that it reads.

    Args:
        device: Device of the tensors.
        toy: Whether shapes are small.
    """

    def __init__(self, device: torch.device, toy: bool) -> None:
        self.device = device
        self.delta_shape, self.mamba_shape = (TOY_DELTA, TOY_MAMBA) if toy else (DELTA, MAMBA)
        heads, key_heads, keys, values = self.delta_shape
        self.channels = 2 * key_heads * keys + heads * values

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device=self.device).to(dtype)

    def column(self, rows: int, first: int, step: int = 0) -> Tensor:
        """Returns an int32 vector of rows: first, first + step, .."""
        return (torch.arange(rows, device=self.device) * step + first).int()

    def slots(self, rows: int, tokens: int, place: bool) -> Arguments:
        """Returns the vectors of a step."""
        read, zero = self.column(rows, 1, 1), self.column(rows, 0)
        return {
            "read": read, "write": read if place else read + rows, "snapshot": zero, "tokens": zero + tokens,
        }  # fmt: skip

    def state(self, rows: int, shape: tuple[int, ...], dtype: torch.dtype, axis: int) -> Arguments:
        """Returns a state, and its scales if it has whole numbers. axis: that of a row of a scale, of a slot."""
        if dtype not in TOP:
            return {"state": self.normal(2 * rows + 1, *shape).mul_(0.1).to(dtype)}
        numbers = torch.randint(-TOP[dtype], TOP[dtype] + 1, (2 * rows + 1, *shape), device=self.device)
        of_rows = [size for at, size in enumerate(shape) if at != axis]
        scales = torch.rand(2 * rows + 1, *of_rows, device=self.device).div_(TOP[dtype])
        return {"state": numbers.to(dtype), "scales": scales}

    def by_chance(self, rows: int) -> Arguments:
        """Returns the arguments with which whole numbers are rounded by chance."""
        return {"lengths": self.column(rows, LENGTH, 3), "seed": SEED, "layer": 2}

    def cut(self, mixed: Tensor) -> Arguments:
        """Returns q, k and v, which are slices of what the convolution returns."""
        heads, key_heads, keys, values = self.delta_shape
        q, k, v = mixed.split([key_heads * keys, key_heads * keys, heads * values], dim=-1)
        q, k = (each.unflatten(-1, (key_heads, keys)) for each in (q, k))
        return {"q": q, "k": k, "v": v.unflatten(-1, (heads, values))}

    def gates(self, rows: int, tokens: int) -> Arguments:
        heads, _, _, values = self.delta_shape
        return {
            "decay": self.normal(rows, tokens, heads, dtype=BF16), "beta": self.normal(rows, tokens, heads, dtype=BF16),
            "a_log": self.normal(heads), "dt_bias": self.normal(heads, dtype=BF16), "sigmoid": True, "normalize": True,
            "out": torch.empty(rows, tokens, heads, values, dtype=BF16, device=self.device),
        }  # fmt: skip

    def delta(
        self, rows: int, dtype: torch.dtype, tokens: int = 1, key_fastest: bool = False, place: bool = False
    ) -> Arguments:
        """Returns the arguments of `gated_delta_step`."""
        heads, _, keys, values = self.delta_shape
        given = self.cut(self.normal(rows, tokens, self.channels, dtype=BF16)) | self.gates(rows, tokens)
        given |= self.state(rows, (heads, keys, values), dtype, 1) | self.slots(rows, tokens, place)
        if key_fastest:
            given["state"] = given["state"].mT.contiguous().mT
        return given

    def drafts(self, rows: int, dtype: torch.dtype, tree: bool) -> Arguments:
        """Returns the arguments of a `gated_delta_step` that verifies drafts, with tokens pending in the tail."""
        heads, key_heads, keys, values = self.delta_shape
        ring = rows + 1, 2 * DRAFTS
        tail = DeltaTail(
            self.normal(*ring, key_heads, keys, dtype=BF16), self.normal(*ring, heads, values, dtype=BF16),
            torch.rand(*ring, heads, device=self.device), torch.rand(*ring, heads, device=self.device),
        )  # fmt: skip
        pending = self.column(rows, PENDING)
        given = self.delta(rows, dtype, DRAFTS)
        given |= {"tail": tail, "cursor": Cursor(self.column(rows, 1, 1), self.column(rows, 0), pending, pending)}
        if tree:
            given["parents"] = torch.tensor([BRANCHES] * rows, dtype=torch.int32, device=self.device)
        return given

    def conv(self, rows: int, tokens: int = 1, place: bool = False) -> Arguments:
        """Returns the arguments of `conv_step` in front of a gated delta step."""
        window = self.normal(2 * rows + 1, self.channels, TAPS - 1, dtype=BF16).mT
        x = self.normal(rows, tokens, self.channels, dtype=BF16)
        weight = self.normal(self.channels, TAPS, dtype=BF16)
        given = {"x": x, "weight": weight, "bias": None, "state": window, "out": torch.empty_like(x)}
        return given | self.slots(rows, tokens, place)

    def mamba(self, rows: int, dtype: torch.dtype) -> Arguments:
        """Returns the arguments of a `selective_step` of Mamba-2."""
        heads, groups, dim, states = self.mamba_shape
        x, z = (self.normal(rows, 1, heads, dim, dtype=BF16) for _ in range(2))
        b, c = (self.normal(rows, 1, groups, states, dtype=BF16) for _ in range(2))
        given = {
            "x": x, "z": z, "b": b, "c": c, "dt": self.normal(rows, 1, heads, dtype=BF16), "softplus": True,
            "a": self.normal(heads).exp_().neg_(), "d": self.normal(heads), "dt_bias": self.normal(heads),
            "out": torch.empty_like(x),
        }  # fmt: skip
        return given | self.state(rows, (heads, dim, states), dtype, 2) | self.slots(rows, 1, False)


def nbytes(given: Arguments) -> int:
    """Returns the bytes that a step moves: a state for each row there and back, with its scales, and the inputs."""
    states = [given[name] for name in ("state", "scales") if name in given]
    rows = len(given["read"])
    tail = [ring for ring in given.get("tail", ()) if ring is not None]
    places = rows * (DRAFTS + PENDING)
    others = (
        each.nbytes for name, each in given.items() if isinstance(each, Tensor) and name not in ("state", "scales")
    )
    return 2 * rows * sum(each[0].nbytes for each in states) + places * sum(x[0, 0].nbytes for x in tail) + sum(others)


def wrong_bytes(op: str, step: Callable[..., Tensor], given: Arguments, axis: int) -> str:
    """Steps states of whole numbers. Returns which bytes are not those of the definition; "" if all are.

    The step between loading and storing is that of the kernel with fp32 states, because sums have an order.

    Args:
        op: Name of the operation.
        step: The operation.
        given: Its arguments.
        axis: Axis of a slot over which values share a scale.
    """
    numbers, scales, dtype = given["state"], given["scales"], given["state"].dtype
    chance = given.get("seed")
    plain = {name: each for name, each in given.items() if name not in ("scales", "lengths", "seed", "layer")}
    exact = torch.stack([loaded(each, scale, axis) for each, scale in zip(numbers, scales, strict=True)])
    other = step(**(plain | {"state": exact, "out": torch.empty_like(given["out"])}))
    mine = step(**given)
    differ = set() if op == "selective_step" or torch.equal(mine, other) else {"out"}  # blocks may change its sums
    for row, slot in enumerate(given["write"].tolist()):
        drawn = None
        if chance is not None:
            length = int(given["lengths"][row]) + 1
            heads, *sizes = exact[slot].shape
            keys = sizes.pop(axis - 1)
            drawn = draws(dtype, chance, given["layer"], range(heads), sizes[0], keys, length, torch.device("cpu"))
            drawn = drawn.mT if axis == 1 else drawn
        for name, tensor, right in zip(
            ("numbers", "scales"), (numbers, scales), stored(exact[slot].cpu(), dtype, axis, drawn), strict=True
        ):
            differ |= set() if torch.equal(tensor[slot].cpu(), right) else {f"{name} of row {row}"}
    return f"{op}, {dtype}: {', '.join(sorted(differ))} differ from the definition" if differ else ""


def evicting(folder: Path) -> Callable[..., Tensor] | None:
    """Returns `gated_delta_step` with states that leave the cache first; None if it cannot be made of its source.

    A launch says nothing of caches, so this is another module: a copy of the source, changed where tiles move.
    """
    source = changed = with_pieces(Path(inspect.getfile(gated_delta)).read_text(encoding="utf-8"))
    for name in ("_load", "store_tile"):
        begin = changed.find(f"def {name}(")
        end = changed.find("\n@triton.jit", begin)
        body = changed[begin:end]
        changed = changed.replace(body, body.replace("mask=mask", 'mask=mask, eviction_policy="evict_first"'))
    if changed.count("evict_first") < 2 or changed == source:
        return None
    file = folder / "gated_delta_evicting.py"
    file.write_text(changed, encoding="utf-8")
    spec = spec_from_file_location(file.stem, file)
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    step: Callable[..., Tensor] = module.gated_delta_step
    return step


def positional(op: str, given: Arguments) -> tuple[Any, ...]:
    """Returns the arguments of an operation in its order, with the defaults of those that are not given."""
    parameters = inspect.signature(getattr(Backend, op)).parameters
    return tuple(given.get(name, each.default) for name, each in parameters.items())
