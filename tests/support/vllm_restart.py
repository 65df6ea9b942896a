"""Makes a tiny hybrid model, or serves fourteen prompts with vLLM's own engine on a CPU, in a process of its own.

python -m tests.support.vllm_restart make MODEL SEED
python -m tests.support.vllm_restart serve MODEL ANSWERS [STORE [FIRST]]
"""

import json
import os
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

LAYERS = ["mamba", "attention"] * 2
WORDS = 512


def make(folder: str, seed: int) -> None:
    """Writes a Granite hybrid with random weights: equal files but for the weights."""
    import torch
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    torch.manual_seed(seed)
    config = GraniteMoeHybridConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=96, shared_intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=0, num_experts_per_tok=0, layer_types=LAYERS,
        mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=16, mamba_expand=2, mamba_chunk_size=32,
        max_position_embeddings=2048, position_embedding_type="rope", initializer_range=0.2, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    GraniteMoeHybridForCausalLM(config).float().save_pretrained(folder)


def prompts() -> list[list[int]]:
    """Two talks: of each its beginning, then six prompts that share more of it."""
    draw = random.Random(1)
    talks = [[draw.randrange(4, WORDS) for _ in range(300)] for _ in range(2)]
    longer = [talks[n % 2] + [draw.randrange(4, WORDS) for _ in range(20)] for n in range(12)]
    return [talk[:150] for talk in talks] + longer


def serve(model: str, store: str | None = None, first: int = 0) -> dict[str, Any]:
    """Returns the tokens of each answer from the first prompt on, and what the connector counted."""
    from vllm import LLM, SamplingParams
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    spec = MambaMixer2.get_kv_cache_spec  # with blocks for checkpoints, vLLM's own forward fails on a CPU
    MambaMixer2.get_kv_cache_spec = lambda self, config: replace(spec(self, config), num_prefill_checkpoint_blocks=0)
    transfer = {
        "kv_connector": "MemstateConnector", "kv_connector_module_path": "memstate.integrations.vllm.connector",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"host_blocks": 300, "store": store, "store_tokens": 32},
    }  # fmt: skip
    llm = LLM(
        model, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, enable_prefix_caching=True,
        mamba_cache_mode="align", block_size=32, num_gpu_blocks_override=200, kv_cache_memory_bytes=1 << 27,
        max_model_len=1024, max_num_seqs=4, seed=0, kv_transfer_config=transfer if store else None,
    )  # fmt: skip
    greedy, answers = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False), []
    for prompt in prompts()[first:]:
        [answer] = llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)
        answers.append(list(answer.outputs[0].token_ids))
        llm.reset_prefix_cache()  # vLLM's own
    core = llm.llm_engine.engine_core.engine_core
    connector, end = core.scheduler.connector, time.monotonic() + 60
    while connector is not None and connector.has_pending_push_work():
        assert time.monotonic() < end, "60 seconds, and the store has not been written"
        core.step()
    counts = vars(connector.counts) if connector is not None else {}
    core.shutdown()
    return {"answers": answers, "counts": counts}


if __name__ == "__main__":
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    what, where, other, *more = sys.argv[1:]
    if what == "make":
        make(where, int(other))
    else:
        Path(other).write_text(json.dumps(serve(where, *more[:1], *map(int, more[1:]))))
