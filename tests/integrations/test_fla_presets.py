"""Compares presets with the states that models of flash-linear-attention keep in their own cache."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from memstate.state.presets import from_config, state_layers
from tests.integrations.test_fla_models import HIDDEN, LAYERS, TAPS, fla_model
from tests.support.peers import module, on_cpu

# type -> the name of its class, and settings that differ from SETTINGS
TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "delta_net": ("DeltaNet", {"expand_k": 0.5}),
    "gated_deltanet": ("GatedDeltaNet", {}),
    "kda": ("KDA", {}),
    "comba": ("Comba", {}),
    "gated_deltaproduct": ("GatedDeltaProduct", {}),
    "precond_gated_deltanet": ("PrecondGatedDeltaNet", {}),
    "precond_kda": ("PrecondKDA", {}),
    "gla": ("GLA", {"num_kv_heads": 1}),
    "retnet": ("RetNet", {}),
    "linear_attn": ("LinearAttention", {}),
    "gsa": ("GSA", {}),
    "raven": ("Raven", {"topk": 4}),
    "hgrn": ("HGRN", {"expand_ratio": 2}),
    "hgrn2": ("HGRN2", {"expand_ratio": 8, "num_heads": None}),
    "rwkv6": ("RWKV6", {}),
    "rwkv7": ("RWKV7", {"num_heads": None}),
    "mamba": ("Mamba", {}),
    "mamba2": ("Mamba2", {"head_dim": 8}),
}
SETTINGS = {  # those that a class takes
    "attn_mode": "fused_recurrent", "num_heads": 2, "head_dim": 16, "num_v_heads": 4, "state_size": 16, "num_slots": 8,
    "use_short_conv": True, "num_householder": 2, "intermediate_size": HIDDEN, "fuse_swiglu": False,
    **{f"{name}_low_rank_dim": 8 for name in ("gate", "proj", "decay", "a", "v")},
}  # fmt: skip


def shapes(kept: Any, *, window: bool = False) -> Iterator[tuple[int, ...]]:
    """Yields the sorted shape of each tensor; a window lacks the input of the step itself."""
    if isinstance(kept, torch.Tensor):
        shape = kept.shape[1:]
        yield tuple(sorted((*shape[:-1], shape[-1] - 1) if window and kept.dim() == 3 else shape))
    elif kept is not None:
        for each in kept:
            yield from shapes(each, window=window)


@pytest.mark.filterwarnings("ignore:Triton is not supported", "ignore:According to Bo")  # warnings of fla
@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", TYPES)
@torch.no_grad()
def test_a_preset_is_what_the_cache_of_a_model_holds(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, own = TYPES[kind]
    taken = inspect.signature(getattr(module("fla.models"), f"{name}Config").__init__).parameters
    settings = {key: value for key, value in SETTINGS.items() if key in taken} | own
    on_cpu(monkeypatch)
    model = fla_model(monkeypatch, name, torch.device("cpu"), hidden_size=HIDDEN, num_hidden_layers=LAYERS, **settings)
    cache, config = model(torch.tensor([[3]]), use_cache=True).past_key_values, model.config
    layout = from_config(config)
    assert config.model_type == kind and layout == from_config(config.to_dict())
    assert state_layers(config) == tuple(range(LAYERS))
    held: list[tuple[int, ...]] = []
    for layer in range(LAYERS):
        state = cache[layer]
        held += [*shapes([state["recurrent_state"], state["ffn_state"]]), *shapes(state["conv_state"], window=True)]
    told: list[tuple[int, ...]] = []
    for plane in layout.planes:
        parts = [plane.shape]
        if plane.name == "conv" and plane.shape[-1] == TAPS - 1 and kind != "mamba2":  # with one window over x, B and C
            names = dict.fromkeys(part.name[0] for part in plane.parts)  # a product has several keys and values
            parts = [(sum(part.length for part in plane.parts if part.name[0] == name), TAPS - 1) for name in names]
        told += [tuple(sorted(size for size in shape if size > 1)) for shape in parts] * layout.layers_of(plane)
    assert sorted(tuple(size for size in shape if size > 1) for shape in held) == sorted(told)
    assert {plane.dtype for plane in layout.planes if plane.name != "conv"} == {torch.float32}
