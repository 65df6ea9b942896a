"""Compares presets of `from_config` with the caches of Transformers: planes, dtypes, order of axes, and layers.

A window in the cache has the input of the current step too, so it is one wider than in a preset. It has the same width
if the layer cuts the window itself: in Zaya, and in Qwen4-Exp for embeddings of n-grams.
"""

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from memstate.state.presets import from_config, kv_from_config, state_layers
from memstate.state.presets.fields import Fields
from memstate.state.presets.rules import attention_layers
from tests.support.tiny_models import FAMILIES, FP32_ONLY, tiny

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

import memstate.integrations.transformers as mst
from memstate.integrations.transformers.layout import layout_of
from memstate.integrations.transformers.own import own_cache
from memstate.integrations.transformers.probe import Findings, probe

AS_WIDE = {"zaya": ("conv",), "qwen4_exp_text": ("conv2", "conv3")}
INDEXED = ("qwen4_exp_text", "glm5_next")  # families with an index; its keys are not KV


# family -> a field that makes the two axes of a state unequal; the axes of Kimi's rule are always equal
UNEQUAL = {
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text", "olmo_hybrid"), "linear_value_head_dim"
    ),
    **dict.fromkeys(("bamba", "granitemoehybrid", "falcon_h1", "zamba2"), "mamba_d_state"),
    "nemotron_h": "ssm_state_size",
    "mamba2": "state_size",
}


def planes(layout: Any) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    return [(plane.name, plane.shape, plane.dtype) for plane in layout.planes]


def in_cache(family: str, layout: Any) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """Returns the planes of a preset with the windows of the cache: K inputs instead of K - 1."""
    return [
        (name, (*shape[:-1], shape[-1] + (name.startswith("conv") and name not in AS_WIDE.get(family, ()))), dtype)
        for name, shape, dtype in planes(layout)
    ]


def configured(model: Any, dtype: torch.dtype) -> Any:
    """Returns the configuration of a model with the dtype of a checkpoint."""
    config = copy.deepcopy(model.config)
    config.get_text_config().dtype = dtype
    return config


def compare(family: str, model: Any) -> Findings:
    config, findings = configured(model, model.dtype), probe(model)
    layout, real = from_config(config), layout_of(findings).state
    assert (in_cache(family, layout), layout.layers) == (planes(real), real.layers)
    text = config.get_text_config()
    assert state_layers(text) == tuple(dict.fromkeys(held.layer for held in findings.held))
    assert attention_layers(Fields(text)) == tuple(one.layer for one in findings.attended)
    return findings


@pytest.mark.sample(8)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_preset_is_what_the_cache_of_the_model_holds(family: str) -> None:
    model = tiny(family)
    findings = compare(family, model)
    page = kv_from_config(configured(model, model.dtype), page_size=1, dtype=model.dtype)
    elements = sum(one.keys[0] * one.keys[1] + one.values[0] * one.values[1] for one in findings.attended)
    assert (page.layers * sum(plane.elements for plane in page.planes) if page else 0) == elements
    assert any(one.indexed for one in findings.attended) == (family in INDEXED)


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", UNEQUAL)
def test_a_preset_has_the_axes_of_a_state_in_the_order_of_the_class(family: str) -> None:
    findings = compare(family, tiny(family, changes=((UNEQUAL[family], 16),)))
    (ssm,) = {one.shape for one in findings.held if one.kind == "recurrent"}
    assert ssm[-2:] == (8, 16)


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in FP32_ONLY])
def test_a_preset_has_the_dtypes_of_a_model_in_bfloat16(family: str) -> None:
    compare(family, tiny(family, dtype=torch.bfloat16))


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_preset_is_the_layout_of_a_model_that_decodes_on_slots(family: str) -> None:
    real, layout = mst.layout(tiny(family)), from_config(configured(tiny(family), torch.float32))
    if not real.on_slots:
        assert (planes(real.state), real.state.layers) == (in_cache(family, layout), layout.layers)
    elif family not in AS_WIDE:
        assert (planes(real.state), real.state.layers) == (planes(layout), layout.layers)
        rings = from_config(configured(tiny(family), torch.float32), tail=4).rows
        assert not real.tails or planes(real.with_tail(4).rows) == planes(rings)


def test_planes_of_compressors_are_what_the_cache_of_the_model_holds(tmp_path: Path) -> None:
    """At 11 tokens each open window lacks one token. A bfloat16 checkpoint has biases in fp32."""
    tiny("deepseek_v4").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    cache, states, rows = own_cache(model), Counter[Any](), Counter[Any]()
    model(input_ids=torch.arange(3, 14)[None], past_key_values=cache)
    for kind, layer in zip(model.config.layer_types, cache.layers, strict=True):
        names = {"compressor": "csa" if kind == "compressed_sparse_attention" else "hca", "indexer": "index"}
        for counted, held in ((states, "overlap"), (rows, "buffer")):
            for what in ("kv", "gate"):
                tensors = getattr(layer, f"{held}_{what}", {}).items()
                counted.update((f"{names[name]}_{what}", tuple(one.shape[1:]), one.dtype) for name, one in tensors)
    layout = from_config(model.config)
    for counted, planes in ((states, layout), (rows, layout.rows)):
        assert counted == {(one.name, one.shape, one.dtype): planes.layers_of(one) for one in planes.planes}
