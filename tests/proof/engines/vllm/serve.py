"""One process of vLLM's own engine on a CPU: serves rounds of requests, and writes what came out and what is left.

python -m tests.proof.engines.vllm.serve JOB.json RESULT.json
"""

import json
import random
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tests.proof.engines.vllm.measured import Measured
from tests.proof.engines.vllm.talks import Ask, Talks

SECONDS: Final = 120  # after which an engine that has nothing left to do but steps on is stuck
CALLS: Final = (
    "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta", "update_connector_output",
    "request_finished_all_groups", "start_load_kv", "wait_for_save", "get_transfer_results", "get_finished",
    "build_connector_worker_meta", "wait_for_layer_load", "save_kv_layer", "has_pending_push_work",
)  # fmt: skip


class Engine:
    """vLLM's engine, step by step.

    Args:
        job: What `run` wrote: `model`, `connector` (None for none), `options` of vLLM, and what happens meanwhile.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM

        mend(job)
        given = {
            "skip_tokenizer_init": True, "enforce_eager": True, "enable_prefix_caching": True, "block_size": 32,
            "dtype": "float32", "num_gpu_blocks_override": 200, "kv_cache_memory_bytes": 1 << 28, "max_model_len": 1024,
            "max_num_seqs": 6, "seed": 0, "kv_transfer_config": job["connector"],
        }  # fmt: skip
        self.job, self.llm = job, LLM(job["model"], **given | job["options"])
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.draw = random.Random(1)
        self.preempted, self.resets, self.steps = 0, Counter[str](), 0
        self.answers: dict[str, dict[str, Any]] = {}
        self.cost = Measured()
        self.cost.watch("step", self.core, ["step_fn"])
        if self.scheduler.connector is not None:
            self.cost.watch("scheduler", self.scheduler.connector, CALLS)
            if (worker := self.worker) is not None:
                self.cost.watch("worker", worker, CALLS)
        preempt = self.scheduler._preempt_request

        def counted(*args: Any) -> None:
            self.preempted += 1
            preempt(*args)

        self.scheduler._preempt_request = counted

    @property
    def worker(self) -> Any:
        """The connector of the worker, None if the workers are processes of their own."""
        import vllm.distributed.kv_transfer.kv_transfer_state as state

        return state._KV_CONNECTOR_AGENT

    def serve(self, asks: list[Ask]) -> None:
        """Serves a round: requests arrive in the order of the round, one or two a step."""
        waiting, length = list(asks), self.job["tokens"]
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False, logprobs=0)
        while waiting or self.engine.has_unfinished_requests():
            for _ in range(min(len(waiting), self.job["together"] or self.draw.randint(1, 2))):
                name, prompt = waiting.pop(0)
                self.engine.add_request(name, {"prompt_token_ids": prompt}, greedy)
                self.answers[name] = {"tokens": [], "logprobs": [], "cached": 0, "aborted": False, "prompt": len(prompt)}
            for out in self.engine.step():
                (chosen,), answer = out.outputs, self.answers[out.request_id]
                answer["tokens"] = list(chosen.token_ids)
                answer["logprobs"] = [next(iter(each.values())).logprob for each in chosen.logprobs]
                answer["cached"] = out.num_cached_tokens or 0
            self.steps += 1
            self.happen()

    def happen(self) -> None:
        """Aborts requests and resets caches while others run."""
        job, running = self.job, [each for each, answer in self.answers.items() if not answer["aborted"]]
        unfinished = [name for name in running if len(self.answers[name]["tokens"]) < job["tokens"]]
        if job["abort"] and unfinished and self.draw.random() < job["abort"]:
            name = self.draw.choice(unfinished)
            self.engine.abort_request([name])
            self.answers[name]["aborted"] = True
        if job["reset"] and self.draw.random() < job["reset"]:
            done = self.engine.reset_prefix_cache(reset_running_requests=job["reset_running"], reset_connector=True)
            self.resets["done" if done else "refused"] += 1

    def settle(self) -> None:
        """Steps until the connector has nothing left to do."""
        end = time.monotonic() + SECONDS
        while self.scheduler.connector is not None and self.scheduler.connector.has_pending_push_work():
            if time.monotonic() > end:
                raise TimeoutError(f"{SECONDS} s, and the connector has not ended its saves and writes")
            self.core.step()

    def forget(self) -> None:
        """Empties vLLM's own cache, so that hits come from the connector. It refuses while a block is held."""
        if not self.engine.reset_prefix_cache():
            raise AssertionError("vLLM's blocks are held by nobody that runs")

    def spoil(self) -> None:
        """Exchanges the records in host memory: each block that is loaded from now on is another's."""
        pool = self.worker.worker._cache.pool
        used = sorted(entry.record for entry in self.scheduler.connector.scheduler.cache.entries())
        pool.memory[used] = pool.memory[used].roll(1, 0)

    def left(self) -> list[str]:
        """Returns what is held though nothing runs; empty if all is well."""
        pool = self.scheduler.kv_cache_manager.block_pool
        free, blocks = pool.get_num_free_blocks(), pool.num_gpu_blocks - 1  # one is the null block
        found = [] if free == blocks else [f"{free} of {blocks} blocks of vLLM are free"]
        found += [f"block {block.block_id} has {block.ref_cnt} owners" for block in pool.blocks[1:] if block.ref_cnt]
        found += [f"request {name} is kept" for name in self.scheduler.requests]
        if (connector := self.scheduler.connector) is None or self.job["theirs"]:
            return found
        sides = [connector.scheduler] + ([self.worker.worker] if self.worker is not None else [])
        names = ("_known", "_loads", "_saves", "_saving", "_writes", "_reading", "_loading", "_writing", "_to_write")
        found += [f"{name} of the connector: {kept}" for side in sides for name in names
                  if (kept := getattr(side, name, None))]  # fmt: skip
        return found + connector.scheduler.cache.miscounts(Counter(), 0)


def mend(job: dict[str, Any]) -> None:
    """Works around what keeps vLLM from running the model on a CPU, and switches on what it switches off there."""
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    # mamba_mixer2.py, line 880 of 0.32.0: the scan for CPUs returns one state a sequence, but the checkpoint inside a
    # forward reads one a chunk: IndexError. Without checkpoints the scheduler ends a chunk where a state is kept.
    spec = MambaMixer2.get_kv_cache_spec
    MambaMixer2.get_kv_cache_spec = lambda self, config: replace(spec(self, config), num_prefill_checkpoint_blocks=0)
    if job["asynchronous"]:
        from vllm.platforms.cpu import CpuPlatform

        update = CpuPlatform.check_and_update_config.__func__

        def ahead(cls: type, config: Any) -> None:  # platforms/cpu.py, line 331: "not required on CPU"
            update(cls, config)
            config.scheduler_config.async_scheduling = True

        CpuPlatform.check_and_update_config = classmethod(ahead)


def main() -> None:
    """Does the job."""
    job = json.loads(Path(sys.argv[1]).read_text())
    engine = Engine(job)
    if job["rounds"] is None:
        talks, rounds = Talks(job["requests"], job["opening"]), []
        while asks := talks.ask():
            engine.serve(asks)
            talks.answered({name: answer["tokens"] for name, answer in engine.answers.items()})
            rounds.append(asks)
    else:
        rounds = [[Ask(*each) for each in asks] for asks in job["rounds"]]
        for asks in rounds:
            engine.serve(asks)
            engine.settle()
            if job["forget"]:
                engine.forget()
            if job["spoil"]:
                engine.spoil()
    engine.settle()
    connector = engine.scheduler.connector
    result = {
        "rounds": rounds, "answers": engine.answers, "left": engine.left(), "preempted": engine.preempted,
        "resets": engine.resets, "steps": engine.steps, "cost": engine.cost.seconds,
        "counts": vars(connector.counts) if connector is not None and not job["theirs"] else {},
    }  # fmt: skip
    engine.core.shutdown()
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
