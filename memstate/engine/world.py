"""Builds the tables of a manager from its settings: planes, registers, rows, pages, cache and tiers."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import lcm

import torch
from torch import Tensor

from memstate.checks import require_switch
from memstate.engine.ages import Ages
from memstate.engine.canary import Canary
from memstate.engine.pool import StatePool
from memstate.engine.settings import Forward, Pages, validate_layout, validate_sizes, validate_tail, validate_tracking
from memstate.engine.sizing import require_fit
from memstate.errors import ConfigurationError
from memstate.kernels.dispatch import Backend
from memstate.prefix import Prefix, PrefixCache
from memstate.prefix.room import Room
from memstate.prefix.session_settings import SessionLimits
from memstate.prefix.sessions import Sessions
from memstate.requests.holdings import Holdings
from memstate.requests.marks import Marks
from memstate.requests.page_table import PageTable
from memstate.requests.steps import StepLog
from memstate.requests.table import RequestTable
from memstate.requests.tracking import Redirect, Tracking
from memstate.requests.tracking.mirror import Mirror
from memstate.slots.allocator import SlotAllocator
from memstate.slots.commands import CommandBuffer
from memstate.slots.registers import RegisterFile
from memstate.state.layout import NEVER, StateLayout
from memstate.state.planes import Planes
from memstate.stats import ChaosStats
from memstate.tiers import TierManager, Tiers

TWO_STEPS = ": a depth of 0 or 1; with more unsettled steps a dead one could overwrite a live snapshot"


class World:
    """The tables of a manager. The arguments are those of `StateManager`.

    Attributes:
        max_batch: entries of the largest batch.
        direct_hits: whether the first step of a row reads a snapshot itself instead of a copy.
        copied: planes that memstate must copy: those that in-place kernels update, and those that a step writes only in
            part. memstate copies such a plane in two cases: the step reads one slot and writes another, or a snapshot
            is due.
        canary: checks what forwards have done to their slots; None without debug mode.
        chaos: returns counts of the faults that `memstate.testing` has injected; None: no faults are injected.
    """

    def __init__(
        self, layout: StateLayout, *, slots: int, max_requests: int, tracking: Tracking | None, pages: Pages | None,
        prefix: Prefix | None, tiers: Tiers | None, sessions: SessionLimits | None, forward: Forward | None,
        overlap: bool, max_batch: int | None, preallocated: int, snapshots: int | None, reserve: int,
        tensors: Mapping[str, Tensor | Sequence[Tensor]] | None, device: torch.device | str, backend: str, debug: bool,
    ) -> None:  # fmt: skip
        for name, value, kind in (
            ("pages", pages, Pages),
            ("forward", forward, Forward),
            ("prefix", prefix, Prefix),
            ("tiers", tiers, Tiers),
            ("sessions", sessions, SessionLimits),
        ):
            if not isinstance(value, kind | None):
                raise ConfigurationError(f"{name}={value!r}: expected ms.{kind.__name__}(...) or None")
        if prefix is not None and pages is None:
            raise ConfigurationError("a prefix cache needs the size of a page: pages=ms.Pages(size=16)")
        if prefix is not None and pages is not None and pages.count and min(pages.count, pages.per_row) < 2:
            raise ConfigurationError(
                f"{pages} with a prefix cache: a cached state stands for whole pages and leaves a token to compute, so "
                "no request of one page could start from it: give requests room for 2 pages or more (tokens= of "
                "mst.manager), make pages smaller, or leave prefix out"
            )
        if prefix is not None and prefix.keyed and (tiers is not None or (pages is not None and pages.count)):
            raise ConfigurationError("Prefix(keyed=True) with tiers or Pages(count=): it is for engines that keep KV")
        if tiers is not None and prefix is None:
            raise ConfigurationError("tiers without a prefix cache: build the manager with prefix=ms.Prefix()")
        validate_layout(layout)
        require_switch("overlap", overlap, TWO_STEPS)
        require_switch("debug", debug)
        validate_sizes(slots, max_requests, preallocated, max_batch, snapshots)
        self.page_settings, forward, grid = pages or Pages(size=1), forward or Forward(), layout.grid
        self.tracking = tracking if tracking is not None else Redirect()
        unit = lcm(self.page_settings.size, grid if grid < NEVER else 1)
        validate_tracking(self.tracking, slots, unit, overlap)
        if forward.tail:
            validate_tail(layout, forward.tail)
        if grid >= NEVER and (prefix or self.tracking.lanes(overlap)):
            never = [repr(plane) for plane in layout.planes if plane.grid is None]
            raise ConfigurationError(
                f"{never or layout}: the state is whole at no length, so nothing of it can be kept: use "
                "tracking=ms.NoTracking() and no prefix cache"
            )
        self.layout, self.overlap, in_place = layout, overlap, forward.in_place
        partly = [plane.name for plane in layout.planes if not plane.rewritten_each_step]
        if forward.grid is not None and partly:
            raise ConfigurationError(
                f"grid={forward.grid} with planes {partly} that a step writes only in part: the forward has no whole "
                "state inside a chunk; leave grid out"
            )
        if forward.direct_hits is None:
            forward = replace(forward, direct_hits=self.tracking.reads_old_slot and not in_place)
        self.forward, self.direct_hits = forward, bool(forward.direct_hits)
        try:
            self.backend = Backend(backend, device)
        except (ValueError, TypeError, RuntimeError) as error:  # torch raises these for an unknown device
            raise ConfigurationError(str(error)) from error
        # With a prefix cache there is one more holder for each row. Otherwise a holder could be emptied and filled
        # again before the next plan, which takes another packet.
        rows = int(max_requests) + int(preallocated)
        self.max_batch = max_batch or rows
        holders = slots + (rows if prefix else 0) if snapshots is None else snapshots
        require_fit(
            layout, given=tensors is not None, slots=slots, max_requests=max_requests, preallocated=preallocated,
            snapshots=holders, pages=self.page_settings, max_batch=self.max_batch,
            device=self.backend.device, tails=forward.tail > 0,
        )  # fmt: skip
        self.allocator = SlotAllocator(slots, self.backend, reserve)
        self.guard, self.stream = self.allocator.guard, self.allocator.stream
        if tensors is None:
            self.planes = Planes(layout, slots, self.backend, rows=rows)
        else:
            self.planes = Planes.from_tensors(layout, tensors, self.backend, slots, rows)
        self.pool = StatePool(self.allocator, self.planes, debug=debug)
        limits = sessions or SessionLimits()
        self.table = RequestTable(rows, limits.clock)
        self.registers = RegisterFile(self.allocator, rows, holders, self.page_settings.per_row, forward.tail > 0)
        self.commands = CommandBuffer(self.registers, self.pool.run_data, self.max_batch)
        self.pages = PageTable(self.page_settings.count, self.page_settings.size, self.commands, grid)
        self.mirror = Mirror(self.registers, self.tracking, overlap, forward.pad, self.pages.unit, forward.tail)
        self.holdings = Holdings(self.commands, self.pages.allocator)
        owners = self.commands, self.pages, self.holdings
        self.cache = PrefixCache(prefix, *owners)
        self.prefix = self.cache if self.cache.enabled else None
        self.copied = tuple(plane.name for plane in layout.planes if in_place or not plane.rewritten_each_step)
        self.tiers: TierManager | None = None
        if tiers is not None:
            alike = self._deciding(limits, tiers)
            self.tiers = TierManager(tiers, self.planes, self.cache, self.commands, self.pages, alike)
        self.ages = Ages(self.table, self.mirror)
        self.sessions = Sessions(*owners, self.mirror.lanes, limits)
        self.room = Room(self.cache, self.sessions, self.allocator, self.pages, self.holdings)
        self.marks = Marks(
            self.commands, self.holdings, self.pages.unit, forward.grid or 0, forward.packed, self.direct_hits
        )
        self.log = StepLog(self.max_batch, int(overlap), self.backend.device, holders, forward.tail > 0)
        self.canary: Canary | None = None
        if debug:
            self.canary = Canary(
                self.planes, self.log, self.copied,
                moves=self.direct_hits or self.tracking.reads_old_slot,
                snapshots=self.mirror.lanes > 0 and not self.tracking.reads_old_slot,
                marks=forward.grid is not None,
            )  # fmt: skip
        self.chaos: Callable[[], ChaosStats] | None = None

    def _deciding(self, limits: SessionLimits, tiers: Tiers) -> Mapping[str, object]:
        """Returns the settings on which decisions depend, by name. All ranks of a group must have the same settings.

        Ranks can have different planes, devices, backends, host memories and stores, because they agree on what they
        load from there.

        Args:
            limits: limits of sessions.
            tiers: settings of the tiers.
        """
        cache = self.cache
        return {
            "memstate": sys.modules["memstate"].__version__,  # not imported: the package is a layer above this module
            "slots": self.allocator.capacity,
            "max_requests and preallocated": self.table.rows,
            "max_batch": self.max_batch,
            "snapshots": self.registers.holders,
            "reserve": self.allocator.reserve,
            "overlap": self.overlap,
            "pages": self.page_settings,
            "tracking": self.tracking,
            "forward": self.forward,
            "grid of the layout": self.layout.grid,
            "Prefix(states=)": cache.state_policy,
            "Prefix(pages=)": cache.page_policy,
            "Prefix(most_states=)": cache.settings.most_states,
            "Prefix(evict=)": cache.settings.evict,
            "Prefix(placement=)": cache.settings.placement,
            "SessionLimits(share=)": limits.share,
            "SessionLimits(per_session=)": limits.per_session,
            "SessionLimits(most_states=)": limits.most_states,
            "Tiers(model=)": tiers.model,
            "Tiers(ranks=)": tiers.ranks,
            "Tiers(int8=)": dict(sorted(tiers.int8.items())),
            "Tiers(prefetch=)": tiers.prefetch,
        }


class Verbs:
    """A group of calls of a manager, with the tables of the manager as attributes.

    It has no reference to the world, because the world has one to it. Without such a cycle, the memory of a manager is
    freed as soon as nobody uses the manager.

    Args:
        world: the tables of the manager.
    """

    def __init__(self, world: World) -> None:
        self._guard, self._commands, self._file = world.guard, world.commands, world.registers
        self._table, self._pages, self._holdings, self._marks = world.table, world.pages, world.holdings, world.marks
        self._mirror, self._log, self._planes = world.mirror, world.log, world.planes
        self._cache, self._sessions, self._tiers, self._room = world.cache, world.sessions, world.tiers, world.room
        self._direct_hits, of_row = world.direct_hits, world.layout.rows
        self._fills = of_row is not None and any(plane.fill is not None for plane in of_row.planes)
