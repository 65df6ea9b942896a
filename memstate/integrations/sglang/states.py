"""Treats SGLang's tensors of recurrent states as planes: one launch for all tensors and layers, not one for each."""

from functools import cached_property
from typing import Any

import torch
from sglang.srt.mem_cache import memory_pool as theirs
from torch import Tensor

from memstate.errors import InvalidArgument
from memstate.kernels.dispatch import Backend
from memstate.state.layout import NUMBERS, Plane, StateLayout
from memstate.state.planes import Planes

TEMPORAL = "temporal"


class MambaPool(theirs.MambaPool):
    """SGLang's `MambaPool`, but memstate zeroes, copies, saves and loads the slots.

    SGLang keeps the tensors, and all buffers with other data of slots.
    """

    @cached_property
    def planes(self) -> Planes:
        """The pool's tensors `layer slot ...` as planes, in the order of `get_cpu_copy`."""
        cache = self.mamba_cache
        if cache.temporal.dtype in NUMBERS:
            raise InvalidArgument(f"states of {cache.temporal.dtype}: it is unknown where SGLang keeps their scales")
        tensors = {f"conv{i}": conv for i, conv in enumerate(cache.conv)} | {TEMPORAL: cache.temporal}
        given = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
        layers, slots = next(iter(given.values())).shape[:2]
        layout = StateLayout(tuple(Plane(name, tuple(t.shape[2:]), t.dtype) for name, t in given.items()), layers)
        device = next(iter(given.values())).device
        return Planes.from_tensors(layout, given, Backend("auto", device), slots - 1)

    def clear_slots(self, indices: Tensor) -> None:
        """Zeroes slots.

        Args:
            indices: slots, axis `n`.

        Syncs: no.
        """
        for sibling in self._slot_siblings:
            sibling.reset_slots(indices)
        self.planes.zero(indices.reshape(-1))

    def copy_from(self, src_indices: Tensor, dst_indices: Tensor) -> None:
        """Copies slots to other slots.

        Args:
            src_indices: slots to read, axis `n`.
            dst_indices: slots to write. They must be distinct, and none of them may be among those that are read.

        Syncs: no.
        """
        self.planes.copy(dst_indices.reshape(-1), src_indices.reshape(-1))
        if self.replayssm_write_pos is not None:
            self.replayssm_write_pos[dst_indices] = 0
        for sibling in self._slot_siblings:
            sibling.copy_slots(src_indices, dst_indices)

    def get_cpu_copy(self, indices: Tensor) -> tuple[Any, ...]:
        """Copies slots to host memory.

        Args:
            indices: slots, axis `n`, or a single slot without an axis.

        Returns:
            A tuple: list of the `conv` tensors, the `temporal` tensor, and a list of side states if there are any.

        Syncs: yes.
        """
        saved = self.planes.save(indices.reshape(-1))
        if indices.dim() == 0:
            saved = {name: batch[:, 0] for name, batch in saved.items()}
        cache = self.mamba_cache
        temporal = saved[TEMPORAL] if TEMPORAL in saved else cache.temporal[:, indices].cpu()
        copies: tuple[Any, ...] = [saved[f"conv{i}"] for i in range(len(cache.conv))], temporal
        if self._slot_siblings:
            copies = (*copies, [sibling.get_cpu_slots(indices) for sibling in self._slot_siblings])
        return copies

    def load_cpu_copy(self, mamba_cache_cpu: tuple[Any, ...], indices: Tensor) -> None:
        """Copies a result of `get_cpu_copy` to slots.

        Args:
            mamba_cache_cpu: the result of `get_cpu_copy`.
            indices: slots to write, as many as were saved.

        Syncs: no.
        """
        convs, temporal = mamba_cache_cpu[:2]
        tensors = {f"conv{i}": conv for i, conv in enumerate(convs)} | {TEMPORAL: temporal}
        slots = indices.reshape(-1)
        saved = {
            name: tensors[name].reshape(self.planes.layout.layers, len(slots), *self.planes[name].shape[2:])
            for name in self.planes
        }
        self.planes.load(saved, slots)
        if self._slot_siblings:
            for sibling, data in zip(self._slot_siblings, mamba_cache_cpu[-1], strict=True):
                sibling.load_cpu_slots(data, indices)
        if slots.device.type == "cuda":  # wait: the caller may reuse the host memory
            torch.cuda.current_stream(slots.device).synchronize()
