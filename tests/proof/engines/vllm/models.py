"""Writes tiny models with random weights, as folders that vLLM loads."""

from pathlib import Path
from typing import Any, Final

WORDS: Final = 512
COMMON: Final[dict[str, Any]] = {
    "vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 2048, "initializer_range": 0.1, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MAMBA2: Final = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_expand": 2,
    "mamba_chunk_size": 32,
}  # fmt: skip
GRANITE: Final = {
    **MAMBA2, "shared_intermediate_size": 96, "num_local_experts": 0, "num_experts_per_tok": 0,
    "layer_types": ["mamba", "attention"] * 2, "position_embedding_type": "rope",
}  # fmt: skip

# model -> (its `model_type` in Transformers, settings that differ from COMMON)
MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "granite": ("granitemoehybrid", GRANITE),
    "reweighted": ("granitemoehybrid", GRANITE),  # this model has its own folder, because its weights are replaced
    "falcon": ("falcon_h1", {**MAMBA2, "mamba_d_ssm": 128, "head_dim": 32}),
    "nemotron": ("nemotron_h", {
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"], "head_dim": 32, "ssm_state_size": 16,
        "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1, "chunk_size": 32, "expand": 2,
    }),
    "qwen": ("qwen3_next", {
        "head_dim": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 1,
        "linear_num_value_heads": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32, "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_key_value_heads": 2,
    }),
    "gemma": ("gemma3_text", {
        "head_dim": 32, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2,
    }),
    # A step takes about 50 ms of CPU time. The cost of the connector is a share of this.
    "large": ("granitemoehybrid", {
        **GRANITE, "hidden_size": 512, "intermediate_size": 1024, "shared_intermediate_size": 1024,
        "num_hidden_layers": 16, "num_attention_heads": 8, "num_key_value_heads": 2, "mamba_n_heads": 32,
        "mamba_d_head": 32, "mamba_d_state": 32, "layer_types": ["mamba", "mamba", "mamba", "attention"] * 4,
        "initializer_range": 0.05,
    }),
}  # fmt: skip


def make(name: str, folder: Path, seed: int = 0) -> None:
    """Writes a model to a folder.

    Args:
        name: One of `MODELS`.
        folder: The new folder.
        seed: Seed of the weights.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, given = MODELS[name]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**COMMON, **given})
    dtype = torch.bfloat16 if name == "qwen" else torch.float32  # vLLM's delta rule for CPUs takes only bf16
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(folder)
