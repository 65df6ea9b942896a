"""Benchmarks a step that verifies drafts, compared with SGLang's step: `memstate bench host --case drafts`.

Both sides plan the next step before they know what the last step has accepted, and learn that later. SGLang
runs `prepare_for_decode` and `prepare_mamba_track_for_verify` of its spec v2, and then `_resolve_spec_v2_tokens` and
`_handle_finish_state_updated_req` of each request. memstate runs `plan` and `accept`. Both sides leave out drafts, KV,
the model and the sampler. SGLang's side also leaves out the launches that bring states to the accepted length.
"""

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from memstate.engine.settings import Forward
from memstate.requests.handles import Request
from memstate.requests.tracking import Tracking
from memstate.slots.registers import Longs
from memstate.state.layout import Plane, StateLayout
from memstate_tools.bench.host_peer import NAME, SglangStates
from memstate_tools.bench.host_sides import BARE, KINDS, LAYOUT, PLAIN, HostSide, TimedManager, Timer, task
from memstate_tools.bench.task import Setting, Task

TAIL = 4  # tokens that a step verifies: the last sampled token and three drafts
CASES = ((1, 0), (8, 0), (64, 0), (256, 0), (256, 16), (256, 256))  # (rows, rows whose accepted tokens pass a boundary)
TOY_CASES = ((3, 0), (3, 1), (3, 3))
# (rows, slots of a small pool, slots of a large pool)
SLOTS, TOY_SLOTS = ((16, 100, 10**6),), ((3, 15, 1000),)
RINGS = StateLayout((Plane("ssm_k", (3 * TAIL - 1, 4), torch.float32),), 1)


class Drafts(TimedManager):
    """Requests that verify drafts.

    Args:
        setting: The setting of the benchmark.
        tracking: The tracking strategy.
        size: Number of requests.
        due: Number of requests whose tokens accepted in the last step pass a boundary.
        settings: More settings of the manager.
    """

    def __init__(self, setting: Setting, tracking: Tracking, size: int, due: int, **settings: int) -> None:
        layout = StateLayout(LAYOUT.planes, 1, rows=RINGS)
        super().__init__(setting, tracking, size, layout=layout, forward=Forward(tail=TAIL), **settings)
        self._rows = self.mem.admit([Request(i) for i in range(size)])
        self._early, self._accepted = np.arange(size) < due, _accepted(size)
        self._length = np.zeros(size, np.int64)
        self._due, self._taken = due, 0

    def turn(self, timer: Timer) -> None:
        """See `HostSide`. The previous step is planned before the timed calls, and all steps are settled after them."""
        mem, every = self.mem, int(self.mem.tracking.every)
        at, target = self._length % every, np.where(self._early, every - 1, every // 2)
        self._move(np.where(at > target, every - at, 1))
        self._move((target - self._length) % every)
        drafts, taken = partial(mem.plan, self._rows, TAIL, drafts=TAIL - 1), mem.stats().snapshots
        steps = [drafts()]
        steps[0].accepted.copy_(torch.tensor(self._accepted, dtype=torch.int32, device="cpu"))
        timer("plan", lambda: steps.append(drafts()))
        timer("accept", lambda: mem.accept(steps[0], self._accepted, written=True))
        mem.accept(steps[1], [1] * len(self._accepted), written=True)
        self._length += np.add(self._accepted, 1)
        for _ in range(2):  # the first of the two steps may stop at a boundary
            self._move(np.ones_like(self._length))
        self._taken = mem.stats().snapshots - taken

    def _move(self, tokens: Longs) -> None:
        self.mem.settle(self.mem.plan(self._rows, tokens.tolist()))
        self._length += tokens

    def wrong(self) -> str:
        """Returns what is wrong: lost tokens, or more or fewer snapshots than were due; empty if nothing is wrong."""
        self.mem.device.check()
        report = self.mem.audit()
        if not report.clean:
            return str(report)
        lengths = [self.mem.info(row).length for row in self._rows]
        if lengths != self._length.tolist():
            return f"lengths {lengths}, not {self._length.tolist()}"
        return "" if self._taken == self._due else f"{self._taken} snapshots of {self._due}"


def _accepted(size: int) -> list[int]:
    """Returns the accepted tokens of each request: 2.5 of 4 on average."""
    return [1 + i % TAIL for i in range(size)]


class SglangDrafts(SglangStates):
    """Requests of SGLang that verify drafts.

    Args:
        size: Number of requests.
        every: Tokens between two tracked states.
        lazy: Whether a request gets its second slot for tracked states only at a boundary.
        due: Number of requests whose tokens accepted in the last step pass a boundary.
        states: False: requests have no states, as for a model without states.

    Raises:
        ImportError: SGLang cannot be used.
    """

    def __init__(self, size: int, every: int, lazy: bool, due: int, states: bool = True) -> None:
        super().__init__(size, every, lazy, due, states=states)
        self._passing, self._accepted = due, _accepted(size)
        self._batch.spec_algorithm = self._sgl.SpeculativeAlgorithm.EAGLE
        self._batch.token_to_kv_pool_allocator = SimpleNamespace(page_size=1)
        parts = {"metrics_reporter": "snapshot_spec_decode_metrics", "model_worker": "on_verify_complete_cpu"}
        for part, method in parts.items():  # stand-ins that do nothing, as in SGLang unless its user configures them
            object.__setattr__(self._processor, part, SimpleNamespace(**{method: lambda *_, **__: None}))

    @contextmanager
    def _here(self) -> Iterator[None]:
        switches = {
            "speculative_algorithm": "EAGLE", "speculative_num_steps": TAIL - 1, "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": TAIL,
        }  # fmt: skip
        no_kv = patch("sglang.srt.speculative.eagle_utils.alloc_for_spec_decode", lambda *_, **__: None)
        spec, schedule = self._sgl.get_spec(), self._sgl.get_schedule()
        with super()._here(), spec.override(**switches), schedule.override(page_size=1), no_kv:
            yield

    def turn(self, timer: Timer) -> None:
        """See `HostSide`."""
        with self._here():
            self._put()
            ids = torch.zeros(TAIL * self._size, dtype=torch.int64, device="cpu")
            accepted = torch.tensor(self._accepted, dtype=torch.int32, device="cpu")
            result = self._sgl.GenerationBatchResult(
                next_token_ids=ids, accept_lens=accepted, speculative_num_draft_tokens=TAIL
            )
            timer("plan", self._prepare)
            timer("accept", partial(self._results, result))

    def _put(self) -> None:
        """Moves requests so that the due ones pass a boundary, and gives each its accepted tokens."""
        self._place(self._passing)
        for req, n in zip(self._reqs, self._accepted, strict=True):
            req.kv.kv_committed_len = len(req.origin_input_ids)
            req.output_ids = array("q", bytes(8 * (n + 1)))  # the accepted tokens, and the token that was sampled last

    def _prepare(self) -> None:
        self._batch.prepare_for_decode()
        self._sgl.prepare_mamba_track_for_verify(self._batch)

    def _results(self, result: Any) -> None:
        batch, processor = self._batch, self._processor
        processor._resolve_spec_v2_tokens(result, batch)
        for i, req in enumerate(self._reqs):
            processor._handle_finish_state_updated_req(req, batch, result, i, None)


def tasks(setting: Setting, there: bool, every: int) -> Iterator[Task]:
    """Yields the tasks that measure steps with drafts, for each strategy, and in a large pool beside a small one.

    Args:
        setting: The setting of the benchmark.
        there: Whether SGLang can run.
        every: Tokens between two snapshots.
    """
    for label, kind in KINDS.items():
        for size, due in setting.sizes(CASES, TOY_CASES):
            ours: Callable[[], HostSide] = partial(Drafts, setting, kind(every), size, due)
            peer = partial(SglangDrafts, size, every, label == "lazy", due)
            peers = {NAME: peer, BARE: partial(peer, states=False)} if there else {}
            yield task(setting, f"R={size} {label}, drafts, {due} due", ours, peers)
        for size, few, many in setting.sizes(SLOTS, TOY_SLOTS):
            small, large = (partial(Drafts, setting, kind(every), size, 0, slots=slots) for slots in (few, many))
            beside: dict[str, Callable[[], HostSide]] = {PLAIN: small} if setting.compares(PLAIN) else {}
            yield task(setting, f"R={size} {label}, drafts, {many} slots", large, beside)
