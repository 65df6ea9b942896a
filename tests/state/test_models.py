"""Compares layouts with sizes reckoned by hand, and tests which configurations are taken for which rule."""

import copy
import importlib
import logging
from collections.abc import Mapping
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import memstate as ms
from docs.site.models import KERNELS, MODELS, PAGE, page
from memstate.state.presets import from_config, kv_from_config, register, rule, rules, state_layers
from tests.support.refusals import refusals

CONFIGS = {name: model["config"] for name, model in MODELS.items()}


def test_the_table_of_models_is_made_from_the_code() -> None:
    assert PAGE.read_text() == page(PAGE.read_text()), "docs/models.md is stale: make docs"
    assert {one.name for one in (*rules.RULES, *rules.OF_TYPE.values())} >= KERNELS.keys()


class Hand(NamedTuple):
    """Sizes of a layer, from the papers and the classes of the models: layers, elements in bf16, elements in fp32."""

    layers: int
    bf16: int
    fp32: int


def delta(layers: int, keys: int, values: int, key: int = 128, value: int = 128, taps: int = 4) -> Hand:
    """Heads of keys, heads of values, their sizes: windows over q, k, v and a matrix for each head of values."""
    return Hand(layers, (2 * keys * key + values * value) * (taps - 1), values * key * value)


HAND = {
    "LaraMini, class defaults": delta(14, 8, 16),  # of five layers the first and the third
    "InternS2-Mobius, an example": delta(30, 16, 32),
    "GigaChat-3.5": delta(9, 8, 16),
    "Alice AI, an example": delta(36, 32, 32),
    "Ling-3.0-flash, type bailing_moe_v3": delta(35, 32, 32),
    "Ling-3.0, a list of layers": delta(4, 4, 4),
    "Jet-Nemotron-2B": Hand(24, 12 * 192 * 3, 12 * 96 * 192),  # only values pass the convolution
    "MiniMax-Text-01": Hand(70, 0, 64 * 128 * 128),
    "MiniMax, class defaults": Hand(16, 0, 32 * 128 * 128),
    "Ring-2.5-1T": Hand(70, 0, 64 * 128 * 128),
    "Ring-mini-linear-2.0": Hand(16, 0, 16 * 128 * 128),
    "MiniCPM-SALA": Hand(31, 0, 32 * 128 * 128),
    "Nemotron-H puzzle, an example": Hand(1, (64 * 64 + 2 * 8 * 128) * 3, 64 * 64 * 128),
    "PLaMo-2, class defaults": Hand(16, 64 * 128 * 3, 64 * 128 * 64),
    "RecurrentGemma-2B": Hand(18, 2560 * 3, 2560),
    "xLSTM-7B": Hand(32, 0, 8 * (256 * 512 + 256 + 1)),
    "RWKV-4, class defaults": Hand(32, 2 * 4096, 3 * 4096),
    "Inkling-2-Mini, class defaults": Hand(48, 0, (2 * 1024 + 2 * 2304) * 3),  # 24 layers, of which 12 run three times
    "DeltaNet (FLA)": delta(24, 16, 16),
    "GatedDeltaNet (FLA)": delta(21, 6, 6, 256, 512),
    "KDA (FLA)": delta(24, 16, 16),
    "Comba (FLA)": delta(21, 6, 6, 256, 512),
    "GatedDeltaProduct (FLA)": delta(21, 6, 6, 256, 512),  # with one key and value for a token
    "PrecondGatedDeltaNet (FLA)": delta(21, 6, 6, 256, 512)._replace(fp32=6 * 256 * 512 + 6 * 256),
    "PrecondKDA (FLA)": delta(24, 16, 16)._replace(fp32=16 * 128 * 128 + 16 * 128),
    "MesaNet (FLA)": Hand(24, 2 * 2048 * 3, 2 * 16 * 128 * 128),
    "GLA (FLA)": Hand(24, 0, 4 * 256 * 512),
    "RetNet (FLA)": Hand(24, 0, 8 * 256 * 512),
    "LinearAttention (FLA)": Hand(24, 0, 4 * 512 * 512),
    "GSA (FLA)": Hand(24, 0, 2 * 4 * 512 * 64),
    "ABC (FLA)": Hand(24, 0, 4 * (256 + 512) * 64),
    "Raven (FLA)": Hand(24, 0, 2 * 4 * 512 * 64),
    "HGRN (FLA)": Hand(24, 0, 2048),
    "HGRN2 (FLA)": Hand(24, 0, 16 * 128 * 128),
    "LightNet (FLA)": Hand(24, 0, 16 * 128 * 128 + 16 * 128),
    "RWKV6 (FLA)": Hand(24, 2 * 2048, 4 * 256 * 512),
    "Rodimus (FLA)": Hand(24, 4096 * 3, 4096 * 64),
    "Samba (FLA)": Hand(9, 4608 * 3, 4608 * 16),
}


@pytest.mark.parametrize("name", HAND)
def test_a_slot_has_the_bytes_reckoned_by_hand(name: str) -> None:
    layers, bf16, fp32 = HAND[name]
    config = copy.deepcopy(CONFIGS[name])
    layout = from_config(config)
    assert layout.bytes_per_slot == layers * (2 * bf16 + 4 * fp32)
    assert len(state_layers(config)) == layers and config == CONFIGS[name]
    composite = {"model_type": "vl", "text_config": config}
    assert from_config(SimpleNamespace(**config)) == layout == from_config(composite)
    assert state_layers(composite) == state_layers(config)


@pytest.mark.parametrize("name", [name for name in CONFIGS if "FLA" not in name and "DeepSeek" not in name])
def test_D40_the_name_of_a_model_does_not_matter_if_its_fields_say_the_rule(name: str) -> None:
    config = CONFIGS[name]
    if config["model_type"] in rules.OF_TYPE:
        assert rule(config) == rules.OF_TYPE[config["model_type"]].name
    else:
        assert from_config(config | {"model_type": "another"}) == from_config(config)


def test_the_fields_that_say_a_rule_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "memstate.presets"):
        from_config(CONFIGS["GigaChat-3.5"])
    assert "model_type='gigachat3_5' rule='gated delta rule' fields='linear_num_key_heads " in caplog.text


LINEAR = CONFIGS["InternS2-Mobius, an example"]


def test_D40_fields_of_two_rules_and_layers_of_an_unknown_kind_are_refused() -> None:
    with pytest.raises(ms.InvalidArgument, match=r"fields of gated delta rule .* and Kimi's delta rule .*one"):
        from_config(LINEAR | {"linear_num_heads": 4, "linear_head_dim": 8})
    listed = {"full_attention_interval": None, "layer_types": ["linear_attention", "retention"] * 20}
    with pytest.raises(ms.InvalidArgument, match=r"layer_types = .*: expected kinds .* memstate knows, not retention"):
        from_config(LINEAR | listed)


test_what_may_be_another_rule_is_refused = refusals(
    ms.InvalidArgument,
    (LINEAR | {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2}, "gated delta rule .* and Mamba .* one rule"),
    (LINEAR | {"linear_value_head_dim": None}, "for gated delta rule it lacks linear_value_head_dim"),
    (CONFIGS["MiniCPM-SALA"] | {"mixer_types": ["minicpm4", "window"]}, "knows, not window"),
    (CONFIGS["MiniCPM-SALA"] | {"num_hidden_layers": 2**40}, "num_hidden_layers = 1099511627776: .* at most 65536"),
    (
        CONFIGS["Inkling-2-Mini, class defaults"] | {"loop_layer_index_end": 25},
        "loop_layer_index_end = 25: .* 24 layers",
    ),
    (
        CONFIGS["Inkling-2-Mini, class defaults"] | {"loop_config": {"num_passes": 3}, "loop_num_passes": None},
        "loop_config = {'num_passes': 3}: expected loop_num_passes",
    ),
    (CONFIGS["Bamba-9B-v2"] | {"block_configs": 3}, "block_configs = 3: expected a list with the kind of each layer"),
    (CONFIGS["MiniCPM-SALA"] | {"lightning_nh": 64}, "lightning_nh = 64: expected as many heads of queries as of keys"),
    (CONFIGS["Ling-3.0, a list of layers"] | {"layer_group_size": [1, 0]}, "expected a 0 or 1 for each of 6 layers"),
    (CONFIGS["MiniMax-Text-01"] | {"attn_type_list": [0, 2] * 40}, "a 0 or 1 for each of 80 layers"),
    (CONFIGS["MiniMax-Text-01"] | {"attn_type_list": [1] * 80}, "no layer of this configuration holds state"),
    (
        CONFIGS["RecurrentGemma-2B"] | {"num_attention_heads": 7},
        "lru_width = 2560, num_attention_heads = 7: .* multiple",
    ),
    (
        CONFIGS["GLA (FLA)"] | {"expand_k": 0.3},
        "expand_k = 0.3: expected a number that makes 2048 another whole number",
    ),
    (CONFIGS["GLA (FLA)"] | {"use_short_conv": None}, "use_short_conv = None: expected true or false"),
    (CONFIGS["HGRN2 (FLA)"] | {"expand_ratio": 100}, "hidden_size = 2048, expand_ratio = 100: .* a multiple"),
    (CONFIGS["GLA (FLA)"] | {"expand_k": float("nan")}, "expand_k = nan: expected a number that makes"),
    (CONFIGS["GLA (FLA)"] | {"expand_v": float("inf")}, "expand_v = inf: expected a number that makes"),
    (CONFIGS["GLA (FLA)"] | {"num_kv_heads": "4"}, "num_kv_heads = '4': expected a number of 1 or more"),
    (CONFIGS["LinearAttention (FLA)"] | {"feature_map": "dpfp"}, "feature_map = 'dpfp': .* not make keys longer"),
    (CONFIGS["RWKV7 (FLA)"] | {"value_dim": [2048, 4096]}, r"value_dim = \[2048, 4096\], .* as many values as keys"),
    (CONFIGS["RWKV7 (FLA)"] | {"value_dim": 4096}, "value_dim = 4096, hidden_size = 2048: .* as many values as keys"),
    ({"model_type": "mom", "num_heads": 4}, "each token changes only some of its memories"),
    ({"model_type": "path_attn"}, "each token changes all cached keys"),
    (
        {"model_type": "minimax_m2", "num_hidden_layers": 62, "num_attention_heads": 48, "head_dim": 128},
        "it has no known rule. A model that only attends holds no state",
    ),
    call=from_config,
)


def test_a_size_that_is_a_fraction_of_another_stays_whole() -> None:
    config = CONFIGS["GLA (FLA)"] | {"use_short_conv": True, "num_kv_heads": 2}
    conv, ssm = from_config(config).planes
    assert (ssm.shape, [part.length for part in conv.parts], conv.shape) == (
        (4, 256, 512),
        [1024, 512, 1024],
        (2560, 3),
    )
    product = CONFIGS["GatedDeltaProduct (FLA)"] | {"num_householder": 2}
    assert [part.name for part in from_config(product).planes[0].parts] == ["q", "k0", "k1", "v0", "v1"]


def test_blocks_have_sizes_of_their_own() -> None:
    puzzle = copy.deepcopy(CONFIGS["Nemotron-H puzzle, an example"]) | {"hybrid_override_pattern": None}
    puzzle["block_configs"][1:3] = [{"block_type": "mamba", "mamba_num_heads": 32}, {"block_type": "attention"}]
    states = [plane.shape for plane in from_config(puzzle).planes if plane.name.startswith("ssm")]
    assert (states, state_layers(puzzle)) == ([(64, 64, 128), (32, 64, 128)], (0, 1))


def test_layers_that_attend_beside_a_state_have_kv() -> None:
    samba = CONFIGS["Samba (FLA)"] | {"attn": {"layers": [1, 3], "num_heads": 18, "num_kv_heads": 6}}
    page = kv_from_config(samba, page_size=1)
    assert page is not None and page.bytes_per_slot == 2 * 2 * 6 * 128 * 2 and len(state_layers(samba)) == 16
    specs = [{"layers": [1], "num_heads": 18, "num_kv_heads": 6}, {"layers": [4, 5], "num_heads": 9}]
    several = kv_from_config(samba | {"attn": specs}, page_size=1)
    assert several is not None and several.payload_bytes_per_slot == 2 * 2 * (6 * 128 + 2 * 9 * 256)
    assert state_layers(samba | {"attn": specs}) == tuple(layer for layer in range(18) if layer not in (1, 4, 5))
    with pytest.raises(ms.InvalidArgument, match="layers = \\[18\\]: expected a list of numbers from 0 to 17"):
        from_config(samba | {"attn": {"layers": [18]}})
    loop = kv_from_config(CONFIGS["Inkling-2-Mini, class defaults"], page_size=1)
    assert loop is not None and loop.bytes_per_slot == 48 * 2 * 8 * 128 * 2
    kinds = ["hybrid_sliding"] * 6 + ["hybrid"] * 12 + ["hybrid_sliding"] * 6
    narrow = CONFIGS["Inkling-2-Mini, class defaults"] | {"swa_num_key_value_heads": 2, "layer_types": kinds}
    shapes = {plane.shape: plane.layers for plane in from_config(narrow).planes}
    runs = 3 * 12  # of layers that do not slide
    assert shapes == {(256, 3): 2 * (48 - runs), (2304, 3): None, (1024, 3): 2 * runs}


def test_a_type_of_ones_own_is_read_with_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "OF_TYPE", {**rules.OF_TYPE})

    def planes(fields: Any, layer: int) -> list[ms.Plane]:
        return [ms.Plane("ssm", (fields.number("width"), layer + 1), torch.float32)]

    mine = {"model_type": "mine", "width": 4, "num_hidden_layers": 3}
    register("mine", planes, placement="pure")
    assert from_config(mine).bytes_per_slot == 4 * (4 + 8 + 12) and rule(mine) == "mine"
    assert from_config(mine | {"layer_types": ["mamba", "attention", "moe"]}).bytes_per_slot == 16
    register("qwen3_next", planes, placement="every")
    assert from_config(LINEAR | {"model_type": "qwen3_next", "width": 1}).payload_bytes_per_slot == 4 * sum(
        range(1, 41)
    )
    register("log_linear_mamba2", planes)
    with pytest.raises(ms.InvalidArgument, match="log_linear_mamba2 without layer_types"):
        from_config(mine | {"model_type": "log_linear_mamba2"})
    for nonsense in (None, planes, [1], "ab", ms.Plane("ssm", (2,), torch.float32)):
        register("mine", lambda *_, given=nonsense: given, placement="pure")  # type: ignore[misc]
        with pytest.raises(
            ms.InvalidArgument, match=r"planes that the reader of 'mine' returned: .* sequence of Plane"
        ):
            from_config(mine)
    for wrong, said in (
        (("mine", 3), "expected the name of a model type and a function"),
        (("", planes), "expected the name of a model type"),
    ):
        with pytest.raises(ms.InvalidArgument, match=said):
            register(*wrong)  # type: ignore[arg-type]
    with pytest.raises(ms.InvalidArgument, match="placement 'some': expected listed or pure or every or beside"):
        register("mine", planes, placement="some")  # type: ignore[arg-type]


def stateful(types: Mapping[str, Any]) -> set[str]:
    """Returns the types whose configuration, with the defaults of its class, has a rule."""
    found = set()
    for name in types:
        try:
            rule(types[name]())
        except ms.InvalidArgument:
            continue
        except Exception:  # some classes have no defaults
            continue
        found.add(name)
    return found


# Types of transformers with a state; the last rows are models of pictures or sound around a text model of the first.
STATEFUL = """
bailing_hybrid bamba deepseek_v4 falcon_h1 falcon_mamba glm5_next_text granitemoehybrid inkling2_loop_text inkling2_text
inkling_text jamba kimi_linear lara_mini lfm2 lfm2_moe lfm3 mamba mamba2 minimax nemotron_h olmo_hybrid qwen3_5_moe_text
qwen3_5_text qwen3_next qwen4_exp_text recurrent_gemma rwkv xlstm zamba zamba2 zaya
glm5_next inkling2 inkling2_loop inkling_mm_model jev lfm2_vl lfm3_vl minicpm_ocr minicpmv4_6 minicpmv4_7 nemo_speechlm
nemotron_h_omni qwen3_5 qwen3_5_moe qwen4_exp
"""


@pytest.mark.proof
def test_no_other_configuration_of_transformers_is_taken_for_a_model_with_state() -> None:
    pytest.importorskip("transformers")
    auto = importlib.import_module("transformers.models.auto.configuration_auto")
    assert stateful(auto.CONFIG_MAPPING) == set(STATEFUL.split())


def test_shards_of_new_rules_hold_whole_heads() -> None:
    for name, most in (("MiniMax-Text-01", 64), ("RecurrentGemma-2B", 10), ("xLSTM-7B", 8), ("HGRN (FLA)", 2048)):
        layout, ranks = from_config(CONFIGS[name]), 2
        assert 2 * from_config(CONFIGS[name], ranks=ranks).bytes_per_slot == layout.bytes_per_slot
        with pytest.raises(ms.InvalidArgument, match=f"at most {most} ranks"):
            from_config(CONFIGS[name], ranks=2 * most)


def test_states_of_lightning_attention_have_rings_orders_and_whole_numbers() -> None:
    config = CONFIGS["MiniMax, class defaults"]
    layout = from_config(config, tail=2, ssm_order="value_key")
    assert layout.planes[0].order == "value_key" and layout.rows is not None
    assert [(ring.name, ring.shape) for ring in layout.rows.planes] == [
        ("ssm_x", (5, 32, 128)), ("ssm_b", (5, 32, 128)), ("ssm_dt", (5, 32)),
    ]  # fmt: skip
    assert from_config(config, ssm_order="engine") == from_config(config)
    ssm, scale = from_config(config, ssm_dtype=torch.int8).planes
    assert (ssm.shape, scale.shape) == ((32, 128, 128), (32, 128)) and prod(scale.shape) == 32 * 128
