"""Describes the job of one process of vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

BLOCKS: Final = 600  # blocks of host memory, with room for all


class Ask(NamedTuple):
    """One request.

    Attributes:
        name: `talk.turn`.
        prompt: Its tokens.
    """

    name: str
    prompt: list[int]


@dataclass(frozen=True)
class Job:
    """The job of one process of vLLM.

    Args:
        model: One of `MODELS`.
        requests: Number of requests, a whole number of rounds.
        opening: Number of tokens with which a talk begins.
        tokens: Number of tokens of an answer.
        rounds: The requests. None: the process writes them from its own answers.
        connector: vLLM's `kv_transfer_config`, None for no connector.
        options: Options of `vllm.LLM`, besides those of every process.
        serial: Whether a request waits for the one before it, and no answer becomes part of a prompt.
        forget: Whether vLLM's own cache is emptied after each round.
        abort: Share of the steps after which a request is aborted.
        reset: Share of the steps after which all caches are reset, also the connector's.
        reset_running: Whether a reset preempts running requests. Otherwise, vLLM refuses a reset while one runs.
        spoil: Whether records in host memory change places after each round, as a control of the comparison.
        asynchronous: Whether the scheduler runs a step ahead.
        seed: Seed of the model's weights.
    """

    model: str = "granite"
    requests: int = 48
    opening: int = 150
    tokens: int = 12
    rounds: list[list[Ask]] | None = None
    connector: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    serial: bool = False
    forget: bool = True
    abort: float = 0
    reset: float = 0
    reset_running: bool = False
    spoil: bool = False
    asynchronous: bool = False
    seed: int = 0

    @property
    def theirs(self) -> bool:
        """Whether the connector is one of vLLM's."""
        return self.connector is not None and "kv_connector_module_path" not in self.connector


def connector(name: str = "MemstateConnector", **settings: Any) -> dict[str, Any]:
    """Returns a `kv_transfer_config`.

    Args:
        name: The connector, memstate's or one of vLLM's.
        settings: Its `kv_connector_extra_config`.
    """
    if name != "MemstateConnector":
        return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": settings}
    return {
        "kv_connector": name, "kv_connector_module_path": "memstate.integrations.vllm.connector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"host_blocks": BLOCKS} | settings,
    }  # fmt: skip
