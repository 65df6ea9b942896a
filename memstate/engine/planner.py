"""Computes what fits into a memory, with the functions that a manager and its tiers use to allocate.

one split    [ slots of requests | cached states | pages of requests | cached pages | tables ]
                                                `- border between states and KV
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import lcm
from typing import Any, Final

import torch

from memstate.checks import INT32_MAX
from memstate.engine.settings import Forward, Pages
from memstate.engine.sizing import device_parts
from memstate.errors import ConfigurationError
from memstate.prefix import Prefix
from memstate.prefix.placement import Placement
from memstate.requests.tracking import Tracking
from memstate.sizes import MOST_SLOTS, MemoryPart, format_bytes
from memstate.slots.registers import cell_starts
from memstate.state.layout import Plane, StateLayout
from memstate.state.memory import table_bytes
from memstate.tiers.settings import Tiers
from memstate.tiers.sizing import TierBytes, pages_in_proportion, tier_bytes

SHARES: Final = (0.0625, 0.125, 0.25, 0.5, 1.0)  # possible shares of cached states in the memory that requests leave
STAGING: Final = Tiers.staging


@dataclass(frozen=True, kw_only=True)
class HostRoom:
    """The records that fit in host memory: the arguments `host_slots` and `host_pages` of `Tiers`.

    Attributes:
        states: number of states.
        pages: number of KV pages, in the device's proportion of pages to slots.
        nbytes: bytes of all records.
        state_record: bytes of the record of a state, with its header.
        page_record: bytes of the record of a KV page, with its header; 0 without KV.
    """

    states: int
    pages: int
    nbytes: int
    state_record: int
    page_record: int


@dataclass(frozen=True, kw_only=True, repr=False)
class Split:
    """One way to divide the memory between states and KV pages, under one strategy.

    Attributes:
        tracking: the tracking strategy.
        requests: number of requests that can run at a time.
        slots: number of slots of the manager.
        pages: number of KV pages of the manager; 0 if the memory holds no KV.
        page_size: tokens of a page.
        per_row: largest number of pages of one request.
        overlap: whether the next step can be planned before the previous step is settled.
        in_place: whether the forward updates one slot.
        placement: the rule that chooses the lengths at which prompts keep states.
        cached_states: number of slots left for cached states, and for states at marks, when all requests run.
        cached_pages: number of KV pages left for the cache when all requests run.
        balanced: whether the cache has room for the states and the KV of the same whole conversations.
        parts: each part that is allocated on the device, with its bytes.
        host: the records that fit in host memory; None without a tier there.
        hit_rate: the block hit rate in a replay of a trace; None without a trace.
        tail: tokens of a step with drafts; 0: rows have no tails.
    """

    tracking: Tracking
    requests: int
    slots: int
    pages: int
    page_size: int
    per_row: int
    overlap: bool
    in_place: bool
    placement: Placement
    cached_states: int
    cached_pages: int
    balanced: bool
    parts: tuple[MemoryPart, ...]
    host: HostRoom | None
    hit_rate: float | None = None
    tail: int = 0

    def __repr__(self) -> str:
        rate = "" if self.hit_rate is None else f", hit rate {self.hit_rate:.3f}"
        size = f"{self.slots} slots, {self.pages} pages, {format_bytes(self.nbytes)}"
        return f"Split({self.requests} requests, {size}{rate}, {self.tracking})"

    @property
    def nbytes(self) -> int:
        """Bytes on the device of all parts together."""
        return sum(part.nbytes for part in self.parts)

    def settings(self) -> dict[str, Any]:
        """Returns the arguments of a `StateManager` that allocates these parts, except its layout and its tiers."""
        pages = Pages(size=self.page_size, count=self.pages, per_row=self.per_row)
        prefix, forward = Prefix(placement=self.placement), Forward(in_place=self.in_place, tail=self.tail)
        return {
            "slots": self.slots, "max_requests": self.requests, "tracking": self.tracking, "pages": pages,
            "prefix": prefix, "forward": forward, "overlap": self.overlap,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SpeculationCost:
    """The cost of steps with drafts: with the tails of memstate, and with a state for each token, as in other engines.

    Attributes:
        tokens: tokens of a step, drafts included.
        tail_bytes_per_request: bytes of the tail that every request has, even if it never has drafts.
        state_bytes_per_request: bytes of a state and a convolution window for each of the tokens.
        max_requests_with_states: number of requests that would fit with these states instead of tails, under the
            recommended strategy.
    """

    tokens: int
    tail_bytes_per_request: int
    state_bytes_per_request: int
    max_requests_with_states: int

    def __str__(self) -> str:
        tail, states = format_bytes(self.tail_bytes_per_request), format_bytes(self.state_bytes_per_request)
        return (
            f"speculation, {self.tokens} tokens a step: {tail} of tail in every request; "
            f"with a state for each token {states}, so that {self.max_requests_with_states} requests fit"
        )


@dataclass(frozen=True, kw_only=True)
class Residency:
    """The memory that one strategy needs, and the number of requests that fit under it.

    Attributes:
        strategy: "none", "ping-pong", "lazy" or "redirect".
        tracking: the tracking strategy.
        slots_per_request: number of slots that a request holds from its admission on.
        most_slots_per_request: largest number of slots of a request, while it has unpublished snapshots. The slots
            beyond `slots_per_request` are free ones, or those of cached states. Without them, no snapshot is taken.
        max_requests: number of requests of `context` tokens that can run at a time, if the cache keeps nothing.
        snapshot_bytes_per_second: bytes written for snapshots in decode at `tokens_per_second`.
        split: the balanced split with `concurrency` requests. None: they do not fit.
    """

    strategy: str
    tracking: Tracking
    slots_per_request: int
    most_slots_per_request: int
    max_requests: int
    snapshot_bytes_per_second: float
    split: Split | None = None


def snapshot_bytes(layout: StateLayout, tracking: Tracking, *, overlap: bool = True, in_place: bool = False) -> int:
    """Returns the bytes that one snapshot in decode writes.

    The ping-pong strategies write the state a second time. Under Redirect the old slot is the snapshot, so only planes
    that memstate copies count: those of in-place kernels, and those that a step writes only in part.

    Args:
        layout: layout of a state.
        tracking: the tracking strategy.
        overlap: whether the next step can be planned before the previous step is settled.
        in_place: whether the kernels of the forward update one slot.

    Example:
        >>> import torch
        >>> from memstate.requests.tracking import NoTracking, PingPong, Redirect
        >>> from memstate.state.layout import Plane
        >>> layout = StateLayout((Plane("ssm", (2, 8, 8), torch.float32),), layers=4)
        >>> [snapshot_bytes(layout, kind()) for kind in (NoTracking, PingPong, Redirect)]
        [0, 2048, 0]
    """
    if not tracking.lanes(overlap):
        return 0
    written = [
        plane for plane in layout.planes if in_place or not tracking.reads_old_slot or not plane.rewritten_each_step
    ]
    return sum(layout.layers_of(plane) * layout.block_bytes(plane) for plane in written)


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Computes splits of one memory. Its arguments are the settings that all splits share.

    Args:
        layout: layout of a state on one rank.
        kv: layout of a KV page on one rank, as if a page were a slot. None: the memory holds no KV.
        page_size: tokens of a page.
        per_row: number of pages of one request.
        overlap: whether the next step can be planned before the previous step is settled.
        in_place: whether the forward updates one slot.
        memory: bytes on the device.
        placement: the rule that chooses the lengths at which prompts keep states.
        marks: number of states that a prompt keeps if there is room.
        prefills: number of prompts that are read at a time. The balanced split has slots for their states at marks.
        host: bytes of host memory; 0 for no tier.
        tokens: tokens of a request.
        tail: tokens of a step with drafts; 0: rows have no tails.
    """

    layout: StateLayout
    kv: StateLayout | None
    page_size: int
    per_row: int
    overlap: bool
    in_place: bool
    memory: int
    placement: Placement
    marks: int
    prefills: int
    host: int
    tokens: int
    tail: int = 0

    def parts(self, requests: int, slots: int, pages: int, tier: TierBytes | None = None) -> list[MemoryPart]:
        """Returns each part that is allocated on the device.

        Without `tier`, the staging of tiers has its largest size. With few host pages it would be smaller.
        """
        parts = device_parts(
            self.layout, slots=slots, rows=requests, snapshots=slots + requests, per_row=self.per_row,
            max_batch=requests, tails=self.tail > 0,
        )  # fmt: skip
        if self.kv is not None:
            parts.append(MemoryPart("KV pages", sum(self.kv.arena_bytes(pages)), "context or concurrency"))
        if self.host:
            tier = tier or self.tier(1, INT32_MAX)
            table = table_bytes(self.kv) if self.kv is not None else 0
            parts.append(MemoryPart("staging of tiers", tier.device + table, "Tiers(staging=)"))
        return parts

    def tier(self, host_slots: int, host_pages: int) -> TierBytes:
        """Returns the bytes of a tier in host memory, and of its staging on the device."""
        return tier_bytes(self.layout, self.kv, host_slots=host_slots, host_pages=host_pages, staging=STAGING)

    def needs(self, requests: int, slots: int, pages: int) -> int:
        """Returns the largest number of bytes that these sizes take on the device."""
        return sum(part.nbytes for part in self.parts(requests, slots, pages))

    def fits(self, requests: int, slots: int, pages: int) -> bool:
        """Returns whether these sizes fit the memory, and int32 can number all slots, pages and cells."""
        cells = cell_starts(requests, slots + requests, self.per_row, tails=self.tail > 0)[-1]
        numbered = slots <= MOST_SLOTS and max(pages, cells) <= INT32_MAX
        return numbered and self.needs(requests, slots, pages) <= self.memory

    def slots(self, tracking: Tracking, requests: int) -> int:
        """Returns the number of slots without which these requests cannot run."""
        return requests * (1 + tracking.lanes_at_admission(self.overlap))

    def most(self, tracking: Tracking) -> int:
        """Returns the number of requests that fit if nothing is cached."""
        return _most(
            lambda count: not count or self.fits(count, self.slots(tracking, count), count * self.per_row), INT32_MAX
        )

    def speculation(self, tracking: Tracking) -> SpeculationCost | None:
        """Returns the cost of drafts under a strategy; None if rows have no tails."""
        if self.layout.rows is None or not self.tail:
            return None
        states = self.tail * self.layout.bytes_per_slot
        rows = StateLayout((Plane("states", (states,), torch.uint8),), layers=1)
        return SpeculationCost(
            tokens=self.tail, tail_bytes_per_request=self.layout.rows.bytes_per_slot, state_bytes_per_request=states,
            max_requests_with_states=replace(self, layout=replace(self.layout, rows=rows)).most(tracking),
        )  # fmt: skip

    def residency(self, strategy: str, tracking: Tracking, tokens_per_second: float) -> Residency:
        """Returns what a strategy needs. Raises: ConfigurationError if it does not work with the page size."""
        tracking.validate(lcm(self.page_size, self.layout.grid), self.overlap)
        written = snapshot_bytes(self.layout, tracking, overlap=self.overlap, in_place=self.in_place)
        return Residency(
            strategy=strategy, tracking=tracking, slots_per_request=1 + tracking.lanes_at_admission(self.overlap),
            most_slots_per_request=tracking.most_slots(self.overlap), max_requests=self.most(tracking),
            snapshot_bytes_per_second=written * tokens_per_second / tracking.every,
        )  # fmt: skip

    def require(self, tracking: Tracking, requests: int, most: int) -> None:
        """Refuses more requests than fit. The error has the bytes that they need."""
        if requests <= most and most:
            return
        requests = requests if most else 1
        slots, pages = self.slots(tracking, requests), requests * self.per_row
        parts = sorted(self.parts(requests, slots, pages), key=lambda part: -part.nbytes)
        each = ", ".join(f"{part.name} {part.nbytes} bytes" for part in parts[:3])
        who = "1 request needs" if requests == 1 else f"{requests} requests need"
        total = sum(part.nbytes for part in parts)
        raise ConfigurationError(
            f"{who} {total} bytes ({format_bytes(total)}), and memory={self.memory} ({format_bytes(self.memory)}), "
            f"for {self.tokens} tokens each under {tracking}: {each}, "
            f"and tables; {most} fit; give more memory or ranks, a narrower dtype, or a lower concurrency or context"
        )

    def split(self, tracking: Tracking, requests: int, slots: int, pages: int, balanced: bool) -> Split:
        """Returns the split with these slots and pages. Raises: ConfigurationError for too little host memory."""
        room, tier = None, None
        if self.host:
            room = self.host_room(slots, pages)
            tier = self.tier(room.states, room.pages)
        return Split(
            tracking=tracking, requests=requests, slots=slots, pages=pages, page_size=self.page_size,
            per_row=self.per_row, overlap=self.overlap, in_place=self.in_place, placement=self.placement,
            cached_states=slots - self.slots(tracking, requests), cached_pages=pages - requests * self.per_row,
            balanced=balanced, parts=tuple(self.parts(requests, slots, pages, tier)), host=room, tail=self.tail,
        )  # fmt: skip

    def host_room(self, slots: int, pages: int) -> HostRoom:
        """Returns the records that fit in host memory. Raises: ConfigurationError if not even one state fits."""

        def room(states: int) -> HostRoom:
            of_kv = pages_in_proportion(states, slots, pages) if pages else 0
            tier = self.tier(states, of_kv)
            return HostRoom(
                states=states, pages=of_kv, nbytes=tier.host, state_record=tier.state_record,
                page_record=tier.page_record,
            )  # fmt: skip

        if room(1).nbytes > self.host:
            raise ConfigurationError(
                f"host_memory={self.host}: a state with its KV pages needs {room(1).nbytes} bytes; give more, or None"
            )
        return room(_most(lambda states: room(states).nbytes <= self.host, INT32_MAX))

    def filled(self, tracking: Tracking, requests: int, slots: int, balanced: bool) -> Split:
        """Returns the split with these slots, and with KV pages in the rest of the memory."""
        least = requests * self.per_row
        more = _most(lambda count: self.fits(requests, slots, least + count), INT32_MAX - least) if self.kv else 0
        return self.split(tracking, requests, slots, least + more, balanced)

    def balanced(self, tracking: Tracking, requests: int) -> Split | None:
        """Returns the split whose cache has room for the same conversations in states and in KV.

        None if the requests do not fit. Without KV, all of the memory is for states.
        """
        base, pages = self.slots(tracking, requests), requests * self.per_row
        if not self.fits(requests, base, pages):
            return None
        reading = self.marks * min(self.prefills, requests)
        base += _most(lambda count: self.fits(requests, base + count, pages), reading)
        states = max(1, self.marks) if self.kv else 1
        paths = _most(
            lambda count: self.fits(requests, base + count * states, pages + count * self.per_row), MOST_SLOTS
        )
        return self.filled(tracking, requests, base + paths * states, balanced=True)

    def most_slots(self, requests: int, slots: int, pages: int) -> int:
        """Returns the number of slots that fit beside these pages. At least `slots` must fit."""
        return slots + _most(lambda count: self.fits(requests, slots + count, pages), MOST_SLOTS)

    def splits(self, tracking: Tracking, requests: int) -> tuple[Split, ...]:
        """Returns the balanced split, and for each of `SHARES` a split whose cached states get this share.

        A share is a part of the memory that the requests leave.
        """
        balanced = self.balanced(tracking, requests)
        assert balanced is not None
        splits = {(balanced.slots, balanced.pages): balanced}
        base, pages = self.slots(tracking, requests), requests * self.per_row
        left = self.memory - self.needs(requests, base, pages)
        for share in SHARES if self.kv else ():
            smaller = replace(self, memory=self.memory - left + int(share * left))
            split = self.filled(tracking, requests, smaller.most_slots(requests, base, pages), balanced=False)
            splits.setdefault((split.slots, split.pages), split)
        return tuple(sorted(splits.values(), key=lambda split: split.slots))


def _most(fits: Callable[[int], bool], limit: int) -> int:
    """Returns the largest number up to `limit` that fits. 0 must fit. If a number does not fit, no larger one may."""
    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
