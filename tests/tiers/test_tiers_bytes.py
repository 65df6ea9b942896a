"""B66: states of every known model come back from host memory, and from files in the next process, byte by byte."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.state import presets
from memstate.state.layout import Plane, StateLayout
from memstate.state.planes import Planes
from memstate.tiers import FileStore, Prefetch, Tiers
from tests.support.build import build
from tests.support.given import FORMS, Engine
from tests.support.tiered import whole
from tests.support.tiered_late import wait_for_staging

pytestmark = pytest.mark.sample

ODD = StateLayout(
    (Plane("a", (), torch.int8), Plane("b", (7,), torch.float64), Plane("c", (0,), torch.float32)), layers=3
)
KV = StateLayout((Plane("k", (4, 3), torch.bfloat16), Plane("v", (5,), torch.uint8)), layers=2)
Blocks = dict[tuple[str, int], Tensor]


def toy(name: str, order: str) -> StateLayout:
    """A preset with the same planes and dtypes, few layers, and sizes that are no multiples of anything."""
    layout = getattr(presets, name)(order=order)
    planes = tuple(
        Plane(plane.name, tuple(min(size, odd) for size, odd in zip(plane.shape, (3, 5, 7), strict=False)), plane.dtype)
        for plane in layout.planes
    )
    return replace(layout, planes=planes, layers=min(3, layout.layers))


class Machine:
    """A manager over any layout, whose states and pages are random bytes that are known by their prompt."""

    def __init__(
        self, backend: Backend, layout: StateLayout, generator: torch.Generator, path: Path | None = None,
        tensors: Mapping[str, Tensor | Sequence[Tensor]] | None = None, **settings: object,
    ) -> None:  # fmt: skip
        self.generator, self.kv = generator, Planes(KV, 8, Backend(backend.name, backend.device))
        store = FileStore(path) if path else None
        self.mem = build(
            layout, slots=4, max_requests=2, device=backend.device, backend=backend.name, pages=8, page_size=4,
            pages_per_row=4, prefix=ms.Prefix(), tensors=tensors, tracking=ms.NoTracking(),
            tiers=Tiers(
                "toy", host_slots=6, kv=self.kv, store=store, prefetch=Prefetch(4, stop="wait_complete"),
                **settings,  # type: ignore[arg-type]
            ),
        )  # fmt: skip
        if backend.device.type == "cuda":
            wait_for_staging(self.mem)

    def blocks(self, storage: Planes, slot: int) -> Blocks:
        """Views of what a slot holds: `.view(uint8)` of each plane and layer."""
        planes = {plane.name: storage[plane.name] for plane in storage.layout.planes if plane.elements}
        return {
            (name, layer): planes[name][layer][slot].reshape(-1).view(torch.uint8)
            for name in planes
            for layer in range(storage.layout.layers)
        }

    def fill(self, blocks: Blocks) -> Blocks:
        for block in blocks.values():
            block.copy_(torch.randint(0, 256, block.shape, dtype=torch.uint8, generator=self.generator))
        return {key: block.to("cpu", copy=True) for key, block in blocks.items()}

    def compute(self, tokens: list[int]) -> list[Blocks]:
        """A request from its admission to its end; returns the bytes of its state, then of its pages."""
        (row,) = self.mem.admit([ms.Request("one", tokens=tokens)])
        step = self.mem.plan([row], len(tokens))
        pages = self.mem.page_table[row.index].tolist()[: len(tokens) // 4]
        made = [self.fill(self.blocks(self.mem.planes, int(step.write[0])))]
        made += [self.fill(self.blocks(self.kv, page)) for page in pages]
        self.mem.settle(step)
        self.mem.release([row], tokens=[tokens])
        return made

    def recall(self, tokens: list[int]) -> list[Blocks]:
        """What a request that goes on from these tokens finds."""
        (row,) = self.mem.admit([ms.Request("two", tokens=[*tokens, 1])])
        assert self.mem.length(row) == len(tokens)
        step = self.mem.plan([row], 1)
        pages = self.mem.page_table[row.index].tolist()[: len(tokens) // 4]
        found = [self.blocks(self.mem.planes, int(step.read[0]))] + [self.blocks(self.kv, page) for page in pages]
        return [{key: block.to("cpu", copy=True) for key, block in blocks.items()} for blocks in found]

    def give_up(self) -> None:
        """The device forgets all of it, and rubbish comes in its place."""
        assert self.mem.prefix
        self.mem.prefix.evict_states(9)
        self.mem.prefix.evict_pages(8)
        self.mem.submit()
        assert (self.mem.free_slots, self.mem.free_pages) == (4, 8)
        for storage in (self.mem.planes, self.kv):
            for slot in range(1, storage.slots + 1):
                self.fill(self.blocks(storage, slot))


def same(got: list[Blocks], snapshot_at: list[Blocks]) -> bool:
    return len(got) == len(snapshot_at) and all(
        one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
        for one, two in zip(got, snapshot_at, strict=True)
    )


def there_and_back(machine: Machine) -> None:
    prompts = [whole(1), whole(2, 1)]
    made = [machine.compute(tokens) for tokens in prompts]
    machine.give_up()
    for tokens, blocks in zip(prompts, made, strict=True):
        assert same(machine.recall(tokens), blocks)
    stats = machine.mem.stats().tiers
    assert stats and (stats.states_out, stats.states_in, stats.pages_out, stats.pages_in) == (2, 2, 3, 3)
    assert stats.leaked_records == 0
    machine.mem.audit().raise_if_leaking()


@pytest.mark.parametrize("order", ["layer_major", "slot_major"])
@pytest.mark.parametrize("name", presets.CHECKPOINTS)
def test_B66_presets_come_back_from_host_memory(name: str, order: str, generator: torch.Generator) -> None:
    there_and_back(Machine(Backend("reference"), toy(name, order), generator))


@pytest.mark.parametrize("staging", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_B66_an_engine_s_own_memory_comes_back(
    form: str, staging: int, backend: Backend, generator: torch.Generator
) -> None:
    layout = toy("qwen3_next", "layer_major")
    engine = Engine(layout, 4, backend, generator, form)
    foreign = engine_gaps(engine)
    there_and_back(Machine(backend, layout, generator, tensors=engine.tensors, staging=staging))
    assert torch.equal(engine_gaps(engine), foreign), "bytes between the planes were touched"


def engine_gaps(engine: Engine) -> Tensor:
    """All bytes of an engine that are not the planes'."""
    own = [torch.zeros(memory.shape, dtype=torch.bool) for memory in engine.memory]
    for (name, _), (memory, offset, stride) in engine.places.items():
        for slot in range(engine.slots + 1):
            own[memory][offset + slot * stride :][: engine.plane[name].nbytes] = True
    return torch.cat([memory.cpu()[~mine] for memory, mine in zip(engine.memory, own, strict=True)])


@pytest.mark.parametrize("staging", [1, 2])
def test_B66_odd_sizes_come_back(staging: int, backend: Backend, generator: torch.Generator) -> None:
    there_and_back(Machine(backend, ODD, generator, staging=staging))


@pytest.mark.parametrize("order", ["layer_major", "slot_major"])
@pytest.mark.parametrize("name", presets.CHECKPOINTS)
def test_B66_presets_come_back_from_files_in_another_manager(
    name: str, order: str, generator: torch.Generator, tmp_path: Path
) -> None:
    """The other one has its planes in the other order: a record does not care."""
    backend, tokens = Backend("reference"), whole(1)
    first = Machine(backend, toy(name, order), generator, tmp_path)
    made = first.compute(tokens)
    first.mem.close()
    other = {"layer_major": "slot_major", "slot_major": "layer_major"}[order]
    second = Machine(backend, toy(name, other), generator, tmp_path)
    second.give_up()
    fetch = second.mem.prefetch([*tokens, 1])
    while not fetch.done:
        second.mem.poll()
    assert (fetch.length, second.mem.match([*tokens, 1]).host_length) == (8, 8)
    assert same(second.recall(tokens), made)
    stats = second.mem.stats().tiers
    assert stats and (stats.storage_hit_tokens, stats.host_hit_tokens, stats.leaked_records) == (8, 0, 0)
    second.mem.close()
