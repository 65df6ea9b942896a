"""Chooses between kernels and reference, and counts: the only place that does either."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar

import torch

if not __name__.startswith("memstate."):
    raise ImportError(
        "import memstate.kernels.dispatch, not kernels.dispatch: a second copy would duplicate every kernel"
    )

P = ParamSpec("P")
R = TypeVar("R")

# op -> the module of that name under memstate.kernels and memstate.kernels.reference
OPS = {
    "claim": "bitmap",
    "release": "bitmap",
    "ownership": "registers",
    "resolve": "registers",
    "audit": "registers",
    "plan": "tracking",
    "settle": "tracking",
    "accept": "speculation",
    "copy_slots": "copy",
    "zero_slots": "copy",
    "run_data": "copy",
    "conv_step": "conv",
    "gated_delta_step": "gated_delta",
    "selective_step": "selective",
    "gather_slots": "gather",
    "scatter_slots": "scatter",
    "scatter_accepted": "scatter",
    "scatter_inputs": "scatter",
    "pack_slots": "pack",
    "unpack_slots": "pack",
    "pack_int8": "pack_int8",
    "unpack_int8": "pack_int8",
}
NAMES = ("reference", "interpreter", "cuda")


@dataclass
class Counts:
    """What the library asked of the device; exact on every backend, because the orchestration is the same code."""

    launches: Counter[str] = field(default_factory=Counter)
    uploads: int = 0
    upload_bytes: int = 0
    syncs: int = 0

    @property
    def total_launches(self) -> int:
        """Launches of all ops together."""
        return sum(self.launches.values())

    def reset(self) -> None:
        """Starts again from zero."""
        self.launches.clear()
        self.uploads = self.upload_bytes = self.syncs = 0


class Backend:
    """One attribute per op of `OPS`, for decode loops as for memstate itself: `Backend(device="cuda").conv_step(...)`.
    Each call is counted as one launch; a manager's own backend counts what memstate launches.

    name: "auto", "reference", "interpreter" or "cuda"; device: where the tensors live.
    Raises: ValueError where the backend cannot run on this device or in this process.
    """

    def __init__(self, name: str = "auto", device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.name = choose(name, self.device)
        self.counts = Counts()
        folder = "memstate.kernels.reference" if self.name == "reference" else "memstate.kernels"
        self._modules = {op: f"{folder}.{module}" for op, module in OPS.items()}

    def __getattr__(self, op: str) -> Callable[..., Any]:
        if op.startswith("_") or op not in OPS:
            raise AttributeError(f"Backend has no op {op!r}: the ops are {', '.join(OPS)}")
        counted = self._counted(op, getattr(import_module(self._modules[op]), op))
        setattr(self, op, counted)  # found directly from now on
        return counted

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *OPS]

    def _counted(self, op: str, call: Callable[P, R]) -> Callable[P, R]:
        @wraps(call)
        def launch(*args: P.args, **kwargs: P.kwargs) -> R:
            self.counts.launches[op] += 1
            return call(*args, **kwargs)

        return launch

    def __repr__(self) -> str:
        return f"Backend({self.name}, {self.device}, {self.counts.total_launches} launches)"


def choose(name: str, device: torch.device) -> str:
    """The backend that `name` means on `device`. Syncs: no. Raises: ValueError with the remedy."""
    interpreted = _interpreted()
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
    return name


def _interpreted() -> bool | None:
    """Whether kernels of this process are interpreted; None without Triton."""
    if find_spec("triton") is None:
        return None
    from triton import knobs  # imported late: Triton is optional

    return bool(knobs.runtime.interpret)
