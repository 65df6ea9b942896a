"""Lists the pairs of runs: for each, settings of SGLang's server, and requests."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.proof.engines.sglang.traffic import Turn, talks

PLAIN: dict[str, Any] = {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True}


def tracked(*, lazy: bool = False, overlap: bool = True, every: int = 64, **more: Any) -> dict[str, Any]:
    """Returns settings of SGLang's server for a strategy that tracks states in decode."""
    strategy = "extra_buffer_lazy" if lazy else "extra_buffer"
    return {
        "mamba_radix_cache_strategy": strategy, "disable_overlap_schedule": not overlap, "mamba_track_interval": every,
    } | more  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """Two runs of the same requests, one over SGLang's pools and one over memstate's.

    Args:
        name: what is special about the pair.
        settings: arguments of SGLang's server.
        turns: the requests.
        aborts: for each request to abort, the number of steps from its arrival to its abort.
        sessions: whether each talk (a conversation) is a streaming session.
        refuse: each `refuse`-th claim of a slot outside of admissions is refused; 0 for none.
        must: counters of `Record` that must not be 0.
    """

    name: str
    settings: dict[str, Any]
    turns: list[Turn]
    aborts: dict[str, int] = field(default_factory=dict)
    sessions: bool = False
    refuse: int = 0
    must: tuple[str, ...] = ()


UNCACHED: dict[str, Any] = {"disable_radix_cache": True}
CHUNKED = {"chunked_prefill_size": 64}
FEW_KV = {"max_total_tokens": 750, "schedule_conservativeness": 0.01}
FEW_SLOTS = {"max_mamba_cache_size": 16}
SESSIONS = {"enable_streaming_session": True}
PAGES = {"page_size": 16}
ABORTS = {"0.0": 3, "1.1": 1, "2.0": 20, "3.1": 0, "3.2": 8}
MIXED: dict[str, Any] = {"fresh": (1, 260), "answer": (1, 90), "apart": 30}
LONG: dict[str, Any] = {"answer": (60, 120), "apart": 4}
GROWING: dict[str, Any] = {"shared": 66, "fresh": (4, 10), "answer": (80, 110), "apart": 2}
STRATEGIES = {
    "no_buffer": lambda **more: PLAIN | more,
    "extra_buffer without overlap": lambda **more: tracked(overlap=False, **more),
    "extra_buffer": tracked,
    "extra_buffer_lazy": lambda **more: tracked(lazy=True, **more),
}


def pairs() -> Iterator[Pair]:
    """Yields every pair."""
    for seed, (strategy, with_) in enumerate(STRATEGIES.items()):
        yield Pair(strategy, with_(), talks(seed, 6))
        yield Pair(f"{strategy}, chunked prefill", with_(**CHUNKED), talks(seed, 5, fresh=(60, 200)), must=("chunks",))
        yield Pair(f"{strategy}, aborts", with_(), talks(seed, 5), ABORTS, must=("aborts",))
        yield Pair(f"{strategy}, retractions", with_(**FEW_KV), talks(seed, 8, 2, **GROWING), must=("retracted",))
        yield Pair(f"{strategy}, sessions", with_(**SESSIONS), talks(seed, 5), sessions=True)
        yield Pair(
            f"{strategy}, failing claims", with_(**FEW_SLOTS), talks(seed, 6, **LONG), refuse=3, must=("refused",)
        )
        yield Pair(f"{strategy}, mixed lengths", with_(max_running_requests=3), talks(seed, 6, 4, **MIXED))
        if strategy != "no_buffer":  # no_buffer needs pages of one token, and tracks nothing in decode
            yield Pair(f"{strategy}, pages of 16", with_(**PAGES), talks(seed, 6))
            yield Pair(f"{strategy}, interval 16", with_(every=16), talks(seed, 6, **LONG))
            everything = with_(every=16, **PAGES | CHUNKED | FEW_KV | FEW_SLOTS)
            yield Pair(f"{strategy}, all at once", everything, talks(seed, 8, 4, **MIXED), ABORTS, refuse=4,
                       must=("chunks", "aborts", "refused"))  # fmt: skip
