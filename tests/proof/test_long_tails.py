"""Tests that the state of a long text with tails and random drafts has the bits of plain decode."""

import random

import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support.build import on
from tests.support.decode_case import same_bits
from tests.support.sampling import PROOF
from tests.support.tail_walk import Model, layout

CHUNK = 80  # number of tokens between two comparisons
TOKENS = 100_000 if PROOF else 800


def test_T2_a_long_text_has_the_states_of_plain_decode(generator: torch.Generator) -> None:
    backend, chance = Backend("reference"), random.Random(int(torch.randint(0, 2**31, (1,), generator=generator)))
    tracking = ms.Redirect(every=64)
    mem = on(backend, layout(4), slots=4, max_requests=1, tracking=tracking, overlap=False, tail=4)
    (row,) = mem.admit([ms.Request("long")])
    plain = torch.zeros(2, *mem.planes["ssm"].shape[2:])  # slot 1 has the state of plain decode
    one = torch.ones(1, dtype=torch.int32)
    snapshots = 0
    for _ in range(TOKENS // CHUNK):
        model = Model(backend, generator, 2)
        where = {"read": one, "write": one, "snapshot": 0 * one, "tokens": CHUNK * one}
        text = {name: x[:1, :CHUNK] for name, x in model.inputs.items()}
        backend.gated_delta_step(**text, **model.weights, **where, state=plain)
        at = 0
        while at < CHUNK:
            drafts = min(3, CHUNK - at - 1)
            right = chance.randint(0, drafts)
            step = mem.plan([row], 1 + drafts, drafts=drafts, defer=chance.choice((0, 0, 4, 8)))
            model.forward(mem, step, [[(0 if t <= right else 1, at + t) for t in range(1 + drafts)]])
            mem.accept(step, [1 + right])
            at += 1 + right
        while mem.info(row).pending:
            step = mem.plan([row], 0)
            model.forward(mem, step, [[]])
            mem.settle(step)
        slot = int(mem.device.live_slots[row.index])
        assert same_bits(mem.planes["ssm"][0, slot], plain[1]), mem.info(row)
        snapshots = mem.stats().snapshots
    assert mem.info(row).length == TOKENS // CHUNK * CHUNK and snapshots >= TOKENS // 64 - 1
    mem.end([row])
    mem.audit().raise_if_leaking()
