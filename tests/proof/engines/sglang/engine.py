"""Boots SGLang's `Scheduler` with a small random model, in a child process for each run."""

import json
import multiprocessing
import tempfile
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from tests.proof.engines.sglang.driver import Driver, Plant, Record
from tests.proof.engines.sglang.scenarios import Pair

# a Qwen3-Next of four layers, three of them recurrent
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


def settings(pair: Pair, folder: str) -> dict[str, Any]:
    """Returns the arguments of SGLang's server for a pair."""
    return {
        "model_path": folder, "served_model_name": "tiny", "load_format": "dummy", "skip_tokenizer_init": True,
        "device": "cpu", "dtype": "float32",
        "attention_backend": "torch_native", "sampling_backend": "pytorch", "grammar_backend": "none",
        "random_seed": 0, "max_running_requests": 8, "max_total_tokens": 4096, "max_mamba_cache_size": 40,
        "mem_fraction_static": 0.5, "log_level": "error",
    } | pair.settings  # fmt: skip


def boot(pair: Pair) -> Any:
    """Returns a scheduler with a model, whose weights are random but the same in every run."""
    from sglang.srt.managers import scheduler
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import PortArgs, ServerArgs

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        args = ServerArgs(**settings(pair, folder))
        publish(args, role="scheduler", ranks=scheduler.SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
        made = scheduler.Scheduler(args, PortArgs.init_new(args))
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in made.tp_worker.model_runner.model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=random) * 0.2)
    return made


def run(pair: Pair, *, ours: bool, tree: bool = False, plant: Plant | None = None) -> Record:
    """Runs the requests of a pair once. Returns the record.

    Args:
        pair: settings and requests.
        ours: whether the pools are memstate's.
        tree: whether the prefix tree is memstate's, too.
        plant: function that plants a fault, called before each forward until it returns True.
    """
    from memstate import Prefix
    from memstate.integrations.sglang import in_place

    with in_place(prefix=Prefix() if tree else None) if ours else nullcontext():
        scheduler = boot(pair)
        core = getattr(scheduler.tree_cache, "tree_core", None)
        assert type(core).__module__.startswith("memstate.") is tree, type(core)
        pool = scheduler.req_to_token_pool
        assert type(pool).__module__.startswith("memstate.") is ours, type(pool)
        record = Driver(scheduler, pair, plant).run()
        if ours:
            pool.mamba_allocator.check()
        return record


class RunFailed(Exception):
    """A run ended with an error."""


def child(pair: Pair, *, ours: bool, tree: bool = False, plant: Plant | None = None) -> Record:
    """Calls `run` in a child process, because SGLang keeps settings and process groups in globals.

    Raises:
        RunFailed: the run ended with an error. The exception has the text of this error.
    """
    context = multiprocessing.get_context("fork")
    result, end = context.Pipe(duplex=False)

    def work() -> None:
        try:
            end.send(run(pair, ours=ours, tree=tree, plant=plant))
        except Exception as error:
            traceback.print_exc()
            end.send(f"{type(error).__name__}: {error}")

    process = context.Process(target=work)
    process.start()
    end.close()
    try:
        record = result.recv()
    except EOFError:
        record = "the process died"
    process.join()
    if not isinstance(record, Record):
        raise RunFailed(record)
    return record
