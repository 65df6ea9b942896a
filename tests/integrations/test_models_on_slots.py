"""Small models of random weights that decode on slots, and on states of their own by the step of another library."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import Mamba3State
from tests.support.build import on
from tests.support.mamba3_peer import siso_step
from tests.support.peers import module

HIDDEN, SIZE, HEADS, WORDS, LAYERS = 32, 16, 2, 50, 2
Planes = dict[str, Tensor]  # of one layer, `slot ...` or `batch ...`
Step = Callable[..., Tensor]  # inputs of a token, planes -> what the recurrence makes of them


class Weights(dict[str, Tensor]):
    """Random weights by name, made when they are first asked for."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def of(self, name: str, *shape: int) -> Tensor:
        if name not in self:
            self[name] = torch.randn(shape, generator=self.generator) * shape[-1] ** -0.5
        return self[name]


def mamba3(x: Tensor, w: Weights, layer: str, planes: Planes, step: Step, shift: Step) -> Tensor:
    """A layer as in mamba_ssm: z, x, B, C, dt, A, trap and angles of one projection, B and C behind their norms."""
    sizes = [HIDDEN, HIDDEN, SIZE, SIZE, HEADS, HEADS, HEADS, 2, SIZE // 4]  # two for tokens on 16 bytes
    z, v, b, c, dt, a, trap, _, rotation = (x @ w.of(layer + "in", sum(sizes), HIDDEN).T).split(sizes, -1)
    dt, a = softplus(dt), -softplus(a).clamp(min=1e-4)
    given = {
        "x": v.unflatten(-1, (HEADS, SIZE)), "z": z.unflatten(-1, (HEADS, SIZE)), "trap": trap, "rotation": rotation,
        **{name: (SIZE**0.5 * normalize(y, dim=-1))[:, None] for name, y in (("b", b), ("c", c))},
        "dt": dt, "decay": a * dt, "d": w.of(layer + "d", HEADS),
        **{name: 1 + w.of(layer + name, HEADS, SIZE) for name in ("b_bias", "c_bias")},
    }  # fmt: skip
    return step(given, planes).flatten(1) @ w.of(layer + "out", HIDDEN, HIDDEN).T


def rwkv7(x: Tensor, w: Weights, layer: str, planes: Planes, step: Step, shift: Step) -> Tensor:
    """Time mixing and channel mixing of RWKV-7, arXiv:2503.14456; full matrices where a model has some of low rank."""

    def mixed(x: Tensor, before: Tensor, *names: str) -> list[Tensor]:
        between = (x + (before - x) * w.of(f"{layer}mix {name}", HIDDEN).sigmoid() for name in names)
        return [y @ w.of(layer + name, HIDDEN, HIDDEN).T for y, name in zip(between, names, strict=True)]

    r, k, v, decay, a, gate = mixed(x, shift(planes, 0, x), "r", "k", "v", "decay", "a", "gate")
    a, heads = a.sigmoid(), (HEADS, SIZE)
    kk = normalize((k * w.of(layer + "kk", HIDDEN)).unflatten(-1, heads), dim=-1)
    r, k, v, a = (y.unflatten(-1, heads) for y in (r, k * (1 + (a - 1) * w.of(layer + "ka", HIDDEN)), v, a))
    given = {"q": r, "k": k, "v": v, "decay": -0.606531 * decay.sigmoid().unflatten(-1, heads), "a": -kk, "b": kk * a}
    y = normalize(step(given, planes), dim=-1) + (r * k * w.of(layer + "bonus", *heads)).sum(-1, keepdim=True) * v
    x = x + (y.flatten(1) * gate.sigmoid()) @ w.of(layer + "out", HIDDEN, HIDDEN).T
    (found,) = mixed(x, shift(planes, 1, x), "found")
    return x + found.relu().square() @ w.of(layer + "value", HIDDEN, HIDDEN).T


def run(model: Any, w: Weights, words: list[list[int]], at: int, layers: list[Planes], step: Step, shift: Step) -> None:
    """One token of each request; where the next is not given, the likeliest is added."""
    x = w.of("words", WORDS, HIDDEN)[[said[at] for said in words]]
    for number, planes in enumerate(layers):
        x = x + model(normalize(x, dim=-1) * HIDDEN**0.5, w, f"{number} ", planes, step, shift)
    for said, logits in zip(words, x @ w.of("heads", WORDS, HIDDEN).T, strict=True):
        if len(said) == at + 1:
            said.append(int(logits.argmax()))


class Own:
    """The state that a model keeps without memstate, advanced by the step of another library."""

    def __init__(self, layout: ms.StateLayout, siso: Callable[..., Any]) -> None:
        whole = {p.name: torch.zeros(layout.layers_of(p), 1, *p.shape) for p in layout.planes}
        self.layers = of_layers(layout, whole)
        self.siso = siso

    def step(self, x: Planes, planes: Planes) -> Tensor:
        if "x" in x:
            turns = x["rotation"][:, None].expand(-1, HEADS, -1)
            names = "c", "b", "x", "decay", "dt", "trap", "c_bias", "b_bias"
            kept = [planes[name] for name in Mamba3State._fields]
            out, kept = self.siso(*(x[name] for name in names), turns, x["d"], x["z"], kept)
            planes.update(zip(Mamba3State._fields, kept, strict=True))
            return out
        recurrence = module("fla.ops.generalized_delta_rule.dplr.naive").dplr_recurrence
        given = (x[name][:, :, None] for name in ("q", "k", "v", "a", "b", "decay"))
        out, planes["ssm"] = recurrence(*given, initial_state=planes["ssm"])
        return out[:, :, 0]

    def shift(self, planes: Planes, which: int, x: Tensor) -> Tensor:
        before = planes["conv"][which, :, :, 0].clone()
        planes["conv"][which, :, :, 0] = x
        return before


def of_layers(layout: ms.StateLayout, whole: Planes) -> list[Planes]:
    """The planes of each layer; of a plane with more layers than the layout has, those that the layer has."""
    each = {p.name: layout.layers_of(p) // layout.layers for p in layout.planes}
    return [
        {name: whole[name][i] if n == 1 else whole[name][n * i : n * (i + 1)] for name, n in each.items()}
        for i in range(layout.layers)
    ]


class OnSlots:
    """The same on slots of a manager."""

    def __init__(self, backend: Backend, layout: ms.StateLayout) -> None:
        self.backend = backend
        self.mem = on(backend, layout, slots=14, max_requests=3, tracking=ms.Redirect(every=4))
        for plane in self.mem.planes.values():
            plane.fill_(torch.nan)
        self.mem.device.scrub_null()
        self.layers = of_layers(layout, dict(self.mem.planes))

    def step(self, x: Planes, planes: Planes) -> Tensor:
        where = self.plan.read, self.plan.write, self.plan.snapshot, torch.ones_like(self.plan.read)
        token = {name: y if name in ("d", "b_bias", "c_bias") else y[:, None] for name, y in x.items()}
        columns = dict(zip(("read", "write", "snapshot", "tokens"), where, strict=True))
        if "x" in x:
            state = Mamba3State(**planes)
            return self.backend.mamba3_step(**token, state=state, **columns)[:, 0]
        return self.backend.gated_delta_step(**token, beta=None, state=planes["ssm"], **columns)[:, 0]

    def shift(self, planes: Planes, which: int, x: Tensor) -> Tensor:
        before = planes["conv"][which, self.plan.read, :, 0]
        planes["conv"][which, self.plan.write, :, 0] = x
        return before

    def decode(self, model: Any, w: Weights, rows: Any, words: list[list[int]], start: int, stop: int) -> None:
        for at in range(start, stop):
            self.plan = self.mem.plan(rows)
            run(model, w, words, at, self.layers, self.step, self.shift)
            self.mem.settle(self.plan)


CONFIGS = {
    "mamba3": {"expand": 1, "head_dim": SIZE, "state_size": SIZE, "rope_fraction": 0.5},
    "rwkv7": {"head_dim": SIZE},
}  # fmt: skip


@pytest.mark.sample(interpreter=0)
@pytest.mark.filterwarnings("ignore:Triton is not supported")  # as fla says where it sees no GPU
@pytest.mark.parametrize("model", [mamba3, rwkv7])
def test_a_model_says_on_slots_what_it_says_on_its_own(
    backend: Backend, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    """Two prompts; one goes to 24 tokens, the other ends. A third request goes on from its snapshot of 12 tokens."""
    kind = model.__name__
    fields = {"model_type": kind, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "dtype": "float32"}
    layout, siso = ms.presets.from_config(fields | CONFIGS[kind]), siso_step(monkeypatch)
    prompts, expected = [[3, 1, 4], [15, 9, 2, 6, 5]], [[0], [0]]
    while len({*expected[0]}) <= 8 or expected[0][5:] == expected[1][5:]:  # it repeats itself
        w, expected = Weights(generator), [prompt.copy() for prompt in prompts]
        for words in expected:
            own = Own(layout, siso)
            for at in range(24):
                run(model, w, [words], at, own.layers, own.step, own.shift)

    served, words = OnSlots(backend, layout), [prompt.copy() for prompt in prompts]
    rows = served.mem.admit([ms.Request("a"), ms.Request("b")])
    served.decode(model, w, rows, words, 0, 14)
    (kept,) = served.mem.end(rows[:1], keep="handle", lengths=[12])
    assert kept is not None and kept.length == 12
    served.decode(model, w, rows[1:], words[1:], 14, 24)
    again = [words[0][:13]]
    served.decode(model, w, served.mem.admit([ms.Request("c", resume=kept)]), again, 12, 24)
    assert words[0] == expected[0][:15] and [*again, *words[1:]] == expected
    served.mem.audit().raise_if_leaking()
