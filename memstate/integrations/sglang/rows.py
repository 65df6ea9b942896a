"""SGLang's rows of requests and their slots, in batches: one claim per admission of a batch, one write per step.

SGLang claims the slots of each request separately, and writes each change of a track buffer to the device at once.
Here, one claim gets the slots of all requests in an admission. The host collects changes of track buffers and freed
slots, and sends them to the device together, before anything there reads them.
"""

import logging
from importlib.metadata import version
from typing import Any

import torch
from sglang.srt.disaggregation import decode as theirs_decode
from sglang.srt.mem_cache import memory_pool as theirs
from torch import Tensor

from memstate import logs
from memstate.errors import InvalidArgument, OutOfSlots
from memstate.integrations.sglang.slots import MambaSlotAllocator, is_ids
from memstate.integrations.sglang.states import MambaPool
from memstate.integrations.sglang.track import TrackBuffer

log = logs.logger("sglang")


def note_tracks(kv: Any, empty: list[bool] | None) -> None:
    """Sets attributes that some versions of SGLang keep beside a track buffer: previous length, empty entries."""
    if hasattr(kv, "mamba_prev_track_seqlen"):
        kv.mamba_prev_track_seqlen = None
    if hasattr(kv, "mamba_ping_pong_empty"):
        kv.mamba_ping_pong_empty = empty


class Batched:
    """The methods that differ from those of SGLang's pools. Both pools have this base class before SGLang's class.

    Example::

        pool = HybridReqToTokenPool(...)  # as SGLang's
        pool.alloc(reqs)  # one claim, whatever the number of requests
    """

    mamba_pool_cls = MambaPool
    device: Any
    mamba_pool: Any
    mamba_ping_pong_track_buffer_size: int
    enable_mamba_extra_buffer: bool
    enable_mamba_extra_buffer_lazy: bool
    req_index_to_mamba_index_mapping: Tensor

    def _init_mamba_pool(self, mamba_size: int, *args: Any, **named: Any) -> None:
        self._changes: list[tuple[int, int, Tensor]] = []  # changes of track buffers: (row, entry, tensor with one id)
        self._first_slots = 1 if self.enable_mamba_extra_buffer_lazy else self.mamba_ping_pong_track_buffer_size
        super()._init_mamba_pool(mamba_size, *args, **named)  # type: ignore[misc]
        self.mamba_allocator = MambaSlotAllocator(mamba_size, self.device, copy=False)
        self._none = torch.full((1,), -1, dtype=torch.int64, device=self.device)
        logs.event(log, logging.INFO, "in place", sglang=version("sglang"), slots=mamba_size)

    @property
    def req_index_to_mamba_ping_pong_track_buffer_mapping(self) -> Tensor:
        """The track buffers on the device, `row entry`; always the same tensor. Writes collected changes to it.

        Syncs: no.
        """
        if self._changes:
            last = {(row, entry): slot for row, entry, slot in self._changes}
            self._changes.clear()  # changed in place, because clones of the pool share the list
            width = self._tracks.shape[1]
            at = self._upload([row * width + entry for row, entry in last])
            self._tracks.view(-1).index_copy_(0, at, torch.cat(list(last.values())))
        return self._tracks

    @req_index_to_mamba_ping_pong_track_buffer_mapping.setter
    def req_index_to_mamba_ping_pong_track_buffer_mapping(self, tracks: Tensor) -> None:
        """Sets the tensor, as SGLang does when it makes the pool."""
        self._tracks = tracks

    def alloc(self, reqs: list[Any]) -> list[int] | None:
        """Gives requests the rows and slots that they do not have yet.

        Args:
            reqs: the requests.

        Returns:
            Their rows; None if too few rows are free.

        Raises:
            OutOfSlots: too few slots are free; nothing changed.
            InvalidArgument: a request is given twice; nothing changed.

        Syncs: no.
        """
        if len(set(map(id, reqs))) < len(reqs):
            raise InvalidArgument(f"requests {[req.rid for req in reqs]}: expected each once")
        fresh, stateless, trackless = [], [], []  # the last two: pairs (record of a request, index of its first id)
        size, n = 0, self._first_slots if self.enable_mamba_extra_buffer else 0
        for req in reqs:
            if req.kv.req_pool_idx is None:
                fresh.append(req)
            if req.kv.mamba_pool_idx is None:
                stateless.append((req.kv, size))
                size += 1
            if n and req.kv.mamba_ping_pong_track_buffer is None:
                trackless.append((req.kv, size))
                size += n
        if len(fresh) > self.available_size():  # type: ignore[attr-defined]
            return None
        ids = self._claim(size)
        try:
            rows: list[int] = theirs.ReqToTokenPool.alloc(self, reqs)
        except BaseException:
            self.mamba_allocator.free(ids)
            raise
        for kv, at in stateless:
            kv.mamba_pool_idx, kv.mamba_needs_clear = ids[at], True
        self._start_rings(fresh, stateless)
        self._start_tracks(trackless, ids)
        if rows:
            self._enter(rows, reqs, ids.view(len(rows), -1) if size == len(rows) * (1 + n) > 1 + n else None)
        return rows

    def _upload(self, numbers: list[int]) -> Tensor:
        """Uploads numbers without waiting for the device. Returns them as a tensor, int64 `n`."""
        self.mamba_allocator.slots.backend.counts.uploads += 1
        pinned = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=self._none.is_cuda)
        return pinned.to(self.device, non_blocking=True)

    def _claim(self, n: int) -> Tensor:
        slots = self.mamba_allocator
        if (ids := slots.alloc(n)) is None:
            raise OutOfSlots(n, slots.available_size(), capacity=slots.size)
        return ids

    def _start_rings(self, fresh: list[Any], stateless: list[tuple[Any, int]]) -> None:
        """Empties the rings of inputs for SGLang's replay of Mamba steps. Some have an entry per slot, some per row."""
        pool = self.mamba_pool
        by_row = getattr(pool, "replayssm_spec_write_pos", None)
        if pool.replayssm_write_pos is not None and stateless:
            slots = torch.stack([kv.mamba_pool_idx for kv, _ in stateless])
            pool.replayssm_write_pos.index_fill_(0, slots, 0)
            if by_row is None and getattr(pool, "replayssm_cache_base", None) is not None:
                pool.replayssm_cache_base.index_fill_(0, slots, 0)
                pool.replayssm_is_flush.index_fill_(0, slots, 0)
        if by_row is not None and fresh:
            rows = self._upload([req.kv.req_pool_idx for req in fresh])
            for ring in (by_row, pool.replayssm_cache_base, pool.replayssm_is_flush):
                ring.index_fill_(0, rows, 0)

    def _start_tracks(self, trackless: list[tuple[Any, int]], ids: Tensor) -> None:
        """Gives requests their track buffers. `trackless` has pairs (record of a request, index of its first id)."""
        n, size = self._first_slots, self.mamba_ping_pong_track_buffer_size
        last = 0 if self.enable_mamba_extra_buffer_lazy else size - 1
        for kv, at in trackless:
            buffer = TrackBuffer(ids, at, n, size, self._none)
            kv.mamba_ping_pong_track_buffer, kv.mamba_next_track_idx, kv.mamba_last_track_idx = buffer, 0, last
            note_tracks(kv, buffer.empty)

    def _alloc_ping_pong_buffer(self, req: Any) -> None:
        self._start_tracks([(req.kv, 0)], self._claim(self._first_slots))

    def _enter(self, rows: list[int], reqs: list[Any], ids: Tensor | None) -> None:
        """Writes the slots of requests to their rows on the device.

        Args:
            rows: the rows.
            reqs: the requests.
            ids: their slots, `request slot`, if there are several requests and all their slots are new; else None.
        """
        if self._changes:
            entered = set(rows)
            self._changes[:] = [change for change in self._changes if change[0] not in entered]
        if len(rows) == 1:  # a single row number needs no upload
            self.req_index_to_mamba_index_mapping[rows[0]] = reqs[0].kv.mamba_pool_idx
            if self.enable_mamba_extra_buffer:
                self._tracks[rows[0]] = reqs[0].kv.mamba_ping_pong_track_buffer.ids()
            return
        at = self._upload(rows)
        states = torch.stack([req.kv.mamba_pool_idx for req in reqs]) if ids is None else ids[:, 0]
        self.req_index_to_mamba_index_mapping.index_copy_(0, at, states.to(torch.int32))
        if self.enable_mamba_extra_buffer:
            buffers = [req.kv.mamba_ping_pong_track_buffer for req in reqs]
            tracks = torch.stack([buffer.ids() for buffer in buffers]) if ids is None else ids[:, 1:]
            if empty := self._tracks.shape[1] - tracks.shape[1]:
                tracks = torch.cat((tracks, self._none.expand(len(rows), empty)), 1)
            self._tracks.index_copy_(0, at, tracks)

    def set_mamba_ping_pong_slot(self, req: Any, idx: int, value: Tensor | int) -> None:
        """Changes an entry of a request's track buffer.

        Args:
            req: the request.
            idx: number of the entry.
            value: its new slot, as a tensor with one id; or -1 to empty the entry.

        Raises:
            InvalidArgument: the request has no such entry, or the value is neither a tensor with one id nor -1; nothing
                changed.

        Syncs: no.
        """
        buffer = req.kv.mamba_ping_pong_track_buffer
        if buffer is None or not 0 <= idx < len(buffer.empty):
            raise InvalidArgument(f"entry {idx} of {buffer} of request {req.rid!r}: expected one of its entries")
        if isinstance(value, Tensor) and value.numel() == 1 and is_ids(value.dtype):
            slot = buffer.put(idx, value.to(self._none))
        elif not isinstance(value, Tensor) and value == -1:
            slot = buffer.put(idx, None)
        else:
            raise InvalidArgument(f"slot {value!r}: expected a tensor with one id, or -1")
        self._changes.append((req.kv.req_pool_idx, idx, slot))

    def donate_mamba_ping_pong_slot(self, req: Any, new_slot: Tensor) -> Tensor:
        """Gives away the slot with the newest tracked state of a request, and puts another slot in its entry.

        Args:
            req: the request.
            new_slot: one slot, axis `1`.

        Returns:
            The slot that was in the entry, axis `1`.

        Raises:
            InvalidArgument: the request has no track buffer, or `new_slot` is not one slot; nothing changed.

        Syncs: no.
        """
        if req.kv.mamba_ping_pong_track_buffer is None:
            raise InvalidArgument(f"request {req.rid!r} has no tracked state to give away")
        at = self.get_mamba_ping_pong_keep_idx(req)  # type: ignore[attr-defined]
        donated: Tensor = req.kv.mamba_ping_pong_track_buffer.entry(at)
        self.set_mamba_ping_pong_slot(req, at, new_slot)
        return donated

    def free_mamba_cache(self, req: Any, mamba_ping_pong_track_buffer_to_keep: int | None = None) -> None:
        """Frees the slots of a request.

        Args:
            req: the request.
            mamba_ping_pong_track_buffer_to_keep: number of an entry of the track buffer. Its slot is not freed, because
                it has another owner now.

        Raises:
            InvalidArgument: the slots of the request were freed before, or it has no such entry; nothing was freed.

        Syncs: no.
        """
        kv, keep = req.kv, mamba_ping_pong_track_buffer_to_keep
        if kv.mamba_pool_idx is None:
            raise InvalidArgument(f"request {getattr(req, 'rid', req)!r} has no slots: they were freed before")
        if keep is not None and not 0 <= keep < self.mamba_ping_pong_track_buffer_size:
            raise InvalidArgument(f"entry {keep} of a track buffer of {self.mamba_ping_pong_track_buffer_size}")
        buffer = kv.mamba_ping_pong_track_buffer
        for slots in [kv.mamba_pool_idx] if buffer is None else buffer.owned(kv.mamba_pool_idx, keep):
            self.mamba_allocator.free(slots)
        kv.mamba_pool_idx = None
        if self.enable_mamba_extra_buffer:
            kv.mamba_ping_pong_track_buffer = kv.mamba_next_track_idx = kv.mamba_last_track_idx = None
            kv.mamba_last_track_seqlen = kv.mamba_cow_src_index = None
            note_tracks(kv, None)
            kv.mamba_needs_clear = False

    def clear(self) -> None:
        """Frees all rows and slots.

        Syncs: yes.
        """
        self._changes.clear()
        super().clear()  # type: ignore[misc]


class HybridReqToTokenPool(Batched, theirs.HybridReqToTokenPool):
    """SGLang's `HybridReqToTokenPool`, but it works in batches. The arguments are SGLang's."""


class HybridMambaDecodeReqToTokenPool(Batched, theirs_decode.HybridMambaDecodeReqToTokenPool):
    """SGLang's pool of a decode server, but in batches. Counts rows that are preallocated for incoming requests."""
