"""Computes linear attention with the decode steps of other rules, and compares with its recurrence in float64."""

import numpy as np
import pytest
import torch
from torch import Tensor

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.state.presets import from_config
from tests.support.build import on
from tests.support.recurrences import Array, float64

HEADS, SIZE, TOKENS, EVERY = 2, 16, 9, 4
LAYOUT = from_config(
    {"model_type": "minimax", "num_attention_heads": HEADS, "head_dim": SIZE, "num_hidden_layers": 1,
     "layer_types": ["linear_attention"]}
)  # fmt: skip


def recurrence(q: Array, k: Array, v: Array, decay: Array) -> Array:
    """Returns `token head value`: S_t = diag(exp(decay_t)) S_{t-1} + k_t v_t^T, o_t = q_t S_t."""
    state, out = np.zeros((HEADS, SIZE, SIZE)), []
    for t in range(len(q)):
        state = np.exp(decay[t])[..., None] * state + k[t][..., None] * v[t][:, None]
        out.append((q[t][..., None] * state).sum(1))
    return np.array(out)


@pytest.mark.parametrize("rule", ["constant per head", "by key"])
@pytest.mark.parametrize("order", ["key_value", "value_key"])
def test_a_step_of_another_rule_computes_linear_attention_on_slots(
    rule: str, order: str, backend: Backend, generator: torch.Generator
) -> None:
    """Two requests decode, one ends; a third goes on from its snapshot of 4 tokens. Slots start as NaN."""
    layout = ms.StateLayout(
        [ms.Plane("ssm", LAYOUT.planes[0].shape, torch.float32, order=order)], layers=1
    )  # the matrices are square
    mem = on(backend, layout, slots=8, max_requests=3, tracking=ms.Redirect(every=EVERY))
    mem.planes["ssm"].fill_(torch.nan)
    mem.device.scrub_null()
    plane = mem.planes["ssm"][0] if order == "key_value" else mem.planes["ssm"][0].mT
    q, k, v = torch.randn((3, 2, TOKENS, HEADS, SIZE), generator=generator)
    rates = torch.rand(HEADS, generator=generator) + 0.05
    shape = (2, TOKENS, HEADS, SIZE)
    decay = -rates[:, None].expand(shape) if rule != "by key" else -torch.rand(shape, generator=generator)
    exact = [recurrence(*map(float64, (q[row], k[row], v[row], decay[row]))) for row in range(2)]

    def computed(inputs: list[Tensor], *columns: Tensor) -> Tensor:
        q, k, v, gate = (each.to(backend.device).contiguous() for each in inputs)
        if rule == "by key":
            zero = torch.zeros_like(k)
            return backend.gated_delta_step(q, k, v, gate, None, plane, *columns, scale=1.0, a=zero, b=zero)
        one = torch.ones(v.shape[:3], device=backend.device)
        return backend.selective_step(v, one, -rates.to(backend.device), k, q, plane.mT, *columns)

    def decode(rows: list[ms.Row], which: list[int], start: int, stop: int) -> None:
        for at in range(start, stop):
            step = mem.plan(rows)
            ones = torch.ones_like(step.read)
            given = [each[which, at : at + 1] for each in (q, k, v, decay)]
            out = computed(given, step.read, step.write, step.snapshot, ones)
            mem.settle(step)
            for row, text in enumerate(which):
                assert np.abs(float64(out[row, 0]) - exact[text][at]).max() < 1e-5 * np.abs(exact[text]).max()

    rows = mem.admit([ms.Request("a"), ms.Request("b")])
    decode(rows, [0, 1], 0, 6)
    (kept,) = mem.end(rows[:1], keep="handle", lengths=[EVERY])
    assert kept is not None and kept.length == EVERY
    decode(rows[1:], [1], 6, TOKENS)
    decode(mem.admit([ms.Request("c", resume=kept)]), [0], EVERY, TOKENS)
