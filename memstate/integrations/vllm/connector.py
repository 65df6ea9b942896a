"""The KV connector that vLLM makes in the scheduler and in each worker. It calls `SchedulerSide` or `WorkerSide`."""

import platform
from collections.abc import Sequence
from typing import Any

import torch

from memstate.errors import ConfigurationError
from memstate.integrations.vllm import VERSIONS
from memstate.integrations.vllm.messages import Plan, Report
from memstate.integrations.vllm.naming import configuration, with_seed
from memstate.integrations.vllm.scheduler import ConnectorCounts, SchedulerSide
from memstate.integrations.vllm.settings import Settings
from memstate.integrations.vllm.weights import Adapters, identity
from memstate.integrations.vllm.worker import WorkerSide

try:
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorTransferResults,
        KVConnectorWorkerMetadata,
        SupportsHMA,
    )
    from vllm.platforms import current_platform
    from vllm.v1.core.kv_cache_utils import get_none_hash_seed, resolve_block_hashes, resolve_kv_cache_block_sizes
    from vllm.v1.kv_cache_interface import MambaSpec

    from memstate.integrations.vllm.metrics import PrometheusCounts, Statistics
except ImportError as error:
    raise ImportError(
        f"this needs vLLM {', '.join(VERSIONS)}; connectors of earlier ones speak another protocol: {error}"
    ) from error


class StepPlan(KVConnectorMetadata):
    """A plan, in the form in which vLLM carries it to the workers.

    Args:
        plan: The plan.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan


class WorkerReport(KVConnectorWorkerMetadata):
    """A report, in the form in which vLLM carries it to the scheduler.

    Args:
        report: The report of one rank, or the sum of several.
    """

    def __init__(self, report: Report) -> None:
        self.report = report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReport":
        """Adds the report of another rank."""
        assert isinstance(other, WorkerReport)
        self.report.add(other.report)
        return self


class MemstateConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps vLLM's KV and states in host memory and in a store, and loads them again by content.

    Configure it with `kv_connector="MemstateConnector"`,
    `kv_connector_module_path="memstate.integrations.vllm.connector"`, `kv_role="kv_both"` and the settings of
    `memstate.integrations.vllm.settings.Settings` as `kv_connector_extra_config`.

    Args:
        vllm_config: vLLM's configuration.
        role: Whether this connector is in the scheduler or in a worker.
        kv_cache_config: vLLM's configuration of the KV cache.

    Attributes:
        scheduler: The scheduler's side; in the scheduler only.
        worker: The worker's side; in a worker only.

    Raises:
        ConfigurationError: vLLM caches no prefixes, or caches them in a mode without content hashes of blocks; vLLM is
            set to end requests whose load fails; there is a store, but nothing names the weights; or a setting is not
            valid.
    """

    scheduler: SchedulerSide
    worker: WorkerSide

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        require_supported(vllm_config, kv_cache_config)
        settings = Settings.read(self._kv_transfer_config.kv_connector_extra_config)
        if role == KVConnectorRole.WORKER:
            self.worker = WorkerSide(settings, vllm_config.parallel_config.rank, settings.open_store())
            return
        self._told = ConnectorCounts()
        align, unit = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        store, adapters = settings.open_store(), Adapters()
        configured = b""
        if store is not None:
            weights = identity(vllm_config, settings.model)
            configured = configuration(vllm_config, kv_cache_config, vllm.__version__, runs_on(), weights)

        def hashes(request: Any, size: int) -> Sequence[bytes]:
            resolved: Sequence[bytes] = resolve_block_hashes(request.block_hashes, unit, size)
            return resolved

        def digest() -> bytes:  # a function, because vLLM chooses the seed after this constructor
            return with_seed(configured, get_none_hash_seed().encode())

        speculation, ahead = vllm_config.speculative_config, getattr(vllm_config, "num_hash_lookahead_tokens", 0)
        # `ahead` is 0 in vLLM 0.32, which has no look-ahead
        drop = speculation is not None and speculation.use_eagle_block_drop() and not ahead
        self.scheduler = SchedulerSide(
            settings, settings.records(kv_cache_config), vllm_config.parallel_config.world_size, align, hashes, digest,
            drop, store, adapter=adapters.identity if store is not None else lambda request: b"",
        )  # fmt: skip

    @property
    def requires_kv_delivery(self) -> bool:
        """False, because without a save, a later prompt only misses a hit."""
        return False

    @property
    def counts(self) -> ConnectorCounts:
        """Counts of the connector's work since the start. Only in the scheduler."""
        return self.scheduler.counts

    # -- calls in the scheduler -------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Stores vLLM's cache manager."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler.bind(kv_cache_manager, self._kv_cache_config.prefix_cacheable_group_ids)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Returns how many tokens can be loaded, and True if the load runs in the background of later steps."""
        if request.skip_reading_prefix_cache:
            self.scheduler.arrived(request)
            return 0, False
        tokens = self.scheduler.matched(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Begins the load of a request into blocks that vLLM has claimed."""
        self.scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """Returns how many tokens of a load come from host memory and from the store."""
        # imported here: vLLM versions without this class do not call this method
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        stored = self.scheduler.stored(request.request_id, num_external_tokens)
        sources = {CacheHitSource.HOST: num_external_tokens - stored, CacheHitSource.DISK: stored}
        return {source: tokens for source, tokens in sources.items() if tokens}

    def get_kv_connector_stats(self) -> Statistics | None:
        """Returns the counts since the last call; None in a worker."""
        if self.role == KVConnectorRole.WORKER:
            return None
        now, before = vars(self.counts), vars(self._told)
        self._told = ConnectorCounts(**now)
        return Statistics({name: count - before[name] for name, count in now.items()})

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Statistics:
        """Returns statistics from counts that came from the scheduler's process."""
        return Statistics(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> PrometheusCounts:
        """Returns the counts as Prometheus metrics."""
        return PrometheusCounts(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        """Returns the plan of this step: what to save, load and write."""
        ended = set(scheduler_output.finished_req_ids) | set(scheduler_output.preempted_req_ids or ())
        return StepPlan(self.scheduler.plan(scheduler_output.num_scheduled_tokens, ended))

    def update_connector_output(self, connector_output: Any) -> None:
        """Records what the workers have done."""
        if (meta := connector_output.kv_connector_worker_meta) is not None:
            self.scheduler.reported(meta.report)
        self.scheduler.loaded(connector_output.finished_recving or (), connector_output.failed_recving)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Lets vLLM free all blocks of a request that ended: blocks are saved right after their forward."""
        self.scheduler.finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Lets vLLM free all blocks; see `request_finished`."""
        return self.request_finished(request, [])

    def has_pending_push_work(self) -> bool:
        """Whether saves or writes are under way, so that vLLM must run more steps."""
        return self.scheduler.busy

    def reset_cache(self) -> bool:
        """Forgets all of host memory, and the names of all records in the store."""
        return self.scheduler.reset()

    # -- calls in a worker ------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Adopts vLLM's memory, and allocates host memory."""
        layers = self._vllm_config.compilation_config.static_forward_context
        backends = {name: layers[name].get_attn_backend().get_name() for name in kv_caches if name in layers}
        self.worker.register(self._kv_cache_config, kv_caches, backends)

    def unregister_kv_caches(self) -> None:
        """Gives up blocks that wait for staging, because vLLM is about to release its memory."""
        self.worker.suspend()

    def restore_kv_caches(self) -> None:
        """Makes the staging buffers again, because vLLM may have released their memory for its sleep."""
        self.worker.restore()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begins the loads of a step."""
        self.worker.begin(self._step().plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing, because a request runs only after its load."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing, because a block is saved with all its layers, after the forward."""

    def wait_for_save(self) -> None:
        """Packs blocks that this forward and earlier ones have completed. Waits for nothing."""
        self.worker.save(self._step().plan)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Returns the finished loads."""
        finished, failed = self.worker.finished()
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """Returns the finished saves and writes."""
        report = self.worker.report()
        return WorkerReport(report) if report else None

    def shutdown(self) -> None:
        """Ends the threads and closes the store."""
        (self.worker if self.role == KVConnectorRole.WORKER else self.scheduler).close()

    def _step(self) -> StepPlan:
        meta = self._get_connector_metadata()
        assert isinstance(meta, StepPlan)
        return meta


def runs_on() -> tuple[str, str, str]:
    """Returns on what vLLM runs: (the machine's architecture, the platform, the device)."""
    try:
        device: str = current_platform.get_device_name()
    except NotImplementedError:  # some platforms cannot tell, such as vLLM for GPUs on a machine without one
        device = ""
    return platform.machine(), type(current_platform).__name__, device


def require_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises an error if the connector does not support a configuration, for example without prefix caching.

    Raises:
        ConfigurationError: It is not supported; the message says what to change.
    """
    if not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigurationError(
            "vLLM without prefix caching: blocks are found by its hashes; set enable_prefix_caching"
        )
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        if isinstance(spec, MambaSpec) and spec.mamba_cache_mode != "align":
            raise ConfigurationError(
                f"group {number} with mamba_cache_mode={spec.mamba_cache_mode!r}: states are kept at the ends of "
                "blocks in 'align' alone"
            )
    if (policy := vllm_config.kv_transfer_config.kv_load_failure_policy) != "recompute":
        raise ConfigurationError(
            f"kv_load_failure_policy={policy!r}: vLLM would end each request of which a block does not come, such as "
            "one that is damaged in the store; set it to 'recompute', then vLLM computes what does not come"
        )
    if vllm_config.model_config.enable_sleep_mode and not hasattr(KVConnectorBase_V1, "restore_kv_caches"):
        raise ConfigurationError(
            f"sleep mode with vLLM {vllm.__version__}, which does not tell connectors of its end: what they have on "
            "the device is lost; use vLLM 0.33, or unset enable_sleep_mode"
        )
    parallel, extra = vllm_config.parallel_config, vllm_config.kv_transfer_config.kv_connector_extra_config
    if parallel.pipeline_parallel_size > 1 and extra.get("host_bytes"):
        raise ConfigurationError("host_bytes with pipeline parallelism: blocks differ in size by rank; set host_blocks")
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ConfigurationError("context parallelism: a block has tokens of several ranks; this is not supported")
