"""Runs a decode loop whose forward is a kernel of another library, on slots of a manager, and compares with float64."""

import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import normalize

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.state.layout import Order
from tests.support import recurrences
from tests.support.build import on
from tests.support.decode_case import same_bits

CUDA = torch.cuda.is_available()
KEY_HEADS, HEADS, KEY, VALUE = 1, 2, 16, 8  # sizes of the delta rule; with 16 keys the scale is 1/4, a power of two
GROUPS, DIM, STATE = 1, 8, 16  # sizes of Mamba2
CHANNELS, WIDTH = 24, 4  # sizes of the short convolution
EVERY = 4  # tokens between two snapshots
CLOSE = 1e-5  # largest error of fp32 after a dozen tokens, relative to the largest number of the state

Array = recurrences.Array
Inputs = dict[str, Tensor]  # `batch token ...`, or weights
Exact = Callable[[dict[str, Array], Array], tuple[Array, Array]]  # a token, a state -> the output, the new state
Forward = Callable[[Tensor, ms.Step, Inputs, Inputs], Tensor]  # a plane `slot ...`, a step, its inputs, weights


class Op(NamedTuple):
    """The computation of a layer: its state, random inputs and weights, and the exact result."""

    shape: tuple[int, ...]  # shape of one state
    draw: Callable[[torch.Generator, int], Inputs]  # a generator, a number of tokens -> inputs of one request
    weights: Callable[[torch.Generator], Inputs]
    exact: Callable[[Inputs], Exact]  # weights -> the function that computes a token in float64


def module(name: str) -> ModuleType:
    """Returns a module of another library, or skips the test if it cannot be imported.

    An import of flash-linear-attention registers its own models of mamba and mamba2 with Transformers, where other
    tests would get them. So `register` does nothing during the import.
    """
    with pytest.MonkeyPatch.context() as patch:
        if name.startswith("fla") and "fla" not in sys.modules and find_spec("transformers"):
            for auto in ("AutoConfig", "AutoModel", "AutoModelForCausalLM"):
                kept = getattr(import_module("transformers"), auto)
                patch.setattr(kept, "register", lambda *args, **kwargs: None)
        return pytest.importorskip(name, reason=f"{name} cannot be imported: see docs/kernels.md", exc_type=ImportError)


def inner_module(name: str, built: str = "") -> ModuleType:
    """Returns a module of a package whose `__init__` needs a CUDA extension.

    If the extension or a GPU is missing, imports the module without `__init__`.

    built: name of the CUDA extension. Without `__init__`, an empty module takes this name.
    """
    package, *inside = name.split(".")[:-1]
    spec = find_spec(package)
    if spec is None:
        pytest.skip(f"{package} is not installed: see docs/kernels.md")
    if CUDA:
        with suppress(ImportError):
            return import_module(name)
    with pytest.MonkeyPatch.context() as patch:
        for depth in range(len(inside) + 1):
            parent = ModuleType(".".join([package, *inside[:depth]]))
            parent.__path__ = [str(Path(place, *inside[:depth])) for place in spec.submodule_search_locations or ()]
            patch.setitem(sys.modules, parent.__name__, parent)
        if built:
            patch.setitem(sys.modules, built, ModuleType(built))
        return module(name)


@triton.jit
def exp(x):  # type: ignore[no-untyped-def]
    """Returns the exponential of each element. Triton's interpreter replaces only `tl.exp` itself."""
    return tl.exp(x)


def on_cpu(patch: pytest.MonkeyPatch, kernels: ModuleType | None = None) -> None:
    """Lets launchers that select a GPU run in Triton's interpreter on a machine without a GPU.

    kernels: a module with the line `exp = tl.exp`. The interpreter replaces only `tl.exp`, so this function replaces
    the `exp` of the module.
    """
    if CUDA:
        return
    for place, name in ((torch.cuda, "device"), (torch.cpu, "device"), (torch.accelerator, "device_index")):
        patch.setattr(place, name, lambda index: nullcontext(), raising=False)
    if kernels is not None:
        patch.setattr(kernels, "exp", exp)


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


def delta_inputs(generator: torch.Generator, tokens: int) -> Inputs:
    """Returns inputs of a gated delta rule. `a` and `b` are the inputs of its gates."""
    q, k = normalize(normal(generator, 2, 1, tokens, KEY_HEADS, KEY), dim=-1)
    v, (a, b) = normal(generator, 1, tokens, HEADS, VALUE), normal(generator, 2, 1, tokens, HEADS)
    return {"q": q, "k": k, "v": v, "a": a, "b": b}


def delta_weights(generator: torch.Generator) -> Inputs:
    log_rate, bias = normal(generator, 2, HEADS)
    return {"A_log": log_rate, "dt_bias": bias}


def gates(weights: Inputs, x: Inputs) -> tuple[Tensor, Tensor]:
    """Returns g = -exp(A_log) softplus(a + dt_bias), the natural log of the decay, and beta = sigmoid(b)."""
    rate = torch.nn.functional.softplus(x["a"] + weights["dt_bias"])
    return -weights["A_log"].exp() * rate, x["b"].sigmoid()


def delta_exact(weights: Inputs, value_first: bool = True) -> Exact:
    """Returns a function that computes the gated delta rule for one token. value_first: states are `head value key`."""
    log_rate, bias = (recurrences.float64(weights[name]) for name in ("A_log", "dt_bias"))

    def exact(x: dict[str, Array], state: Array) -> tuple[Array, Array]:
        out, after = np.zeros_like(x["v"]), np.zeros_like(state)
        decay, beta = -np.exp(log_rate) * np.logaddexp(0, x["a"] + bias), 1 / (1 + np.exp(-x["b"]))
        for h in range(HEADS):
            old = state[h].T if value_first else state[h]
            one = recurrences.gated_delta(
                x["q"][:, 0], x["k"][:, 0], x["v"][:, h], decay[:, h], beta[:, h], old, KEY**-0.5
            )
            out[:, h], after[h] = one[0], one[1].T if value_first else one[1]
        return out, after

    return exact


def mamba_inputs(generator: torch.Generator, tokens: int) -> Inputs:
    """Returns inputs of a layer of Mamba2."""
    x, (b, c) = normal(generator, 1, tokens, HEADS, DIM), normal(generator, 2, 1, tokens, GROUPS, STATE)
    return {"x": x, "dt": normal(generator, 1, tokens, HEADS), "b": b, "c": c}


def mamba_weights(generator: torch.Generator) -> Inputs:
    a, d, dt_bias = normal(generator, 3, HEADS).abs()
    return {"a": -a, "d": d, "dt_bias": dt_bias}


def mamba_exact(weights: Inputs) -> Exact:
    """Returns a function that computes Mamba2 for one token, with softplus(dt + dt_bias) and the D term."""
    a, d, bias = (recurrences.float64(weights[name]) for name in ("a", "d", "dt_bias"))

    def exact(x: dict[str, Array], state: Array) -> tuple[Array, Array]:
        out, after = np.zeros_like(x["x"]), np.zeros_like(state)
        for h in range(HEADS):
            dt = np.repeat(x["dt"][:, h, None] + bias[h], DIM, axis=1)
            rate, skip = np.full((DIM, STATE), a[h]), np.full(DIM, d[h])
            inputs = x["x"][:, h], dt, rate, x["b"][:, 0], x["c"][:, 0], skip
            out[:, h], states = recurrences.selective(*inputs, None, state[h], softplus=True)
            after[h] = states[-1]
        return out, after

    return exact


def mamba_arguments(weights: Inputs, x: Inputs) -> dict[str, Tensor]:
    """Returns the arguments of `selective_state_update`, which are the same in each library.

    Each head has one step size, one rate and one bias; strides of 0 repeat them for all channels.
    """
    dt, d, bias = (t[..., None].expand(*t.shape, DIM) for t in (x["dt"][:, 0], weights["d"], weights["dt_bias"]))
    rate = weights["a"][:, None, None].expand(HEADS, DIM, STATE)
    return {"x": x["x"][:, 0], "dt": dt, "A": rate, "B": x["b"][:, 0], "C": x["c"][:, 0], "D": d, "dt_bias": bias}


def conv_inputs(generator: torch.Generator, tokens: int) -> Inputs:
    return {"x": normal(generator, 1, tokens, CHANNELS)}


def conv_weights(generator: torch.Generator) -> Inputs:
    return {"weight": normal(generator, CHANNELS, WIDTH), "bias": normal(generator, CHANNELS)}


def conv_exact(weights: Inputs) -> Exact:
    """Returns a function that computes a short convolution with SiLU for one token. Windows are `channel width-1`."""
    weight, bias = recurrences.float64(weights["weight"]), recurrences.float64(weights["bias"])

    def exact(x: dict[str, Array], state: Array) -> tuple[Array, Array]:
        out, window = recurrences.causal_conv(x["x"], weight, bias, state.T, silu=True)
        return out, window.T

    return exact


DELTA = Op((HEADS, VALUE, KEY), delta_inputs, delta_weights, delta_exact)  # states `value key`, as engines store them
DELTA_KEY_FIRST = DELTA._replace(shape=(HEADS, KEY, VALUE), exact=partial(delta_exact, value_first=False))
MAMBA = Op((HEADS, DIM, STATE), mamba_inputs, mamba_weights, mamba_exact)
CONV = Op((CHANNELS, WIDTH - 1), conv_inputs, conv_weights, conv_exact)


class Coming(NamedTuple):
    """A request of the loop."""

    name: str
    at: int  # the step in which the request begins
    tokens: int  # number of tokens that the request computes
    after: str = ""  # the request from whose last snapshot this one starts


REQUESTS = [
    Coming("a", 0, 14), Coming("b", 0, 5), Coming("c", 3, 7), Coming("d", 6, 8, "b"), Coming("e", 11, 6),
    Coming("f", 15, 5, "a"), Coming("g", 15, 5, "d"),
]  # fmt: skip
RESUMED = 3  # requests that start from a snapshot


class Loop:
    """Runs twenty steps in which requests begin, end, and start from snapshots of others. Unused slots hold NaN.

    After each step, the loop compares outputs and states with float64. A snapshot must have the bytes of its state. The
    loop checks this after the step if the forward stores snapshots, otherwise when a request starts from the snapshot.
    """

    def __init__(
        self, backend: Backend, generator: torch.Generator, op: Op, forward: Forward, tracking: ms.Tracking, *,
        order: Order = "slot_major", **settings: Any,
    ) -> None:  # fmt: skip
        """order: with "slot_major" a slot has all its layers, so the slots of one layer have gaps between them."""
        layout = ms.StateLayout((ms.Plane("states", op.shape, torch.float32),), layers=2, order=order)
        self.mem = on(backend, layout, slots=14, max_requests=3, max_batch=4, tracking=tracking, **settings)
        self.plane: Tensor = self.mem.planes["states"][1]
        weights = op.weights(generator)
        self.weights = {name: tensor.to(backend.device) for name, tensor in weights.items()}
        self.forward, self.exact = forward, op.exact(weights)
        self.said = {request.name: op.draw(generator, 20) for request in REQUESTS}
        self.states: dict[tuple[str, int], tuple[Array, Tensor]] = {}  # (request, tokens) -> exact state, computed one
        self.rows: dict[str, ms.Row] = {}
        self.kept: dict[str, ms.Snapshot] = {}
        self.null_written = False  # whether the kernel stored something to the null slot
        self.mem.planes["states"].fill_(torch.nan)
        self.mem.device.scrub_null()

    def run(self) -> "Loop":
        end: dict[str, int] = {}
        for at in range(20):
            for request in REQUESTS:
                if request.at == at:
                    self._admit(request)
                    end[request.name] = self.mem.info(self.rows[request.name]).length + request.tokens
            self._step(at)
            for name in [name for name, row in self.rows.items() if self.mem.info(row).length == end[name]]:
                boundary = end[name] // EVERY * EVERY
                (kept,) = self.mem.end([self.rows.pop(name)], keep="handle", lengths=[boundary])
                assert kept is not None and kept.length == boundary
                self.kept[name] = kept
        assert len(self.kept) == len(REQUESTS)
        self.mem.drop(list(self.kept.values()))
        self.mem.audit().raise_if_leaking()
        self.mem.device.check()
        return self

    def _admit(self, request: Coming) -> None:
        """Admits a request. If it starts from a snapshot, it gets the first inputs of the snapshot's request."""
        kept = self.kept[request.after] if request.after else None
        (self.rows[request.name],) = self.mem.admit([ms.Request(request.name, resume=kept)])
        if kept is None:
            self.states[request.name, 0] = np.zeros(self.plane.shape[1:]), torch.zeros_like(self.plane[0])
            return
        for name, tensor in self.said[request.name].items():
            tensor[:, : kept.length] = self.said[request.after][name][:, : kept.length]
        self.states[request.name, kept.length] = self.states[request.after, kept.length]

    def _step(self, at: int) -> None:
        """Runs a step of one token for each request, with one entry of padding whose inputs are NaN."""
        names = [*self.rows]
        names.insert(at % (len(names) + 1), "")
        step = self.mem.plan([self.rows.get(name) for name in names])
        fed = {
            name: torch.full((len(names), 1, *t.shape[2:]), torch.nan, device=self.plane.device)
            for name, t in self.said["a"].items()
        }
        real = [(i, name, int(step.before[i])) for i, name in enumerate(names) if name]
        for i, who, before in real:
            for name, tensor in self.said[who].items():
                fed[name][i] = tensor[0, before]
            assert same_bits(self.plane[step.read[i]], self.states[who, before][1]), "what the snapshot held"
        other, null = self.mem.planes["states"][0].clone(), self.plane[0].clone()
        out = self.forward(self.plane, step, fed, self.weights)
        assert same_bits(self.mem.planes["states"][0], other), "the states of another layer"
        self.null_written |= not same_bits(self.plane[0], null)
        for i, who, before in real:
            x = {name: recurrences.float64(tensor[0, before : before + 1]) for name, tensor in self.said[who].items()}
            answer, state = self.exact(x, self.states[who, before][0])
            computed = self.plane[step.write[i]].clone()
            for one, other in (out[i], answer), (computed, state):
                assert np.abs(recurrences.float64(one).ravel() - other.ravel()).max() < CLOSE * (
                    1 + np.abs(state).max()
                )
            self.states[who, before + 1] = state, computed
            if step.snapshot[i] > 0 and not self.mem.forward.in_place:
                assert same_bits(self.plane[step.snapshot[i]], computed)
        self.mem.settle(step)

    @property
    def copied(self) -> int:
        """The number of states that memstate has copied."""
        return self.mem.stats().copied_bytes // self.mem.layout.bytes_per_slot
