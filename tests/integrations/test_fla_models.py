"""Tests that models of flash-linear-attention generate the same tokens on slots as with their own cache.

The layers are unchanged, except that memstate's kernels read and write the states on slots.
"""

import sys
from collections.abc import Callable
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import Mamba3State
from tests.support.build import on
from tests.support.peers import inner_module, module, on_cpu

WORDS = 50
HIDDEN, SIZE, HEADS, LAYERS, TAPS = 32, 16, 2, 2, 4
TOKENS = 16
State = dict[str, Any]  # states of a layer, by their names in the cache of flash-linear-attention


class SaidToBeOnCuda(nn.Module):
    """A projection that says it is on a GPU, for a layer that refuses all other devices."""

    def __init__(self, projection: nn.Module) -> None:
        super().__init__()
        self.inner, self.weight = projection, SimpleNamespace(device=torch.device("cuda"))

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.inner(x)
        return projected


def fla_model(patch: pytest.MonkeyPatch, name: str, device: torch.device, **config: Any) -> Any:
    """Returns a model of the class with this name. Its autotuned kernels use their largest blocks, unmeasured."""
    models = module("fla.models")
    patch.setattr("triton.runtime.autotuner.Autotuner._bench", _small)
    plain = {"vocab_size": WORDS, "fuse_norm": False, "fuse_cross_entropy": False, "dtype": "float32"}
    made = getattr(models, f"{name}ForCausalLM")(getattr(models, f"{name}Config")(**plain | config))
    return made.eval().requires_grad_(False).to(device)


def _small(tuner: Any, *args: Any, config: Any, **kwargs: Any) -> int:
    """Returns a false time for a configuration: smaller for larger blocks, because they mean fewer programs."""
    return -sum(config.kwargs.values())


def draw(model: Any, generator: torch.Generator) -> None:
    """Draws new matrices at random. Vectors and short convolutions keep their initial values, plus noise."""
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator).to(weight)
        if weight.dim() == 2:
            weight.copy_(noise * weight.shape[-1] ** -0.5)
        else:
            weight.add_(noise / 4)


class OnSlots:
    """A model whose states are in slots of a manager. All slots except slot 0 start as NaN."""

    def __init__(self, backend: Backend, model: Any, layout: ms.StateLayout) -> None:
        self.ops, self.model = backend, model
        self.mem = on(backend, layout, slots=14, max_requests=3, tracking=ms.Redirect(every=4))
        for plane in self.mem.planes.values():
            plane.fill_(torch.nan)
        self.mem.device.scrub_null()

    def columns(self, tokens: int = 1) -> tuple[Tensor, ...]:
        read, write, snapshot = self.plan.read, self.plan.write, self.plan.snapshot
        return read, write, snapshot, torch.full_like(read, tokens)

    def decode(self, states: Callable[[int], State], rows: Any, texts: list[list[int]], start: int, stop: int) -> None:
        for at in range(start, stop):
            self.plan = self.mem.plan(rows)
            say(self.model, texts, at, [states(layer) for layer in range(LAYERS)])
            self.mem.settle(self.plan)


@torch.no_grad()  # with gradients, layers would choose training kernels
def say(model: Any, texts: list[list[int]], at: int, states: Any) -> tuple[Any, float]:
    """Runs token `at` of each text. Appends the likeliest next token to each text that ends at `at`.

    Returns:
        The new cache, and the smallest distance between the best two logits of an appended token.
    """
    tokens = torch.tensor([[text[at]] for text in texts], device=model.device)
    if isinstance(states, list):
        states = module("fla.models.utils").Cache.from_legacy_cache(states)
    made, clear = model(tokens, past_key_values=states, use_cache=True), 1.0
    for text, logits in zip(texts, made.logits[:, -1], strict=True):
        if len(text) == at + 1:
            (first, second), (likeliest, _) = logits.topk(2)
            text.append(int(likeliest))
            clear = min(clear, float(first - second))
    return made.past_key_values, clear


def rwkv7(served: OnSlots, patch: pytest.MonkeyPatch) -> Callable[[int], State]:
    def recurrence(r: Tensor, w: Tensor, k: Tensor, v: Tensor, kk: Tensor, a: Tensor, **given: Any) -> Any:
        state, inputs = given["initial_state"], (r, k, v, w, None)
        return served.ops.gated_delta_step(*inputs, state, *served.columns(), 1.0, a=-kk, b=kk * a), state

    def shift(x: Tensor, cu_seqlens: None, *, cache: Tensor, output_cache: bool) -> tuple[Tensor, Tensor]:
        before = cache[served.plan.read].mT
        cache[served.plan.write] = x.mT
        return before - x, cache

    patch.setattr("fla.layers.rwkv7.fused_mul_recurrent_rwkv7", recurrence)
    for place in ("fla.layers.rwkv7", "fla.models.rwkv7.modeling_rwkv7"):
        patch.setattr(f"{place}.token_shift", shift)
    conv, ssm = served.mem.planes["conv"], served.mem.planes["ssm"]
    return lambda layer: {
        "recurrent_state": ssm[layer], "conv_state": conv[2 * layer], "ffn_state": conv[2 * layer + 1]
    }  # fmt: skip


def convolved(served: OnSlots, patch: pytest.MonkeyPatch) -> Callable[[int], State]:
    """Puts the short convolutions of q, k and v on slots; returns a function layer -> its states."""

    def convolution(self: Any, x: Tensor, cache: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
        return served.ops.conv_step(x, self.weight[:, 0], None, cache.mT, *served.columns(x.shape[1])), cache

    patch.setattr("fla.modules.ShortConvolution.forward", convolution)
    planes = served.mem.planes
    return lambda layer: {
        "recurrent_state": planes["ssm"][layer], "conv_state": tuple(planes[name][layer] for name in "qkv")
    }  # fmt: skip


def product(served: OnSlots, patch: pytest.MonkeyPatch) -> Callable[[int], State]:
    def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
        state, columns = given["initial_state"], served.columns(q.shape[1])
        return served.ops.gated_delta_step(q, k, v, g, beta, state, *columns, normalize=True), state

    patch.setattr("fla.layers.gated_deltaproduct.fused_recurrent_gated_delta_rule", recurrence)
    return convolved(served, patch)


def gdn2(served: OnSlots, patch: pytest.MonkeyPatch) -> Callable[[int], State]:
    def recurrence(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor, **given: Any
    ) -> tuple[Tensor, Tensor]:
        (q, k), state = (normalize(x, dim=-1) for x in (q, k)), given["initial_state"]
        inputs, columns = (q, k, v * w, g, None, state), served.columns()
        return served.ops.gated_delta_step(*inputs, *columns, a=g.exp() * b * k, b=-k), state

    patch.setattr("fla.layers.gdn2.fused_recurrent_gdn2", recurrence)
    return convolved(served, patch)


def mamba3(served: OnSlots, patch: pytest.MonkeyPatch) -> Callable[[int], State]:
    """Puts Mamba-3 on slots; returns a function layer -> its states.

    memstate's kernel rotates keys and queries itself, so it gets them before the layer rotates them.
    """
    before: State = {}

    def turn(angle_state: Tensor, **given: Any) -> tuple[Tensor, Tensor, Tensor]:
        before.update(given)
        return given["q"], given["k"], angle_state

    def step(ssm: Mamba3State, k: Tensor, v: Tensor, a: Tensor, *inputs: Tensor, out: Tensor, **given: Any) -> None:
        _, _, d, x, dt, trap, _ = inputs
        token = {
            "x": x, "b": before["k"][:, 0], "c": before["q"][:, 0], "dt": dt, "decay": a * dt, "trap": trap.logit(),
            "rotation": before["angle_proj"][:, 0], "z": given["z"],
        }  # fmt: skip
        biases = {"b_bias": before["bias_k"][0], "c_bias": before["bias_q"][0]}
        shaped = {name: t[:, None].clone(memory_format=torch.contiguous_format) for name, t in token.items()}
        columns = dict(zip(("read", "write", "snapshot", "tokens"), served.columns(), strict=True))
        out[:] = served.ops.mamba3_step(**shaped, **biases, d=d, state=ssm, **columns)[:, 0]

    patch.setattr("fla.layers.mamba3.apply_rotary_qk_inference_fwd", turn)
    patch.setattr("fla.layers.mamba3.mamba3_step_fn", step)

    def state(layer: int) -> State:
        angle, _, k, v = empty(served.model, layer, len(served.plan.read))
        planes = Mamba3State(**{name: served.mem.planes[name][layer] for name in Mamba3State._fields})
        return {"recurrent_state": (angle, planes, k, v)}

    return state


def empty(model: Any, layer: int, batch: int) -> Any:
    """Returns the cache with which a layer of Mamba-3 begins."""
    mixer = model.backbone.layers[layer].mixer
    return mixer.allocate_inference_cache(batch, 1, model.device, torch.float32)


def mamba3_model(patch: pytest.MonkeyPatch, device: torch.device, **config: Any) -> Any:
    """Returns a Mamba-3 model whose step is the torch reference of mamba_ssm instead of its CUTLASS kernel."""
    model, layers = fla_model(patch, "Mamba3", device, **config), module("fla.layers.mamba3")
    with pytest.MonkeyPatch.context() as absent:
        for name in ("cuda.bindings.driver", "cutlass.cute", "quack.compile_utils", "quack.cute_dsl_utils"):
            for inner in accumulate(name.split("."), "{}.{}".format):
                absent.setitem(sys.modules, inner, MagicMock())
        reference = inner_module("mamba_ssm.ops.cute.mamba3.mamba3_step_fn").selective_state_update_fused_ref_v2
    rotary = inner_module("mamba_ssm.ops.triton.mamba3.mamba3_mimo_rotary_step").apply_rotary_qk_inference_fwd

    def step(
        state: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, x: Tensor, dt: Tensor,
        trap: Tensor, xproj: Tensor, *, out: Tensor, z: Tensor, zproj: Tensor, outproj: Tensor, **given: Any
    ) -> None:  # fmt: skip
        out[:], state[:] = reference(state, a, b, c, xproj, x, zproj, z, dt, k, v, trap, d, outproj)

    on_cpu(patch)
    patch.setattr(torch.library, "wrap_triton", lambda kernel: kernel)
    patch.setattr(layers, "mamba3_siso_combined", "for whole prompts: not called")
    patch.setattr(layers, "mamba3_step_fn", step)
    patch.setattr(layers, "apply_rotary_qk_inference_fwd", rotary)
    for block in model.backbone.layers:
        block.mixer.in_proj = SaidToBeOnCuda(block.mixer.in_proj)
    return model


def gdn2_model(patch: pytest.MonkeyPatch, device: torch.device, **config: Any) -> Any:
    """Returns a model of Gated DeltaNet with layers of Gated DeltaNet-2, for which fla has no model."""
    model, layer = fla_model(patch, "GatedDeltaNet", device, **config), module("fla.layers.gdn2").GatedDeltaNet2
    for number, block in enumerate(model.model.layers):
        sizes = {name: config[name] for name in ("hidden_size", "head_dim", "num_heads", "expand_v")}
        block.attn = layer(**sizes, layer_idx=number).to(device)
    return model.eval().requires_grad_(False)


class Kind(NamedTuple):
    model: Callable[..., Any]
    config: dict[str, Any]
    serve: Callable[[OnSlots, pytest.MonkeyPatch], Callable[[int], State]]


def named(name: str) -> Callable[..., Any]:
    return lambda patch, device, **config: fla_model(patch, name, device, **config)


LOW_RANK = {f"{name}_low_rank_dim": 8 for name in ("decay", "gate", "a", "v")}
DELTA = {"head_dim": SIZE, "num_heads": HEADS, "expand_v": 1, "intermediate_size": HIDDEN, "fuse_swiglu": False}
PRODUCT = {"num_householder": 2, "use_forget_gate": True, "allow_neg_eigval": True}
KINDS = {
    "rwkv7": Kind(named("RWKV7"), LOW_RANK | {"head_dim": SIZE, "intermediate_size": HIDDEN}, rwkv7),
    "product": Kind(named("GatedDeltaProduct"), DELTA | PRODUCT, product),
    "gdn2": Kind(gdn2_model, DELTA, gdn2),
    "mamba3": Kind(mamba3_model, {"expand": 1, "head_dim": SIZE, "state_size": SIZE}, mamba3),
}


def layout_of(model: Any) -> ms.StateLayout:
    """Returns the layout of a model: its preset, or for DeltaProduct and Gated DeltaNet-2 one by hand."""
    if model.config.model_type in ("rwkv7", "mamba3"):
        return ms.presets.from_config(model.config)
    attn = model.model.layers[0].attn
    windows = [ms.Plane(name, (getattr(attn, f"{name}_conv1d").hidden_size, TAPS - 1), torch.float32) for name in "qkv"]
    return ms.StateLayout((*windows, ms.Plane("ssm", (HEADS, SIZE, SIZE), torch.float32)), LAYERS)


@pytest.mark.filterwarnings("ignore:Triton is not supported", "ignore:According to Bo")  # warnings of fla
@pytest.mark.parametrize(
    "name", ["gdn2", *(pytest.param(kind, marks=pytest.mark.proof) for kind in KINDS if kind != "gdn2")]
)
def test_a_model_says_on_slots_what_it_says_with_a_cache_of_its_own(
    backend: Backend, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """One request runs to 16 tokens, a second one ends.

    A third request goes on from the second's snapshot of 8 tokens.
    """
    kind = KINDS[name]
    model = kind.model(monkeypatch, backend.device, hidden_size=HIDDEN, num_hidden_layers=LAYERS, **kind.config)
    prompts, expected, clear = [[3, 1, 4], [15, 9, 2, 6, 5]], [[0], [0]], 0.0
    while clear < 1e-3 or len({*expected[0]}) <= 6 or expected[0][5:] == expected[1][5:]:  # until the texts vary
        draw(model, generator)
        cache: Any = [{"recurrent_state": empty(model, i, 2)} for i in range(LAYERS)] if name == "mamba3" else None
        expected, clear = [prompt.copy() for prompt in prompts], 1.0
        for at in range(TOKENS):
            cache, least = say(model, expected, at, cache)
            clear = min(clear, least)

    served, texts = OnSlots(backend, model, layout_of(model)), [prompt.copy() for prompt in prompts]
    states = kind.serve(served, monkeypatch)
    rows = served.mem.admit([ms.Request("a"), ms.Request("b")])
    served.decode(states, rows, texts, 0, 10)
    (kept,) = served.mem.end(rows[:1], keep="handle", lengths=[8])
    assert kept is not None and kept.length == 8
    served.decode(states, rows[1:], texts[1:], 10, TOKENS)
    again = [texts[0][:9]]
    served.decode(states, served.mem.admit([ms.Request("c", resume=kept)]), again, 8, TOKENS)
    assert texts[0] == expected[0][:11] and [*again, *texts[1:]] == expected
    served.mem.audit().raise_if_leaking()
