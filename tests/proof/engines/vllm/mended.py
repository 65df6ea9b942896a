"""Changes vLLM so that it runs the models of `models.py` on a CPU, and can schedule a step ahead there.

vLLM's setting `worker_extension_cls` names a class of this module, so a worker imports the module before the model.
"""

from dataclasses import replace
from typing import Any

from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.platforms.cpu import CpuPlatform

_spec = MambaMixer2.get_kv_cache_spec


def _without_checkpoints(self: Any, config: Any) -> Any:
    # A checkpoint inside a forward reads one state per chunk. The scan for CPUs returns only one per sequence, so this
    # raises IndexError: mamba_mixer2.py, line 880 of 0.32.0. Without checkpoints, a chunk ends where a state is kept.
    return replace(_spec(self, config), num_prefill_checkpoint_blocks=0)


MambaMixer2.get_kv_cache_spec = _without_checkpoints


class Mended:
    """Adds nothing to a worker. Only makes the worker import this module."""


def run_ahead() -> None:
    """Lets the scheduler plan a step ahead. vLLM switches this off on a CPU: platforms/cpu.py, line 331 of 0.32.0."""
    update = CpuPlatform.check_and_update_config.__func__

    def ahead(cls: type, config: Any) -> None:
        update(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(ahead)
