"""Replays a trace with each policy and size, and refuses invalid arguments before the first replay."""

from collections.abc import Sequence
from statistics import median

from memstate.checks import INT32_MAX, is_count
from memstate.cli.policies import POLICIES, Named, factories_of, placement_of, prefix_of
from memstate.cli.replay.bound import most_hits, require_scipy
from memstate.cli.replay.report import Progress, Replayed, UpperBound, part_of
from memstate.cli.replay.requests import Units, numbered, served
from memstate.cli.replay.serving import DEFAULT, InUnits, Loop, Serving
from memstate.cli.traces import BLOCK, TraceRequest
from memstate.errors import InvalidArgument

MOST = 2**24  # states, and pages: the host keeps a number for each
MOST_RUNNING = 4096
BOUND = "bound"
REASONS = ("no_sharing", "evicted", "no_snapshot", "not_filled")
NAMES = tuple(POLICIES)
EVERY = f"a multiple of {BLOCK} tokens, a page of the replay, at most {INT32_MAX}"


def replay(
    requests: Sequence[TraceRequest], states: int, pages: int, policy: Named, start: float = 0.0,
    progress: Progress | None = None, loop: Loop = DEFAULT,
) -> Replayed:  # fmt: skip
    """Replays a trace with room for a number of states and pages.

    Args:
        requests: The requests of the trace, in its order.
        states: States that fit.
        pages: KV pages that fit.
        policy: One of `NAMES`; or a class or function that makes a `StatePolicy`; or its name, module:name.
        start: Fraction of the requests that only warm up the cache.
        progress: Called with (requests done, requests in all).
        loop: Settings of the loop.

    Returns:
        The figures of the replay.

    Raises:
        InvalidArgument: A value is out of range, or a single request does not fit.

    Syncs: no.
    """
    _require(requests, states, pages, policy, start, loop)
    requests = numbered(requests)
    units, first = Units.of(loop.chunk), int(len(requests) * start)
    given = served(requests, units)
    prefix = prefix_of(policy, states, placement=InUnits(placement_of(loop.placement), units))
    serving = Serving(prefix, given, units, loop, first=first, pages=pages)
    done = 0
    while serving.busy:
        serving.turn()
        if progress and (serving.admitted - done >= 64 or serving.admitted == len(requests) > done):
            done = serving.admitted
            progress(done, len(requests))
    assert serving.mem.prefix is not None
    stats, (cold, warm) = serving.mem.prefix.stats(), serving.tallies
    return Replayed(
        policy=_name(policy), placement=loop.placement, states=states, pages=pages, chunk=loop.chunk, every=loop.every,
        running=loop.running, start=start, requests=warm.requests, block_hit_rate=_share(warm.hits, warm.asked),
        answer_hit_rate=_share(warm.answer_hits, warm.asked),
        ideal_hit_rate=_share(sum(one.known for one in given[first:]), warm.asked),
        whole_hit_rate=_share(cold.hits + warm.hits, cold.asked + warm.asked),
        forwards_per_prompt=_share(warm.forwards, warm.requests),
        states_filed_per_request=_share(warm.filed.total(), warm.requests), filed_by_kind=dict(warm.filed),
        turns=warm.turns, recomputed_tokens_per_turn=_share(warm.recomputed, warm.turns),
        longest_wait=serving.longest_wait,
        us_per_match=_us(warm.match_seconds), us_per_insert=_us(warm.file_seconds),
        evicted_states=stats.evicted_states, evicted_pages=stats.evicted_pages,
        leaked_slots=serving.leaked,
        misses_by_reason={reason: warm.misses[reason] for reason in REASONS},
    )  # fmt: skip


def bound(
    requests: Sequence[TraceRequest], states: int, pages: int, start: float = 0.0, chunk: int = 8192
) -> UpperBound:
    """Returns the hit rate that no policy exceeds, for one request at a time.

    Args:
        requests: The requests of the trace, in its order.
        states: States that fit.
        pages: KV pages that fit.
        start: Fraction of the requests that only warm up the cache.
        chunk: Largest number of tokens of a prefill chunk. It decides the unit of lengths.

    Raises:
        InvalidArgument: A value is out of range, or a single request does not fit.
        ConfigurationError: scipy is missing.
    """
    _require(requests, states, pages, BOUND, start, Loop(chunk=chunk))
    units, first = Units.of(chunk), int(len(requests) * start)
    given = served(numbered(requests), units)
    hits, asked = most_hits(given, units.per_block, states, pages, first), sum(one.asked for one in given[first:])
    ideal = _share(sum(one.known for one in given[first:]), asked)
    return UpperBound(
        policy=BOUND, states=states, pages=pages, start=start, requests=len(given) - first,
        block_hit_rate=min(_share(hits, asked), ideal), ideal_hit_rate=ideal,
    )  # fmt: skip


def _share(part: float, whole: float) -> float:
    return part / max(1, whole)


def _name(policy: Named) -> str:
    return policy if isinstance(policy, str) else getattr(policy, "__name__", repr(policy))


def _us(seconds: Sequence[float]) -> float:
    return median(seconds) * 1e6 if seconds else 0.0


def compare(
    requests: Sequence[TraceRequest], states: Sequence[int], pages: int, policies: Sequence[Named], start: float = 0.0,
    progress: Progress | None = None, loop: Loop = DEFAULT,
) -> list[Replayed | UpperBound]:  # fmt: skip
    """Replays a trace once for each policy and number of states. The policy `BOUND` gives the bound.

    Raises:
        InvalidArgument: A value is out of range, or a request does not fit; raised before the first replay.
        ConfigurationError: `BOUND` is among the policies and scipy is missing; raised before the first replay.
    """
    if not (states and policies and requests):
        raise InvalidArgument("nothing to replay: give at least one policy, one number of states and one request")
    runs = [(policy, size) for policy in policies for size in states]
    for policy, size in runs:
        _require(requests, size, pages, policy, start, loop)
    return [
        bound(requests, size, pages, start, loop.chunk)
        if policy == BOUND
        else replay(requests, size, pages, policy, start, part_of(progress, at, len(runs)), loop)
        for at, (policy, size) in enumerate(runs)
    ]


def require_fraction(start: float) -> None:
    """Raises InvalidArgument unless `start` is a fraction from 0 to below 1: at least one request must count."""
    if not 0.0 <= start < 1.0:
        raise InvalidArgument(f"from {start}: expected a fraction from 0 to below 1")


def _require(
    requests: Sequence[TraceRequest], states: int, pages: int, policy: Named, start: float, loop: Loop
) -> None:
    if policy == BOUND:
        require_scipy()
    else:
        factories_of(policy)
    placement_of(loop.placement)
    for name, value, least, most, expected in (
        ("states", states, 1, MOST, f"at least 1, at most {MOST}"),
        ("pages", pages, 1, MOST, f"at least 1, at most {MOST}"),
        ("chunk", loop.chunk, 1, INT32_MAX, f"at least 1 token, at most {INT32_MAX}"),
        ("every", loop.every, BLOCK, INT32_MAX, EVERY),
        ("running", loop.running, 1, MOST_RUNNING, f"from 1 to {MOST_RUNNING} requests at a time"),
    ):
        if not is_count(value) or not least <= value <= most or (name == "every" and value % BLOCK):
            raise InvalidArgument(f"{name} {value!r}: expected {expected}")
    if not requests:
        raise InvalidArgument("nothing to replay: no request")
    require_fraction(start)
    longest = max(-(-(one.input_length + one.output_length) // BLOCK) for one in requests)
    if longest > pages:
        raise InvalidArgument(f"pages {pages}: the longest request needs {longest}")
