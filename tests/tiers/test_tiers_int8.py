"""States kept as 8-bit integers: what comes back, and how exact it is."""

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.prefix.policies import Lru
from tests.support.build import build
from tests.support.serving import PAGE

pytestmark = pytest.mark.sample(None, interpreter=0)

HEADS, KEYS, VALUES, LAYERS = 2, 3, 16, 2
LAYOUT = ms.StateLayout(
    (ms.Plane("ssm", (HEADS, KEYS, VALUES), torch.float32), ms.Plane("conv", (5,), torch.bfloat16)), layers=LAYERS
)


def value(tokens: list[int], backend: Backend) -> tuple[Tensor, Tensor]:
    """The state of a prefix: `layer head key value`, and a window that is to stay exact."""
    generator = torch.Generator().manual_seed(hash(tuple(tokens)) % 2**31)
    scales = 10.0 ** torch.randint(-3, 4, (LAYERS, HEADS, KEYS, 1), generator=generator)
    ssm = torch.randn(LAYERS, HEADS, KEYS, VALUES, generator=generator) * scales
    return ssm.to(backend.device), torch.randn(LAYERS, 5, generator=generator).bfloat16().to(backend.device)


def manager(backend: Backend, **tiers: object) -> ms.StateManager:
    settings = ms.Tiers("toy", prefetch=ms.Prefetch(threshold=PAGE, stop="wait_complete"), int8={"ssm": 2}, **tiers)  # type: ignore[arg-type]
    return build(
        LAYOUT, slots=4, max_requests=2, tracking=ms.Redirect(every=2 * PAGE), page_size=PAGE, prefix=ms.Prefix(Lru()),
        tiers=settings, backend=backend.name, device=backend.device,
    )  # fmt: skip


def compute(mem: ms.StateManager, prompt: list[int], backend: Backend) -> None:
    """Runs a prompt whose state is `value` of its whole pages."""
    (row,) = mem.admit([ms.Request("r", tokens=prompt)])
    assert mem.length(row) == 0
    for n in (2 * PAGE, 1):
        step = mem.plan([row], n)
        ssm, conv = value(prompt[:n], backend)
        mem.planes["ssm"][:, step.write.long()], mem.planes["conv"][:, step.write.long()] = ssm[:, None], conv[:, None]
        mem.settle(step)
    mem.release([row], tokens=[prompt])
    mem.poll()


def come_back(mem: ms.StateManager, prompt: list[int], backend: Backend) -> None:
    """The prompt is gone on from; what its step reads is its state, within half a step of each row's scale."""
    (row,) = mem.admit([ms.Request("r", tokens=prompt)])
    assert mem.length(row) == 2 * PAGE
    step = mem.plan([row], 1)
    slot = int(step.read[0])
    ssm, conv = value(prompt[: 2 * PAGE], backend)
    got, exact = mem.planes["ssm"][:, slot].double(), ssm.double()
    scale = exact.abs().amax(-1, keepdim=True) / 127
    assert ((got - exact).abs() <= scale * (0.5 + 2**-14)).all() and not torch.equal(got, exact)
    assert torch.equal(mem.planes["conv"][:, slot], conv)
    mem.settle(step)
    mem.release([row], tokens=[prompt])
    mem.poll()


@pytest.mark.sample(None, interpreter=1)
def test_b66_int8_states_come_back_within_half_a_step(backend: Backend) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(1000) for _ in range(2 * PAGE + 1)] for _ in range(3)]
    mem = manager(backend, host_slots=4)
    for prompt in prompts:
        compute(mem, prompt, backend)
    assert mem.prefix is not None and mem.tiers is not None
    mem.prefix.evict_states(99)
    for prompt in prompts:
        come_back(mem, prompt, backend)
    figures = mem.stats().tiers
    assert figures is not None and figures.leaked_records == 0
    assert figures.host_hit_tokens == 3 * 2 * PAGE
    assert mem.tiers.host.states.pool.nbytes < LAYOUT.bytes_per_slot
    mem.close()


def test_int8_records_outlive_the_process(backend: Backend, tmp_path: Path) -> None:
    prompt = list(range(2 * PAGE + 1))
    mem = manager(backend, host_slots=4, store=ms.FileStore(tmp_path))
    compute(mem, prompt, backend)
    mem.close()
    again = manager(backend, host_slots=4, store=ms.FileStore(tmp_path))
    fetch = again.prefetch(prompt)
    while not fetch.done:
        again.poll()
    come_back(again, prompt, backend)
    again.close()
