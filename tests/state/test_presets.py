"""Compares presets with a table of known models, to the byte, and with the configuration classes of Transformers."""

import copy
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from memstate.errors import InvalidArgument
from memstate.kernels.tables import Mamba3State
from memstate.state import presets
from memstate.state.layout import StateLayout
from memstate.state.presets import from_config, kv_from_config, state_layers
from tests.support.refusals import refusals

ORDERS = ("layer_major", "slot_major")
Shape = tuple[int, ...]


class Known(NamedTuple):
    """A known model: number of layers with states, shapes of a window (bf16) and a state, MiB per slot by dtype."""

    layers: int
    conv: Shape
    ssm: Shape | None
    fp32: str
    bf16: str
    shards: dict[int, tuple[Shape, Shape | None]]  # ranks -> shapes on one rank; if ranks outnumber groups, they share


KNOWN = {
    "qwen3_next": Known(36, (8192, 3), (32, 128, 128), "73.69", "37.69",
        {2: ((4096, 3), (16, 128, 128)), 4: ((2048, 3), (8, 128, 128)), 8: ((1024, 3), (4, 128, 128)),
         32: ((384, 3), (1, 128, 128))}),
    "qwen3_5": Known(48, (10240, 3), (48, 128, 128), "146.81", "74.81",
        {2: ((5120, 3), (24, 128, 128)), 4: ((2560, 3), (12, 128, 128)), 8: ((1280, 3), (6, 128, 128))}),
    "nemotron_h": Known(24, (10240, 3), (128, 64, 128), "97.41", "49.41",
        {2: ((5120, 3), (64, 64, 128)), 4: ((2560, 3), (32, 64, 128)), 8: ((1280, 3), (16, 64, 128)),
         16: ((768, 3), (8, 64, 128))}),
    "falcon_h1": Known(32, (8704, 3), (128, 64, 256), "257.59", "129.59",
        {2: ((4608, 3), (64, 64, 256)), 4: ((2560, 3), (32, 64, 256)), 8: ((1536, 3), (16, 64, 256))}),
    "granite_hybrid": Known(36, (4352, 3), (64, 64, 128), "72.90", "36.90",
        {2: ((2304, 3), (32, 64, 128)), 4: ((1280, 3), (16, 64, 128)), 8: ((768, 3), (8, 64, 128))}),
    "kimi_linear": Known(20, (12288, 3), (32, 128, 128), "41.41", "21.41",
        {2: ((6144, 3), (16, 128, 128)), 4: ((3072, 3), (8, 128, 128)), 8: ((1536, 3), (4, 128, 128))}),
    "lfm2": Known(10, (2048, 2), None, "0.08", "0.08",
        {2: ((1024, 2), None), 4: ((512, 2), None), 8: ((256, 2), None)}),
    "falcon_mamba": Known(64, (8192, 3), (8192, 16), "35.00", "19.00",
        {2: ((4096, 3), (4096, 16)), 4: ((2048, 3), (2048, 16)), 8: ((1024, 3), (1024, 16))}),
    "bamba": Known(29, (8448, 3), (128, 64, 128), "117.40", "59.40",
        {2: ((4352, 3), (64, 64, 128)), 4: ((2304, 3), (32, 64, 128)), 8: ((1280, 3), (16, 64, 128))}),
    "codestral_mamba": Known(64, (10240, 3), (128, 64, 128), "259.75", "131.75",
        {2: ((5120, 3), (64, 64, 128)), 4: ((2560, 3), (32, 64, 128)), 8: ((1280, 3), (16, 64, 128))}),
    "mamba": Known(64, (5120, 3), (5120, 16), "21.88", "11.88",
        {2: ((2560, 3), (2560, 16)), 4: ((1280, 3), (1280, 16)), 8: ((640, 3), (640, 16))}),
}  # fmt: skip


MAMBA3 = {
    "model_type": "mamba3", "hidden_size": 2048, "expand": 2, "head_dim": 64, "state_size": 128,
    "rope_fraction": 0.5, "num_hidden_layers": 48, "is_mimo": False,
}  # fmt: skip


def size(shape: Shape | None, itemsize: int) -> int:
    return 0 if shape is None else torch.Size(shape).numel() * itemsize


def preset(name: str, **options) -> StateLayout:
    return getattr(presets, name)(**options)


def transformers_config(fields: dict):
    """Returns the configuration object that Transformers makes from the fields of a config.json."""
    from transformers import AutoConfig

    fields = copy.deepcopy(fields)
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def shapes(layout: StateLayout) -> tuple[Shape, Shape | None]:
    by_name = {plane.name: plane.shape for plane in layout.planes}
    assert set(by_name) <= {"conv", "ssm"}
    return by_name["conv"], by_name.get("ssm")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", KNOWN)
def test_bytes_per_slot_are_those_of_the_table(name, order):
    known, fields = KNOWN[name], presets.CHECKPOINTS[name]
    config = transformers_config(fields)
    written = config.to_dict()
    sources = fields, config, written, SimpleNamespace(**written), {"model_type": "two", "text_config": config}
    for dtype, mib in ((torch.float32, known.fp32), (torch.bfloat16, known.bf16)):
        expected = known.layers * (size(known.conv, 2) + size(known.ssm, dtype.itemsize))
        assert f"{expected / 2**20:.2f}" == mib
        for source in sources:
            layout = from_config(source, ssm_dtype=dtype, order=order)
            assert layout == preset(name, ssm_dtype=dtype, order=order)
            assert (layout.layers, shapes(layout)) == (known.layers, (known.conv, known.ssm))
            assert layout.bytes_per_slot == layout.payload_bytes_per_slot == expected
            assert sum(layout.arena_bytes(512)) == 513 * expected
    assert {plane.name: plane.dtype for plane in preset(name).planes}["conv"] == torch.bfloat16


@pytest.mark.parametrize("name", KNOWN)
def test_a_rank_holds_what_an_engine_gives_it(name):
    for ranks, expected in KNOWN[name].shards.items():
        layout = preset(name, ranks=ranks)
        assert layout == preset(name).shard(ranks)
        assert (layout.layers, shapes(layout)) == (KNOWN[name].layers, expected)


@pytest.mark.parametrize(
    ("name", "most"), [("qwen3_next", 32), ("kimi_linear", 32), ("granite_hybrid", 64), ("lfm2", 2048), ("mamba", 5120)]
)
def test_no_state_is_planned_for_more_ranks_than_it_has_heads(name, most):
    """With `most` ranks, several ranks have copies of a group or a KV head. With more ranks, the plan is refused."""
    fields = presets.CHECKPOINTS[name]
    assert from_config(fields, ranks=most).bytes_per_slot > 0
    with pytest.raises(
        InvalidArgument, match=f"for {2 * most} ranks: a state has {most} units of part .* at most {most} "
    ):
        from_config(fields, ranks=2 * most)


def test_windows_say_where_their_parts_are():
    assert presets.qwen3_next().planes[0].slices()["v"] == slice(4096, 8192)
    assert presets.kimi_linear().planes[0].slices()["k"] == slice(4096, 8192)
    assert presets.kimi_linear(conv_order="engine").planes[0].axis == 1
    nemotron = presets.nemotron_h()
    assert nemotron.planes[0].slices() == {"x": slice(0, 8192), "B": slice(8192, 9216), "C": slice(9216, 10240)}
    assert nemotron.planes[1].slices() == {"head": slice(0, 128)}
    assert nemotron.shard(8).planes[0].slices()["C"] == slice(1152, 1280)


def test_dtypes_are_those_of_the_configuration_and_of_the_class():
    def dtypes(fields, **options):
        return [plane.dtype for plane in from_config(fields, **options).planes]

    lfm2 = presets.CHECKPOINTS["lfm2"]
    zaya, inkling = (transformers_config({"model_type": name}).to_dict() for name in ("zaya", "inkling_text"))
    del zaya["dtype"], inkling["dtype"]  # these fields of the configuration are None
    assert dtypes(lfm2) == [torch.bfloat16]
    for name, value in (("dtype", "float16"), ("torch_dtype", "float16"), ("dtype", torch.float16)):
        assert dtypes({**lfm2, name: value}) == [torch.float16]
        assert dtypes({**presets.CHECKPOINTS["qwen3_next"], name: value}) == [torch.float16, torch.float32]
        assert dtypes({"model_type": "two", "text_config": lfm2, name: value}) == [torch.float16]
        assert dtypes({**zaya, name: value}) == [torch.float16, torch.float16]
        assert dtypes({**inkling, name: value}) == [torch.float32] * 3
    nested = {"model_type": "two", "text_config": {**lfm2, "dtype": "float32"}, "dtype": "float16"}
    assert dtypes(nested) == [torch.float32]
    assert dtypes({**lfm2, "dtype": "float32"}, conv_dtype=torch.float16) == [torch.float16]
    for value in ("int8", "half precision", 16):
        with pytest.raises(InvalidArgument, match=f"lfm2 with dtype = {value!r}: expected a floating-point dtype"):
            from_config({**lfm2, "dtype": value})


@pytest.mark.parametrize("field", ["mamba_ssm_dtype", "mamba_ssm_cache_dtype"])
def test_states_have_the_dtype_that_engines_read_from_the_configuration(field):
    """If the field is missing, the configuration class sets the dtype. Qwen3.5-27B has 78.4 MB per slot in bf16."""
    fields = presets.CHECKPOINTS["qwen3_5"]
    for name, slot in (
        ("float32", 153944064), ("bfloat16", 78446592), ("float16", 78446592), (None, 153944064),
        ("int16", 79626240), ("torch.int8", 41877504),
    ):  # fmt: skip
        for config in ({**fields, field: name}, {"model_type": "two", "text_config": {**fields, field: name}}):
            assert from_config(config).bytes_per_slot == slot
        assert from_config({"model_type": "two", "text_config": fields, field: name}).bytes_per_slot == slot
    assert from_config({**fields, field: "bfloat16"}, ssm_dtype=torch.float32).bytes_per_slot == 153944064
    windows = from_config({**fields, field: "bfloat16", "dtype": "float32"}).planes
    assert [plane.dtype for plane in windows] == [torch.float32, torch.bfloat16]
    with pytest.raises(InvalidArgument, match=f"{field} = 'int32': expected one of torch.float32, .*, torch.int8"):
        from_config({**fields, field: "int32"})


@pytest.mark.parametrize("names", [["llm_config"], ["language_config"], ["thinker_config", "text_config"]])
def test_the_text_model_of_a_configuration_has_one_of_several_names(names):
    fields = config = presets.CHECKPOINTS["nemotron_h"]
    for name in reversed(names):
        config = {"model_type": "several", name: config}
    assert from_config(config) == from_config(fields)
    assert kv_from_config(config, page_size=1) == kv_from_config(fields, page_size=1)


def test_dtypes_and_order_are_the_callers():
    layout = presets.qwen3_next(ssm_dtype=torch.float16, conv_dtype=torch.float32, order="slot_major")
    assert [plane.dtype for plane in layout.planes] == [torch.float32, torch.float16] and layout.order == "slot_major"
    with pytest.raises(TypeError, match="rank"):
        presets.qwen3_next(rank=8)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16])
@pytest.mark.parametrize(
    ("name", "ssm_order", "state"),
    [
        ("qwen3_next", None, (8, 128, 128)), ("qwen3_next", "engine", (8, 128, 128)),
        ("nemotron_h", None, (32, 64, 128)), ("nemotron_h", "state_dim", (32, 128, 64)),
    ],
)  # fmt: skip
def test_whole_numbers_have_a_scale_for_each_row_and_ranks_cut_both_by_heads(name, ssm_order, state, dtype):
    rows = {"qwen3_next": (8, 128), "nemotron_h": (32, 64)}[name]
    layout = preset(name, ssm_dtype=dtype, ssm_order=ssm_order, ranks=4, tail=2, order="slot_major")
    conv, ssm, scales = layout.planes
    assert (scales.name, scales.shape, scales.dtype, scales.fill) == ("ssm_scale", rows, torch.float32, 0)
    assert (ssm.shape, ssm.dtype, ssm.slices()) == (state, dtype, scales.slices())
    assert layout.bytes_per_slot == layout.layers * (conv.nbytes + ssm.elements * dtype.itemsize + 4 * math.prod(rows))
    assert layout.rows == preset(name, ranks=4, tail=2, order="slot_major").rows


def test_only_delta_rules_and_mamba2_have_states_of_whole_numbers():
    rwkv7 = {"model_type": "rwkv7", "hidden_size": 64, "head_dim": 32, "num_hidden_layers": 2}
    for fields in (rwkv7, MAMBA3, *(presets.CHECKPOINTS[name] for name in ("mamba", "falcon_mamba"))):
        with pytest.raises(InvalidArgument, match=f"{fields['model_type']}: no states of torch.int8: only delta rules"):
            from_config(fields, ssm_dtype=torch.int8)
    qwen4 = {"model_type": "qwen4_exp_text", "num_hidden_layers": 4, "ple_layer_ids": [2], "eos_token_id": 2}
    layout = from_config(transformers_config(qwen4), ssm_dtype=torch.int8)
    assert [plane.name for plane in layout.planes] == ["conv", "ssm", "ssm_scale", "conv2", "conv3"]
    with pytest.raises(
        InvalidArgument, match=r"qwen3_next: no states of torch.int16: 72 numbers share a scale: .*of 16"
    ):
        from_config(presets.CHECKPOINTS["qwen3_next"] | {"linear_key_head_dim": 72}, ssm_dtype=torch.int16)
    for wrong in (torch.int32, torch.uint8, torch.float8_e4m3fn, torch.float64):
        with pytest.raises(InvalidArgument, match=f"ssm_dtype={wrong}: expected one of torch.float32"):
            presets.qwen3_next(ssm_dtype=wrong)
    with pytest.raises(InvalidArgument, match=r"conv_dtype=torch.int8: expected a floating-point dtype"):
        presets.qwen3_next(conv_dtype=torch.int8)


# Models without a preset: fields that differ from the defaults of the class, number of layers with states, shapes of
# window and state.
OTHERS = (
    ({"model_type": "qwen3_5"}, 24, (8192, 3), (32, 128, 128)),
    ({"model_type": "qwen3_5_moe"}, 30, (8192, 3), (32, 128, 128)),
    ({"model_type": "qwen3_5_moe_text"}, 30, (8192, 3), (32, 128, 128)),
    ({"model_type": "olmo_hybrid"}, 24, (11520, 3), (30, 96, 192)),
    ({"model_type": "falcon_h1", "mamba_d_ssm": None}, 32, (8704, 3), (128, 64, 256)),
    ({"model_type": "falcon_h1"}, 32, (1536, 3), (128, 8, 256)),
    ({"model_type": "kimi_linear"}, 21, (12288, 3), (32, 128, 128)),
    ({"model_type": "zamba2", "n_mamba_heads": 80}, 54, (5248, 3), (80, 64, 64)),
    ({"model_type": "jamba"}, 28, (8192, 3), (8192, 16)),
    ({"model_type": "lfm2_moe", "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, 1, (2048, 2), None),
    ({"model_type": "mamba", "conv_kernel": 1}, 32, (1536, 0), (1536, 16)),
    ({"model_type": "nemotron_h"}, 1, (10240, 3), (128, 64, 128)),
    ({"model_type": "zamba"}, 76, (7424, 3), (2, 3712, 16)),
    ({"model_type": "bailing_hybrid"}, 35, (12288, 3), (32, 128, 128)),
    ({"model_type": "glm5_next"}, 34, (24576, 3), (64, 128, 128)),
    ({"model_type": "glm5_next_text"}, 34, (24576, 3), (64, 128, 128)),
    ({"model_type": "qwen4_exp"}, 30, (8192, 3), (32, 128, 128)),
    ({"model_type": "qwen4_exp_text"}, 30, (8192, 3), (32, 128, 128)),
    ({"model_type": "lfm3"}, 13, (2048, 6), None),
    ({"model_type": "zaya"}, 40, (1280, 2), (128,)),
)
# Models whose layers have several windows: fields that differ from the defaults, the shape of each plane, and the
# number of layers in the layout.
SEVERAL = (
    ({"model_type": "inkling_mm_model"}, {"conv": (2048, 3), "conv2": (6144, 3), "conv3": (1024, 3)}, 132),
    ({"model_type": "inkling_text", "num_hidden_layers": 2, "layer_types": ["hybrid"] * 2},
     {"conv": (1024, 3), "conv2": (6144, 3)}, 4),
    ({"model_type": "inkling2_text", "num_hidden_layers": 3}, {"conv": (1024, 3), "conv2": (4608, 3)}, 6),
    ({"model_type": "qwen4_exp_text", "num_hidden_layers": 4, "ple_layer_ids": [2], "eos_token_id": 2},
     {"conv": (8192, 3), "ssm": (32, 128, 128), "conv2": (8192, 9), "conv3": (2,)}, 3),
)  # fmt: skip


@pytest.mark.parametrize(("fields", "layers", "conv", "ssm"), OTHERS, ids=lambda value: str(value)[:40])
def test_other_types_by_their_classes(fields, layers, conv, ssm):
    layout = from_config(transformers_config(fields))
    assert (layout.layers, shapes(layout)) == (layers, (conv, ssm))


@pytest.mark.parametrize(("fields", "planes", "layers"), SEVERAL, ids=lambda value: str(value)[:40])
def test_states_that_differ_or_are_in_some_layers_only_are_several_planes(fields, planes, layers):
    layout = from_config(transformers_config(fields))
    assert ({plane.name: plane.shape for plane in layout.planes}, layout.layers) == (planes, layers)
    half = {plane.name: plane.shape for plane in layout.shard(2).planes}
    assert half["conv"][-2] * 2 == planes["conv"][-2] and half["conv2"] == planes["conv2"]  # conv2 is not cut


def test_rwkv7_has_a_state_and_two_token_shifts():
    fields = {"model_type": "rwkv7", "hidden_size": 2560, "head_dim": 64, "num_hidden_layers": 32}
    layout = from_config(fields)
    assert (layout.layers, shapes(layout)) == (32, ((2560, 1), (40, 64, 64)))
    assert [layout.layers_of(plane) for plane in layout.planes] == [64, 32]
    assert shapes(from_config(fields, ranks=8)) == ((2560, 1), (5, 64, 64))
    assert presets.kv_from_config(fields, page_size=16) is None
    with pytest.raises(InvalidArgument, match="hidden_size = 100, head_dim = 64: expected the first to be a multiple"):
        from_config(fields | {"hidden_size": 100})


def test_mamba3_keeps_four_planes_that_ranks_cut_by_heads():
    """The sizes of the model are the defaults of flash-linear-attention."""
    fields = MAMBA3
    layout, rank = from_config(fields), from_config(fields, ranks=8)
    assert layout.layers == 48 and tuple(plane.name for plane in layout.planes) == Mamba3State._fields
    assert [plane.shape for plane in layout.planes] == [(64, 32), (64, 64, 128), (64, 128), (64, 64)]
    assert [plane.shape for plane in rank.planes] == [(8, 32), (8, 64, 128), (8, 128), (8, 64)]
    half = from_config(fields, ssm_dtype=torch.bfloat16, ssm_order="engine")
    assert [plane.dtype for plane in half.planes] == [torch.float32, *[torch.bfloat16] * 3]
    assert presets.kv_from_config(fields, page_size=16) is None
    for wrong in ({"is_mimo": True}, {"rope_fraction": 0.25}, {"head_dim": 60}):
        with pytest.raises(InvalidArgument, match=rf"{next(iter(wrong))} = "):
            from_config(fields | wrong)


# Fields of config.json of DeepSeek-V4-Flash. The last entry of compress_ratios is for a layer that drafts tokens.
FLASH = {
    "model_type": "deepseek_v4", "num_hidden_layers": 43, "head_dim": 512, "index_head_dim": 128,
    "torch_dtype": "bfloat16", "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
}  # fmt: skip


def test_compressors_keep_overlaps_in_slots_and_open_windows_in_rows():
    layout, rows = from_config(FLASH), from_config(FLASH).rows
    assert from_config(transformers_config(FLASH)) == from_config(transformers_config(FLASH).to_dict()) == layout
    assert state_layers(FLASH) == tuple(range(2, 43))
    for planes, kinds in (
        (layout, {"csa": (21, (4, 512), torch.float32), "index": (21, (4, 128), torch.float32)}),
        (rows, {"csa": (21, (3, 1024), torch.bfloat16), "hca": (20, (127, 512), torch.bfloat16),
                "index": (21, (3, 256), torch.bfloat16)}),
    ):  # fmt: skip
        specs = {plane.name: (planes.layers_of(plane), plane.shape, plane.dtype, plane.fill) for plane in planes.planes}
        expected = {f"{name}_kv": (layers, shape, torch.bfloat16, 0) for name, (layers, shape, _) in kinds.items()}
        assert specs == expected | {f"{name}_gate": (*kind, -float("inf")) for name, kind in kinds.items()}
    assert (layout.grid, layout.bytes_per_slot, rows.bytes_per_slot) == (128, 322560, 5524480)
    assert from_config(FLASH, ranks=8, order="slot_major") == from_config(FLASH, order="slot_major")
    half = from_config({**FLASH, "torch_dtype": "float16"})
    assert {plane.dtype for plane in (*half.planes, *half.rows.planes)} == {torch.float16, torch.float32}


def test_pooled_kv_has_no_pages_of_tokens():
    with pytest.raises(InvalidArgument, match=r"deepseek_v4: its KV is a window and .*: give .* kv_bytes_per_token"):
        kv_from_config(FLASH, page_size=128)


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"layer_types": ["linear_attention", "full_attention", "mamba", "hybrid", "conv", "moe"]}, (0, 2, 3, 4)),
        ({"layers_block_type": ["mamba", "attention", "mamba"]}, (0, 2)),
        ({"layer_types": None, "hybrid_override_pattern": "M-M*ME"}, (0, 2, 4)),
        ({"linear_attn_config": {"kda_layers": [4, 1, 2]}}, (0, 1, 3)),
        ({"num_hidden_layers": 8, "attn_layer_indices": [3, 7]}, (0, 1, 2, 4, 5, 6)),
        ({"num_hidden_layers": 3, "full_attn_idxs": []}, (0, 1, 2)),
        ({"num_hidden_layers": 9, "full_attention_interval": 4}, (0, 1, 2, 4, 5, 6, 8)),
        ({"num_hidden_layers": 3, "layer_group_size": [1, 0, 1]}, (0, 2)),
        ({"num_hidden_layers": 3, "attn_type_list": [1, 0, 1]}, (1,)),
        ({"num_hidden_layers": 4, "full_attention_layers": [1]}, (0, 2, 3)),
        ({"num_hidden_layers": 4, "attn": {"layers": [0, 2]}}, (1, 3)),
        ({"num_hidden_layers": 5, "block_types": ["recurrent", "attention"]}, (0, 2, 4)),
        ({"num_hidden_layers": 8, "mamba_step": 4}, (0, 1, 3, 4, 5, 7)),
        ({"num_hidden_layers": 3, "mamba_step": 8}, (0, 1)),
        (
            {"model_type": "falcon_h1", "num_hidden_layers": 5, "layers_block_type": ["full_attention"] * 5},
            tuple(range(5)),
        ),
    ],
)
def test_state_layers_are_read_from_whatever_list_there_is(fields, layers):
    assert state_layers(fields) == state_layers(SimpleNamespace(**fields)) == layers


def test_a_head_size_that_is_not_given_follows_from_the_width():
    fields = presets.CHECKPOINTS["granite_hybrid"]
    assert from_config({**fields, "mamba_d_head": "auto"}) == presets.granite_hybrid()
    fields = {name: value for name, value in presets.CHECKPOINTS["falcon_h1"].items() if name != "mamba_d_head"}
    assert from_config(fields) == presets.falcon_h1()
    assert from_config({**fields, "mamba_d_ssm": None, "mamba_expand": 2}) == presets.falcon_h1()


class SelfNested:
    """A configuration that names itself as its text model."""

    model_type = "two"

    @property
    def text_config(self):
        return self


test_what_cannot_be_read_is_refused_by_name = refusals(
    InvalidArgument,
    (
        {"model_type": "llama"},
        "model_type 'llama': it has no known rule. .* attends holds no state. .* ms.presets.register, .*layout, or a",
    ),
    ({"model_type": "log_linear_mamba2"}, "model_type 'log_linear_mamba2': .*log-linear attention grows with"),
    ({"model_type": ["qwen3_next"]}, r"model_type \['qwen3_next'\]: it has no known rule"),
    (
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        "'Qwen/.*': No such file or directory: expected the path of a config.json",
    ),
    (None, "None: expected a configuration object or a dict"),
    (Path("config.json"), "'config.json': No such file .*: expected the path of a config.json"),
    (__file__, "Extra data: .*: expected the path of a config.json"),
    ({"model_type": "two", "text_config": "qwen3_next"}, "'qwen3_next': expected a configuration object or a dict"),
    (SelfNested(), "model_type 'two': it has no known rule"),
    (
        {**presets.CHECKPOINTS["qwen3_next"], "full_attention_interval": None},
        "qwen3_next without layer_types, .*full_attention_int",
    ),
    (
        {**presets.CHECKPOINTS["qwen3_next"], "linear_key_head_dim": None},
        "model_type 'qwen3_next': for gated delta rule it lacks linear_key_head_dim",
    ),
    ({**presets.CHECKPOINTS["mamba"], "num_hidden_layers": None}, "mamba with num_hidden_layers = None"),
    ({**presets.CHECKPOINTS["lfm2"], "conv_L_cache": 0}, "lfm2 with conv_L_cache = 0: expected a number"),
    ({**presets.CHECKPOINTS["lfm2"], "layer_types": ["full_attention"] * 16}, "no layer of this configuration"),
    (
        {"model_type": "kimi_linear", "linear_attn_config": {"num_heads": 2, "short_conv_kernel_size": 4}},
        "for Kimi's delta rule it lacks linear_attn_config.head_dim",
    ),
    ({**FLASH, "head_dim": None}, "deepseek_v4 with head_dim = None"),
    ({**FLASH, "index_head_dim": None}, "deepseek_v4 with index_head_dim = None"),
    ({**FLASH, "compress_ratios": None}, "deepseek_v4 without layer_types, .*compress_ratios"),
    ({**FLASH, "compress_ratios": [4, 8] * 22}, "compress_ratios = .*: expected 0, 4 or 128 for each of 43 layers"),
    ({**FLASH, "compress_ratios": [4] * 42}, "compress_ratios = .*: expected 0, 4 or 128 for each of 43 layers"),
    ({**FLASH, "compress_ratios": [0, 128] * 22}, "no layer of this configuration holds state"),
    (
        {**FLASH, "layer_types": ["compressed_sparse_attention"] * 43},
        "compress_rates.compressed_sparse_attention = None: expected a number",
    ),
    call=from_config,
)


def test_from_config_takes_the_path_of_a_config_json_or_of_its_folder(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(presets.CHECKPOINTS["qwen3_next"]))
    for given in (path, str(path), tmp_path, str(tmp_path)):
        assert from_config(given) == preset("qwen3_next")
        assert state_layers(given) == tuple(layer for layer in range(48) if layer % 4 != 3)
    path.write_text("[1]")
    with pytest.raises(InvalidArgument, match="with an object in it"):
        from_config(tmp_path)


# name -> bytes of KV per token in bf16, from the model cards: attention layers * 2 (keys and values) * KV heads * head
# size * 2 bytes. Kimi Linear keeps a latent of 512 + 64 numbers instead of keys and values.
KV_OF_A_TOKEN = {
    "qwen3_next": 12 * 2 * 2 * 256 * 2, "qwen3_5": 16 * 2 * 4 * 256 * 2, "nemotron_h": 4 * 2 * 8 * 128 * 2,
    "falcon_h1": 32 * 2 * 8 * 128 * 2, "granite_hybrid": 4 * 2 * 8 * 64 * 2, "kimi_linear": 7 * 576 * 2,
    "lfm2": 6 * 2 * 8 * 64 * 2, "falcon_mamba": 0, "bamba": 3 * 2 * 8 * 128 * 2, "codestral_mamba": 0, "mamba": 0,
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_kv_of_a_preset_is_that_of_its_attention_layers(name):
    page = kv_from_config(presets.CHECKPOINTS[name], page_size=16)
    assert (page.bytes_per_slot if page else 0) == 16 * KV_OF_A_TOKEN[name]
    if page and name != "kimi_linear":
        eighth = kv_from_config(presets.CHECKPOINTS[name], page_size=16, ranks=8, dtype=torch.float32)
        heads = presets.CHECKPOINTS[name]["num_key_value_heads"]
        assert eighth.bytes_per_slot == 2 * page.bytes_per_slot // min(heads, 8)
    assert (
        page is None
        or name != "kimi_linear"
        or kv_from_config(presets.CHECKPOINTS[name], page_size=16, ranks=8) == page
    )


KDA = {"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        # fields that name wrong layers
        ("granite_hybrid", {"num_hidden_layers": 39}, "num_hidden_layers = 39: expected the 40 that layer_types"),
        ("lfm2", {"layer_types": []}, "num_hidden_layers = 16: expected the 0 that layer_types"),
        ("lfm2", {"layer_types": [1] * 16}, "layer_types = .*: expected a list with the kind of each layer"),
        ("lfm2", {"num_hidden_layers": 4}, r"full_attn_idxs = \[2, 5, .*: .* 0 to 3, because num_hidden_layers = 4"),
        ("lfm2", {"full_attn_idxs": 6}, "full_attn_idxs = 6: expected a list of numbers from 0 to 15"),
        ("lfm2", {"full_attn_idxs": [2, 2]}, r"full_attn_idxs = \[2, 2\]: expected each number once"),
        ("nemotron_h", {"hybrid_override_pattern": 7}, "hybrid_override_pattern = 7: expected a text"),
        ("kimi_linear", {"num_hidden_layers": 20}, r"kda_layers = \[1, .*: expected a list of numbers from 1 to 20"),
        (
            "kimi_linear",
            {"linear_attn_config": KDA | {"kda_layers": [1, 3], "full_attn_layers": [3]}},
            r"layers \[3\] in one",
        ),
        ("qwen3_next", {"full_attention_interval": 0}, "full_attention_interval = 0"),
        # fields with wrong dimensions
        ("qwen3_next", {"linear_num_value_heads": 24}, "linear_num_value_heads = 24, linear_num_key_heads = 16"),
        ("nemotron_h", {"n_groups": 3}, "mamba_num_heads = 128, n_groups = 3: expected the first to be a multiple"),
        ("falcon_h1", {"mamba_d_ssm": 8193}, "mamba_n_heads = 128, mamba_d_head = 64, mamba_d_ssm = 8193: .* 8193 ch"),
        ("falcon_h1", {"mamba_d_ssm": 1000, "mamba_d_head": "auto"}, "mamba_d_ssm = 1000: expected heads of one size"),
        ("granite_hybrid", {"mamba_d_head": None, "hidden_size": 2047}, "mamba_expand = 2, hidden_size = 2047"),
        ("bamba", {"mamba_d_head": 32}, "mamba_d_head = 32, mamba_expand = 2, hidden_size = 4096: .* 8192 channels"),
    ],
)
def test_what_contradicts_itself_is_refused_by_its_fields(name, changes, message):
    from_config(presets.CHECKPOINTS[name])
    with pytest.raises(InvalidArgument, match=message):
        from_config({**presets.CHECKPOINTS[name], **changes})


@pytest.mark.parametrize("kind", ["bamba", "jamba"])
def test_lists_of_layers_that_a_class_derives_are_derived_from_what_it_writes(kind):
    config = transformers_config({"model_type": kind})
    written = config.to_dict()
    assert not {"layer_types", "layers_block_type"} & set(written)
    assert from_config(written) == from_config(config)
    if kind == "bamba":
        with pytest.raises(InvalidArgument, match="bamba without layer_types"):
            from_config({name: value for name, value in written.items() if name != "attn_layer_indices"})
    else:
        assert state_layers({**written, "num_hidden_layers": 13, "attn_layer_period": 4, "attn_layer_offset": 0}) == (
            1, 2, 3, 5, 6, 7, 9, 10, 11,
        )  # fmt: skip
        with pytest.raises(InvalidArgument, match="attn_layer_offset = 8, attn_layer_period = 8"):
            from_config({**written, "attn_layer_offset": 8})


@pytest.mark.parametrize("name", KNOWN)
def test_windows_lie_the_way_that_is_asked_for(name):
    usual = preset(name)
    for conv_order, axis in (("channel_first", 0), ("width_first", 1), ("engine", int(name == "kimi_linear"))):
        layout = preset(name, conv_order=conv_order)
        assert (layout == usual) == (axis == 0)
        assert layout.bytes_per_slot == usual.bytes_per_slot
        conv = layout.planes[0]
        assert conv.axis == axis and conv.slices() == usual.planes[0].slices() and layout.planes[1:] == usual.planes[1:]
        channels = sum(part.length for part in conv.parts)
        assert conv.shape[axis] == channels and sorted(conv.shape) == sorted(usual.planes[0].shape)
        for ranks, (window, _) in KNOWN[name].shards.items():
            turned = window[::-1] if axis else window
            assert shapes(preset(name, conv_order=conv_order, ranks=ranks))[0] == turned
            cut = conv.owned(ranks, ranks - 1)[-1]
            assert usual.planes[0].owned(ranks, ranks - 1)[-1] == cut
            view = torch.empty(2, 3, *conv.shape)[conv.index(cut.whole)]
            assert view.shape[2 + axis] == cut.whole.stop - cut.whole.start
    with pytest.raises(InvalidArgument, match="conv_order 'channel_last': expected channel_first or width_first or en"):
        preset(name, conv_order="channel_last")


def test_D6_states_of_a_delta_rule_lie_the_way_that_is_asked_for():
    """Ranks cut heads alike in both orders. By default keys come first; engines store values first."""
    config = presets.CHECKPOINTS["qwen3_next"] | {"linear_key_head_dim": 64}
    usual = from_config(config)
    assert usual == from_config(config, ssm_order="key_value") and usual.planes[1].shape == (32, 64, 128)
    turned = from_config(config, ssm_order="value_key", conv_order="width_first")
    assert turned.planes[1].shape == (32, 128, 64) and turned.bytes_per_slot == usual.bytes_per_slot
    assert from_config(config, ssm_order="engine").planes == (usual.planes[0], turned.planes[1])
    same_shape = [preset("qwen3_next", ssm_order=order) for order in ("key_value", "value_key")]
    assert same_shape[0].planes[1].shape == same_shape[1].planes[1].shape and same_shape[0] != same_shape[1]
    assert "value_key" in repr(same_shape[1].planes[1])
    for ranks in (2, 4, 8):
        share = from_config(config, ssm_order="engine", ranks=ranks)
        assert share.planes[1].shape == (32 // ranks, 128, 64)
        assert turned.planes[1].owned(ranks, ranks - 1) == usual.planes[1].owned(ranks, ranks - 1)


@pytest.mark.parametrize("name", KNOWN)
def test_D6_D20_a_state_lies_as_its_model_allows(name):
    """Ranks cut the heads of Mamba2 alike in both orders. By default the state axis is contiguous, as in SGLang and
    vLLM.
    """
    usual, engine = preset(name), preset(name, ssm_order="engine")
    delta = name in ("qwen3_next", "qwen3_5", "kimi_linear")
    mamba2 = not delta and name not in ("falcon_mamba", "mamba", "lfm2")
    assert engine.bytes_per_slot == usual.bytes_per_slot and (delta or engine == usual)
    if mamba2:
        head, dim, state = usual.planes[1].shape
        turned = preset(name, ssm_order="state_dim")
        assert preset(name, ssm_order="dim_state") == usual
        assert turned.planes[1].shape == (head, state, dim) and turned.planes[0] == usual.planes[0]
        assert turned.bytes_per_slot == usual.bytes_per_slot
        assert preset(name, ssm_order="state_dim", ranks=2).planes[1].shape == (head // 2, state, dim)
    refused = {"last": "expected key_value or value_key or dim_state or"}
    refused |= {order: "not of .*; expected .*engine" for order, has in (("value_key", delta), ("state_dim", mamba2))
                if not has}  # fmt: skip
    for order, said in refused.items():
        with pytest.raises(InvalidArgument, match=f"ssm_order '{order}': {said}"):
            preset(name, ssm_order=order)


def test_lists_in_lists_in_lists_are_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(InvalidArgument, match=r"recursion.*: expected the path of a config\.json"):
        from_config(tmp_path)
