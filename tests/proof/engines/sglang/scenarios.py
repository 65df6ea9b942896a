"""The pairs of runs: settings of SGLang's server, and requests."""

from dataclasses import dataclass, field
from typing import Any

from tests.proof.engines.sglang.traffic import Turn, talks

PLAIN: dict[str, Any] = {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True}


def tracked(*, lazy: bool = False, overlap: bool = True, every: int = 64, **more: Any) -> dict[str, Any]:
    """Returns the settings of a strategy that tracks states while a request decodes."""
    strategy = "extra_buffer_lazy" if lazy else "extra_buffer"
    return {
        "mamba_radix_cache_strategy": strategy, "disable_overlap_schedule": not overlap, "mamba_track_interval": every,
    } | more  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """Two runs of the same requests, one over SGLang's pools and one over ours.

    Args:
        name: says what is special.
        settings: arguments of SGLang's server.
        turns: the requests.
        aborts: of requests by name, after how many steps they are given up.
        sessions: whether a talk is a streaming session.
        must: what has to happen in it besides hits: names of `Record` whose numbers are above 0.
    """

    name: str
    settings: dict[str, Any]
    turns: list[Turn]
    aborts: dict[str, int] = field(default_factory=dict)
    sessions: bool = False
    must: tuple[str, ...] = ()


PAIRS = (
    Pair("no_buffer", PLAIN, talks(1)),
    Pair("extra_buffer, overlap", tracked(), talks(2)),
    Pair("extra_buffer_lazy", tracked(lazy=True), talks(3)),
)
