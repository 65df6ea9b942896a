"""Lets vLLM's own connectors run on a CPU: replaces their CUDA copies. The connectors still choose what to keep."""

from types import SimpleNamespace
from typing import Any

import torch


class Stream:
    """Stands in for a CUDA stream. Its work is done at once."""

    def __init__(self, **_: Any) -> None:
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Returns the lowest and the highest priority."""
        return 0, 0


class Event:
    """Stands in for a CUDA event. It is always complete."""

    def record(self, stream: object = None) -> None:
        """Does nothing."""

    def query(self) -> bool:
        """Says that the event is complete."""
        return True


class Copies:
    """Stands in for `DmaCopyBackend` of `SimpleCPUOffloadConnector`."""

    def init(self, device: dict[str, Any], host: dict[str, Any], *_: Any) -> None:
        """Notes the tensors of the device and of host memory; in both dicts, the keys are their names."""
        self._pairs = [(device[name], host[name]) for name in device]

    def launch_copy(
        self, source: list[int], target: list[int], *, is_store: bool, event_idx: int, events_list: list[Any],
        wait_event: object = None,
    ) -> None:  # fmt: skip
        """Copies blocks, and appends a complete event to `events_list`."""
        for device, host in self._pairs:
            if is_store:
                host[target] = device[source]
            else:
                device[target] = host[source]
        events_list.append((event_idx, Event()))

    def shutdown(self) -> None:
        """Does nothing."""


def stand_in() -> None:
    """Replaces the CUDA copies of vLLM's connectors in this process."""
    from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
    from vllm.v1.simple_kv_offload import worker

    cuda = SimpleNamespace(Stream=Stream, current_stream=lambda: None)
    worker.torch = SimpleNamespace(**vars(torch) | {"cuda": cuda, "Event": Event})
    worker.DmaCopyBackend, worker.PIN_MEMORY = Copies, False

    class Worker(OffloadingWorker):
        """Stands in for `CPUOffloadingWorker` of `OffloadingConnector`, with chunks of one block."""

        def __init__(self, caches: Any, chunks: int) -> None:
            self._groups, self._over = caches.group_data_refs, list[TransferResult]()
            each = [one.tensor.view(torch.int8).view(-1, one.page_size_bytes) for one in caches.tensors]
            self._pairs = [(device, device.new_zeros(chunks, device.shape[1])) for device in each]

        def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
            """Copies blocks to host memory."""
            for place, blocks, chunks in self._parts(src_spec, dst_spec):
                self._pairs[place][1][chunks] = self._pairs[place][0][blocks]
            return self._end(job_id)

        def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
            """Copies blocks to the device."""
            for place, blocks, chunks in self._parts(dst_spec, src_spec):
                self._pairs[place][0][blocks] = self._pairs[place][1][chunks]
            return self._end(job_id)

        def get_finished(self) -> list[TransferResult]:
            """Returns the transfers that were done since the last call."""
            over, self._over = self._over, []
            return over

        def wait(self, job_ids: set[int]) -> None:
            """Does nothing, because transfers are done at once."""

        def _parts(self, device: Any, host: Any) -> list[tuple[int, Any, Any]]:
            parts, first = [], 0
            for refs, size in zip(self._groups, device.group_sizes, strict=True):
                ids = [torch.from_numpy(spec.block_ids[first : first + size]).long() for spec in (device, host)]
                parts += [(place, *ids) for place in sorted({ref.tensor_idx for ref in refs})]
                first += size
            return parts

        def _end(self, job: int) -> bool:
            self._over.append(TransferResult(job, success=True))
            return True

    def get_worker(self: Any, kv_caches: Any) -> Worker:
        self._worker = self._worker or Worker(kv_caches, self.num_chunks)
        return self._worker

    CPUOffloadingSpec.get_worker = get_worker
