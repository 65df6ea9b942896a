"""Serves rounds of requests with vLLM's own engine on a CPU. Returns answers, figures, and what is still held."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final

from tests.proof.engines.vllm.job import Ask, Job
from tests.proof.engines.vllm.mended import run_ahead
from tests.proof.engines.vllm.talks import Talks
from tests.proof.engines.vllm.theirs import stand_in

SECONDS: Final = 120  # limit for saves and writes after the last request
CALLS: Final = (
    "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta", "update_connector_output",
    "request_finished_all_groups", "start_load_kv", "wait_for_save", "get_transfer_results", "get_finished",
    "build_connector_worker_meta", "wait_for_layer_load", "save_kv_layer", "has_pending_push_work",
)  # fmt: skip


class Measured:
    """Sums the CPU time of this thread in calls. A call inside another call of the same label does not count again.

    Attributes:
        seconds: Label -> CPU time.
    """

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._inside: set[str] = set()

    def watch(self, label: str, thing: Any, names: Iterable[str]) -> None:
        """Measures methods of an object from now on.

        Args:
            label: The label to which their time is added.
            thing: The object.
            names: Names of its methods. Names that it does not have are skipped.
        """
        for name in names:
            if (method := getattr(thing, name, None)) is not None:
                setattr(thing, name, self._measured(label, method))

    def _measured(self, label: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if label in self._inside:
                return method(*args, **kwargs)
            self._inside.add(label)
            began = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds[label] += time.thread_time() - began
                self._inside.discard(label)

        return call


class Engine:
    """vLLM's engine. This class calls each of its steps.

    Args:
        job: The requests, aborts and resets.
        model: Folder of the model.
    """

    def __init__(self, job: Job, model: str) -> None:
        from vllm import LLM

        if job.theirs:
            stand_in()
        if job.asynchronous:
            run_ahead()
        given = {
            "worker_extension_cls": "tests.proof.engines.vllm.mended.Mended",  # imported by each worker
            "skip_tokenizer_init": True, "enforce_eager": True, "enable_prefix_caching": True, "block_size": 32,
            "dtype": "float32", "num_gpu_blocks_override": 200, "kv_cache_memory_bytes": 1 << 28, "max_model_len": 1024,
            "max_num_seqs": 6, "seed": 0, "kv_transfer_config": job.connector and dict(job.connector),
        }  # fmt: skip
        self.job, self.llm = job, LLM(model, **given | dict(job.options))
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.draw = random.Random(1)
        self.counts = Counter[str](ahead=int(self.core.batch_queue is not None))
        self.answers: dict[str, dict[str, Any]] = {}
        self.cost = Measured()
        self.cost.watch("step", self.core, ["step_fn"])
        if self.scheduler.connector is not None:
            self.cost.watch("scheduler", self.scheduler.connector, CALLS)
            if (worker := self.worker) is not None:
                self.cost.watch("worker", worker, CALLS)
        preempt = self.scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> None:
            self.counts["preempted"] += 1
            preempt(*args, **kwargs)

        self.scheduler._preempt_request = counted

    @property
    def worker(self) -> Any:
        """The connector of the worker; None if the workers are other processes."""
        import vllm.distributed.kv_transfer.kv_transfer_state as state

        return state._KV_CONNECTOR_AGENT

    def serve(self, asks: list[Ask]) -> None:
        """Serves the requests of a round. One or two of them arrive in each step, in order."""
        from vllm import SamplingParams

        waiting, length = list(asks), self.job.tokens
        greedy = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False, logprobs=0)
        while waiting or self.engine.has_unfinished_requests():
            room = self.draw.randint(1, 2) if not self.job.serial else not self.engine.has_unfinished_requests()
            for _ in range(min(len(waiting), room)):
                name, prompt = waiting.pop(0)
                self.engine.add_request(name, {"prompt_token_ids": prompt}, greedy)
                self.answers[name] = {
                    "tokens": [],
                    "logprobs": [],
                    "cached": 0,
                    "aborted": False,
                    "prompt": len(prompt),
                }
            for out in self.engine.step():
                (chosen,), answer = out.outputs, self.answers[out.request_id]
                self.counts["accepted"] += max(0, len(chosen.token_ids) - len(answer["tokens"]) - 1)
                answer["tokens"] = list(chosen.token_ids)
                answer["logprobs"] = [next(iter(each.values())).logprob for each in chosen.logprobs]
                answer["cached"] = out.num_cached_tokens or 0
            self.counts["steps"] += 1
            self.happen()

    def happen(self) -> None:
        """At random, aborts a request and resets the caches, while other requests run."""
        job, running = self.job, [each for each, answer in self.answers.items() if not answer["aborted"]]
        unfinished = [name for name in running if len(self.answers[name]["tokens"]) < job.tokens]
        if job.abort and unfinished and self.draw.random() < job.abort:
            name = self.draw.choice(unfinished)
            self.engine.abort_request([name])
            self.answers[name]["aborted"] = True
        if self.draw.random() < job.reset:
            self.reset()

    def reset(self) -> None:
        """Resets vLLM's cache and the connector's. vLLM refuses a reset while a block is held."""
        try:
            done = self.engine.reset_prefix_cache(reset_running_requests=self.job.reset_running, reset_connector=True)
        except RuntimeError as error:  # raised in vLLM's scheduler.py, line 2871, if a request waits for a load
            if "waiting for remote KV transfer" not in str(error):
                raise
            done = False
        self.counts["resets" if done else "resets refused"] += 1

    def settle(self) -> None:
        """Runs steps until the connector has nothing left to do."""
        end = time.monotonic() + SECONDS
        while self.scheduler.connector is not None and self.scheduler.connector.has_pending_push_work():
            if time.monotonic() > end:
                raise TimeoutError(f"{SECONDS} s, and the connector has not ended its saves and writes")
            self.core.step()

    def forget(self) -> None:
        """Empties vLLM's own cache, so that hits come from the connector. vLLM refuses while a block is held."""
        if not self.engine.reset_prefix_cache():
            raise AssertionError("vLLM's blocks are held by nobody that runs")

    def spoil(self) -> None:
        """Makes records in host memory change places, so that each loaded block is a wrong one."""
        pool = self.worker.worker._cache.pool
        used = sorted(entry.record for entry in self.scheduler.connector.scheduler.cache.entries())
        pool.memory[used] = pool.memory[used].roll(1, 0)

    def left(self) -> list[str]:
        """Returns a line for each block, request or record that is held although no request runs."""
        pool = self.scheduler.kv_cache_manager.block_pool
        free, blocks = pool.get_num_free_blocks(), pool.num_gpu_blocks - 1  # without the null block
        faults = [] if free == blocks else [f"{free} of {blocks} blocks of vLLM are free"]
        faults += [f"block {block.block_id} has {block.ref_cnt} owners" for block in pool.blocks[1:] if block.ref_cnt]
        faults += [f"request {name} is kept" for name in self.scheduler.requests]
        if (connector := self.scheduler.connector) is None or self.job.theirs:
            return faults
        sides = [connector.scheduler] + ([self.worker.worker] if self.worker is not None else [])
        names = (
            "_known",
            "_loads",
            "_saves",
            "_saving",
            "_writes",
            "_waiting",
            "_packed",
            "_reading",
            "_loading",
            "_writing",
            "_to_write",
        )
        faults += [f"{name} of the connector: {kept}" for side in sides for name in names
                  if (kept := getattr(side, name, None))]  # fmt: skip
        return faults + connector.scheduler.cache.miscounts(Counter(), 0)


def serve(job: Job, model: str) -> dict[str, Any]:
    """Runs a job in this process.

    Args:
        job: The job.
        model: Folder of the model.

    Returns:
        A dict: the served `rounds`, the `answers`, the `counts`, the `cost` in seconds, and `left`, which has a line
        for each block, request or record that is still held.
    """
    engine = Engine(job, model)
    rounds = job.rounds or []
    if not rounds:
        talks = Talks(job.requests, job.opening)
        while asks := talks.ask():
            engine.serve(asks)
            if not job.serial:
                talks.answered({name: answer["tokens"] for name, answer in engine.answers.items()})
            rounds.append(asks)
    for number, asks in enumerate(job.rounds or []):
        engine.serve([Ask(*each) for each in asks])
        engine.settle()
        if job.reset and number % 2:  # no request runs, so vLLM does not refuse
            engine.reset()
        elif job.forget:
            engine.forget()
        if job.spoil:
            engine.spoil()
    engine.settle()
    left = engine.left()
    engine.core.shutdown()
    ours = getattr(engine.scheduler.connector, "counts", None)
    counts = engine.counts | Counter(vars(ours) if ours is not None else {})
    return {
        "rounds": rounds, "answers": engine.answers, "left": left, "counts": counts,
        "cost": engine.cost.seconds,
    }  # fmt: skip
