"""Cuts layouts and bytes into the shares of tensor-parallel ranks, and puts the records of all ranks into stores."""

import itertools
import random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from memstate.integrations.handover.handover import HandOver
from memstate.state import presets
from memstate.state.layout import Plane, StateLayout
from memstate.state.sharding import Part
from memstate.tiers.keys import Keys, fingerprint
from memstate.tiers.records import RecordFormat
from memstate.tiers.stores.base import Bytes, Outcome
from memstate.tokens import SaltedTokens, encode
from tests.support.given import in_order

PRESETS = [name for name in presets.__all__ if name in presets.CHECKPOINTS]
PAGE, MODEL, LAYERS = 4, "toy", 2
HEAD, WIDE = (Part("head", 4),), (Part("x", 4, 2),)
GROUPS = (Part("B", 2, 3), Part("C", 2, 3))
MIXED = StateLayout(
    (
        Plane("conv", (30, 3), torch.bfloat16, parts=(Part("x", 8, 2), *GROUPS, Part("z", 1, 2))),
        Plane("turned", (3, 28), torch.float32, parts=(Part("x", 8, 2), *GROUPS), axis=1),
        Plane("inner", (2, 16, 3), torch.int8, parts=(Part("channel", 16),), axis=1),
        Plane("whole", (7, 2), torch.float32),
        Plane("one", (), torch.float32),
        Plane("own", (8, 3), torch.int16, parts=(Part("head", 8),), layers=3),
        Plane("none", (8, 0), torch.float32, parts=(Part("head", 8),)),
    ),
    LAYERS,
)  # fmt: skip
KV = {"latent": StateLayout((Plane("latent", (4, 5), torch.bfloat16),), LAYERS)}
for count in (2, 4):
    of_heads = {"parts": (Part("head", count),), "axis": 1}
    KV[f"{count} heads"] = StateLayout([Plane(n, (4, count, 3), torch.float16, **of_heads) for n in "kv"], LAYERS)


def toy(name: str, **options: torch.dtype) -> StateLayout:
    """Returns a small copy of a preset, with sizes up to 3, and with few units per part, but enough for 8 ranks."""

    def units(count: int) -> int:
        while count > 16 and count // 2 % 8 == 0:
            count //= 2
        return count

    def small(plane: Plane) -> Plane:
        parts = tuple(Part(part.name, units(part.units), min(part.size, 3)) for part in plane.parts)
        shape = [min(size, 3) for size in plane.shape]
        shape[plane.axis] = sum(part.length for part in parts)
        return Plane(plane.name, tuple(shape), plane.dtype, parts=parts, axis=plane.axis)

    return StateLayout(tuple(map(small, getattr(presets, name)(**options).planes)), LAYERS)


def whole(layout: StateLayout, seed: int) -> dict[str, Tensor]:
    """Returns plane -> random bytes of a state of the whole model, `layer ... byte`."""
    random = {"dtype": torch.uint8, "generator": torch.Generator().manual_seed(seed)}
    shapes = {plane.name: (layout.layers_of(plane), *plane.shape, plane.dtype.itemsize) for plane in layout.planes}
    return {name: torch.randint(0, 256, shape, **random) for name, shape in shapes.items()}


def cut(plane: Plane, full: Tensor, ranks: int, rank: int) -> Tensor:
    """Returns the bytes of a rank: its share of the units of each part.

    If a part has fewer units than there are ranks, several ranks get the same unit.
    """
    pieces, axis = [], plane.axis + 1
    for part in plane.parts:
        units = full.narrow(axis, sum(piece.length for piece in plane.parts[: plane.parts.index(part)]), part.length)
        if part.units < ranks:
            units = units.unflatten(axis, (part.units, part.size)).repeat_interleave(ranks // part.units, axis)
            units = units.flatten(axis, axis + 1)
        pieces.append(units.chunk(ranks, axis)[rank])
    return torch.cat(pieces, axis) if pieces else full


def shard(layout: StateLayout, full: dict[str, Tensor], ranks: int, rank: int, padding: int = 0) -> Bytes:
    """Returns the body of a rank's record: all its blocks in order. Uses no code of the library."""
    blocks = []
    for plane, layer in in_order(layout):
        block = cut(plane, full[plane.name], ranks, rank)[layer].reshape(-1)
        blocks += [block, torch.full((-len(block) % 16,), padding, dtype=torch.uint8)]
    return torch.cat(blocks).numpy()


TOKENS = random.Random(7).choices(range(1000), k=5 * PAGE + 2)  # five whole pages and a part of a sixth
STATE = StateLayout((MIXED.planes[0], Plane("ssm", (8, 3, 2), torch.float32, parts=(Part("head", 8),))), LAYERS)
EVERY = range(5)


class Model(NamedTuple):
    """The layouts of a whole model, and its records. The bytes of a record are random, with kind and page as seed."""

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
        return self.form(kind, ranks, rank).name(self.keys(ranks, rank).of(SaltedTokens(encode(TOKENS), salt))[page])

    def record(self, kind: str, page: int, ranks: int, rank: int, salt: object = None) -> Bytes:
        form, layout = self.form(kind, ranks, rank), self.kinds[kind]
        record = np.zeros(form.nbytes, np.uint8)
        record[form.header_bytes :] = shard(layout, whole(layout, 2 * page + (kind == "kv")), ranks, rank)
        form.seal(record, self.keys(ranks, rank).of(SaltedTokens(encode(TOKENS), salt))[page], (page + 1) * PAGE)
        return record

    def put(self, store: Any, ranks: int, states: Any = (0, 2, 4), pages: Any = EVERY, salt: object = None) -> None:
        """Puts the records of all ranks into a store.

        states: the pages (from 0) at whose ends there are states. pages: the pages whose KV there is.
        """
        for kind, there in (("state", states), ("kv", pages)):
            for page, rank in itertools.product(there if kind in self.kinds else (), range(ranks)):
                name, record = self.name(kind, page, ranks, rank, salt), self.record(kind, page, ranks, rank, salt)
                assert store.put([name], [record]) == [Outcome.DONE]

    def hand_over(self, source: Any, ranks: int, target: Any, to_ranks: int, rank: int, batch: int = 8) -> HandOver:
        ends = {"source": source, "ranks": ranks, "target": target, "to_ranks": to_ranks}
        return HandOver(MODEL, *self, PAGE, **ends, rank=rank, batch=batch)

    def found(self, store: Any, ranks: int, rank: int, salt: object = None) -> int:
        """Returns the length that a rank can start from with the records of a store. Checks every byte of them."""
        names = {kind: [self.name(kind, page, ranks, rank, salt) for page in EVERY] for kind in self.kinds}
        there = {kind: store.exists(names[kind]) for kind in names}
        reach = [*there.get("kv", [True] * 5), False].index(False)
        ends = there.get("state", [True] * 5)[:reach]
        end = max([page + 1 for page, has in enumerate(ends) if has], default=0)
        wanted = {"kv": range(end), "state": range(end - 1, end) if end else ()}
        for kind in self.kinds:
            form, keys = self.form(kind, ranks, rank), self.keys(ranks, rank).of(SaltedTokens(encode(TOKENS), salt))
            for page in wanted[kind]:
                record = np.zeros(form.nbytes, np.uint8)
                assert store.get([form.name(keys[page])], [record]) == [Outcome.DONE]
                assert form.flaw(record, keys[page], (page + 1) * PAGE) == ""
                assert record.tobytes() == self.record(kind, page, ranks, rank, salt).tobytes()
        return end * PAGE
