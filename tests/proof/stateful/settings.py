"""Draws the settings of a manager from the digits of one number. Sizes are small, so that everything runs short."""

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, fields, replace
from math import gcd, lcm
from typing import Any

import torch

import memstate as ms
from memstate.prefix.placement import Ends
from memstate.state.layout import NEVER
from memstate.state.planes import Planes
from memstate.tiers import Prefetch, Store, Tiers

TAIL = ms.Plane("tail", (3,), torch.int16, fill=77)
RING = "late"  # name of the plane with the tail of each row


class Digits:
    """Choices by the digits of a number, lowest first. Digit 0, also after the last one, is the simplest choice."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, choices: int) -> int:
        self.left, digit = divmod(self.left, max(1, choices))
        return digit

    def pick(self, *choices):  # type: ignore[no-untyped-def] # one of any objects
        return choices[self(len(choices))]


@dataclass(frozen=True)
class Settings:
    """One configuration of a manager.

    memory: "own" and "fenced" are allocated by memstate, the latter inside larger blocks; "tensor" and "layers" are
    given by the engine. gap: bytes between blocks of given memory. parts: planes, "fold" and perhaps "conv", "conv
    turned", "ring", "few" with "few_scale", and "score". alone: grid of "fold", tokens. tails: whether rows have memory
    of their own. tail: largest step, in tokens, that the tail takes, 0 for no tails; without row memory, the engine
    keeps the tails. kv: what the engine tells of KV that it keeps: "keys" of its blocks, the "reach" of prompts in
    tokens, or nothing.
    """

    strategy: str = "none"
    every: int = 4
    overlap: bool = False
    in_place: bool = False
    direct_hits: bool | None = None
    lane_count: int | None = None
    overwrite: bool = True
    slots: int = 4
    rows: int = 2
    preallocated: int = 0
    max_batch: int | None = None
    snapshots: int | None = None
    reserve: int = 0
    page_size: int = 1
    pages: int = 0
    pages_per_row: int = 0
    parts: tuple[str, ...] = ("fold",)
    wide: int = 2
    layers: int = 1
    order: str = "layer_major"
    memory: str = "own"
    interleaved: bool = False
    gap: int = 16
    debug: bool = False
    prefix: bool = False
    tombstones: bool = True
    most_states: int | None = None
    evict: bool = True
    tiered: bool = False
    write: str = "through"
    host_slots: int = 0
    host_pages: int = 0
    host_reserve: float = 0.0
    staging: int = 2
    storing: bool = False
    stop: str = "wait_complete"
    timeout: float = 1.0
    timeout_per_page: float = 0.5
    fetch_threshold: int = 1
    fetch_limit: int | None = None
    chunk: int = 32
    share: float = 0.5
    per_session: int | None = None
    most_kept: int | None = None
    grid: int = 0
    packed: bool = False
    pad: int = 0
    placed: int = 0  # tokens between marks; 0: marks at ends and branch points only
    spare: int = 1  # tokens of a prompt that its last mark leaves to compute
    alone: int = 1
    tails: bool = False
    tail: int = 0
    kv: str = ""

    @classmethod
    def draw(
        cls, number: int, strategy: str | None = None, overlap: bool | None = None, tiered: bool | None = None,
        tail: bool = False, kv: str | None = None,
    ) -> "Settings":  # fmt: skip
        """Draws settings that work together; arguments that are given stay. tail: rows have tails in any case."""
        tiered = False if kv else tiered
        d = Digits(number)
        name = strategy or d.pick("none", "ping-pong", "lazy", "redirect")
        every = d.pick(4, 2, 3, 1, 6)
        late = bool(d(2)) if overlap is None else overlap
        lane_count = d.pick(None, 2) if late else d.pick(None, 1, 2)
        rows = d.pick(2, 3, 4, 5, 5, 1)
        most = 1 + {"none": 0, "ping-pong": 2, "lazy": 2, "redirect": 1}[name]
        least = {"none": 1, "ping-pong": 1 + (lane_count or 1 + late), "lazy": 2, "redirect": 1}[name]
        page_size = d.pick(*[n for n in (1, 2, 3) if every % n == 0])
        prefix = d(3) > 0 or bool(tiered or kv)
        more = most * rows // 2 + 4 + 6 * prefix
        pages_per_row = d.pick(0, 24 // page_size, 10)
        chosen = cls(
            name, every, late, d(4) == 1, d.pick(None, True, False),
            lane_count if name == "ping-pong" else None, d(2) == 0,
            slots=max(least, least * rows // 2) + d(more), rows=rows,
            preallocated=d(3) if d(2) else 0,
            max_batch=d.pick(None, rows + 3, rows, None, None, 1), snapshots=d.pick(None, 1, 2, 0, 3, 5),
            reserve=d.pick(0, 0, 1, 2) if least > 1 else d(2), page_size=page_size,
            pages=(6 + pages_per_row * (d(2 * rows) + 2 * prefix)) if pages_per_row else 0, pages_per_row=pages_per_row,
            parts=("fold", *d.pick((), ("conv",), ("ring",), ("conv turned", "ring"))),
            wide=d.pick(2, 3), layers=1 + d(2), order=d.pick("layer_major", "slot_major"),
            memory=d.pick("own", "fenced", "tensor", "layers"), interleaved=d(2) == 1, gap=d.pick(16, 8, 24, 40),
            debug=d(3) == 1, prefix=prefix, tombstones=d(3) < 2,
            most_states=d.pick(None, None, None, 2, 1, 0), evict=d(4) < 3,
            share=d.pick(0.5, 0.0, 1.0), per_session=d.pick(None, None, 1, 2), most_kept=d.pick(None, None, None, 2, 0),
        )  # fmt: skip
        if not chosen.in_place and "ring" not in chosen.parts and (grid := d.pick(0, 1, 1, 2, 3, 4)):
            chosen = replace(chosen, grid=grid, packed=d(3) == 1)
        if prefix:
            chosen = replace(chosen, placed=d.pick(0, 0, page_size, 3, 6))
        chosen = replace(chosen, pad=-int(d(4) == 1))
        some = bool(d(2)) if tiered is None else tiered
        chosen = replace(chosen, tiered=True, **cls._below(d, chosen)) if prefix and some else chosen
        chosen = replace(chosen, **cls._kinds(d, chosen)) if d(3) == 1 else chosen
        if tail or d(2) == 1:
            chosen = replace(chosen, tails=d(4) > 0, tail=1 + d(4))
            if chosen.overlap and chosen.copied and overlap is None and d(2):
                chosen = replace(chosen, overlap=False)
            elif chosen.overlap:  # memstate cannot tell which states to copy
                parts = tuple(part for part in chosen.parts if part != "ring")
                chosen = replace(chosen, in_place=False, parts=parts)
        if chosen.prefix and not chosen.tiered and (kv := kv or d.pick("", "keys", "reach")):
            more = {"snapshots": None, "most_states": None, "slots": chosen.slots + 8} if d(4) else {}  # most have room
            chosen = replace(chosen, kv=kv, pages=0, pages_per_row=0, **more)
        return replace(chosen, spare=d.pick(1, 1, 4)) if prefix else chosen

    @staticmethod
    def _kinds(d: Digits, chosen: "Settings") -> dict[str, Any]:
        """Draws settings with a plane "score", whose fresh states are not 0, a grid of "fold", and memory of rows."""
        alone = d.pick(1, 2, 3, 4, 1 if chosen.prefix or chosen.strategy != "none" else NEVER)
        every = lcm(chosen.every, chosen.page_size, alone % NEVER or 1)
        return {"parts": (*chosen.parts, "score"), "alone": alone, "every": every, "tails": d(4) > 0}

    @staticmethod
    def _below(d: Digits, chosen: "Settings") -> dict[str, Any]:
        """Draws settings of tiers that are so small that they are full most of the time."""
        slots, pages = d.pick(3, 1, 2, 4, 6, 9), d.pick(8, 4, 12, 24, 2, 40)
        return {
            "pages": min(chosen.pages, d.pick(999, 999, 999, 20, 30)), "write": d.pick("through", "selective", "back"),
            "host_slots": slots,
            "host_pages": pages if chosen.pages else 0, "host_reserve": d.pick(0.0, 0.3, 0.5),
            "staging": d.pick(2, 1), "storing": d(4) > 0,
            "stop": d.pick("wait_complete", "best_effort", "timeout"), "timeout": float(d(3)),
            "timeout_per_page": d.pick(0.5, 0.0), "fetch_threshold": d.pick(1, 1, 4, 0, 7),
            "fetch_limit": d.pick(None, None, None, 30, 12), "chunk": d.pick(32, 1, 1, 2),
        }  # fmt: skip

    def __repr__(self) -> str:
        told = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Settings({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in told)})"

    @property
    def unit(self) -> int:
        """Number of tokens; the length of every kept state is a multiple of it."""
        return lcm(self.page_size, self.alone)

    def states_inside(self, at: int) -> bool:
        """Says whether a forward can store states of whole pages inside a chunk that begins at `at`."""
        return self.grid == 1 or (self.grid > 1 and not self.packed and at % gcd(self.unit, self.grid) == 0)

    @property
    def keyed(self) -> bool:
        return self.kv == "keys"

    @property
    def row_count(self) -> int:
        return self.rows + self.preallocated

    @property
    def holder_count(self) -> int:
        return self.slots + self.prefix * self.row_count if self.snapshots is None else self.snapshots

    @property
    def cache(self) -> ms.Prefix | None:
        """The settings of the prefix cache. Its policies are new each time, because they keep a history."""
        if not self.prefix:
            return None
        pages, placement = ms.policies.LruPages(self.tombstones), Ends(self.placed or None, self.spare)
        return ms.Prefix(ms.policies.Lru(), pages, self.most_states, self.evict, placement, self.keyed)

    def sessions(self, clock: Callable[[], float]) -> ms.SessionLimits:
        return ms.SessionLimits(share=self.share, per_session=self.per_session, most_states=self.most_kept, clock=clock)

    @property
    def prefetch(self) -> Prefetch:
        of_time = (self.timeout, self.timeout_per_page)
        return Prefetch(self.fetch_threshold, self.fetch_limit, self.stop, *of_time, self.chunk)  # type: ignore[arg-type]

    def tiers(self, kv: Planes | None, store: Store, executor: Executor, clock: Callable[[], float]) -> Tiers | None:
        if not self.tiered:
            return None
        return Tiers(
            "model", host_slots=self.host_slots, host_pages=self.host_pages or None, reserve=self.host_reserve, kv=kv,
            write=self.write, store=store if self.storing else None, prefetch=self.prefetch, staging=self.staging,  # type: ignore[arg-type]
            executor=executor, clock=clock,
        )  # fmt: skip

    @property
    def direct(self) -> bool:
        return self.strategy == "redirect" and not self.in_place if self.direct_hits is None else self.direct_hits

    @property
    def lanes(self) -> int:
        pair = self.lane_count or (2 if self.overlap else 1)
        return {"none": 0, "ping-pong": pair, "lazy": 2, "redirect": 1}[self.strategy]

    @property
    def lanes_at_admission(self) -> int:
        return {"none": 0, "ping-pong": self.lanes, "lazy": 1, "redirect": 0}[self.strategy]

    @property
    def tracking(self) -> ms.Tracking:
        if self.strategy == "ping-pong":
            return ms.PingPong(self.every, lane_count=self.lane_count)
        if self.strategy == "lazy":
            return ms.LazyPingPong(self.every, overwrite=self.overwrite)
        return {"none": ms.NoTracking, "redirect": ms.Redirect}[self.strategy](self.every)

    @property
    def layout(self) -> ms.StateLayout:
        shapes = {
            "fold": ms.Plane("fold", (self.wide,), torch.int64, grid=self.alone % NEVER or None),
            "conv": ms.Plane("conv", (2, 3), torch.int32),
            "conv turned": ms.Plane("conv turned", (3, 2), torch.int32),
            "ring": ms.Plane("ring", (3,), torch.int16, rewritten_each_step=False),
            "few": ms.Plane("few", (1, 3, 2), torch.int16),
            "few_scale": ms.Plane("few_scale", (1, 3), torch.float32),
            "score": ms.Plane("score", (5,), torch.int32, layers=self.layers_of("score"), fill=-123456789),
        }
        ring = ms.Plane(RING, (self.ring,), torch.int64)
        own = (TAIL, ring) if self.tail else (TAIL,)
        rows = ms.StateLayout(own, 2, self.order) if self.tails else None  # type: ignore[arg-type]
        planes = tuple(shapes[part] for part in self.parts)
        return ms.StateLayout(planes, self.layers, self.order, rows=rows)  # type: ignore[arg-type]

    @property
    def ring(self) -> int:
        """Number of tokens for which the tail of a row has room."""
        return max(0, 3 * self.tail - 1)

    def layers_of(self, part: str) -> int:
        return 3 - self.layers if part == "score" else self.layers

    @property
    def copied(self) -> frozenset[str]:
        """Planes that a forward updates in place."""
        return frozenset(part for part in self.parts if self.in_place or part == "ring")

    def block_bytes(self, part: str) -> int:
        """Returns the number of bytes of one plane in one layer of a slot, without padding."""
        return {
            "fold": 8 * self.wide,
            "conv": 24,
            "conv turned": 24,
            "ring": 6,
            "few": 12,
            "few_scale": 12,
            "score": 20,
        }[part]

    def slot_bytes(self, parts: frozenset[str] | None = None) -> int:
        """Returns the number of bytes that a copy of a slot moves. Blocks of memstate's own memory are padded to 16."""
        unit = 16 if self.memory in ("own", "fenced") else 1
        named = [part for part in self.parts if parts is None or part in parts]
        return sum(self.layers_of(part) * -(-self.block_bytes(part) // unit) * unit for part in named)
