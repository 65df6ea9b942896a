"""Tiny Transformers models with random weights, one of each family that keeps recurrent states in a cache.

Transformers prefers the kernels of fla, mamba_ssm and causal_conv1d if these packages can be imported. The kernels need
a GPU, so the packages are hidden while the modelling code is loaded.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import torch

GPU_ONLY: Final = ("fla", "mamba_ssm", "causal_conv1d")  # as in memstate.integrations.transformers.probe
COMMON: Final[dict[str, Any]] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,  # large enough that each state changes the logits
}
DELTA: Final = {
    "head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
EXPERTS: Final = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
KEY: Final = {
    "kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 8, "num_key_value_heads": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
MAMBA2: Final = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 8,
}  # fmt: skip
INKLING: Final = {
    "head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8,
    "sliding_window_size": 6, "d_rel": 4, "rel_extent": 16, "moe_intermediate_size": 16, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "layer_types": ["hybrid", "hybrid_sliding"] * 2,
}  # fmt: skip
SHORT: Final = {"conv_L_cache": 3, "layer_types": ["conv", "full_attention"] * 2}

# family -> its settings besides COMMON
FAMILIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "qwen3_next": {**DELTA, **EXPERTS},
    "qwen3_5_text": {**DELTA},
    "qwen3_5_moe_text": {**DELTA, **EXPERTS},
    "qwen4_exp_text": {
        **DELTA, **EXPERTS, "layer_types": ["linear_attention", "indexed_attention"] * 2, "hc_count": 2,
        "hc_lowrank": 8, "ple_layer_ids": [1], "ngram_vocab_size_base": 50, "heads_per_ngram": 2,
        "make_ngram_vocab_size_divisible_by": 1, "split_ngram_parts": 1, "indexer_n_heads": 2, "indexer_kv_heads": 1,
        "indexer_head_dim": 8, "indexer_budget": 32, "indexer_compress_ratio": 4,
    },
    "lara_mini": {
        **DELTA, **EXPERTS, "sliding_window": 6,
        "layer_types": ["linear_attention", "sliding_attention", "linear_attention", "full_attention"],
    },
    "olmo_hybrid": {
        **{name: value for name, value in DELTA.items() if name != "head_dim"}, "linear_num_key_heads": 4,
    },
    "kimi_linear": {**KEY, "linear_head_dim": 8, "linear_num_heads": 4, "num_local_experts": 4},
    "bailing_hybrid": {**KEY, "head_dim": 8, "num_local_experts": 4},
    "glm5_next": {
        **KEY, "layer_types": ["linear_attention", "indexed_attention"] * 2, "qk_rope_head_dim": 0, "q_lora_rank": 8,
        "linear_head_dim": 8, "linear_num_heads": 4, "n_routed_experts": 4, "index_topk": 16, "index_head_dim": 8,
        "index_n_heads": 16,  # with few heads many scores are 0, and the order of equal scores depends on shapes
        "index_kpool": 4, "hc_mult": 2,
    },
    "bamba": {**MAMBA2, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {
        **MAMBA2, "num_local_experts": 4, "shared_intermediate_size": 16, "layer_types": ["mamba", "attention"] * 2,
    },
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 64, "head_dim": 8},
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "mamba"], "head_dim": 8, "ssm_state_size": 8,
        "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "chunk_size": 8, "n_routed_experts": 4,
        "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16,
    },
    "zamba": {
        "num_hidden_layers": 6, "num_key_value_heads": 4, "mamba_d_state": 8, "attn_layer_period": 3,
        "attn_layer_offset": 1,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_key_value_heads": 4, "mamba_d_state": 8,
        "mamba_ngroups": 2, "n_mamba_heads": 8, "chunk_size": 8, "adapter_rank": 4,
    },
    "mamba": {"state_size": 8},
    "falcon_mamba": {"state_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "jamba": {
        "mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "mamba_dt_rank": 4,
    },
    "lfm2": {**SHORT, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {
        **SHORT, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_dense_layers": 1,
    },
    "lfm3": {**SHORT, "head_dim": 8, "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
             "sliding_window": 6},
    "zaya": {
        "head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "router_hidden_size": 16, "sliding_window": 6,
        "layer_types": ["hybrid", "hybrid_sliding"] * 2,
    },
    "inkling_text": INKLING,
    "inkling2_text": {**INKLING, "unpadded_vocab_size": COMMON["vocab_size"]},
    "inkling2_loop_text": {
        **INKLING, "unpadded_vocab_size": COMMON["vocab_size"], "loop_layer_index_start": 1, "loop_layer_index_end": 3,
        "loop_num_passes": 2, "loop_gate_rank": 4, "n_layers_per_attn_res_block": 1, "swa_num_key_value_heads": 1,
    },
}  # fmt: skip

FP32_ONLY: Final = ("inkling2_text", "inkling2_loop_text")  # families that cannot run in 16 bits, even without memstate
# families whose layers compute on states without a kernel
COPIES: Final = ("qwen4_exp_text", "zaya", "inkling2_text", "inkling2_loop_text")

# Families whose cache layers keep states as attributes. `manager` refuses them; one test puts their states on slots.
BY_HAND: Final[Mapping[str, Mapping[str, Any]]] = {
    "deepseek_v4": {
        "num_key_value_heads": 1, "head_dim": 8, "q_lora_rank": 8, "o_lora_rank": 8, "o_groups": 2, "hc_mult": 2,
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "num_hash_layers": 1, "sliding_window": 6, "partial_rotary_factor": 0.5, "index_topk": 3, "index_head_dim": 4,
        "index_n_heads": 16,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 6},
        "layer_types": [
            "heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention",
            "compressed_sparse_attention",
        ],
    },
}  # fmt: skip

WITH_PICTURES: Final = ("glm5_next",)
PICTURES: Final = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32, "intermediate_size": 16,
    "projection_intermediate_size": 16,
}  # fmt: skip


@contextmanager
def without_gpu_kernels() -> Iterator[None]:
    """Hides the packages whose kernels need a GPU."""
    before = {name: sys.modules.pop(name) for name in GPU_ONLY if name in sys.modules}
    sys.modules.update(dict.fromkeys(GPU_ONLY))  # None in sys.modules makes an import fail
    try:
        yield
    finally:
        for name in GPU_ONLY:
            del sys.modules[name]
        sys.modules.update(before)


@cache
def tiny(
    family: str, seed: int = 0, dtype: torch.dtype = torch.float32,
    changes: tuple[tuple[str, str | int | tuple[str | int, ...]], ...] = (),
) -> Any:  # fmt: skip
    """Returns a model of a family with random weights, in evaluation mode. Tests share it and may not change it.

    changes: names and values of fields of its configuration.
    """
    with without_gpu_kernels():
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

        torch.manual_seed(seed)
        changed = {name: list(value) if isinstance(value, tuple) else value for name, value in changes}
        settings = {**COMMON, **{**FAMILIES, **BY_HAND}[family], **changed}
        if family in WITH_PICTURES:
            config = CONFIG_MAPPING[family](text_config=settings, vision_config=PICTURES)
            model = AutoModelForImageTextToText.from_config(config)
        else:
            model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**settings))
    _spread(model)
    model.generation_config.eos_token_id = None
    return model.to(dtype).eval()


def small(vocabulary: int = 97) -> Any:
    """Returns a model with attention only. Its cache can be shortened, unlike one with states."""
    with without_gpu_kernels():
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM

        torch.manual_seed(1)
        settings = {**COMMON, "vocab_size": vocabulary, "num_hidden_layers": 1, "eos_token_id": None}
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**settings)).eval()


@torch.no_grad()
def _spread(model: Any) -> None:
    """Adds noise to parameters whose elements are all equal. Otherwise a scale of 0 could hide a layer."""
    for parameter in model.parameters():
        if parameter.numel() > 1 and torch.all(parameter == parameter.flatten()[0]):
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


def described(family: str) -> str:
    """Returns the line of a family in the table of docs/transformers.md."""
    import memstate.integrations.transformers as mst

    layout = mst.layout(tiny(family))
    kv = sorted({"all tokens" if one.window is None else "a window" for one in layout.attended})
    indexed = any(one.indexed for one in layout.attended)
    cells = (
        f"`{family}`",
        ", ".join(plane.name for plane in layout.state.planes),
        " and ".join(kv + ["an index"] * indexed) or "none",
        "slots" if layout.on_slots else "copies",
        "any chunks" if layout.continues else "one chunk, then single tokens",
    )
    return f"| {' | '.join(cells)} |"


HEADINGS = "| family | planes | KV | decode on | prompts of `serve` |\n| --- | --- | --- | --- | --- |\n"
