"""A pytest plugin that puts a StateCache where `generate` of Transformers makes its own cache.

Each `generate` that brings no cache runs twice with the same random numbers, over Transformers' cache and over
memstate's, and the tokens are compared. Selects the tests of generation, and those that a model's own file defines.
"""

import inspect
import os
from typing import Any

import torch
import transformers.generation.utils as generation
import transformers.testing_utils as testing
from notes import INSIDE
from transformers.cache_utils import DynamicCache

import memstate.integrations.transformers as mst
from memstate.errors import MemstateError

KERNELS = os.environ["PEER_KERNELS"]  # of StateCache
SLOTS = 128
# A call with one of these is not repeated: the second call would find what the first one left in it.
USED_UP = (
    "past_key_values", "cache_params", "cache", "streamer", "assistant_model", "custom_generate", "logits_processor",
    "stopping_criteria",
)  # fmt: skip
LEFT_OUT = ("compil", "export", "flash_attention", "_fa")  # graphs, and what needs a GPU

# The sizes of models in the tests of Transformers before 5.24, which looked for them here. All layers of these sizes
# have kernels on slots.
OLD_SIZES = {
    "batch_size": 13, "seq_length": 7, "is_training": True, "use_input_mask": True, "use_labels": True,
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 32, "hidden_act": "silu", "max_position_embeddings": 512, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "expert_interval": 1, "moe_layer_start_index": 0,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 36, "shared_expert_gate": True,
    "moe_num_shared_experts": 2, "num_experts_per_tok": 2, "num_experts": 8,
}  # fmt: skip
if not hasattr(testing, "_TEXT_MODEL_TESTER_DEFAULTS"):
    testing._TEXT_MODEL_TESTER_DEFAULTS = OLD_SIZES

mixin = generation.GenerationMixin
own_cache, own_generate = mixin._prepare_cache_for_generation, mixin.generate
managers: dict[int, Any] = {}
caches: list[Any] = []


def _keeps_states(model: Any) -> bool:
    config = model.config.get_text_config(decoder=True)
    return any(type(layer).__name__.startswith("LinearAttention") for layer in DynamicCache(config=config).layers)


def prepare(self: Any, generation_config: Any, model_kwargs: dict[str, Any], *more: Any, **named: Any) -> Any:
    """Lets Transformers make its cache, and puts a StateCache in the place of it."""
    before = set(model_kwargs)
    result = own_cache(self, generation_config, model_kwargs, *more, **named)
    made = [name for name in model_kwargs if name not in before and type(model_kwargs[name]) is DynamicCache]
    if not INSIDE.on or not made or generation_config.cache_implementation == "offloaded" or not _keeps_states(self):
        return result
    try:
        if id(self) not in managers:
            managers[id(self)] = mst.manager(self, slots=SLOTS, max_requests=SLOTS // 2)
        model_kwargs[made[0]] = cache = mst.StateCache(self, managers[id(self)], kernels=KERNELS)
    except MemstateError as error:
        INSIDE.refused.append(f"{type(error).__name__}: {error}")
        raise
    caches.append(cache)
    INSIDE.used += 1
    return result


def both(self: Any, *args: Any, **given: Any) -> Any:
    """Calls `generate` without and with memstate. Returns the result with it."""
    if not INSIDE.on or any(given.get(name) is not None for name in USED_UP):
        return own_generate(self, *args, **given)
    numbers, INSIDE.on = torch.get_rng_state(), False
    try:
        first = own_generate(self, *args, **given)
    finally:
        INSIDE.on = True
    torch.set_rng_state(numbers)
    before = INSIDE.used
    second = own_generate(self, *args, **given)
    if INSIDE.used > before:
        INSIDE.compared += 1
        theirs, ours = (each if torch.is_tensor(each) else each.sequences for each in (first, second))
        if not torch.equal(theirs, ours):
            INSIDE.faults.append(f"other tokens: {theirs.tolist()}, over memstate {ours.tolist()}")
    return second


def close() -> list[str]:
    """Closes the caches of a test, and audits their managers."""
    for cache in caches:
        cache.close()
    found = [
        f"{mem.free_slots} of {SLOTS} slots are free: {audit}"
        for mem in managers.values()
        if not (audit := mem.audit()).clean or mem.free_slots != SLOTS
    ]
    caches.clear()
    managers.clear()
    return found


both.__signature__ = inspect.signature(own_generate)  # type: ignore[attr-defined]
both.__wrapped__ = own_generate  # type: ignore[attr-defined]
mixin._prepare_cache_for_generation, mixin.generate = prepare, both
INSIDE.last.append(close)


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Keeps the tests of generation, and those that a model's own file defines."""
    from tests.generation.test_utils import GenerationTesterMixin  # of Transformers

    common = {name for name in dir(GenerationTesterMixin) if name.startswith("test_")}
    keep, drop = [], []
    for item in items:
        name = item.name
        own = item.function.__code__.co_filename == str(item.path)
        wanted = (own or any(name.startswith(each) for each in common)) and not any(word in name for word in LEFT_OUT)
        (keep if wanted and "Integration" not in item.cls.__name__ else drop).append(item)
    items[:] = keep
    config.hook.pytest_deselected(items=drop)
