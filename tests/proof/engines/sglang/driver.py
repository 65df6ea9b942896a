"""Runs SGLang's own event loop. Requests arrive at given steps, and all decisions of the loop are recorded."""

import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from sglang.srt.managers.io_struct import (
    AbortReq,
    CloseSessionReqInput,
    OpenSessionReqInput,
    SessionParams,
    TokenizedGenerateReqInput,
)
from sglang.srt.sampling.sampling_params import SamplingParams

from tests.proof.engines.sglang.scenarios import Pair
from tests.proof.engines.sglang.traffic import Turn

Plant = Callable[[Any, Any], bool]  # gets pool and batch, and tries to plant a fault; returns whether it has
SOON = 20  # number of steps before a fault is planted
MOST_STEPS = 3000
QUIET = 3  # number of idle steps at the end, in which SGLang looks for leaks


@dataclass
class Record:
    """The record of a run. Runs over different pools must have equal records.

    Attributes:
        batches: for each step, the mode of the step, and the length of each request in it.
        logits: for each step, a digest of the logits.
        free: before each step, the free slots and the free KV tokens.
        tokens: for each request, the generated tokens.
        hits: for each request, the number of tokens that came from the cache.
        ends: for each request, why it ended.
        chunks: number of steps that computed a part of a prompt.
        aborts: number of requests that were aborted.
        retracted: number of requests that were put back into the queue for lack of memory.
        refused: number of claims that got no slots.
    """

    batches: list[Any] = field(default_factory=list)
    logits: list[int] = field(default_factory=list)
    free: list[tuple[int, int]] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)
    chunks: int = 0
    aborts: int = 0
    retracted: int = 0
    refused: int = 0

    def differences(self, other: "Record") -> list[str]:
        """Returns a line for each field that differs. For a list, it names the first step that differs."""
        places = []
        for name, mine in vars(self).items():
            theirs = vars(other)[name]
            if mine != theirs and isinstance(mine, list):
                at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), "the end")
                places.append(f"{name} from step {at}")
            elif mine != theirs:
                places.append(name)
        return places


class Driver:
    """Gives the scheduler requests, and records what it does.

    Args:
        scheduler: SGLang's scheduler, ready to run.
        pair: says which requests arrive, which are aborted, and which claims are refused.
        plant: tries to plant a fault into the pool; returns whether it has.
    """

    def __init__(self, scheduler: Any, pair: Pair, plant: Plant | None = None) -> None:
        self.scheduler, self.record, self.step = scheduler, Record(), 0
        self._pair, self._plant, self._quiet = pair, plant, 0
        self._left = {turn.talk: [each for each in pair.turns if each.talk == turn.talk] for turn in pair.turns}
        self._last: dict[int, str] = {}  # talk -> name of its newest request
        self._prompts: dict[str, list[int]] = {}
        self._arrived: dict[str, int] = {}
        self._reqs: dict[str, Any] = {}  # name -> SGLang's request
        self._gone: set[str] = set()  # requests that were aborted before they ran
        self._watch_scheduler()
        self._watch_claims()

    def run(self) -> Record:
        """Runs until all requests have ended and the idle scheduler has checked its memory. Returns the record."""
        self.scheduler.run_event_loop()
        for name, req in self._reqs.items():
            self.record.tokens[name], self.record.hits[name] = list(req.output_ids), req.cached_tokens
            self.record.ends[name] = type(req.finished_reason).__name__
            self.record.aborts += name in self._gone or self.record.ends[name] == "FINISH_ABORT"
        return self.record

    def _watch_scheduler(self) -> None:
        scheduler, record = self.scheduler, self.record
        queue, run = scheduler._add_request_to_queue, scheduler.run_batch

        def enqueue(req: Any, is_retracted: bool = False) -> None:
            self._reqs[req.rid] = req
            record.retracted += is_retracted
            queue(req, is_retracted)

        def compute(batch: Any, *args: Any, **named: Any) -> Any:
            lengths = dict(zip([req.rid for req in batch.reqs], batch.seq_lens_cpu.tolist(), strict=True))
            record.batches.append((batch.forward_mode.name, lengths))
            if self._plant and self.step > SOON and self._plant(scheduler.req_to_token_pool, batch):
                self._plant = None
            record.chunks += scheduler.chunked_req in batch.reqs
            result = run(batch, *args, **named)
            record.logits.append(crc32(result.logits_output.next_token_logits.numpy().tobytes()))
            return result

        scheduler._add_request_to_queue, scheduler.run_batch, scheduler.ingest_requests = enqueue, compute, self._ingest
        for sender in (scheduler.ipc_channels.send_to_tokenizer, scheduler.ipc_channels.send_to_detokenizer):
            sender.socket, sender.send_output = None, self._told  # there are no other processes

    def _told(self, output: Any, *_: Any) -> None:
        """Receives what the scheduler sends to other processes."""
        if isinstance(output, AbortReq):
            self._gone.add(output.rid)

    def _watch_claims(self) -> None:
        """Counts claims that get no slots, and refuses some, but none in an admission: SGLang asserts that it works."""
        pool, claims = self.scheduler.req_to_token_pool, 0
        admit, claim = pool.alloc, pool.mamba_allocator.alloc
        admitting = refused = False

        def admitted(reqs: list[Any]) -> Any:
            nonlocal admitting
            admitting = True
            try:
                return admit(reqs)
            finally:
                admitting = False

        def claimed(n: int) -> Any:
            nonlocal claims, refused
            if admitting:
                return claim(n)
            claims += 1
            again = refused  # a second refusal would fail, because the tree asserts a free slot after an eviction
            slots = None if self._pair.refuse and claims % self._pair.refuse == 0 and not again else claim(n)
            refused = slots is None
            self.record.refused += refused
            return slots

        pool.alloc, pool.mamba_allocator.alloc = admitted, claimed

    def _ingest(self) -> list[Any]:
        """Returns the requests and aborts that arrive now. The loop calls it at the start of each step."""
        scheduler = self.scheduler
        pools = scheduler.req_to_token_pool.mamba_allocator, scheduler.token_to_kv_pool_allocator
        self.record.free.append(tuple(pool.available_size() for pool in pools))
        self.step += 1
        if self.step > MOST_STEPS:
            raise RuntimeError(
                f"{MOST_STEPS} steps: {[name for name in self._reqs if not self._ended(name)]} still run"
            )
        due = [*self._arrivals(), *self._aborts()]
        scheduler.process_input_requests(due)
        idle = not due and not any(self._left.values()) and scheduler.is_fully_idle()
        self._quiet = self._quiet + 1 if idle else 0
        if scheduler.waiting_queue and scheduler.running_batch.is_empty():
            time.sleep(0.001)  # seconds, in which threads can read a store for a request
        scheduler.gracefully_exit = self._quiet > QUIET
        return due

    def _ended(self, name: str) -> bool:
        return name in self._gone or self._reqs[name].finished()

    def _arrivals(self) -> Iterator[Any]:
        for talk, left in self._left.items():
            last = self._last.get(talk)
            if last is not None and not self._ended(last):
                continue
            if left and left[0].at <= self.step:
                if self._pair.sessions and last is None:
                    yield OpenSessionReqInput(capacity_of_str_len=10**6, session_id=str(talk), streaming=True)
                yield self._request(left.pop(0), last)
            elif not left and self._pair.sessions and last is not None:
                del self._last[talk]
                yield CloseSessionReqInput(session_id=str(talk))

    def _request(self, turn: Turn, last: str | None) -> Any:
        name = f"{turn.talk}.{sum(name.startswith(f'{turn.talk}.') for name in self._arrived)}"
        before = [] if last is None else self._prompts[last] + list(self._reqs[last].output_ids)
        prompt = self._prompts[name] = [*before, *turn.fresh]
        self._last[turn.talk], self._arrived[name] = name, self.step
        sampling = SamplingParams(max_new_tokens=turn.answer, temperature=0.0)
        sampling.normalize(None)
        session = SessionParams(id=str(turn.talk)) if self._pair.sessions else None
        return TokenizedGenerateReqInput(
            rid=name, input_text="", input_ids=array("q", turn.fresh if session else prompt), input_embeds=None,
            mm_inputs=None, token_type_ids=None, sampling_params=sampling, return_logprob=False, logprob_start_len=-1,
            top_logprobs_num=0, token_ids_logprob=None, stream=False, session_params=session,
        )  # fmt: skip

    def _aborts(self) -> Iterator[Any]:
        for name, after in self._pair.aborts.items():
            if self._arrived.get(name, self.step) + after == self.step and name in self._arrived:
                yield AbortReq(rid=name)
