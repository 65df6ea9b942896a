"""Runs SGLang's own event loop: requests come by step number, and everything that it decides is written down."""

from array import array
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.proof.engines.sglang.traffic import Turn

MOST_STEPS = 3000


@dataclass
class Record:
    """What a run did; two runs over different pools must be equal.

    Attributes:
        batches: of each step its mode, and each request with its length.
        free: before each step the free slots and the free KV tokens.
        logits: of each step a digest of the logits.
        tokens: of each request what it generated.
        hits: of each request the tokens that came from the cache.
        ends: of each request why it ended.
        retracted: requests that were put back for lack of memory.
        refused: claims of slots that found too few.
    """

    batches: list[tuple[str, list[tuple[str, int]]]] = field(default_factory=list)
    free: list[tuple[int, int]] = field(default_factory=list)
    logits: list[int] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)
    retracted: int = 0
    refused: int = 0

    def differences(self, other: "Record") -> list[str]:
        """Returns the names of what differs, with the first place."""
        found = []
        for name, mine in asdict(self).items():
            theirs = asdict(other)[name]
            if name != "refused" and mine != theirs:
                places = mine if isinstance(mine, dict) else range(max(len(mine), len(theirs))) if isinstance(mine, list) else ()
                first = next((at for at in places if mine[at : at + 1] != theirs[at : at + 1]), None) if isinstance(mine, list) else next((at for at in places if mine[at] != theirs.get(at)), None)
                found.append(f"{name} at {first}")
        return found


class Driver:
    """Takes the place of the scheduler's input.

    Args:
        scheduler: SGLang's, booted.
        turns: what arrives.
        aborts: names of requests by the number of steps after their arrival at which they are given up.
        sessions: whether a talk is a streaming session.
    """

    def __init__(self, scheduler: Any, turns: list[Turn], aborts: dict[str, int], *, sessions: bool) -> None:
        self.scheduler, self._sessions, self._aborts = scheduler, sessions, aborts
        self._waiting = {talk: [turn for turn in turns if turn.talk == talk] for talk in {turn.talk for turn in turns}}
        self._step = self._quiet = 0
        self._arrived: dict[str, int] = {}
        self._reqs: dict[str, Any] = {}
        self._gone: set[str] = set()  # ended outside the stream of results
        self._last: dict[int, str] = {}  # of each talk the newest request
        self._said: dict[int, list[int]] = {}  # of each talk the prompt of its newest request
        self.record = Record()
        self._hook()

    def run(self) -> Record:
        """Runs until every request has ended and the scheduler has checked its memory; returns what happened."""
        self.scheduler.run_event_loop()
        for name, req in self._reqs.items():
            self.record.tokens[name] = list(req.output_ids)
            self.record.hits[name] = req.cached_tokens
            self.record.ends[name] = type(req.finished_reason).__name__
        return self.record

    def _hook(self) -> None:
        scheduler, record = self.scheduler, self.record
        queue, run = scheduler._add_request_to_queue, scheduler.run_batch

        def enqueue(req: Any, *args: Any, **named: Any) -> Any:
            self._reqs[req.rid] = req
            record.retracted += bool(named.get("is_retracted"))
            return queue(req, *args, **named)

        def compute(batch: Any, *args: Any, **named: Any) -> Any:
            record.batches.append((batch.forward_mode.name, [*zip([req.rid for req in batch.reqs], batch.seq_lens_cpu.tolist(), strict=True)]))
            result = run(batch, *args, **named)
            logits = result.logits_output and result.logits_output.next_token_logits
            record.logits.append(hash(logits.numpy().tobytes()) if logits is not None else 0)
            return result

        scheduler._add_request_to_queue, scheduler.run_batch = enqueue, compute
        scheduler.ingest_requests = self._ingest
        for sender in (scheduler.ipc_channels.send_to_tokenizer, scheduler.ipc_channels.send_to_detokenizer):
            sender.socket = None  # nobody listens
            sender.send_output = lambda output, *_: self._gone.add(getattr(output, "rid", None))

    def _ingest(self, *_: Any, **__: Any) -> list[Any]:
        """What the loop calls at the start of each step."""
        scheduler = self.scheduler
        pool = scheduler.req_to_token_pool.mamba_allocator
        self.record.free.append((pool.available_size(), scheduler.token_to_kv_pool_allocator.available_size()))
        self._step += 1
        if self._step > MOST_STEPS:
            raise RuntimeError(f"{MOST_STEPS} steps: {[n for n in self._reqs if not self._ended(n)]} have not ended")
        due = [*self._due(), *self._given_up()]
        scheduler.process_input_requests(due)
        self._quiet = 0 if due or any(self._waiting.values()) or not scheduler.is_fully_idle() else self._quiet + 1
        scheduler.gracefully_exit = self._quiet > 2
        return due

    def _ended(self, name: str) -> bool:
        return name in self._gone or self._reqs[name].finished()

    def _due(self) -> list[Any]:
        from sglang.srt.managers import io_struct

        found: list[Any] = []
        for talk, left in self._waiting.items():
            last = self._last.get(talk)
            if left and left[0].at <= self._step and (last is None or self._ended(last)):
                if self._sessions and last is None:
                    found.append(io_struct.OpenSessionReqInput(capacity_of_str_len=10000, session_id=str(talk), streaming=True))
                found.append(self._request(left.pop(0)))
        return found

    def _request(self, turn: Turn) -> Any:
        from sglang.srt.managers import io_struct
        from sglang.srt.sampling.sampling_params import SamplingParams

        last = self._last.get(turn.talk)
        name = f"{turn.talk}.{sum(name.startswith(f'{turn.talk}.') for name in self._reqs)}"
        before = [] if last is None else self._said[turn.talk] + list(self._reqs[last].output_ids)
        prompt = [*before, *turn.fresh]
        self._said[turn.talk], self._last[turn.talk] = prompt, name
        self._arrived[name] = self._step
        params = SamplingParams(max_new_tokens=turn.answer, temperature=0.0, ignore_eos=True)
        params.normalize(None)
        return io_struct.TokenizedGenerateReqInput(
            rid=name, input_text="", input_ids=array("q", turn.fresh if self._sessions else prompt), input_embeds=None,
            mm_inputs=None, token_type_ids=None, sampling_params=params, return_logprob=False, logprob_start_len=-1,
            top_logprobs_num=0, token_ids_logprob=None, stream=False,
            session_params=io_struct.SessionParams(id=str(turn.talk)) if self._sessions else None,
        )

    def _given_up(self) -> list[Any]:
        from sglang.srt.managers import io_struct

        return [io_struct.AbortReq(rid=name) for name, after in self._aborts.items()
                if self._arrived.get(name, self._step) + after == self._step]
