"""A pytest plugin that attaches memstate's connector to the schedulers of vLLM's own tests.

A scheduler without a connector, or with vLLM's ExampleConnector, gets a MemstateConnector with an empty host memory.
Prefix caching is on in every run, with and without memstate, because the connector needs it. No worker stands behind
these schedulers, so a save never ends.
"""

from collections import Counter
from typing import Any

from notes import INSIDE

from memstate.errors import MemstateError
from memstate.integrations.vllm.scheduler import SchedulerSide

sides: list[SchedulerSide] = []


def pytest_collection_finish(session: Any) -> None:
    """Replaces what vLLM's tests make their schedulers of."""
    import tests.v1.core.utils as utils  # of vLLM
    import vllm.config as config

    vllm_config, cache_config = utils.VllmConfig, utils.CacheConfig

    def attached(**given: Any) -> Any:
        transfer = given.get("kv_transfer_config")
        if INSIDE.on and (transfer is None or transfer.kv_connector == "ExampleConnector"):
            given["kv_transfer_config"] = config.KVTransferConfig(
                kv_connector="MemstateConnector", kv_connector_module_path="memstate.integrations.vllm.connector",
                kv_role="kv_both", kv_load_failure_policy="recompute",
                kv_connector_extra_config={"host_blocks": 64, "model": "test"},
            )  # fmt: skip
        return vllm_config(**given)

    utils.VllmConfig = attached
    utils.CacheConfig = lambda **given: cache_config(**given | {"enable_prefix_caching": True})


def audit() -> list[str]:
    """Counts the records of each scheduler's host memory, which are cached, or claimed by a save that has not ended."""
    found = []
    for side in sides:
        busy = [*side._writes.values(), *side._loads.values()]
        pins = Counter(entry for each in busy for entry in getattr(each, "entries", getattr(each, "pinned", ())))
        claimed = sum(len(save.records) for save in side._saves.values())
        found += side.cache.miscounts(pins, claimed)
        side.close()
    sides.clear()
    return found


def _noted(make: Any) -> Any:
    def made(self: SchedulerSide, *args: Any, **given: Any) -> None:
        make(self, *args, **given)
        sides.append(self)
        INSIDE.used += INSIDE.on

    return made


def _told(make: Any) -> Any:
    def made(self: Any, *args: Any, **given: Any) -> None:
        make(self, *args, **given)
        INSIDE.refused.append(f"{type(self).__name__}: {self}")

    return made


SchedulerSide.__init__ = _noted(SchedulerSide.__init__)  # type: ignore[method-assign]
MemstateError.__init__ = _told(MemstateError.__init__)  # type: ignore[method-assign]
INSIDE.last.append(audit)
