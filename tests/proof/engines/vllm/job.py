"""Describes the job of one process of vLLM: its requests and its settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

BLOCKS: Final = 600  # blocks of host memory: enough for all requests


class Ask(NamedTuple):
    """One request.

    Attributes:
        name: The numbers of conversation and turn, as `talk.turn`.
        prompt: The tokens of the prompt.
    """

    name: str
    prompt: list[int]


@dataclass(frozen=True)
class Job:
    """The job of one process of vLLM. It serves round after round; a round is one turn of each talk.

    Args:
        model: One of `MODELS`.
        requests: Number of requests, a multiple of `talks.TURNS`.
        opening: Number of first tokens that a talk shares with others.
        tokens: Number of tokens of an answer.
        rounds: The requests of each round. None: the process writes them from its own answers.
        connector: vLLM's `kv_transfer_config`, None for no connector.
        options: Options of `vllm.LLM`, besides those that every process has.
        serial: Whether requests run one at a time, and answers never become part of a prompt.
        forget: Whether vLLM's own cache is emptied after each round.
        abort: Probability that a request is aborted after a step.
        reset: Probability that all caches, including the connector's, are reset after a step.
        reset_running: Whether a reset preempts running requests. Otherwise, vLLM refuses a reset while one runs.
        spoil: Whether records in host memory change places after each round, as a control of the comparison.
        asynchronous: Whether the scheduler plans a step before it has the answer of the last one.
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
        name: Name of the connector: memstate's or one of vLLM's.
        settings: Entries of the field `kv_connector_extra_config`.
    """
    if name != "MemstateConnector":
        return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": settings}
    return {
        "kv_connector": name, "kv_connector_module_path": "memstate.integrations.vllm.connector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"host_blocks": BLOCKS} | settings,
    }  # fmt: skip
