"""Tests the rings of presets: decode steps of every rank accept them. Models whose steps take no tail are refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import Cursor
from memstate.state.layout import StateLayout
from memstate.state.planes import Planes
from memstate.state.presets import CHECKPOINTS, from_config
from tests.support.build import on

TAIL, RING, BATCH = 3, 8, 2
DELTA = {
    "model_type": "qwen3_next", "num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
KIMI = {
    "model_type": "kimi_linear", "num_hidden_layers": 2,
    "linear_attn_config": {"kda_layers": [1, 2], "num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4},
}  # fmt: skip
MAMBA2 = {
    "model_type": "mamba2", "num_hidden_layers": 2, "hidden_size": 16, "expand": 2, "num_heads": 4, "head_dim": 8,
    "n_groups": 2, "state_size": 8, "conv_kernel": 4,
}  # fmt: skip
MAMBA = {
    "model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 16, "expand": 2, "state_size": 8, "conv_kernel": 4,
}  # fmt: skip
ZAMBA = {
    "model_type": "zamba", "num_hidden_layers": 2, "hidden_size": 16, "mamba_expand": 2, "n_mamba_heads": 2,
    "mamba_d_state": 8, "mamba_d_conv": 4,
}  # fmt: skip
SHORT = {"model_type": "lfm2", "hidden_size": 32, "conv_L_cache": 3, "num_hidden_layers": 3, "full_attn_idxs": [1]}
SHORTS = {
    "model_type": "inkling_text", "num_hidden_layers": 2, "layer_types": ["hybrid", "hybrid_sliding"],
    "hidden_size": 32, "conv_kernel_size": 4, "num_key_value_heads": 2, "head_dim": 8, "swa_num_key_value_heads": 4,
    "swa_head_dim": 8,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "delta rule": DELTA, "kda": KIMI, "rwkv7": {"model_type": "rwkv7", "hidden_size": 32, "head_dim": 8,
    "num_hidden_layers": 2}, "mamba2": MAMBA2, "mamba": MAMBA, "mamba with heads": ZAMBA, "convolution": SHORT,
    "several convolutions": SHORTS,
}  # fmt: skip


def steps(planes: Planes, model: str, backend: Backend, pending: int = 0, stores: bool = True) -> None:
    """Runs the decode step of each plane, with its tail, in every layer."""
    read, write, snapshot = (
        torch.tensor(ids, dtype=torch.int32, device=planes.device) for ids in ([1, 2], [3, 4], [0, 0])
    )
    tokens, row = torch.full_like(read, TAIL), torch.tensor([2, 1]).to(read)
    where = {"read": read, "write": write, "snapshot": snapshot, "tokens": tokens}
    store = torch.full_like(row, pending if stores else -1)
    cursor = Cursor(row, torch.zeros_like(row), torch.full_like(row, pending), store)

    def ones(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.ones(BATCH, TAIL, *shape, dtype=dtype, device=planes.device)

    for plane in planes.layout.planes:
        for layer in range(planes.layout.layers_of(plane)):
            state, kept = planes[plane.name][layer], {"tail": planes.tail(plane.name, layer), "cursor": cursor}
            if plane.name.startswith("conv"):
                state = state if plane.axis or plane.shape[0] < plane.shape[1] else state.mT
                weight = torch.ones(state.shape[2], state.shape[1] + 1, device=planes.device)
                x = ones(state.shape[2], dtype=plane.dtype)
                backend.conv_step(x, weight, None, state, **where, **kept)
            elif model in ("delta rule", "kda", "rwkv7"):
                heads, key, value = state.shape[1:]
                k = ones(kept["tail"].k.shape[2], key)
                own: dict[str, Any] = {"beta": ones(heads)}
                decay = ones(heads) if model == "delta rule" else ones(heads, key)
                if model == "rwkv7":
                    own = {"beta": None, "a": k, "b": k}
                backend.gated_delta_step(k, k, ones(heads, value), -decay, state=state, **own, **where, **kept)
            else:
                state = state if state.dim() == 4 else state.unsqueeze(1)
                heads, dim, size = state.shape[1:]
                b = ones(kept["tail"].b.shape[2], size)
                a, dt = torch.ones(heads, device=planes.device), ones(heads)
                if model != "mamba2":
                    a, dt = torch.ones(heads, dim, size, device=planes.device), ones(heads, dim)
                backend.selective_step(ones(heads, dim), dt, -a, b, b, state, **where, **kept)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", KINDS)
def test_T22_rings_fit_the_steps(backend: Backend, model: str, ranks: int) -> None:
    layout = from_config(KINDS[model], tail=TAIL, ranks=ranks)
    planes = Planes(layout, 4, backend, rows=2)
    assert planes.rows is not None
    for plane in [*planes.values(), *planes.rows.values()]:
        plane.fill_(torch.nan)
    for plane in planes.values():
        plane[:, 1:3] = 0
    steps(planes, model, backend)
    for name, plane in planes.rows.items():
        assert plane.shape[2] == RING
        assert plane[:, 1:, :TAIL].isfinite().all(), name
        assert plane[:, 1:, TAIL:].isnan().all() and plane[:, 0].isnan().all(), name


def test_rings_have_the_names_and_the_layers_of_their_planes() -> None:
    layout = from_config(SHORTS, tail=TAIL)
    assert layout.rows is not None
    for plane, ring in zip(layout.planes, layout.rows.planes, strict=True):
        assert ring.name == f"{plane.name}_x" and ring.shape == (RING, plane.shape[0])
        assert layout.layers_of(plane) == layout.rows.layers_of(ring) and ring.dtype == plane.dtype == torch.float32
    planes = Planes(layout, 1, Backend("reference"), rows=1)
    assert planes.tail("conv3", 1).x.data_ptr() == planes.rows["conv3_x"][1].data_ptr()  # type: ignore[index]
    with pytest.raises(ms.InvalidArgument, match="rows have no tail of plane 'ssm', but"):
        planes.tail("ssm", 0)
    for layer in (-1, len(planes["conv3"])):
        with pytest.raises(ms.InvalidArgument, match=f"plane 'conv3' has layers 0 to .*, not {layer}"):
            planes.tail("conv3", layer)
    with pytest.raises(ms.InvalidArgument, match="rows have no tail of plane 'conv', but"):
        Planes(from_config(SHORT), 1, Backend("reference"), rows=1).tail("conv", 0)


def test_rings_have_the_dtype_of_the_model_and_gates_fp32() -> None:
    layout = from_config(DELTA | {"dtype": "float16"}, tail=4, conv_dtype=torch.float32, ssm_dtype=torch.bfloat16)
    dtypes = {plane.name: plane.dtype for plane in layout.rows.planes}  # type: ignore[union-attr]
    assert dtypes == dict.fromkeys(("conv_x", "ssm_k", "ssm_v"), torch.float16) | dict.fromkeys(
        ("ssm_gate", "ssm_beta"), torch.float32
    )
    assert layout.planes == from_config(DELTA, conv_dtype=torch.float32, ssm_dtype=torch.bfloat16).planes


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_preset_has_a_tail_that_its_ranks_share(name: str) -> None:
    preset = getattr(ms.presets, name)
    whole: StateLayout = preset(tail=4)
    assert whole.rows is not None and {plane.shape[0] for plane in whole.rows.planes} == {11}
    assert preset(tail=4, ranks=2) == whole.shard(2) and preset(tail=0) == preset()
    for plane in whole.rows.planes:
        (half,) = (one for one in whole.shard(2).rows.planes if one.name == plane.name)  # type: ignore[union-attr]
        shared = any(part.units == 1 for part in plane.parts) or not plane.parts  # B and C of a single group
        assert shared or 2 * half.nbytes == plane.nbytes, plane


V4 = {
    "model_type": "deepseek_v4", "num_hidden_layers": 2, "head_dim": 8, "index_head_dim": 8, "compress_ratios": [4, 4],
}  # fmt: skip
MAMBA3 = {
    "model_type": "mamba3", "hidden_size": 16, "expand": 2, "head_dim": 8, "state_size": 8, "rope_fraction": 0.5,
    "num_hidden_layers": 2, "is_mimo": False,
}  # fmt: skip
ZAYA = {
    "model_type": "zaya", "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8, "num_attention_heads": 4,
    "cca_time0": 2, "cca_time1": 2,
}  # fmt: skip
NGRAMS = DELTA | {
    "model_type": "qwen4_exp_text", "ple_layer_ids": [2], "ngram_size": 3, "hc_count": 1, "hidden_size": 16,
    "ple_conv_kernel_size": 4,
}  # fmt: skip


@pytest.mark.parametrize("fields", [V4, MAMBA3, ZAYA, NGRAMS], ids=lambda fields: fields["model_type"])
def test_T22_a_state_whose_steps_have_no_tail_is_refused_by_name(fields: dict[str, Any]) -> None:
    assert from_config(fields).bytes_per_slot
    expected = f"tail=4: {fields['model_type']} keeps states whose steps have no tail"
    with pytest.raises(ms.InvalidArgument, match=expected):
        from_config(fields, tail=4)


def test_T23_an_admission_writes_no_byte_of_a_ring(backend: Backend) -> None:
    """A fork copies the row's ring only if tokens are pending. Rings of Qwen3-Next take 10.9 MiB per row."""
    layout, settings = from_config(DELTA, tail=TAIL), {"slots": 4, "max_requests": 2, "overlap": False}
    mem = on(backend, layout, **settings, tail=TAIL)
    rings = mem.planes.rows
    assert rings is not None
    for region in rings.regions:
        region.blocks.fill_(0xAB)
    (a,) = mem.admit([ms.Request("a")])
    step = mem.plan([a])
    assert all((region.blocks == 0xAB).all() for region in rings.regions)
    mem.settle(step)
    for pending, copied in ((0, 0xAB), (1, 0xCD)):
        for region in rings.regions:
            region.blocks[:, a.index] = 0xCD
        mem.accept(mem.plan([a], 1, drafts=1), [pending])
        (b,) = mem.fork(a, ["b"]).rows
        mem.submit()
        assert all((region.blocks[:, a.index] == 0xCD).all() for region in rings.regions)
        assert all((region.blocks[:, b.index] == copied).all() for region in rings.regions)
        mem.end([b])


def test_no_number_of_tokens() -> None:
    for tail in (-1, 1.5, True):
        with pytest.raises(ms.InvalidArgument, match=f"tail {tail!r}: expected"):
            from_config(DELTA, tail=tail)  # type: ignore[arg-type]
