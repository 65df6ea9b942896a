"""Chooses between kernels and reference, chooses the device of a launch, and counts launches. No other file does so."""

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from importlib import import_module
from typing import Any, Generic, ParamSpec, TypeVar, overload

import torch
from torch import Tensor

from memstate.kernels import interpreter
from memstate.kernels.reference import (
    bitmap,
    conv,
    conv_delta,
    copy,
    gated_delta,
    gather,
    mamba3,
    marks,
    pack,
    registers,
    scatter,
    selective,
    tracking,
    trees,
)
from memstate.kernels.reference import pack_int8 as int8

P = ParamSpec("P")
R = TypeVar("R")

NAMES = ("reference", "interpreter", "cuda")
LAUNCHES = {"conv_delta_step": 2}  # op -> launches of a call; 1 for others
HERE = nullcontext()


def on(device: torch.device) -> AbstractContextManager[object]:
    """Returns a context in which a device is the current one; it does nothing if the device is current already.

    Args:
        device: a CUDA device with its index, or the CPU.
    """
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return HERE
    return torch.cuda.device(device)


@dataclass
class Counts:
    """Counts of launches, uploads and syncs; exact on every backend, because all backends run the same host code."""

    launches: Counter[str] = field(default_factory=Counter)
    uploads: int = 0
    upload_bytes: int = 0
    syncs: int = 0

    @property
    def total_launches(self) -> int:
        """The number of launches of all ops."""
        return sum(self.launches.values())

    def reset(self) -> None:
        """Sets all counts to 0."""
        self.launches.clear()
        self.uploads = self.upload_bytes = self.syncs = 0


class Op(Generic[P, R]):
    """An op as an attribute of a `Backend`, with the signature and the docstring of its reference.

    The first use imports the module of the op, and stores in the backend a function that counts the launch and then
    makes it.
    """

    def __init__(self, reference: Callable[P, R], name: str = "", launch: Callable[P, R] | None = None) -> None:
        self.reference, self.name, self.launch = reference, name or reference.__name__, launch
        self.module = reference.__module__.rpartition(".")[2]  # the modules of kernel and reference have the same name

    @overload
    def __get__(self, backend: None, owner: type["Backend"]) -> Callable[P, R]: ...

    @overload
    def __get__(self, backend: "Backend", owner: type["Backend"]) -> Callable[P, R]: ...

    def __get__(self, backend: "Backend | None", owner: type["Backend"]) -> Callable[P, R]:
        if backend is None:
            return self.reference
        counts, name, launches = backend.counts, self.name, LAUNCHES.get(self.name, 1)
        folder = "memstate.kernels.reference" if backend.name == "reference" else "memstate.kernels"
        call: Callable[P, R]
        if self.launch:
            call = self.reference if backend.name == "reference" else self.launch
        else:
            call = getattr(import_module(f"{folder}.{self.module}"), name)
        if backend.device.type == "cuda":
            call = _on_tensors(call, backend.device)

        @wraps(self.reference)
        def launch(*args: P.args, **kwargs: P.kwargs) -> R:
            counts.launches[name] += launches
            return call(*args, **kwargs)

        setattr(backend, name, launch)  # later uses find it on the backend
        return launch


class Backend:
    """The ops of memstate, as Triton kernels or in plain torch: `Backend(device="cuda").conv_step(...)`.

    Decode loops call the same ops as memstate itself. Each call is counted as one launch in `counts`, a call of
    `conv_delta_step` as two. A manager has a backend of its own, which counts what memstate launches. A launch goes to
    the device of its tensors, on the current stream of that device, whatever device is current.

    Args:
        name: "auto", "reference", "interpreter" or "cuda".
        device: device of the tensors. "cuda" means the current device.

    Raises:
        ValueError: the backend cannot run on this device or in this process.

    Example:
        >>> import torch
        >>> from memstate import Backend
        >>> ops = Backend("reference")
        >>> plane = torch.arange(6.0).view(1, 3, 2)  # layer slot ...
        >>> out = torch.empty(1, 2, 2)
        >>> ops.gather_slots(plane, torch.tensor([2, 1]), out)
        >>> out.tolist()
        [[[4.0, 5.0], [2.0, 3.0]]]
        >>> ops
        Backend(reference, cpu, 1 launches)
    """

    claim = Op(bitmap.claim)
    release = Op(bitmap.release)
    ownership = Op(registers.ownership)
    resolve = Op(registers.resolve)
    audit = Op(registers.audit)
    plan = Op(tracking.plan)
    copy_slots = Op(copy.copy_slots)
    zero_slots = Op(copy.zero_slots)
    run_data = Op(copy.run_data)
    run_rows = Op(copy.run_rows)
    conv_step = Op(conv.conv_step)
    gated_delta_step = Op(gated_delta.gated_delta_step)
    conv_delta_step = Op(conv_delta.conv_delta_step)
    selective_step = Op(selective.selective_step)
    mamba3_step = Op(mamba3.mamba3_step)
    keep_path = Op(trees.keep_path)
    gather_slots = Op(gather.gather_slots)
    scatter_slots = Op(scatter.scatter_slots)
    scatter_states = Op(marks.scatter_states)
    pack_slots = Op(pack.pack_slots)
    unpack_slots = Op(pack.unpack_slots)
    pack_int8 = Op(int8.pack_int8)
    unpack_int8 = Op(int8.unpack_int8)

    def __init__(self, name: str = "auto", device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.name = choose(name, self.device)
        if self.device == torch.device("cuda"):  # "cuda" without an index
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.counts = Counts()

    def __getattr__(self, name: str) -> Any:
        failed = {} if name.startswith("_") else import_module("memstate.kernels.own").load()
        if name in failed:
            raise AttributeError(failed[name])
        return object.__getattribute__(self, name)

    def __repr__(self) -> str:
        return f"Backend({self.name}, {self.device}, {self.counts.total_launches} launches)"


# op -> name of its module, under memstate.kernels and under memstate.kernels.reference
OPS = {name: op.module for name, op in vars(Backend).items() if isinstance(op, Op)}


def add_op(name: str, reference: Callable[..., Any], launch: Callable[..., Any]) -> None:
    """Adds an op to every backend, from outside of memstate. Raises: ValueError if the name is taken."""
    if name in {*dir(Backend), *vars(Backend("reference"))}:
        raise ValueError(f"op {name!r}: there is one already; choose another name")
    setattr(Backend, name, Op(reference, name, launch))


def _on_tensors(op: Callable[P, R], default: torch.device) -> Callable[P, R]:
    """Returns a function that makes the tensors' device current, for Triton launches there, and then calls `op`."""

    def launch(*args: P.args, **kwargs: P.kwargs) -> R:
        with on(_device_of(args or kwargs.values(), default)):
            return op(*args, **kwargs)

    return launch


def _device_of(arguments: Iterable[Any], default: torch.device) -> torch.device:
    """Returns the device of the first tensor among an op's arguments; a tuple counts as its first tensor."""
    for argument in arguments:
        first = argument[0] if isinstance(argument, tuple) and argument else argument
        if isinstance(first, Tensor):
            return first.device
    return default


def choose(name: str, device: torch.device) -> str:
    """Returns the name of the backend that `name` means on a device.

    Args:
        name: name of the backend, as in `Backend`.
        device: device of the tensors.

    Raises:
        ValueError: the backend cannot run there; the message says what to do.

    Syncs: no.
    """
    interpreted = interpreter.interpreted()
    if name == "auto":
        name = "cuda" if device.type == "cuda" else "interpreter" if interpreted else "reference"
        if interpreted is None:
            name = "reference"
    if name not in NAMES:
        raise ValueError(f"backend {name!r}: expected auto, {', '.join(NAMES)}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device}: torch sees no CUDA device here; use device='cpu'")
    if name == "reference":
        return name
    if interpreted is None:
        raise ValueError(
            f"backend {name!r} needs Triton, which is not installed; the backend 'reference' runs without it"
        )
    if name == "cuda" and device.type != "cuda":
        raise ValueError(f"backend 'cuda' cannot use tensors on {device}: choose a CUDA device or another backend")
    if name == "cuda" and interpreted:
        raise ValueError("backend 'cuda' cannot run in a process where TRITON_INTERPRET=1 is set")
    if name == "interpreter" and not interpreted:
        raise ValueError(
            "backend 'interpreter' needs TRITON_INTERPRET=1 in the environment before memstate is imported"
        )
    if name == "interpreter":
        interpreter.mend()
    return name
