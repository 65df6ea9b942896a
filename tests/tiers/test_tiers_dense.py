"""Dense records on the device, and states kept as 8-bit integers: what comes back, from where, and how exact it is."""

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
from tests.support.tiered import Tiered, whole

pytestmark = pytest.mark.sample(None, interpreter=0)

HEADS, KEYS, VALUES, LAYERS = 2, 3, 16, 2
LAYOUT = ms.StateLayout(
    (ms.Plane("ssm", (HEADS, KEYS, VALUES), torch.float32), ms.Plane("conv", (5,), torch.bfloat16)), layers=LAYERS
)


def test_dense_records_serve_what_host_memory_has_no_room_for(backend: Backend) -> None:
    """Eight prompts in turn: two slots' worth of host memory, six dense records; every byte read is looked at."""
    at = Tiered(backend, tiers={"dense_slots": 6, "host_slots": 2, "host_pages": 60}, slots=5, pages=40)
    prompts = [[*whole(n, 2), 7] for n in range(6)]
    at.cache_prompts(*prompts)
    at.give_up()
    assert (at.tiers.dense_states, at.tiers.host_states) == (6, 2)
    for prompt in prompts:
        assert at.turn(prompt, 0) == 2 * PAGE
        at.mem.poll()
        at.look()
    assert at.tiers.states_in == 0 and at.tiers.dense_hit_tokens > 0  # from the device itself
    at.empty()
    assert at.tiers.dense_states == 0 and at.below.host.dense is not None
    assert at.below.host.dense.pool.free == 6


def test_dense_records_are_given_up_last_used_first(backend: Backend) -> None:
    at = Tiered(backend, tiers={"dense_slots": 2, "host_slots": 1, "host_pages": 60}, slots=5, pages=40)
    prompts = [[*whole(n, 2), 7] for n in range(4)]
    at.cache_prompts(*prompts)
    gone: list[int] = []
    while len(gone) < len(prompts):
        at.cache.evict_states(1)
        at.mem.poll()
        gone += [n for n, prompt in enumerate(prompts) if n not in gone and not at.mem.match(prompt).snapshot]
    assert [n for n in gone if at.mem.match(prompts[n]).host_length] == gone[-2:]


def test_a_dense_record_that_is_hit_stays_longer(backend: Backend) -> None:
    at = Tiered(backend, tiers={"write": "back", "dense_slots": 2}, slots=6, pages=40)
    one, two, three = (whole(n) for n in (1, 2, 3))
    at.pass_down(one, two)
    at.mem.end([at.hit(len(one), [*one, 7])])
    at.pass_down(three)
    dense = at.below.host.dense
    assert dense is not None and {at.known[entry.key] for entry in dense.entries()} == {tuple(one), tuple(three)}


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
    assert mem.info(row).length == 0
    for n in (2 * PAGE, 1):
        step = mem.plan([row], n)
        ssm, conv = value(prompt[:n], backend)
        mem.planes["ssm"][:, step.write.long()], mem.planes["conv"][:, step.write.long()] = ssm[:, None], conv[:, None]
        mem.settle(step)
    mem.end([row], keep="cache", tokens=[prompt])
    mem.poll()


def come_back(mem: ms.StateManager, prompt: list[int], backend: Backend) -> None:
    """The prompt is gone on from; what its step reads is its state, within half a step of each row's scale."""
    (row,) = mem.admit([ms.Request("r", tokens=prompt)])
    assert mem.info(row).length == 2 * PAGE
    step = mem.plan([row], 1)
    slot = int(step.read[0])
    ssm, conv = value(prompt[: 2 * PAGE], backend)
    got, exact = mem.planes["ssm"][:, slot].double(), ssm.double()
    scale = exact.abs().amax(-1, keepdim=True) / 127
    assert ((got - exact).abs() <= scale * (0.5 + 2**-14)).all() and not torch.equal(got, exact)
    assert torch.equal(mem.planes["conv"][:, slot], conv)
    mem.settle(step)
    mem.end([row], keep="cache", tokens=[prompt])
    mem.poll()


@pytest.mark.sample(None, interpreter=1)
@pytest.mark.parametrize("dense", [0, 4])
def test_b66_int8_states_come_back_within_half_a_step(backend: Backend, dense: int) -> None:
    rng = random.Random(dense)
    prompts = [[rng.randrange(1000) for _ in range(2 * PAGE + 1)] for _ in range(3)]
    mem = manager(backend, host_slots=4, dense_slots=dense)
    for prompt in prompts:
        compute(mem, prompt, backend)
    assert mem.prefix is not None and mem.tiers is not None
    mem.prefix.evict_states(99)
    for prompt in prompts:
        come_back(mem, prompt, backend)
    figures = mem.stats().tiers
    assert figures is not None and figures.leaked_records == 0
    assert (figures.dense_hit_tokens if dense else figures.host_hit_tokens) == 3 * 2 * PAGE
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
