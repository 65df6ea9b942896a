"""States packed into records with int8 planes: back within half a step of the scale, other planes exactly."""

import random

import pytest
import torch
from torch import Tensor

import memstate as ms
from memstate.errors import InvalidArgument
from memstate.kernels.dispatch import Backend
from memstate.prefix.policies import Lru
from memstate.state.layout import Order, Plane, StateLayout
from memstate.state.planes import Planes
from memstate.tiers.host.packing import Packing
from tests.kernels.test_copy import ORDERS
from tests.support.build import build
from tests.support.packed import Records, body_mask, filled, ids, toy
from tests.support.tiered_small import PAGE

# preset -> axis of values in its ssm plane: `head key value`, `head dim state` or `channel state`
AXES = dict.fromkeys(("qwen3_next", "qwen3_5", "kimi_linear"), 2)
AXES |= dict.fromkeys(("nemotron_h", "falcon_h1", "granite_hybrid", "bamba", "codestral_mamba"), 1)
AXES |= dict.fromkeys(("mamba", "falcon_mamba"), 1)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TWO = StateLayout(
    [Plane("conv", (3, 3), torch.bfloat16), Plane("ssm", (2, 3, 5), torch.float32), Plane("m", (4,), torch.float16)], 3
)


def numbers(storage: Planes, generator: torch.Generator, names: tuple[str, ...] = ("ssm",)) -> Planes:
    """Returns the storage with random numbers instead of random bytes in its planes of floats."""
    for name in names:
        for plane in storage[name]:
            plane.copy_(torch.randn(plane.shape, generator=generator))
    return storage


def step(x: Tensor, axis: int) -> Tensor:
    """Returns the int8 scale per row, in float64, of values whose first axis is the layer."""
    return x.double().abs().amax(axis + 1, keepdim=True) / 127


def layers_of(storage: Planes, name: str, slot: int) -> Tensor:
    """Returns a plane of a slot, `layer ...`, on the host."""
    return torch.stack([plane[slot] for plane in storage[name]]).cpu()


def same_bytes(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", AXES)
def test_B66_int8_round_trip_of_every_preset(
    backend: Backend, generator: torch.Generator, name: str, order: Order
) -> None:
    """Moves slot 1 to a record and then to slot 3: conv keeps its bits, ssm changes by at most half a step of the
    scale.
    """
    for dtype in DTYPES[:2] if order == "slot_major" else DTYPES[::2]:
        storage = numbers(filled(toy(name, order, ssm_dtype=dtype), 3, backend, generator), generator)
        packing, axis = Packing(storage, {"ssm": AXES[name]}), AXES[name]
        before = {slot: {plane: layers_of(storage, plane, slot) for plane in storage} for slot in range(4)}
        records = Records(packing, generator)
        packing.pack(None, ids(storage, 1), ids(storage, 2), records.bodies)
        outside = torch.ones(records.expected.shape, dtype=torch.bool)
        start = int(records.bodies.storage_offset())
        outside[2, start : start + packing.nbytes] = ~body_mask(packing)
        assert torch.equal(records.whole.cpu()[outside], records.expected[outside])  # only the body was written
        kept = records.whole.clone()
        packing.unpack(None, ids(storage, 3), ids(storage, 2), records.bodies)
        assert torch.equal(records.whole, kept)
        for slot in range(3):
            assert all(same_bytes(layers_of(storage, plane, slot), was) for plane, was in before[slot].items())
        assert same_bytes(layers_of(storage, "conv", 3), before[1]["conv"])
        x, restored = before[1]["ssm"].double(), layers_of(storage, "ssm", 3).double()
        half_a_digit = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
        bound = step(x, axis) * (0.5 + 2**-16) + restored.abs() * half_a_digit + 2.0**-25
        assert ((x - restored).abs() <= bound).all() and not torch.equal(x, restored)


def test_the_body_has_values_and_scales_in_place_of_the_plane(backend: Backend, generator: torch.Generator) -> None:
    storage = numbers(filled(TWO, 3, backend, generator), generator, ("ssm", "m"))
    packing = Packing(storage, {"ssm": 2})
    names = [(plane.name, plane.shape, plane.dtype) for plane in packing.layout.planes]
    assert names == [
        ("conv", (3, 3), torch.bfloat16), ("ssm", (2, 3, 5), torch.int8), ("ssm.scale", (2, 3, 1), torch.float32),
        ("m", (4,), torch.float16),
    ]  # fmt: skip
    assert packing.nbytes == packing.layout.bytes_per_slot == 3 * (32 + 32 + 32 + 16)
    records, layout = Records(packing, generator), packing.layout
    packing.pack(None, ids(storage, 2), ids(storage, 1), records.bodies)
    for row in layout.table():
        for layer in range(3):
            start = row.offset + layer * row.layer_stride
            part = records.bodies[1, start : start + row.payload].cpu().clone().view(row.dtype).view(row.shape)
            x = layers_of(storage, row.name.removesuffix(".scale"), 2)[layer]
            if row.name == "ssm.scale":
                assert torch.equal(part, x.abs().amax(2, keepdim=True) / 127)  # scales are exact, in float32
            elif row.name == "ssm":
                assert torch.equal(part, (x / (x.abs().amax(2, keepdim=True) / 127)).round().to(torch.int8))
            else:
                assert same_bytes(part, x)


@pytest.mark.parametrize("order", ORDERS)
def test_B79_a_plane_with_layers_of_its_own_is_int8_beside_others(
    backend: Backend, generator: torch.Generator, order: Order
) -> None:
    """Moves slot 1 to a record and then to slot 3: the int8 plane keeps its layers, and the other plane its bytes."""
    planes = [Plane("ssm", (2, 3, 5), torch.float32, layers=3, fill=1.5), Plane("ids", (3,), torch.int16, fill=-1)]
    storage = numbers(filled(StateLayout(planes, 2, order), 3, backend, generator), generator)
    packing = Packing(storage, {"ssm": 2})
    records = Records(packing, generator)
    packing.pack(None, ids(storage, 1), ids(storage, 0), records.bodies)
    packing.unpack(None, ids(storage, 3), ids(storage, 0), records.bodies)
    x, y = layers_of(storage, "ssm", 1), layers_of(storage, "ssm", 3)
    assert len(x) == 3 and ((x.double() - y.double()).abs() <= 0.51 * step(x, 2)).all()
    assert same_bytes(layers_of(storage, "ids", 1), layers_of(storage, "ids", 3))


def test_one_launch_for_bytes_and_one_for_each_plane(backend: Backend, generator: torch.Generator) -> None:
    storage = numbers(filled(TWO, 3, backend, generator), generator, ("ssm", "m"))
    for int8, expected in (
        ({}, {"pack_slots": 1}), ({"ssm": 0}, {"pack_slots": 1, "pack_int8": 1}),
        ({"ssm": 0, "m": 0}, {"pack_slots": 1, "pack_int8": 2}),
    ):  # fmt: skip
        packing = Packing(storage, int8)
        backend.counts.reset()
        packing.pack(None, ids(storage, 1, 2), ids(storage, 0, 1), Records(packing, generator).bodies)
        assert backend.counts.launches == expected
    alone = numbers(Planes(StateLayout([Plane("ssm", (4, 4), torch.float32)], 2), 2, backend), generator)
    packing = Packing(alone, {"ssm": 1})
    backend.counts.reset()
    records = Records(packing, generator)
    packing.pack(None, ids(alone, 1), ids(alone, 0), records.bodies)
    packing.unpack(None, ids(alone, 2), ids(alone, 0), records.bodies)
    assert backend.counts.launches == {"pack_int8": 1, "unpack_int8": 1}


@pytest.mark.parametrize(
    ("int8", "problem"),
    [({"sssm": 0}, r"no planes \['sssm'\] in \['conv', 'ssm', 'm'\]"), ({"ssm": 3}, r"axis 3 of Plane\(ssm.* 3 axes"),
     ({"ssm": -1}, "axis -1 of"), ({"ssm": True}, "axis True of"), ({"ssm": None}, "axis None of"),
     ({"ints": 0}, r"axis 0 of Plane\(ints\[4\] int32"), ({"no": 0}, r"axis 0 of Plane\(no\[0,3\]")],
)  # fmt: skip
def test_planes_that_cannot_be_int8_are_named(backend: Backend, int8: dict[str, int], problem: str) -> None:
    planes = TWO.planes
    if int8.keys() & {"ints", "no"}:
        planes = (*planes, Plane("ints", (4,), torch.int32), Plane("no", (0, 3), torch.float32))
    storage = Planes(StateLayout(planes, 2), 1, backend)
    with pytest.raises(InvalidArgument, match=problem):
        Packing(storage, int8)
    storage = Planes(StateLayout((*planes, Plane("ssm.scale", (1,), torch.float32)), 2), 1, backend)
    with pytest.raises(InvalidArgument, match="each name once"):
        Packing(storage, {"ssm": 0})


LAYOUT = ms.StateLayout((ms.Plane("ssm", (2, 3, 16), torch.float32), ms.Plane("conv", (5,), torch.bfloat16)), layers=2)


def value(tokens: list[int], backend: Backend) -> tuple[Tensor, Tensor]:
    """Returns the state of a prefix, `layer head key value`, and a window that must stay exact."""
    generator = torch.Generator().manual_seed(hash(tuple(tokens)) % 2**31)
    scales = 10.0 ** torch.randint(-3, 4, (2, 2, 3, 1), generator=generator)
    ssm = torch.randn(2, 2, 3, 16, generator=generator) * scales
    return ssm.to(backend.device), torch.randn(2, 5, generator=generator).bfloat16().to(backend.device)


@pytest.mark.sample
def test_B66_int8_states_come_back_within_half_a_step(backend: Backend) -> None:
    """The loaded state differs by at most half a step of each row's scale; the loaded window is exact."""
    rng = random.Random(0)
    prompts = [[rng.randrange(1000) for _ in range(2 * PAGE + 1)] for _ in range(3)]
    mem = build(
        LAYOUT, slots=4, max_requests=2, tracking=ms.Redirect(every=2 * PAGE), page_size=PAGE, prefix=ms.Prefix(Lru()),
        tiers=ms.Tiers("toy", host_slots=4, int8={"ssm": 2}), backend=backend.name, device=backend.device,
    )  # fmt: skip
    assert mem.prefix is not None and mem.tiers is not None
    for prompt in prompts:
        (row,) = mem.admit([ms.Request("r", tokens=prompt)])
        for n in (2 * PAGE, 1):
            step = mem.plan([row], n)
            ssm, conv = value(prompt[:n], backend)
            for name, plane in (("ssm", ssm), ("conv", conv)):
                mem.planes[name][:, step.write.long()] = plane[:, None]
            mem.settle(step)
        mem.end([row], keep="cache", tokens=[prompt])
        mem.poll()
    mem.prefix.evict_states(99)
    for prompt in prompts:
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
    figures = mem.stats().tiers
    assert figures.leaked_records == 0 and figures.host_hit_tokens == 3 * 2 * PAGE
    assert mem.tiers.host.states.pool.nbytes < LAYOUT.bytes_per_slot
    mem.close()
