"""Adds the hit rates of a trace to the splits of a memory plan."""

from collections.abc import Sequence

from memstate.cli.policies import Named
from memstate.cli.replay.report import Progress, part_of
from memstate.cli.replay.runs import replay, require_fraction
from memstate.cli.replay.serving import Loop
from memstate.cli.traces import BLOCK, TraceRequest
from memstate.engine.figures import Capacity
from memstate.errors import InvalidArgument


def rated(
    plan: Capacity, requests: Sequence[TraceRequest], start: float = 0.0, report: Progress | None = None,
    policy: Named = "return-rate",
) -> Capacity:  # fmt: skip
    """Replays a trace with the states and pages of each split, as `memstate replay` does.

    A page of the replay is a block of 512 tokens, so `every` is rounded up to whole blocks. A split without cached
    states has hit rate 0. If the model has no KV, the replay has pages for the whole trace.

    Args:
        plan: The memory plan whose splits get hit rates.
        requests: The requests of the trace, in its order.
        start: Fraction of the requests that only warm up the cache.
        report: Called with (requests done, requests in all).
        policy: Name of a policy, or a class or function that makes a policy for states.

    Returns:
        The plan with the hit rates of its splits.

    Raises:
        InvalidArgument: A request is longer than the context of the plan, or the trace cannot be replayed.
    """
    require_fraction(start)
    lengths = [request.input_length + request.output_length for request in requests]
    if max(lengths, default=0) > plan.context:
        raise InvalidArgument(
            f"context={plan.context}: the longest request of the trace has {max(lengths)} tokens; plan with as many"
        )
    everything = sum(-(-length // BLOCK) for length in lengths)
    loop = Loop(every=-(-plan.every // BLOCK) * BLOCK, running=plan.concurrency)
    rates = []
    for at, split in enumerate(plan.splits):
        if not split.cached_states:
            rates.append(0.0)
            continue
        pages = split.pages * split.page_size // BLOCK if plan.kv is not None else everything
        progress = part_of(report, at, len(plan.splits))
        rates.append(replay(requests, split.cached_states, pages, policy, start, progress, loop).block_hit_rate)
    return plan.with_hit_rates(rates)
