"""Decodes on slots with families of Transformers that keep their states outside of shared cache layers.

memstate has their layouts only. The test reads states from slots, calls the model, and writes the new states to slots.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.state.presets import from_config, kv_from_config
from tests.support.build import on
from tests.support.tiny_models import COMMON

pytest.importorskip("transformers")

from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.minimax.modeling_minimax import MiniMaxCache
from transformers.models.xlstm.modeling_xlstm import xLSTMCache

States = dict[str, list[Tensor]]  # plane -> its layers, each `row ...`
END, KEPT, EVERY = 14, 8, 4


def mlstm(model: Any, states: States) -> dict[str, Any]:
    cache = xLSTMCache(model.config, len(states["max"][0]), dtype=torch.float32)
    cache.rnn_state = dict(enumerate(zip(*(states[name] for name in ("ssm", "norm", "max")), strict=True)))
    return {"cache": cache, "use_cache": True}


def of_mlstm(_: Any, given: dict[str, Any], __: Any) -> States:
    layers = zip(*given["cache"].rnn_state.values(), strict=True)
    return dict(zip(("ssm", "norm", "max"), map(list, layers), strict=True))


def rwkv4(_: Any, states: States) -> dict[str, Any]:
    """Puts the shift and the sums of a layer where the model has them: behind the rows, the last axis counts layers."""
    shifts, sums = ([state.flatten(1) for state in states[name]] for name in ("conv", "ssm"))
    lists = shifts[1::2], shifts[::2], sums[::2], sums[1::2], states["max"]
    return {"state": [torch.stack(layers, dim=-1) for layers in lists], "use_cache": True}


def of_rwkv4(_: Any, __: Any, out: Any) -> States:
    feed, attention, top, bottom, largest = (list(each.unbind(-1)) for each in out.state)
    pairs = [[one for pair in zip(*lists, strict=True) for one in pair] for lists in ((attention, feed), (top, bottom))]
    return {"conv": [shift[..., None] for shift in pairs[0]], "ssm": pairs[1], "max": largest}


def lightning(_: Any, states: States) -> dict[str, Any]:
    cache = MiniMaxCache()
    cache.linear_cache = [*states["ssm"]]
    return {"cache": cache, "use_cache": True}


def of_lightning(_: Any, given: dict[str, Any], __: Any) -> States:
    return {"ssm": given["cache"].linear_cache}


def blocks(model: Any) -> list[Any]:
    return [layer.temporal_block for layer in model.model.layers]


def rg_lru(model: Any, states: States) -> dict[str, Any]:
    for block, conv, ssm in zip(blocks(model), states["conv"], states["ssm"], strict=True):
        block.conv1d_state, block.rg_lru.recurrent_states = conv, ssm
    return {"cache": object(), "use_cache": True}  # without a cache, the model would make its states fresh


def of_rg_lru(model: Any, _: Any, __: Any) -> States:
    held = [(block.conv1d_state, block.rg_lru.recurrent_states) for block in blocks(model)]
    return dict(zip(("conv", "ssm"), map(list, zip(*held, strict=True)), strict=True))


class Family(NamedTuple):
    put: Callable[[Any, States], dict[str, Any]]  # gives a model the states of a batch -> arguments of its forward
    take: Callable[[Any, dict[str, Any], Any], States]  # its states behind a forward, from arguments and output
    config: dict[str, Any]


FAMILIES = {
    "xlstm": Family(mlstm, of_mlstm, {"num_blocks": 2, "num_hidden_layers": 2, "num_heads": 2, "hidden_size": 64}),
    "rwkv": Family(rwkv4, of_rwkv4, {"attention_hidden_size": 32, "rescale_every": 0}),
    "minimax": Family(lightning, of_lightning, {
        "head_dim": 8, "num_local_experts": 2, "layer_types": ["linear_attention"] * 2, "num_hidden_layers": 2,
    }),
    "recurrent_gemma": Family(rg_lru, of_rg_lru, {
        "lru_width": 32, "num_hidden_layers": 2, "block_types": ["recurrent"], "attention_window_size": 16,
    }),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_model_decodes_on_slots_as_it_reads_a_whole_text(
    family: str, backend: Backend, generator: torch.Generator
) -> None:
    """Two requests decode, the first one ends, and a third one goes on from its snapshot of 8 tokens."""
    put, take, config = FAMILIES[family]
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**COMMON | config), dtype=torch.float32).eval()
    for weight in model.parameters():
        if weight.dim() == 1:
            weight.add_(torch.randn(weight.shape, generator=generator) / 4)
    layout = from_config(model.config, conv_dtype=torch.float32)
    assert kv_from_config(model.config, page_size=1) is None
    mem = on(backend, layout, slots=10, max_requests=3, tracking=ms.Redirect(every=EVERY))
    texts = torch.randint(3, COMMON["vocab_size"], (2, END), generator=generator)
    expected = model(texts, use_cache=False).logits

    def decode(rows: list[ms.Row], which: list[int], start: int, stop: int) -> None:
        held = {plane.name: mem.planes[plane.name] for plane in layout.planes}
        for at in range(start, stop):
            step = mem.plan(rows)
            for place, text in enumerate(which):  # the class of RWKV-4 mixes the rows of a batch
                read, write = (int(column[place]) for column in (step.read, step.write))
                given = put(
                    model,
                    {name: [layer[read, None].to("cpu", copy=True) for layer in each] for name, each in held.items()},
                )
                if family == "recurrent_gemma":
                    given |= {"position_ids": torch.tensor([[at]]), "attention_mask": {"sliding_attention": None}}
                out = model(texts[text, at, None, None], **given)
                for name, layers in take(model, given, out).items():
                    for layer, new in zip(held[name], layers, strict=True):
                        layer[write] = new[0].to(layer)
                apart = float((out.logits[0, -1] - expected[text, at]).abs().max() / expected.abs().max())
                assert apart < 1e-4, (text, at)
            mem.settle(step)

    rows = mem.admit([ms.Request("a"), ms.Request("b")])
    decode(rows, [0, 1], 0, 10)
    (kept,) = mem.end(rows[:1], keep="handle", lengths=[KEPT])
    assert kept is not None and kept.length == KEPT
    decode(rows[1:], [1], 10, END)
    decode(mem.admit([ms.Request("c", resume=kept)]), [0], KEPT, END)
    mem.audit().raise_if_leaking()
