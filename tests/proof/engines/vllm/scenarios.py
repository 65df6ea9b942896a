"""Lists the scenarios in which vLLM runs with memstate's connector."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tests.proof.engines.vllm.job import Job, connector


@dataclass(frozen=True)
class Scenario:
    """Runs of vLLM with the connector, to be compared with a run without a cache.

    Args:
        job: The job of each process.
        wants: Names of counts. The value of each is the smallest right sum of this count over all processes.
        settings: Settings of the connector.
        theirs: Name of one of vLLM's connectors; "" for memstate's.
        store: Whether there is a store.
        at_once: Number of processes that run at the same time over one store.
        then: If not "", another process afterwards serves the last round again, over the same store. The text says
            what happens before: nothing (`restart`), damage to half of the records, or other weights in the model
            (`reweighted`).
        never: Counts that must stay 0.
        wrong: Whether there must be wrong answers, as a control of the comparison.
    """

    job: Job
    wants: Mapping[str, int] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    theirs: str = ""
    store: bool = False
    at_once: int = 1
    then: str = ""
    never: tuple[str, ...] = ()
    wrong: bool = False

    @property
    def reference(self) -> Job:
        """The job of the process without a cache."""
        exact = self.job.model == "qwen"
        options = {
            name: value for name, value in self.job.options.items() if name in ("max_model_len", "tensor_parallel_size")
        }
        if exact:
            options = dict(self.job.options)
        given = (self.job.model, self.job.requests, self.job.opening, self.job.tokens)
        return Job(*given, options=options | {"enable_prefix_caching": exact}, serial=exact)

    @property
    def transfer(self) -> dict[str, Any]:
        """The `kv_transfer_config` of vLLM, still without the folder of the store."""
        return connector(self.theirs, **self.settings) if self.theirs else connector(**self.settings)


SMALL: Final = {"host_blocks": 40, "store_tokens": 32}
NGRAM: Final = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
# In bf16, the bits of a block in vLLM itself depend on the batch, on the chunks of a prompt, and on prefill or decode.
# So requests run one at a time with vLLM's own cache, and no block of an answer is read again. Then all bits are equal.
SERIAL: Final = {"dtype": "bfloat16", "num_gpu_blocks_override": 1000}

SCENARIOS: Final[dict[str, Scenario]] = {
    "chats-granite": Scenario(Job("granite")),
    "chats-falcon": Scenario(Job("falcon")),
    "chats-nemotron": Scenario(Job("nemotron")),
    "chats-qwen": Scenario(Job("qwen", options=SERIAL, serial=True)),
    "preemption": Scenario(
        Job("granite", tokens=60, options={"num_gpu_blocks_override": 24, "max_num_seqs": 8}), {"preempted": 5}
    ),
    "aborts": Scenario(Job("falcon", abort=0.2), {"aborted": 8}),
    "resets": Scenario(Job("nemotron", reset=0.1), {"resets": 2, "resets refused": 2}),
    "resets-running": Scenario(Job("granite", reset=0.05, reset_running=True), {"resets": 3}),
    "small-host": Scenario(Job("granite"), {"saved": 41}, {"host_blocks": 40}),
    "store": Scenario(Job("falcon"), {"fetched": 10, "written": 41}, SMALL, store=True),
    "restart": Scenario(
        Job("nemotron", opening=900, options={"max_model_len": 2048}), {"fetched": 10, "reused": 95},
        {"store_tokens": 32}, store=True, then="restart",
    ),
    "damaged": Scenario(Job("granite"), {"fetched": 1, "lost": 1}, {"store_tokens": 32}, store=True, then="damaged"),
    "reweighted": Scenario(
        Job("reweighted"), {"written": 41}, {"store_tokens": 32}, store=True, then="reweighted", never=("fetched",)
    ),
    "two-ranks": Scenario(Job("granite", options={"tensor_parallel_size": 2})),
    "two-engines": Scenario(Job("granite"), {"fetched": 10}, SMALL, store=True, at_once=2),
    "asynchronous": Scenario(Job("falcon", asynchronous=True), {"ahead": 1}),
    # No hybrid model: its drafts need a Triton kernel, impossible on a CPU (v1/worker/mamba_utils.py:1226 of 0.32.0).
    "ngram": Scenario(Job("gemma", tokens=40, options={"speculative_config": NGRAM}), {"accepted": 1}),
    "windows": Scenario(Job("gemma")),
    "control": Scenario(Job("granite", spoil=True), wrong=True),
    "cost": Scenario(Job("large", requests=24)),
}  # fmt: skip

THEIRS: Final = ("SimpleCPUOffloadConnector", "OffloadingConnector")
HYBRIDS: Final = ("granite", "gemma")

# the same requests with memstate's connector and with vLLM's own ones
PEERS: Final[dict[str, Scenario]] = {
    **{f"MemstateConnector-{model}": Scenario(Job(model)) for model in HYBRIDS},
    **{
        f"{peer}-{model}": Scenario(Job(model), settings={"cpu_bytes_to_use": 1 << 28}, theirs=peer)
        for peer in THEIRS for model in HYBRIDS
    },
}  # fmt: skip
