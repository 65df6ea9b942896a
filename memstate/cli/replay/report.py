"""The figures of replays, and their table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memstate.cli.units import measured

COSTS = {  # heading -> attribute of `Replayed`
    "forwards a prompt": "forwards_per_prompt", "states filed": "states_filed_per_request",
    "recomputed a turn": "recomputed_tokens_per_turn", "longest wait": "longest_wait",
}  # fmt: skip
TIMES = {"time of a match": "us_per_match", "time of an insert": "us_per_insert"}
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """The figures of one replay. They count the requests from fraction `start` of the trace on, when the cache is warm.

    Attributes:
        policy: Name of the policy.
        placement: Name of the placement.
        states: States that fit.
        pages: Pages that fit.
        chunk: Largest number of tokens of a prefill chunk.
        every: Tokens between two states of decode.
        running: Requests that run at a time.
        start: Fraction of the requests that only warm up the cache.
        requests: Requests that count.
        block_hit_rate: Of all blocks of the prompts, the share that lies before the state from which a request starts
            and that earlier prompts had.
        answer_hit_rate: Of all blocks of the prompts, the share that lies before that state and belongs to earlier
            answers.
        ideal_hit_rate: `block_hit_rate` with room for everything.
        whole_hit_rate: `block_hit_rate` of all requests of the trace, including those before `start`.
        forwards_per_prompt: Steps that compute a chunk of a prompt, mean.
        states_filed_per_request: States that the cache takes from a request, mean.
        filed_by_kind: Number of all states that the cache takes, by kind.
        turns: Requests that go on from the answer of an earlier request.
        recomputed_tokens_per_turn: Tokens of the earlier request and its answer that a turn computes again, mean.
        longest_wait: Most steps that a request waited while a row was free, over the whole trace.
        us_per_match: Host microseconds of a match, median.
        us_per_insert: Host microseconds of all calls that file the states and pages of a request, median.
        evicted_states: States evicted over the whole trace.
        evicted_pages: Pages evicted over the whole trace.
        leaked_slots: Slots leaked over the whole trace.
        misses_by_reason: Blocks that are computed, by reason.
    """

    policy: str
    placement: str
    states: int
    pages: int
    chunk: int
    every: int
    running: int
    start: float
    requests: int
    block_hit_rate: float
    answer_hit_rate: float
    ideal_hit_rate: float
    whole_hit_rate: float
    forwards_per_prompt: float
    states_filed_per_request: float
    filed_by_kind: dict[str, int]
    turns: int
    recomputed_tokens_per_turn: float
    longest_wait: int
    us_per_match: float
    us_per_insert: float
    evicted_states: int
    evicted_pages: int
    leaked_slots: int
    misses_by_reason: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class UpperBound:
    """The hit rate that no policy exceeds. The attributes are those of `Replayed`."""

    policy: str
    states: int
    pages: int
    start: float
    requests: int
    block_hit_rate: float
    ideal_hit_rate: float


def table(replayed: Sequence[Replayed | UpperBound]) -> list[dict[str, str | float | None]]:
    """Returns a row for each policy: its hit rate for each number of states, then costs with the last number of states.

    If the bound is known, each hit rate has its share of the bound beside it.
    """
    sizes = list(dict.fromkeys(one.states for one in replayed))
    bounds = {one.states: one.block_hit_rate for one in replayed if isinstance(one, UpperBound)}
    rows: list[dict[str, str | float | None]] = []
    for policy in dict.fromkeys(one.policy for one in replayed):
        mine = {one.states: one for one in replayed if one.policy == policy}
        row: dict[str, str | float | None] = {"policy": policy}
        for size, one in mine.items():
            share = (
                f" ({one.block_hit_rate / bounds[size]:.0%})" if bounds.get(size) and isinstance(one, Replayed) else ""
            )
            row[str(size)] = f"{one.block_hit_rate:.3f}{share}"
        if isinstance(last := mine[sizes[-1]], Replayed):
            row |= {heading: getattr(last, name) for heading, name in COSTS.items()}
            row |= {heading: measured(getattr(last, name), "us") for heading, name in TIMES.items()}
            row["leaked"] = max(one.leaked_slots for one in mine.values() if isinstance(one, Replayed))
        rows.append(row)
    ideal = dict.fromkeys(map(str, sizes), f"{replayed[0].ideal_hit_rate:.3f}")
    return [*rows, {"policy": "room for everything", **ideal}]


def part_of(progress: Progress | None, run: int, runs: int) -> Progress:
    """Returns the progress callback of replay number `run`. It adds the requests of the replays before."""
    return lambda done, total: progress(run * total + done, runs * total) if progress else None
