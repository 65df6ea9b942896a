"""Compares the ownership launch, the resolution of registers and the audit's counts with a model in plain Python."""

import random

import pytest
import torch

from memstate import DeviceFault, SlotAllocator
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import AUDIT_FREE, Count
from tests.support.packets import Device, Model, Packet

KINDS = (Count.DOUBLE_RELEASE, Count.OUT_OF_RANGE, Count.CLAIM_FULL, Count.CLAIM_SHORT, Count.MOVE_FULL)


def random_packet(model: Model, rng: random.Random, share: float) -> Packet:
    """Returns random entries, chosen without regard to what registers hold.

    A phase names each register once, as the host promises.
    """

    def some(most: int) -> list[int]:
        return rng.sample(range(3, model.count), int(share * rng.random() * most))

    def moves(registers: list[int], sign: int) -> list[tuple[int, int]]:
        half = len(registers) // 2
        return [(sign * to, of) for to, of in zip(registers[:half], registers[half : 2 * half], strict=True)]

    last = some(model.count - 3)  # moves and claims behind the releases
    claims = last[rng.randrange(len(last) + 1) :]
    moved = [*moves(some(model.count - 3), 1), *moves(last[: len(last) - len(claims)], -1)]
    targets = some(model.count // 2)
    sources = [register for register in range(3, model.count) if register not in set(targets)]
    cells = rng.sample(range(len(model.columns)), int(share * len(model.columns)))
    return Packet(
        moves=rng.sample(moved, len(moved)),
        releases=some(model.count - 3),
        claims=claims,
        writes=[(cell, rng.randint(-(2**31), 2**31 - 1)) for cell in cells],
        data=[(target, rng.choice((-1, rng.choice(sources)))) for target in targets],
    )


@pytest.mark.parametrize(
    ("capacity", "rows", "holders", "packets", "share"),
    [(5, 2, 3, 12, 1.0), (33, 8, 10, 4, 0.8), (900, 250, 400, 3, 1.0), (40_000, 4, 20, 3, 1.0)],
)
def test_ownership_follows_the_model_on_random_packets(
    backend: Backend, generator: torch.Generator, capacity: int, rows: int, holders: int, packets: int, share: float
) -> None:
    """Sections have up to several blocks of 256 entries. Registers are full or empty; there may be too few slots."""
    rng = random.Random(generator.initial_seed())
    model = Model(capacity, 3 * (rows + 1) + holders, rows)
    model.populate(rng, 0.5)
    device = Device(model, backend)
    for _ in range(packets):
        packet = random_packet(model, rng, share)
        model.run(packet)
        device.run(packet)
        device.check(model)


def faulty(kind: Count, n: int) -> tuple[Model, Packet]:
    """Returns a register file with full and empty registers, and a packet with `n` faults of a kind."""
    model, first, second = Model(700, 3 + 3 * n + 6, 1), range(3, 3 + n), range(3 + n, 3 + 2 * n)
    for register in (*first, *second):
        model.slots[register], model.labels[register] = register, 9
        model.free.discard(register)
    if kind == Count.DOUBLE_RELEASE:
        model.free |= set(first)
    if kind == Count.OUT_OF_RANGE:
        model.slots[3 : 3 + n] = [701 + k if k % 3 < 2 else -(2**31) + k for k in range(n)]
    if kind == Count.CLAIM_SHORT:
        model.slots[3 + n : 3 + 2 * n] = model.labels[3 + n : 3 + 2 * n] = [0] * n
        model.free = set()
    model.counts[Count.FREE] = len(model.free)
    if kind == Count.MOVE_FULL:
        return model, Packet(moves=list(zip(first, second, strict=True)))
    if kind in (Count.CLAIM_FULL, Count.CLAIM_SHORT):
        return model, Packet(claims=list(first if kind == Count.CLAIM_FULL else second))
    return model, Packet(releases=list(first))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name.lower())
@pytest.mark.parametrize("n", [1, 300])
def test_G1_faults_on_the_device_are_counted_and_change_nothing_else(backend: Backend, kind: Count, n: int) -> None:
    """`check` raises each fault once, with the name of the fault and the register or slot."""
    model, packet = faulty(kind, n)
    device = Device(model, backend)
    model.run(packet)
    device.run(packet)
    device.check(model)
    assert {k: model.counts[k] for k in KINDS} == dict.fromkeys(KINDS, 0) | {kind: n}
    allocator = SlotAllocator(model.capacity, backend)
    allocator.counters.copy_(device.table.counters)
    with pytest.raises(DeviceFault, match=kind.name.lower().replace("_", " ")) as raised:
        allocator.check()
    assert (raised.value.count, raised.value.offender) == (n, model.counts[Count.OFFENDER])
    allocator.check()


@pytest.mark.parametrize("n", [1, 256, 700])
def test_resolve_gives_slots_and_zero_for_everything_else(backend: Backend, generator: torch.Generator, n: int) -> None:
    rng = random.Random(generator.initial_seed())
    model = Model(500, 300, 20)
    model.populate(rng, 0.6)
    wanted = [rng.choice((0, -1, -(2**31), 300, 2**31 - 1, rng.randint(3, 299))) for _ in range(n)]
    out = torch.full((n + 4,), -7, dtype=torch.int32, device=backend.device)
    registers = torch.tensor(wanted, dtype=torch.int32, device=backend.device)
    backend.resolve(Device(model, backend).table, registers, out[:n])
    expected = [model.slots[r] if 0 < r < 300 else 0 for r in wanted]
    assert out.tolist() == expected + [-7] * 4


@pytest.mark.parametrize("capacity", [1, 31, 32, 33, 1023, 1024, 2500])
def test_audit_counts_owners_and_free_bits(backend: Backend, generator: torch.Generator, capacity: int) -> None:
    rng = random.Random(generator.initial_seed())
    model = Model(capacity, 1100, 20)
    model.populate(rng, 0.5)
    for register in rng.sample(range(1100), 60):  # writes slots that are shared, unknown or negative
        model.slots[register] = rng.choice((0, 1, capacity, capacity + 1, -1, 2**31 - 1, rng.randint(1, capacity)))
    device = Device(model, backend)
    out = torch.full((capacity + 1 + 8,), -7, dtype=torch.int32, device=backend.device)
    backend.audit(device.table, out[: capacity + 1])
    expected = [AUDIT_FREE * (slot in model.free) for slot in range(capacity + 1)]
    for slot in model.slots:
        if slot:
            expected[slot if 0 < slot <= capacity else 0] += 1
    assert out.tolist() == expected + [-7] * 8
