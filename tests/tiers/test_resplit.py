"""Records across tensor-parallel splits: whatever ranks are made of whatever ranks, the bytes are those of the model's
whole tensors, cut for them; and a store has what a rank can start from, or nothing.
"""

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memstate.errors import InvalidArgument, LayoutMismatch
from memstate.kernels.dispatch import Backend
from memstate.state import presets
from memstate.state.layout import Plane, StateLayout
from memstate.state.planes import Planes
from memstate.state.sharding import Part
from memstate.tiers.handover.handover import HandOver
from memstate.tiers.handover.resplit import Resplit
from memstate.tiers.host.packing import Packing
from memstate.tiers.keys import Keys, fingerprint
from memstate.tiers.records import RecordFormat
from memstate.tiers.stores.base import Bytes, Outcome
from memstate.tiers.stores.file import FileStore
from memstate.tokens import encode

RANKS, LAYERS, CANARY = (1, 2, 4, 8), 2, 48
PRESETS = [name for name in presets.__all__ if name in presets.CHECKPOINTS]
PAIRS = list(itertools.product(RANKS, RANKS))
GROUPS = (Part("B", 2, 3), Part("C", 2, 3))
MIXED = StateLayout(
    (
        Plane("conv", (30, 3), torch.bfloat16, parts=(Part("x", 8, 2), *GROUPS, Part("z", 1, 2))),
        Plane("turned", (3, 28), torch.float32, parts=(Part("x", 8, 2), *GROUPS), axis=1),
        Plane("inner", (2, 16, 3), torch.int8, parts=(Part("channel", 16),), axis=1),
        Plane("whole", (7, 2), torch.float32),
        Plane("one", (), torch.float32),
        Plane("none", (8, 0), torch.float32, parts=(Part("head", 8),)),
    ),
    LAYERS,
)  # fmt: skip
KV = {
    f"{heads} heads": StateLayout(
        [Plane(name, (4, heads, 3), torch.float16, parts=(Part("head", heads),), axis=1) for name in "kv"], LAYERS
    )
    for heads in (2, 4)
} | {
    "latent": StateLayout((Plane("latent", (4, 5), torch.bfloat16),), LAYERS),
}


def toy(name: str) -> StateLayout:
    """A preset with fewer units, of which as many ranks have a share, and small sizes along every other axis."""

    def units(count: int) -> int:
        while count > 16 and count // 2 % 8 == 0:
            count //= 2
        return count

    def small(plane: Plane) -> Plane:
        parts = tuple(Part(part.name, units(part.units), min(part.size, 3)) for part in plane.parts)
        shape = [min(size, 3) for size in plane.shape]
        shape[plane.axis] = sum(part.length for part in parts)
        return Plane(plane.name, tuple(shape), plane.dtype, parts=parts, axis=plane.axis)

    return StateLayout(tuple(map(small, getattr(presets, name)().planes)), LAYERS)


LAYOUTS = {name: toy(name) for name in PRESETS} | {"mixed": MIXED} | KV


def legal(layout: StateLayout, ranks: int) -> bool:
    units = [part.units for plane in layout.planes for part in plane.parts]
    return all(count % ranks == 0 or ranks % count == 0 for count in units)


def whole(layout: StateLayout, seed: int) -> dict[str, Tensor]:
    """Every plane of the whole model as random bytes, `layer ... byte`."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {plane.name: (layout.layers, *plane.shape, plane.dtype.itemsize) for plane in layout.planes}
    return {
        name: torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator) for name, shape in shapes.items()
    }


def cut(plane: Plane, full: Tensor, ranks: int, rank: int) -> Tensor:
    """What a rank holds: of each part its share of the units, or the one that it has in common with neighbours."""
    pieces, axis = [], plane.axis + 1
    for part in plane.parts:
        units = full.narrow(axis, sum(piece.length for piece in plane.parts[: plane.parts.index(part)]), part.length)
        if part.units < ranks:
            units = units.unflatten(axis, (part.units, part.size)).repeat_interleave(ranks // part.units, axis)
            units = units.flatten(axis, axis + 1)
        pieces.append(units.chunk(ranks, axis)[rank])
    return torch.cat(pieces, axis) if pieces else full


def shard(layout: StateLayout, full: dict[str, Tensor], ranks: int, rank: int, padding: int = 0) -> Bytes:
    """The body of a rank, from the order of a body alone."""
    blocks = []
    cuts = [cut(plane, full[plane.name], ranks, rank) for plane in layout.planes]
    for layer in range(layout.layers):
        for plane in cuts:
            block = plane[layer].reshape(-1)
            blocks += [block, torch.full((-len(block) % 16,), padding, dtype=torch.uint8)]
    return torch.cat(blocks).numpy()


def resplit(form: Resplit, rank: int, bodies: dict[int, Bytes], size: int) -> Bytes:
    """The body of a rank in memory that held something else, whose neighbourhood must not change."""
    memory = np.random.default_rng(rank).integers(0, 256, size + 2 * CANARY, dtype=np.uint8)
    before, inside = memory.copy(), slice(CANARY, CANARY + size)
    form.body(rank, bodies, memory[inside])
    after, memory[inside] = memory[inside].copy(), before[inside]
    assert (memory == before).all()
    return after


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_split_is_made_of_every_other_bit_for_bit(name: str, generator: torch.Generator) -> None:
    """And back again: m -> n -> m."""
    layout, full, made = LAYOUTS[name], whole(LAYOUTS[name], generator.initial_seed()), set()
    splits = [ranks for ranks in RANKS if legal(layout, ranks)]
    assert splits == list(RANKS)
    shards = {ranks: [shard(layout, full, ranks, rank) for rank in range(ranks)] for ranks in splits}
    dirty = {ranks: [shard(layout, full, ranks, rank, 0xA5) for rank in range(ranks)] for ranks in splits}
    for ranks, to_ranks in itertools.product(splits, splits):
        form, there = Resplit(layout, ranks, to_ranks), []
        for rank in range(to_ranks):
            needed = {source: dirty[ranks][source] for source in form.sources(rank)}  # and nothing else is there
            there.append(resplit(form, rank, needed, shards[to_ranks][rank].size))
            assert there[-1].tobytes() == shards[to_ranks][rank].tobytes(), f"rank {rank}, {ranks} -> {to_ranks}"
        back = Resplit(layout, to_ranks, ranks)
        for rank in range(ranks):
            body = resplit(back, rank, {of: there[of] for of in back.sources(rank)}, shards[ranks][rank].size)
            assert body.tobytes() == shards[ranks][rank].tobytes()
        made.add((ranks, to_ranks))
    assert made == set(PAIRS)


def held(layout: StateLayout, ranks: int, rank: int) -> set[int]:
    """Numbers of the elements that a rank holds, of all planes one after the other."""
    numbers, first = set(), 0
    for plane in layout.planes:
        full = torch.arange(first, first + plane.elements).view(1, *plane.shape)
        numbers |= set(cut(plane, full, ranks, rank).flatten().tolist())
        first += plane.elements
    return numbers


def fewest(layout: StateLayout, ranks: int, wanted: set[int]) -> list[int]:
    """The first of the smallest sets of ranks that hold everything, by trying all of them."""
    of = [held(layout, ranks, rank) for rank in range(ranks)]
    sets = (chosen for n in range(1, ranks + 1) for chosen in itertools.combinations(range(ranks), n))
    return list(next(chosen for chosen in sets if wanted <= set().union(*(of[rank] for rank in chosen))))


@pytest.mark.parametrize(("ranks", "to_ranks"), PAIRS)
@pytest.mark.parametrize("name", ["mixed", "2 heads", "latent", "nemotron_h", "granite_hybrid"])
def test_sources_are_as_few_as_can_be_and_the_lowest(name: str, ranks: int, to_ranks: int) -> None:
    layout = LAYOUTS[name]
    form = Resplit(layout, ranks, to_ranks)
    for rank in range(to_ranks):
        assert form.sources(rank) == fewest(layout, ranks, held(layout, to_ranks, rank))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([1, 2, 3, 4, 6, 12]), max_size=3), min_size=1, max_size=3),
    st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([1, 2, 3, 4, 6, 12]), st.integers(0, 2**31),
)  # fmt: skip
def test_splits_that_do_not_divide_each_other(units: list[list[int]], ranks: int, to_ranks: int, seed: int) -> None:
    """Six heads on two ranks are those of three, too; parts of any units side by side."""
    planes = []
    for number, counts in enumerate(units):
        parts = tuple(Part(f"p{place}", count, 1 + place) for place, count in enumerate(counts))
        shape = (2, sum(part.length for part in parts), 3) if parts else (5,)
        planes.append(Plane(f"plane{number}", shape, torch.int16, parts=parts, axis=1 if parts else 0))
    layout = StateLayout(tuple(planes), 2)
    if not (legal(layout, ranks) and legal(layout, to_ranks)):
        with pytest.raises(InvalidArgument, match="one of the two numbers must divide the other"):
            Resplit(layout, ranks, to_ranks)
        return
    form, full = Resplit(layout, ranks, to_ranks), whole(layout, seed)
    for rank in range(to_ranks):
        sources, expected = form.sources(rank), shard(layout, full, to_ranks, rank)
        assert sources == fewest(layout, ranks, held(layout, to_ranks, rank))
        bodies = {of: shard(layout, full, ranks, of) for of in sources}
        assert resplit(form, rank, bodies, expected.size).tobytes() == expected.tobytes()


def test_replicas_by_hand() -> None:
    """Two groups on eight ranks are there four times; what is not cut, eight times."""
    groups = StateLayout((Plane("conv", (6, 2), torch.int16, parts=(Part("k", 2, 3),)),), 1)
    assert [Resplit(groups, 8, 2).sources(rank) for rank in range(2)] == [[0], [4]]
    assert [Resplit(groups, 8, 4).sources(rank) for rank in range(4)] == [[0], [0], [4], [4]]
    assert Resplit(groups, 8, 1).sources(0) == [0, 4]
    assert [Resplit(KV["latent"], 8, 4).sources(rank) for rank in range(4)] == [[0]] * 4
    assert Resplit(toy("qwen3_next"), 8, 2).sources(1) == [4, 5, 6, 7]
    assert [Resplit(toy("qwen3_next"), 2, 8).sources(rank) for rank in range(8)] == [[0]] * 4 + [[1]] * 4


def test_the_order_on_the_device_does_not_matter() -> None:
    full = whole(MIXED, 1)
    bodies, expected = {of: shard(MIXED, full, 4, of) for of in range(4)}, shard(MIXED, full, 2, 1)
    for order, alignment in itertools.product(("layer_major", "slot_major"), (16, 256)):
        layout = StateLayout(MIXED.planes, LAYERS, order, alignment)  # type: ignore[arg-type]
        assert resplit(Resplit(layout, 4, 2), 1, bodies, expected.size).tobytes() == expected.tobytes()


def test_nothing_but_empty_planes_is_a_body_too() -> None:
    layout = StateLayout((Plane("none", (4, 0), torch.float32, parts=(Part("head", 4),)),), 3)
    form, nothing = Resplit(layout, 2, 4), np.zeros(0, np.uint8)
    assert form.sources(3) == [1]
    form.body(3, {1: nothing}, nothing.copy())


SMALL = StateLayout((Plane("ssm", (4, 5), torch.float32, parts=(Part("head", 4),)), Plane("w", (3,), torch.int8)), 1)


def body(ranks: int) -> Bytes:
    return np.zeros(SMALL.shard(ranks).bytes_per_slot, np.uint8)


@pytest.mark.parametrize(
    ("rank", "bodies", "out", "message"),
    [
        (2, {0: body(4), 1: body(4)}, body(2), "rank 2: expected 0 to 1"),
        (-1, {}, body(2), "rank -1"),
        (True, {}, body(2), "rank True"),
        (1, {2: body(4)}, body(2), r"ranks \[2\]: rank 1 also needs that of 3"),
        (0, {}, body(2), r"also needs that of 0"),
        (0, {0: body(4), 1: body(2)}, body(2), f"body of rank 1: .* expected {body(4).size} contiguous bytes"),
        (0, {0: body(4), 1: body(4)}, body(4), f"out: .* expected {body(2).size} contiguous bytes"),
        (0, {0: body(4), 1: body(4).view(np.int8)}, body(2), "body of rank 1: int8"),
        (0, {0: np.zeros(2 * body(4).size, np.uint8)[::2], 1: body(4)}, body(2), "body of rank 0"),
        (0, {0: body(4), 1: body(4)}, np.frombuffer(bytes(body(2).size), np.uint8), "out is read-only"),
    ],
)
def test_bodies_that_do_not_fit_are_refused(rank: int, bodies: Any, out: Bytes, message: str) -> None:
    if out.flags.writeable:
        out[:] = 7
    before = out.copy()
    with pytest.raises(InvalidArgument, match=message):
        Resplit(SMALL, 4, 2).body(rank, bodies, out)
    assert (out == before).all()


def test_a_body_is_not_made_in_the_memory_of_its_sources() -> None:
    memory = np.arange(2 * body(4).size + body(2).size, dtype=np.uint8)
    size, before = body(4).size, memory.copy()
    with pytest.raises(InvalidArgument, match="out shares memory with the body of rank 1"):
        form, bodies = Resplit(SMALL, 4, 2), {0: memory[:size], 1: memory[size : 2 * size]}
        form.body(0, bodies, memory[2 * size - 1 :][: body(2).size])
    assert (memory == before).all()
    read_only = {of: np.frombuffer(bytes(size), np.uint8) for of in (0, 1)}  # as mapped files are
    form.body(0, read_only, memory[: body(2).size])
    assert not memory[: body(2).size].any()


@pytest.mark.parametrize(
    ("ranks", "to_ranks", "message"),
    [
        (3, 2, "plane ssm: part head has 4 units of 1 for 3 ranks"),
        (2, 6, "plane ssm: part head has 4 units of 1 for 6 ranks"),
        (0, 2, "ranks 0: expected 1 or more"),
        (2, 2.0, "to_ranks 2.0"),
        (True, 2, "ranks True"),
    ],
)
def test_impossible_splits_are_refused(ranks: Any, to_ranks: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Resplit(SMALL, ranks, to_ranks)


HEAD, WIDE = (Part("head", 4),), (Part("x", 4, 2),)


def int8(values: Plane, scales: Plane) -> StateLayout:
    return StateLayout((values, scales), LAYERS)


@pytest.mark.parametrize("shared", [1, 2])
def test_int8_records_go_with_their_scales(shared: int, generator: torch.Generator) -> None:
    """What each rank's own states become in its records, which have a scale for the values along an axis of a head."""
    plane = Plane("ssm", (4, 5, 6), torch.float32, parts=HEAD)
    model = StateLayout((MIXED.planes[3], plane), LAYERS)
    rest = (*plane.shape[:shared], 1, *plane.shape[shared + 1 :])
    layout = StateLayout(
        (
            MIXED.planes[3],
            Plane("ssm", plane.shape, torch.int8, parts=HEAD),
            Plane("ssm.scale", rest, torch.float32, parts=HEAD),
        ),
        LAYERS,
    )
    full = whole(model, generator.initial_seed())
    full["ssm"] = torch.randn((LAYERS, *plane.shape, 1), generator=generator).view(torch.uint8)

    def record(ranks: int, rank: int) -> Bytes:
        storage = Planes(model.shard(ranks), 1, Backend("reference"))
        for each in model.planes:
            bits = cut(each, full[each.name], ranks, rank)
            storage[each.name][:, 1] = bits.view(each.dtype).squeeze(-1)
        packing = Packing(storage, int8={"ssm": shared})
        own = [layout.shard(ranks), packing.layout]
        assert len({fingerprint(MODEL, each, None, PAGE, rank, ranks) for each in own}) == 1
        out = torch.zeros((1, packing.nbytes), dtype=torch.uint8)
        packing.pack(None, torch.tensor([1], dtype=torch.int32), torch.tensor([0], dtype=torch.int32), out)
        return out[0].numpy()

    records = {ranks: [record(ranks, rank) for rank in range(ranks)] for ranks in (1, 2, 4)}
    for ranks, to_ranks in itertools.product(records, records):
        form = Resplit(layout, ranks, to_ranks)
        for rank, expected in enumerate(records[to_ranks]):
            bodies = {of: records[ranks][of] for of in form.sources(rank)}
            assert resplit(form, rank, bodies, expected.size).tobytes() == expected.tobytes()


SCALE_OF_WIDE = Plane("x.scale", (1, 8), torch.float32, parts=WIDE, axis=1)


@pytest.mark.parametrize(
    ("values", "scales", "fits"),
    [
        (Plane("x", (4, 5, 6), torch.int8, parts=HEAD), Plane("x.scale", (4, 1, 6), torch.float32, parts=HEAD), True),
        (Plane("x", (3, 8), torch.int8, parts=WIDE, axis=1), SCALE_OF_WIDE, True),
        (Plane("x", (8, 8), torch.int8, parts=WIDE, axis=1), SCALE_OF_WIDE, True),
        (Plane("x", (4, 5), torch.int8), Plane("x.scale", (1, 5), torch.float32), True),  # whole on every rank
        (Plane("x", (4, 5), torch.float16, parts=HEAD), Plane("x.scale", (7,), torch.float32), True),  # no int8
        (Plane("x", (4, 5), torch.int8, parts=HEAD), Plane("y.scale", (7,), torch.float32), True),  # of another plane
        (Plane("x", (4, 5), torch.int8, parts=HEAD), Plane("x.scale", (1, 5), torch.float32), False),  # of all heads
        (Plane("x", (4, 5, 6), torch.int8, parts=HEAD), Plane("x.scale", (4, 5, 1), torch.float32), False),  # not cut
        (Plane("x", (4, 5), torch.int8), Plane("x.scale", (4, 1), torch.float32, parts=HEAD), False),
        (Plane("x", (4, 5, 6), torch.int8, parts=HEAD), Plane("x.scale", (4, 1, 7), torch.float32, parts=HEAD), False),
        (Plane("x", (4, 5), torch.int8, parts=HEAD), Plane("x.scale", (4, 5), torch.float32, parts=HEAD), False),
        (  # cut along another axis of the same size
            Plane("x", (4, 4, 4), torch.int8, parts=HEAD),
            Plane("x.scale", (4, 4, 1), torch.float32, parts=HEAD, axis=1),
            False,
        ),
    ],
)  # fmt: skip
def test_scales_that_ranks_would_not_hold_with_their_values_are_refused(
    values: Plane, scales: Plane, fits: bool
) -> None:
    if fits:
        Resplit(int8(values, scales), 2, 4)
        return
    with pytest.raises(LayoutMismatch, match=r"Plane\(x\[.*Plane\(x.scale\[.*give both the same parts"):
        Resplit(int8(values, scales), 2, 4)


PAGE, MODEL = 4, "toy"
TOKENS = random.Random(7).choices(range(1000), k=5 * PAGE + 2)  # five whole pages and a part of one
STATE = StateLayout((MIXED.planes[0], Plane("ssm", (8, 3, 2), torch.float32, parts=(Part("head", 8),))), LAYERS)
EVERY = range(5)


class Model(NamedTuple):
    """The layouts of a whole model; what a record must hold is drawn from its kind and its page."""

    state: StateLayout | None = STATE
    kv: StateLayout | None = KV["2 heads"]

    @property
    def kinds(self) -> dict[str, StateLayout]:
        return {kind: layout for kind, layout in (("state", self.state), ("kv", self.kv)) if layout}

    def keys(self, ranks: int, rank: int) -> Keys:
        state, kv = (layout and layout.shard(ranks) for layout in self)
        return Keys(fingerprint(MODEL, state, kv, PAGE, rank, ranks), PAGE)

    def form(self, kind: Any, ranks: int, rank: int) -> RecordFormat:
        return RecordFormat(kind, self.kinds[kind].shard(ranks), self.keys(ranks, rank).fingerprint)

    def name(self, kind: str, page: int, ranks: int, rank: int, salt: object = None) -> str:
        return self.form(kind, ranks, rank).name(self.keys(ranks, rank).of(encode(TOKENS), salt)[page])

    def record(self, kind: str, page: int, ranks: int, rank: int, salt: object = None) -> Bytes:
        form, layout = self.form(kind, ranks, rank), self.kinds[kind]
        record = np.zeros(form.nbytes, np.uint8)
        record[form.header_bytes :] = shard(layout, whole(layout, 2 * page + (kind == "kv")), ranks, rank)
        form.seal(record, self.keys(ranks, rank).of(encode(TOKENS), salt)[page], (page + 1) * PAGE)
        return record

    def put(
        self,
        store: Any,
        ranks: int,
        states: Sequence[int] = (0, 2, 4),
        pages: Sequence[int] = EVERY,
        salt: object = None,
    ) -> None:
        """What all ranks have written. states: pages at whose ends there is one."""
        for kind, there in (("state", states), ("kv", pages)):
            for page, rank in itertools.product(there if kind in self.kinds else (), range(ranks)):
                name, record = self.name(kind, page, ranks, rank, salt), self.record(kind, page, ranks, rank, salt)
                assert store.put([name], [record]) == [Outcome.DONE]

    def hand_over(self, source: Any, ranks: int, target: Any, to_ranks: int, rank: int, batch: int = 8) -> HandOver:
        return HandOver(
            MODEL, *self, PAGE, source=source, ranks=ranks, target=target, to_ranks=to_ranks, rank=rank, batch=batch
        )

    def found(self, store: Any, ranks: int, rank: int, salt: object = None) -> int:
        """Tokens that a rank can start from, as a prefetch finds it; every byte is what the model says."""
        there = {}
        for kind in self.kinds:
            there[kind] = store.exists([self.name(kind, page, ranks, rank, salt) for page in EVERY])
        reach = [*there.get("kv", [True] * 5), False].index(False)
        ends = there.get("state", [True] * 5)[:reach]
        end = max([page + 1 for page, has in enumerate(ends) if has], default=0)
        wanted = {"kv": range(end), "state": range(end - 1, end) if end else ()}
        for kind in self.kinds:
            form, keys = self.form(kind, ranks, rank), self.keys(ranks, rank).of(encode(TOKENS), salt)
            for page in wanted[kind]:
                record = np.zeros(form.nbytes, np.uint8)
                assert store.get([form.name(keys[page])], [record]) == [Outcome.DONE]
                assert form.flaw(record, keys[page], (page + 1) * PAGE) == ""
                assert record.tobytes() == self.record(kind, page, ranks, rank, salt).tobytes()
        return end * PAGE


MODELS = {
    "both": Model(), "states alone": Model(kv=None), "KV alone": Model(None), "latent": Model(kv=KV["latent"]),
    "qwen3_next": Model(toy("qwen3_next")), "kimi_linear": Model(toy("kimi_linear"), KV["latent"]),
}  # fmt: skip


@pytest.mark.parametrize(("ranks", "to_ranks"), [(1, 2), (8, 2), (2, 4), (4, 4), (4, 1)])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_handed_over_is_found_there(name: str, ranks: int, to_ranks: int, tmp_path: Path) -> None:
    model, names = MODELS[name], set()
    source, target = FileStore(tmp_path / "source"), FileStore(tmp_path / "target")
    model.put(source, ranks, states=(0, 3), salt="tenant")
    length = (4 if model.state else 5) * PAGE
    count = (length // PAGE if model.kv else 0) + bool(model.state)
    for rank in range(to_ranks):
        assert model.found(target, to_ranks, rank, "tenant") == 0
        hand_over = model.hand_over(source, ranks, target, to_ranks, rank, batch=3)
        done = hand_over.run(TOKENS, "tenant")
        assert (done.length, done.written, done.present, done.faults) == (length, count, 0, Counter())
        assert model.found(target, to_ranks, rank, "tenant") == length
        again = hand_over.run(np.array(TOKENS), "tenant")
        assert (again.length, again.written, again.present, again.faults) == (length, 0, count, Counter())
        assert hand_over.run(TOKENS).length == hand_over.run(TOKENS, "another").length == 0
        assert hand_over.run([1, *TOKENS[1:]], "tenant").length == hand_over.run(TOKENS[:3], "tenant").length == 0
        names |= {model.name("kv", page, to_ranks, rank, "tenant") for page in range(length // PAGE) if model.kv}
        names |= {model.name("state", 3, to_ranks, rank, "tenant")} if model.state else set()
    assert {path.name for path in (tmp_path / "target").rglob("*") if path.name.startswith(("kv-", "state-"))} == names
    assert len(names) == to_ranks * count


@pytest.mark.parametrize(("ranks", "to_ranks"), [(4, 2), (2, 8), (4, 4)])
def test_one_store_serves_both_sides(ranks: int, to_ranks: int, tmp_path: Path) -> None:
    model, store = Model(), FileStore(tmp_path)
    model.put(store, ranks)
    for rank in range(to_ranks):
        done = model.hand_over(store, ranks, store, to_ranks, rank).run(TOKENS)
        assert (done.length, done.written, done.present) == ((20, 0, 6) if ranks == to_ranks else (20, 6, 0))
    assert [model.found(store, to_ranks, rank) for rank in range(to_ranks)] == [20] * to_ranks
    assert [model.found(store, ranks, rank) for rank in range(ranks)] == [20] * ranks


class Shelf:
    """A store in memory that takes registered buffers alone, and fails as it is told to.

    lost: names that it says it has. refused: that it cannot write, nor read what it has. broken: calls that raise.
    stuck: names that it cannot delete.
    """

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}
        self.lost: set[str] = set()
        self.refused: set[str] = set()
        self.stuck: set[str] = set()
        self.broken: set[str] = set()
        self.memory: list[Bytes] | None = None
        self.puts: list[str] = []

    def register(self, memory: Tensor) -> None:
        self.memory = [*(self.memory or []), memory.numpy()]

    def exists(self, names: Sequence[str]) -> list[bool]:
        self._enter("exists")
        return [name in self.records or name in self.lost for name in names]

    def get(self, names: Sequence[str], buffers: Sequence[Bytes]) -> list[Outcome]:
        self._enter("get", buffers)
        return [self._get(*each) for each in zip(names, buffers, strict=True)]

    def put(self, names: Sequence[str], buffers: Sequence[Bytes]) -> list[Outcome]:
        self._enter("put", buffers)
        self.puts += names
        return [self._put(*each) for each in zip(names, buffers, strict=True)]

    def discard(self, names: Sequence[str]) -> None:
        self._enter("discard")
        for name in names:
            if name not in self.stuck:
                del self.records[name]

    def close(self) -> None:
        """Nothing to end."""

    def _enter(self, call: str, buffers: Sequence[Bytes] = ()) -> None:
        if call in self.broken:
            raise OSError(f"{call} is broken")
        for buffer in buffers if self.memory is not None else ():
            assert any(np.shares_memory(buffer, memory) for memory in self.memory or ()), "memory not registered"

    def _get(self, name: str, buffer: Bytes) -> Outcome:
        if name in self.refused:
            return Outcome.FAILED
        if name not in self.records:
            return Outcome.MISSING
        record = np.frombuffer(self.records[name], np.uint8)
        if record.size != buffer.size:
            del self.records[name]
            return Outcome.DAMAGED
        buffer[:] = record
        return Outcome.DONE

    def _put(self, name: str, buffer: Bytes) -> Outcome:
        if name in self.refused:
            return Outcome.FAILED
        self.records.setdefault(name, buffer.tobytes())
        return Outcome.DONE

    def spoil(self, name: str, at: int = -1) -> None:
        data = bytearray(self.records[name])
        data[at] ^= 4
        self.records[name] = bytes(data)


class Case:
    """Four ranks' records in one store, of which target rank 0 of 2 needs those of ranks 0 and 1; another store."""

    def __init__(self) -> None:
        self.model, self.source, self.target = Model(kv=KV["4 heads"]), Shelf(), Shelf()
        self.model.put(self.source, 4)

    def hand_over(self, rank: int, batch: int = 8) -> HandOver:
        """Whose memory the stores know, and no other."""
        self.source.memory, self.target.memory = self.source.memory or [], self.target.memory or []
        return self.model.hand_over(self.source, 4, self.target, 2, rank, batch)

    def found(self) -> int:
        """What a reader with memory of its own finds."""
        self.target.memory = None
        self.target.broken.clear()
        return self.model.found(self.target, 2, 0)

    def theirs(self, kind: str, page: int, rank: int = 1) -> str:
        return self.model.name(kind, page, 4, rank)

    def own(self, kind: str, page: int) -> str:
        return self.model.name(kind, page, 2, 0)

    def give(self, kind: str, page: int) -> str:
        """The target has it already."""
        self.target.records[self.own(kind, page)] = self.model.record(kind, page, 2, 0).tobytes()
        return self.own(kind, page)


def lose_page(case: Case) -> None:
    del case.source.records[case.theirs("kv", 3)]


def lose_page_of_nobody(case: Case) -> None:
    for rank in (2, 3):
        del case.source.records[case.theirs("kv", 3, rank)]


def lose_page_twice(case: Case) -> None:
    for rank in (0, 1):
        del case.source.records[case.theirs("kv", 1, rank)]
    del case.source.records[case.theirs("kv", 2)]  # nobody asks beyond a gap


def lose_first_page(case: Case) -> None:
    del case.source.records[case.theirs("kv", 0, 0)]


def lose_state(case: Case) -> None:
    del case.source.records[case.theirs("state", 4, 0)]


def lose_states(case: Case) -> None:
    case.source.records = {name: data for name, data in case.source.records.items() if name.startswith("kv")}


def lose_between(case: Case) -> None:
    case.source.lost.add(case.theirs("kv", 3))
    lose_page(case)


def spoil_page(case: Case) -> None:
    case.source.spoil(case.theirs("kv", 3))


def spoil_state(case: Case) -> None:
    case.source.spoil(case.theirs("state", 4, 0), at=20)


def cut_page(case: Case) -> None:
    name = case.theirs("kv", 3)
    case.source.records[name] = case.source.records[name][:-1]


def exchange_pages(case: Case) -> None:
    case.source.records[case.theirs("kv", 3)] = case.source.records[case.theirs("kv", 2)]


def exchange_ranks(case: Case) -> None:
    case.source.records[case.theirs("kv", 3)] = case.source.records[case.theirs("kv", 3, 0)]


def refuse_page_there(case: Case) -> None:
    case.target.refused.add(case.own("kv", 3))


def refuse_state_there(case: Case) -> None:
    case.target.refused.add(case.own("state", 4))


def have_what_is_lost(case: Case) -> None:
    lose_page(case)
    lose_state(case)
    case.give("kv", 3)
    case.give("state", 4)


def have_state(case: Case) -> None:
    case.give("state", 4)


def spoil_page_there(case: Case) -> None:
    case.target.spoil(case.give("kv", 3))


def cut_page_there(case: Case) -> None:
    case.target.records[case.own("kv", 3)] = b"half of one"


def keep_spoilt_page_there(case: Case) -> None:
    spoil_page_there(case)
    case.target.stuck.add(case.own("kv", 3))


def break_discard_there(case: Case) -> None:
    spoil_page_there(case)
    case.target.broken.add("discard")


def hide_page_there(case: Case) -> None:
    case.target.refused.add(case.give("kv", 3))


def lose_page_there(case: Case) -> None:
    case.target.lost.add(case.own("kv", 3))


def break_get(case: Case) -> None:
    case.source.broken.add("get")


def break_exists(case: Case) -> None:
    case.source.broken.add("exists")


def break_put(case: Case) -> None:
    case.target.broken.add("put")


def break_target(case: Case) -> None:
    case.target.broken |= {"exists", "get", "put"}


SHORT = ["kv0", "kv1", "kv2", "state2"]  # what a length of three pages takes
WHOLE = ["kv0", "kv1", "kv2", "kv3", "kv4", "state4"]


@pytest.mark.parametrize("batch", [1, 2, 8])
@pytest.mark.parametrize(
    ("mishap", "length", "there", "faults"),
    [
        (lose_page, 12, SHORT, {"missing": 1}),
        (lose_page_of_nobody, 20, WHOLE, {}),
        (lose_page_twice, 4, ["kv0", "state0"], {"missing": 2}),
        (lose_first_page, 0, [], {"missing": 1}),
        (lose_state, 12, SHORT, {"missing": 1}),
        (lose_states, 0, [], {}),
        (lose_between, 12, SHORT, {"missing": 1}),
        (spoil_page, 12, SHORT, {"checksum": 1}),
        (spoil_state, 12, SHORT, {"header": 1}),
        (cut_page, 12, SHORT, {"damaged": 1}),
        (exchange_pages, 12, SHORT, {"foreign": 1}),
        (exchange_ranks, 12, SHORT, {"foreign": 1}),
        (refuse_state_there, 0, WHOLE[:-1], {"failed": 1}),
        (have_what_is_lost, 20, WHOLE, {}),
        (have_state, 20, WHOLE, {}),
        (spoil_page_there, 20, WHOLE, {"checksum": 1}),
        (cut_page_there, 20, WHOLE, {"damaged": 1}),
        (keep_spoilt_page_there, 12, [*SHORT, "kv3"], {"checksum": 1}),
        (break_discard_there, 12, [*SHORT, "kv3"], {"checksum": 1}),
        (hide_page_there, 12, [*SHORT, "kv3"], {"failed": 1}),
        (lose_page_there, 20, WHOLE, {}),
        (break_get, 0, [], {"failed": 3}),  # one rank's state at each of three lengths; the other's is not asked for
        (break_exists, 0, [], {"missing": 2}),
    ],
)
def test_mishaps_cost_length_and_nothing_else(
    mishap: Any, length: int, there: list[str], faults: dict[str, int], batch: int
) -> None:
    case = Case()
    mishap(case)
    before = dict(case.source.records)
    done = case.hand_over(0, batch).run(TOKENS)
    names = {f"{kind}{page}": case.own(kind, page) for kind in ("kv", "state") for page in EVERY}
    assert done.length == length
    assert set(case.target.records) == {names[name] for name in there}
    assert done.faults == Counter(faults)
    assert before.items() - case.source.records.items() == {  # stores let go of what has another size, and nothing else
        (name, before[name]) for name in before if mishap is cut_page and name == case.theirs("kv", 3)
    }
    assert done.written == len([name for name in case.target.puts if name not in case.target.refused])
    assert case.found() == length


@pytest.mark.parametrize("mishap", [refuse_page_there, break_put, break_target])
@pytest.mark.parametrize("batch", [1, 2, 8])
def test_a_target_that_takes_nothing_is_asked_once(mishap: Any, batch: int) -> None:
    """Pages behind one that was refused may have been on their way with it."""
    case = Case()
    mishap(case)
    done = case.hand_over(0, batch).run(TOKENS)
    refused = 1 if mishap is refuse_page_there else min(batch, 5)
    assert (done.length, done.faults) == (12 if mishap is refuse_page_there else 0, Counter(failed=refused))
    assert len(case.target.puts) == len(set(case.target.puts))
    assert case.found() == done.length


def test_ranks_that_start_alike_run_again_with_the_least() -> None:
    """The second rank's sources have all there is, the first one's have less; `most` is in tokens."""
    case = Case()
    lose_page(case)
    ranks = [case.hand_over(rank) for rank in range(2)]
    lengths = [each.run(TOKENS).length for each in ranks]
    assert lengths == [12, 20]
    assert [each.run(TOKENS, most=min(lengths)).length for each in ranks] == [12, 12]
    assert [ranks[1].run(TOKENS, most=most).length for most in (0, 3, 4, 11, 19, 20, 10**9)] == [0, 0, 4, 4, 12, 20, 20]
    with pytest.raises(InvalidArgument, match="most -1"):
        ranks[1].run(TOKENS, most=-1)


def test_the_last_token_of_a_prompt_is_left_to_compute() -> None:
    """A request cannot start behind its whole prompt; longer ones can, for whom `most` says so."""
    case = Case()
    case.model.put(case.source, 4, states=EVERY, pages=())
    assert case.hand_over(0).run(TOKENS[: 3 * PAGE]).length == 8
    assert case.target.puts == [case.own("kv", 0), case.own("kv", 1), case.own("state", 1)]
    assert case.hand_over(0).run(TOKENS[: 3 * PAGE + 1]).length == 12
    assert case.hand_over(0).run(TOKENS[: 4 * PAGE], most=4 * PAGE).length == 16
    alone, source = Model(None), Shelf()
    alone.put(source, 4)
    for tokens, length in ((TOKENS[:PAGE], 0), (TOKENS[: PAGE + 1], 4), (TOKENS[: 3 * PAGE], 8), ([], 0)):
        assert alone.hand_over(source, 4, Shelf(), 2, 0).run(tokens).length == length


def test_states_are_written_after_their_kv_and_no_others() -> None:
    case = Case()
    case.hand_over(0).run(TOKENS)
    assert case.target.puts == [*(case.own("kv", page) for page in EVERY), case.own("state", 4)]


def expected(case: Case, sound: set[str]) -> int:
    """The deepest length that can be had, from what is sound and where: tokens."""

    def can(kind: str, page: int) -> bool:
        return case.own(kind, page) in sound or {case.theirs(kind, page, rank) for rank in (0, 1)} <= sound

    ends = [page + 1 for page in EVERY if can("state", page) and all(can("kv", before) for before in range(page + 1))]
    return PAGE * max(ends, default=0)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_lost_or_spoilt_the_length_is_the_deepest(seed: int, generator: torch.Generator) -> None:
    case, chance = Case(), random.Random(f"{generator.initial_seed()} {seed}")
    case.model.put(case.source, 4, states=EVERY, pages=())
    for kind, page in itertools.product(("state", "kv"), EVERY):
        if chance.random() < 0.4:
            case.give(kind, page)
    names = {case.theirs(kind, page, rank) for kind in ("state", "kv") for page in EVERY for rank in range(4)}
    sound = names | set(case.target.records)
    for shelf, likely in ((case.source, 0.1), (case.target, 0.3)):
        for name in sorted(shelf.records):
            if chance.random() < likely:
                sound.discard(name)
                ruin = chance.choice(
                    (shelf.spoil, shelf.records.pop, lambda name, of=shelf: of.records.update({name: b""}))
                )
                ruin(name)
    done = case.hand_over(0, chance.choice((1, 2, 8))).run(TOKENS)
    assert done.length == expected(case, sound)
    for kind, page in itertools.product(("state", "kv"), EVERY):
        own, read = case.own(kind, page), {case.theirs(kind, page, rank) for rank in (0, 1)}
        if own in case.target.puts:
            assert read <= sound and own not in sound
            assert case.target.records[own] == case.model.record(kind, page, 2, 0).tobytes()
    assert done.written == len(case.target.puts) == len(set(case.target.puts))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": Model(None, None)}, InvalidArgument, "nothing to hand over"),
        ({"ranks": 3}, InvalidArgument, "8 units of 2 for 3 ranks"),
        ({"rank": 2}, InvalidArgument, "rank 2: expected 0 to 1"),
        ({"batch": 0}, InvalidArgument, "batch 0"),
        (
            {"model": Model(int8(Plane("x", (4, 5), torch.int8, parts=HEAD), Plane("x.scale", (5,), torch.float32)))},
            LayoutMismatch,
            "without int8",
        ),
    ],
)
def test_what_cannot_be_handed_over_is_refused_at_once(change: dict[str, Any], error: Any, message: str) -> None:
    arguments = {"source": Shelf(), "ranks": 4, "target": Shelf(), "to_ranks": 2, "rank": 0, "batch": 1} | change
    model = arguments.pop("model", Model())
    with pytest.raises(error, match=message):
        model.hand_over(**arguments)
    assert arguments["source"].memory is arguments["target"].memory is None
