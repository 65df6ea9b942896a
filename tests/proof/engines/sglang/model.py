"""Writes the configuration of a Qwen3-Next of four layers, three of them recurrent, without weights or tokenizer."""

import json
from pathlib import Path

CONFIG = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "torch_dtype": "float32",
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
    "full_attention_interval": 4, "partial_rotary_factor": 0.25, "rope_theta": 10000.0,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 0,
    "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False, "hidden_act": "silu", "rms_norm_eps": 1e-6,
}  # fmt: skip


def write(folder: Path) -> None:
    """Writes the configuration into a folder.

    Args:
        folder: an existing folder.
    """
    (folder / "config.json").write_text(json.dumps(CONFIG))
