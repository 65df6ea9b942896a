"""Why decode on slots has other bits in bf16 and under autocast: Transformers rounds where memstate's kernels do not.

If the convolution on slots is rounded where Transformers rounds it, what was different is gone.
"""

import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import memstate as ms
from tests.support.tiny_models import tiny
from tests.support.tiny_served import TEXT

pytest.importorskip("transformers")
import memstate.integrations.transformers as mst
from memstate.integrations.transformers import on_slots

NAME = "causal_conv1d_update"
BF16 = torch.bfloat16


def rounded(
    hidden_states: Tensor, conv_state: Any, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """The convolution on slots, rounded to bf16 before the activation too; under autocast with weights in bf16."""
    if torch.is_autocast_enabled("cpu"):
        weight, bias = weight.to(BF16).float(), None if bias is None else bias.to(BF16).float()
    out = on_slots.conv(hidden_states, conv_state, weight, bias).to(BF16)
    return out if activation is None else torch.nn.functional.silu(out)


def decoded(model: Any, kernels: Any) -> Tensor:
    """The logits of the token behind a prompt; with None for the kernels from the model's own cache."""
    ids, last = torch.tensor([TEXT[:12]]), torch.tensor([TEXT[12:13]])
    mem = mst.manager(model, slots=4, max_requests=1, backend="reference")
    cache = mst.probe.own_cache(model) if kernels is None else mst.StateCache(model, mem, kernels=kernels)
    model(input_ids=ids, past_key_values=cache, use_cache=True)
    logits: Tensor = model(input_ids=last, past_key_values=cache, use_cache=True).logits.float()
    if isinstance(cache, mst.StateCache):
        cache.close()
    return logits


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
@torch.no_grad()
def test_slots_differ_from_the_own_cache_by_the_roundings_of_its_convolution(
    autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("qwen3_next", dtype=torch.float32 if autocast else BF16)
    with torch.autocast("cpu", BF16) if autocast else nullcontext():
        own = decoded(model, None)
        assert torch.equal(decoded(model, "gathered"), own)
        apart = (decoded(model, "slots") - own).abs().max()
        assert apart > 0
        module = sys.modules[type(model).__module__]
        theirs = getattr(module, NAME)
        monkeypatch.setattr(module, NAME, on_slots._either(getattr(theirs, "__wrapped__", theirs), rounded))
        assert (decoded(model, "slots") - own).abs().max() < apart / 2  # none, if a CPU sums a convolution in fp32


def test_the_convolution_on_slots_rounds_its_output_once(generator: torch.Generator) -> None:
    rows, channels, taps = 8, 256, 4
    x, weight, bias, state = (
        torch.randn(*shape, generator=generator).to(BF16)
        for shape in ((rows, 1, channels), (channels, taps), (channels,), (rows + 1, taps - 1, channels))
    )
    slots, none = torch.arange(1, rows + 1, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    window = torch.cat([state[1:], x], 1).float()
    ones = torch.ones_like(slots)
    found = ms.Backend("reference").conv_step(x, weight, bias, state, slots, slots, none, ones, activation="silu")
    total = torch.einsum("btc,ct->bc", window, weight.float()) + bias.float()
    once, twice = torch.nn.functional.silu(total).to(BF16), torch.nn.functional.silu(total.to(BF16))
    assert (found[:, 0] != once).float().mean() < 0.01  # the sum has another order
    assert (found[:, 0] != twice).float().mean() > 0.1
