"""What one process of vLLM does."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

BLOCKS: Final = 600  # of host memory: room for all


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
    """What one process of vLLM does.

    Args:
        model: One of `MODELS`.
        requests: Requests, a whole number of rounds.
        opening: Tokens with which talks begin.
        tokens: Tokens of an answer.
        rounds: The requests. None: the process writes them from its own answers.
        connector: vLLM's `kv_transfer_config`, None for none.
        options: Options of `vllm.LLM` beside those of every process.
        serial: Whether a request waits for the one before it, and no answer becomes part of a prompt.
        forget: Whether vLLM's own cache is emptied behind each round.
        abort: Share of the steps behind which a request is aborted.
        reset: Share of the steps behind which the caches are reset, the connector's too.
        reset_running: Whether a reset preempts the requests that run. Otherwise vLLM refuses it while one runs.
        spoil: Whether records in host memory change places behind each round: a control.
        asynchronous: Whether the scheduler runs a step ahead.
        seed: Of the model's weights.
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
        name: Of the connector, ours or one of vLLM's.
        settings: Its `kv_connector_extra_config`.
    """
    if name != "MemstateConnector":
        return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": settings}
    return {
        "kv_connector": name, "kv_connector_module_path": "memstate.integrations.vllm.connector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"host_blocks": BLOCKS} | settings,
    }  # fmt: skip
