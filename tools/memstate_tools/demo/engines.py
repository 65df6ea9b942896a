"""Three kinds of decode engines, which differ in who allocates memory and in what the kernels know of slots.

own        memstate allocates; the kernels read one slot and write another and a snapshot
in-place   memstate allocates; the kernels know one slot per row, and memstate copies states before and after them
arena      the engine allocates one block of memory for states and KV pages; the kernels are those of `own`
"""

import torch
from torch import Tensor

from memstate.cli.policies import placement_of
from memstate.engine.capacity import STRATEGIES
from memstate.engine.manager import StateManager
from memstate.engine.settings import Forward, Pages
from memstate.engine.warmup import warm_up
from memstate.errors import InvalidArgument
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import Cursor, StepRecord
from memstate.prefix import Prefix
from memstate.requests.steps import Step
from memstate.requests.tracking import Tracking
from memstate.state.planes import Planes
from memstate.testing import Chaos, Faults
from memstate.tiers import Store
from memstate_tools.demo.arena import Arena
from memstate_tools.demo.config import LAYOUTS, DemoConfig
from memstate_tools.demo.mixers import state_layout
from memstate_tools.demo.model import DemoMemory, HybridModel, StepPlaces
from memstate_tools.demo.tiers import tiers_of


class DemoEngine:
    """A manager, a model, and their memory. Memory that was never written holds NaN.

    Kernels in place write garbage to the null slot.

    Args:
        config: Settings of the run.
        pages: Number of KV pages.
        pages_per_row: KV pages of the longest request.
        store: Storage below host memory.

    Attributes:
        arena: The engine's memory; None if memstate allocates.
        marks: The marks of steps, for kernels that store states at them.

    Raises:
        InvalidArgument: The memory is too small for one request.
    """

    def __init__(self, config: DemoConfig, pages: int, pages_per_row: int, store: Store | None = None) -> None:
        size, self._batch, self.in_place = config.size, config.batch, config.engine == "in-place"
        tracking = STRATEGIES[config.strategy](every=config.track_every)
        _require_fit(config, tracking, pages, pages_per_row)
        states = state_layout(size, config.model, LAYOUTS[config.layout], config.state_order, config.tails)
        kv, device = size.page_layout(config.page_size), torch.device(config.device)
        faults = Faults.from_environment()
        if config.fail_claims:
            faults = Faults(Chaos(seed=config.seed, claims=config.fail_claims))
        if faults is not None and store is not None:
            store = faults.store(store)
        self.arena = Arena(states, config.slots, kv, pages, device) if config.engine == "arena" else None
        try:
            # a backend of its own: its launches must not count as the manager's
            backend = Backend(config.backend, config.device)
            self.kv = Planes.from_tensors(kv, self.arena.kv, backend) if self.arena else Planes(kv, pages, backend)
            self.mem = StateManager(
                states, slots=config.slots, max_requests=config.batch - 1, max_batch=config.batch, tracking=tracking,
                device=config.device, backend=config.backend, overlap=bool(config.overlap),
                tensors=self.arena.states if self.arena else None,
                pages=Pages(count=pages, size=config.page_size, per_row=pages_per_row),
                forward=Forward(in_place=self.in_place, grid=None if self.in_place else 1, tail=config.tails),
                prefix=Prefix(placement=placement_of(config.placement)), tiers=tiers_of(config, store, self.kv),
            )  # fmt: skip
            if faults is not None:
                faults.inject(self.mem)
        except ValueError as error:
            raise InvalidArgument(str(error)) from error
        self.model = HybridModel(
            size, config.seed, Backend(self.mem.backend.name, config.device), config.model, config.state_order
        )
        if self.mem.backend.name == "cuda":  # other backends compile nothing
            warm_up(self.mem)
        rows = [(self.mem.planes.rows, 1)] if self.mem.planes.rows is not None else []
        for storage, first in ((self.mem.planes, 0 if self.in_place else 1), (self.kv, 1), *rows):
            for layer in (layer for plane in storage.values() for layer in plane):
                layer[first:] = float("nan")  # NaN shows reads of memory that was never written
        self.memory = memory_of(self.mem.planes, self.kv, self.mem.device.page_table)
        self.marks = None if self.in_place else self.mem.device.marks
        self._nowhere = torch.zeros(config.batch, dtype=torch.int32, device=self.mem.backend.device)

    def slots(self, step: Step | StepRecord) -> StepPlaces:
        """Returns the slots of a step, as the kernels of the forward take them.

        Syncs: no.
        """
        cursor, accepted, tails = None, None, self.mem.device.tails
        if tails is not None:
            *of_cursor, accepted = (
                column[: self._batch]
                for column in (tails.rows, tails.label, tails.pending, tails.store, tails.accepted)
            )
            cursor = Cursor(*of_cursor)
        where = (step.write, step.write, self._nowhere) if self.in_place else (step.read, step.write, step.snapshot)
        return StepPlaces(step.rows, step.tokens, *where, self.marks, cursor, accepted)

    def launch(self) -> StepPlaces:
        """Launches the plan of a step before its forward, and returns its slots.

        Syncs: no.
        """
        return self.slots(self.mem.launch(self._batch))


def memory_of(planes: Planes, kv: Planes, page_table: Tensor) -> DemoMemory:
    """Returns the memory of planes and pages, as the model takes it."""
    layers = range(len(planes["conv"]) if planes.rows is not None else 0)
    tails = [(planes.tail("conv", layer), planes.tail("ssm", layer)) for layer in layers]
    return DemoMemory(planes["conv"], planes["ssm"], kv["key"][0], kv["value"][0], page_table, tails)


def _require_fit(config: DemoConfig, tracking: Tracking, pages: int, pages_per_row: int) -> None:
    """Requires that at least one request fits. Raises: InvalidArgument."""
    if pages < pages_per_row:
        raise InvalidArgument(
            f"pages {pages}: the longest conversation alone needs {pages_per_row} pages of {config.page_size} tokens"
        )
    needed = 1 + tracking.lanes_at_admission(bool(config.overlap))
    if config.slots < needed:
        raise InvalidArgument(f"slots {config.slots}: one request under {config.strategy} needs {needed}")
