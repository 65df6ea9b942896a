"""Figures of a running decode loop, read from the manager's stats and the backend's counts."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from memstate.engine.manager import StateManager
from memstate.kernels.dispatch import Counts
from memstate.requests.handles import Row

OWNERSHIP = ("ownership", "run_data")
COPY = "copy_slots"


@dataclass
class DeviceCounts:
    """Launches, copies and waits of the device in a part of the loop.

    Launches in a replayed CUDA graph are not counted: the host launched them once, when the graph was captured.

    Attributes:
        step: Launches of steps (plan, settle).
        copies: Copies before and after a forward.
        ownership: Launches of ownership changes that the scheduler had recorded.
        syncs: Waits of the host for the device.
    """

    step: int = 0
    copies: int = 0
    ownership: int = 0
    syncs: int = 0

    @property
    def launches(self) -> int:
        """Number of launches of steps, without ownership changes."""
        return self.step + self.copies


class Gauge:
    """Counts the calls of plan and settle.

    Copies of a snapshot also count outside of `adding_to`, because a submit between two such blocks may run them.
    """

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._copies = self._now().copies

    def _now(self) -> DeviceCounts:
        launches = self._counts.launches
        copies, ownership = launches[COPY], sum(launches[op] for op in OWNERSHIP)
        return DeviceCounts(self._counts.total_launches - copies - ownership, copies, ownership, self._counts.syncs)

    @contextmanager
    def adding_to(self, asked: DeviceCounts) -> Iterator[None]:
        """Adds the calls that the `with` block makes to `asked`."""
        before = self._now()
        yield
        now = self._now()
        asked.step += now.step - before.step
        asked.copies += now.copies - self._copies
        asked.ownership += now.ownership - before.ownership
        asked.syncs += now.syncs - before.syncs
        self._copies = now.copies


@dataclass
class Meter:
    """Counts of a run, in tokens and slots unless said otherwise.

    Attributes:
        prefix_hit_tokens: Tokens of the states from which admissions started.
        session_hit_tokens: Those of the prefix_hit_tokens whose state a session had kept.
        resumed: Admissions that started from a state.
        read_cached: Admissions from a state that stays cached.
        refused: Requests that had to wait, by what ran out; and running requests that were refused more pages.
        gave_way: Times that the cache was given up because no request could go on.
        ended: Ends of requests, by reason. Retracted and cancelled requests come back and count again.
        session_turns: Ends of turns of sessions, by reason, with more detail for aborts.
        prompts_read: Admissions after which a forward has read a part of the prompt.
        prompt_chunks: Parts of prompts that forwards have read. A prompt here has all tokens known at the admission.
        parked: Requests that were parked.
        parked_inside_a_page: Those of them whose last page was filled in part.
        parked_behind_the_fence: Those of them that were copied only after a forward that was planned.
        guessed: Guessed tokens.
        right: Guessed tokens that were accepted.
        between: Calls between a plan and its forward, by name.
        held: Held slots by kind of owner, summed over `looks`.
        decode: Calls of the device in each decode step.
    """

    generated_tokens: int = 0
    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    session_hit_tokens: int = 0
    resumed: int = 0
    read_cached: int = 0
    admissions: int = 0
    steps: int = 0
    mixed_steps: int = 0
    prompts_read: int = 0
    prompt_chunks: int = 0
    dead_entries: int = 0
    parked: int = 0
    parked_inside_a_page: int = 0
    parked_behind_the_fence: int = 0
    guessed: int = 0
    right: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    gave_way: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    session_turns: Counter[str] = field(default_factory=Counter)
    between: Counter[str] = field(default_factory=Counter)
    held: Counter[str] = field(default_factory=Counter)
    looks: int = 0
    slots_held_mean_sum: float = 0.0
    slots_held_looks: int = 0
    slots_held_peak: int = 0
    decode: list[DeviceCounts] = field(default_factory=list)

    def look(self, mem: StateManager, rows: Iterable[Row]) -> None:
        """Samples the slots that are held now.

        Syncs: no.
        """
        held = [mem.info(row).slots for row in rows]
        if held:
            self.slots_held_peak = max(self.slots_held_peak, *held)
            self.slots_held_mean_sum += sum(held) / len(held)
            self.slots_held_looks += 1
        self.held.update(held_by_kind(mem))
        self.looks += 1

    @property
    def slots_held_mean(self) -> float:
        """Mean number of slots per running request, over all samples with running requests."""
        return self.slots_held_mean_sum / max(1, self.slots_held_looks)

    def per_decode_step(self, what: str) -> dict[str, float]:
        """Returns mean and maximum of an attribute of `DeviceCounts` over all decode steps; zeros without steps."""
        values = [getattr(asked, what) for asked in self.decode]
        return {"mean": sum(values) / max(1, len(values)), "max": max(values, default=0)}

    @property
    def slots_held_by_kind(self) -> dict[str, float]:
        """Mean number of slots by kind of owner, over all samples."""
        return {kind: slots / max(1, self.looks) for kind, slots in self.held.items()}


def held_by_kind(mem: StateManager) -> dict[str, int]:
    """Returns the number of held slots by kind of owner, as `mem.inspect()` names the kinds.

    Syncs: no.
    """
    stats = mem.stats()
    cached = stats.prefix.states if stats.prefix else 0
    return {
        "live": stats.held_by_live, "lane": stats.held_by_lanes, "snapshot": stats.held_by_snapshots - cached,
        "cached": cached, "session": stats.held_by_sessions,
    }  # fmt: skip
