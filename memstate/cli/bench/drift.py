"""How far states and outputs drift from float64 where every step rounds the state: a property of the arithmetic.

Each token is a step: the state is loaded, advanced in fp32, and stored. Decays are those with which layers of models
begin, from a slow head to a fast one. What heads read and write is random.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from memstate.cli.bench.task import Figure, Setting, Task
from memstate.kernels.dispatch import Backend
from memstate.state.bits import Bits, fewer_bits
from memstate.state.layout import Plane

TOKENS, TOY_TOKENS = (1_000, 10_000, 100_000), (4, 8)
PLANE = Plane("ssm", (4, 64, 32), torch.float32)  # `head key value`, of Mamba-2 `head state dim`
READ = 64  # last tokens whose outputs are compared
FORMATS: tuple[tuple[Bits, bool], ...] = tuple(
    (bits, by_chance) for bits in ("int16", "e4m3", "int8", "int8+residual") for by_chance in (False, True)
)


def advanced(
    delta: bool, s: Tensor, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of the gated delta rule, or of Mamba-2: the state `.. head key value`, and what `q` reads from it."""
    s, q, k = s * gate[:, None, None], q[..., None], k[..., None]
    s = s + k * (beta[:, None] * (v - (k * s).sum(-2) if delta else v))[..., None, :]
    return s, (q * s).sum(-2)


class Rounding:
    """Loads and stores a state in fewer bits."""

    def __init__(self, bits: Bits, by_chance: bool, device: torch.device) -> None:
        self.by_chance, self.slot = by_chance, torch.ones(1, dtype=torch.int32, device=device)
        self.planes: dict[str, Any] = {
            name: torch.zeros(2, plane.nbytes, dtype=torch.uint8, device=device).view(plane.dtype).view(2, *plane.shape)
            for name, plane in zip(("values", "scales", "residual"), fewer_bits(PLANE, bits), strict=False)
        }

    def __call__(self, backend: Backend, state: Tensor, token: int) -> None:
        """Stores a state `1 ...` and loads it again."""
        numbers = torch.full_like(self.slot, token) if self.by_chance else None
        backend.store_bits(**self.planes, slots=self.slot, batch=state, numbers=numbers)
        backend.load_bits(**self.planes, slots=self.slot, out=state)


def _check(setting: Setting) -> str:
    """Compares the ops with the reference, in every format."""
    state, token = torch.randn(1, *PLANE.shape, dtype=torch.float32, device=setting.device), 7
    for bits, by_chance in FORMATS:
        sides = state.clone(), state.clone()
        for side, backend in zip(sides, (setting.make_backend(), setting.reference()), strict=True):
            Rounding(bits, by_chance, setting.device)(backend, side, token)
        if not torch.equal(*sides):
            return f"{bits} differs from the reference"
    return ""


def _drift(setting: Setting, rule: str) -> list[Figure]:
    device, backend, tokens = setting.device, setting.make_backend(), setting.sizes(TOKENS, TOY_TOKENS)
    random = partial(torch.randn, generator=torch.Generator(device).manual_seed(0), device=device, dtype=torch.float64)
    roundings = [Rounding(*kind, device) for kind in FORMATS]
    names = [f"{bits}{', by chance' * by_chance}" for bits, by_chance in FORMATS] + ["bf16", "fp32"]
    s = torch.zeros(len(names), *PLANE.shape, dtype=torch.float32, device=device)
    exact, reads, found = s[0].double(), list[tuple[Tensor, Tensor]](), list[Figure]()
    heads, keys, values = PLANE.shape
    rate = torch.linspace(1, 16, heads, device=device, dtype=torch.float64)
    bias = torch.logspace(-3, -1, heads, device=device, dtype=torch.float64).expm1().log()  # of softplus 0.001 to 0.1
    delta = rule == "gated delta"
    for token in range(1, tokens[-1] + 1):
        q, k, v, (wide, beta) = random(heads, keys), random(heads, keys), random(heads, values), random(2, heads)
        step = softplus(wide + bias)
        inputs = [q, k, v, (-rate * step).exp(), step]
        if delta:
            inputs = [normalize(q, dim=-1), normalize(k, dim=-1), v, inputs[3], beta.sigmoid()]
        exact, expected = advanced(delta, exact, *inputs)
        s, out = advanced(delta, s, *(x.float() for x in inputs))
        for number, rounding in enumerate(roundings):
            rounding(backend, s[number : number + 1], token)
        s[-2] = s[-2].bfloat16()
        reads = [*reads[1 - READ :], (out.double(), expected)]
        if token in tokens:
            outs, stated = (torch.stack(each, -1) for each in zip(*reads, strict=True))
            for number, name in enumerate(names):
                for what, got, wanted in (("state", s[number].double(), exact), ("output", outs[number], stated)):
                    error, case = float((got - wanted).norm() / wanted.norm()), setting.case(f"{name}, {token} tokens")
                    found.append(Figure(rule, case, error, f"relative error, {what}"))
    return found


def tasks(setting: Setting) -> Iterator[Task]:
    """Yields both rules, each with a state in every format."""
    for rule in ("gated delta", "mamba2"):
        yield Task(f"drift, {rule}", partial(_check, setting), partial(_drift, setting, rule))
