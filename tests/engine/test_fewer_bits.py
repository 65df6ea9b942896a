"""A request with states of whole numbers has the outputs and bytes of plain decode, wherever its state comes from."""

import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support.build import on
from tests.support.decode_case import same_bits
from tests.support.tail_walk import HEADS, SIZE, WRONG, Model, layout
from tests.support.virtual import AtOnce, MemoryStore

TAIL = 4


class Engine:
    """Decodes texts of a model one after the other, with drafts, and compares each output and the last state."""

    def __init__(self, model: Model, store: MemoryStore) -> None:
        tiers = ms.Tiers(
            "toy", host_slots=16, store=store, executor=AtOnce(), prefetch=ms.Prefetch(4, stop="wait_complete")
        )
        self.model = model
        self.mem = on(
            model.backend, layout(TAIL, model.dtype), slots=16, max_requests=2, tail=TAIL,
            tracking=ms.Redirect(every=8), page_size=4, prefix=ms.Prefix(), tiers=tiers,
        )  # fmt: skip
        self.slots = set[int]()

    def turn(self, text: int, length: int) -> int:
        """Reads a prompt, decodes 8 tokens with drafts, and returns the length from which the request started."""
        mem, tokens, read = self.mem, [100 * text + n for n in range(length)], length - 8
        fetch = mem.prefetch(tokens[:read])
        while not fetch.done:
            mem.poll()
        (row,) = mem.admit([ms.Request(text, tokens=tokens[:read], fetch=fetch)])
        start = at = mem.info(row).length
        while at < length:
            decodes = at >= read
            real = min(2, length - at) if decodes else mem.chunk(row, 7)
            step = mem.plan([row], real + decodes, drafts=real if decodes else 0)  # the last draft is wrong
            out = self.model.forward(mem, step, [[(text, at + t) for t in range(real)] + [(WRONG, at)] * decodes])
            assert same_bits(out[0, :real], self.model.outputs[text, at : at + real])
            mem.accept(step, [real])
            at += real
        while mem.info(row).pending:
            step = mem.plan([row], 0)
            self.model.forward(mem, step, [[]])
            mem.settle(step)
        (slot,) = mem.device.read_slots([row]).wait().tolist()
        assert self.model.same(mem.planes, slot, text, length)
        self.slots.add(slot)
        mem.end([row], keep="cache", tokens=[tokens])
        return start


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16], ids=str)
def test_D32_states_of_whole_numbers_travel(backend: Backend, generator: torch.Generator, dtype: torch.dtype) -> None:
    """From the device, from host memory and from a store. int8 is rounded by chance."""
    model, store = Model(backend, generator, WRONG + 1, dtype), MemoryStore()
    first = Engine(model, store)
    assert [first.turn(*turn) for turn in ((0, 20), (1, 12), (0, 32))] == [0, 0, 20]
    first.mem.prefix.evict_states(99)
    assert first.turn(0, 44) == 32
    assert first.mem.stats().tiers.host_hit_tokens
    first.mem.close()
    second = Engine(model, store)
    assert second.turn(0, 56) == 44
    assert second.mem.stats().tiers.storage_hit_tokens
    assert len(first.slots) > 1


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16], ids=str)
def test_D32_steps_of_one_token_and_of_one_head_have_the_same_bytes(
    backend: Backend, generator: torch.Generator, dtype: torch.dtype
) -> None:
    """A rank has some of the heads, and names the first one."""
    model = Model(backend, generator, 1, dtype)
    one = torch.ones(1, dtype=torch.int32, device=backend.device)
    slots = {"read": one, "write": one, "snapshot": 0 * one, "tokens": one}
    for head in range(HEADS):
        of = slice(head, head + 1)
        weights = model.weights | {"a_log": model.weights["a_log"][of], "first_head": head}
        state = torch.zeros(2, 1, SIZE, SIZE, dtype=dtype, device=backend.device)
        scales = torch.zeros(2, 1, SIZE, device=backend.device)
        for at in range(20):
            x = {name: each[:, at : at + 1] for name, each in model.inputs.items()}
            x |= {name: x[name][:, :, of].contiguous() for name in ("v", "decay", "beta")}
            draws = model.draws(at * one)
            out = backend.gated_delta_step(**x, **weights, **slots, **draws, state=state, scales=scales)
            assert same_bits(out, model.outputs[:, at : at + 1, of])
            assert same_bits(state[1], model.states["ssm"][0, at, of])
            assert same_bits(scales[1], model.states["ssm_scale"][0, at, of])
