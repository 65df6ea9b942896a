"""Runs vLLM's whole engine on a CPU, once with memstate's connector, once without a cache. Compares the answers.

Run it in the environment of `pins.txt`:

    python -m tests.proof.engines.vllm.run [--only SCENARIO ...] [--requests N] [--json PATH]

`--only peers` runs memstate's connector and vLLM's own connectors with the same requests.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tests.proof.engines.vllm.compared import Outcome, compared
from tests.proof.engines.vllm.job import Job
from tests.proof.engines.vllm.scenarios import PEERS, SCENARIOS, Scenario

VARIABLES: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
}  # fmt: skip


class Processes:
    """Runs vLLM in processes. They are forked, because to import vLLM takes longer than most runs.

    Args:
        folder: Folder for models, results and logs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._made, self._count = folder, dict[str, dict[str, Any]](), 0
        self._fork = multiprocessing.get_context("fork")

    def run(self, *jobs: Job) -> list[dict[str, Any]]:
        """Runs jobs at the same time, each in a process. Returns their results.

        Raises:
            RuntimeError: A process failed. The text has the end of its output.
        """
        begun = [self._begin(job) for job in jobs]
        for process, _, log in begun:
            process.join()
            if process.exitcode:
                raise RuntimeError(f"vLLM ended with {process.exitcode}: {log}\n{log.read_text()[-3000:]}")
        return [json.loads(result.read_text()) for _, result, _ in begun]

    def reference(self, job: Job) -> dict[str, Any]:
        """Returns the result of a job without a connector. Scenarios with equal jobs share one run."""
        key = json.dumps(vars(job), sort_keys=True)
        if key not in self._made:
            [self._made[key]] = self.run(job)
        return self._made[key]

    def _begin(self, job: Job) -> tuple[Any, Path, Path]:
        self._count += 1
        result, log = (self.folder / f"{self._count}.{end}" for end in ("json", "log"))
        process = self._fork.Process(target=_work, args=(job, self.folder / job.model, result, log))
        process.start()
        return process, result, log


def _work(job: Job, model: Path, result: Path, log: Path) -> None:
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    from tests.proof.engines.vllm.models import make
    from tests.proof.engines.vllm.serve import serve

    if not model.is_dir():
        make(job.model, model, job.seed)
    result.write_text(json.dumps(serve(job, str(model))))


def prove(scenario: Scenario, processes: Processes) -> Outcome:
    """Runs a scenario, and returns its outcome."""
    right, transfer = processes.reference(scenario.reference), scenario.transfer
    store = Path(tempfile.mkdtemp(dir=processes.folder))
    if scenario.store:
        transfer["kv_connector_extra_config"]["store"] = str(store)
    job = replace(scenario.job, rounds=right["rounds"], connector=transfer)
    results = [(right, result) for result in processes.run(*[job] * scenario.at_once)]
    if scenario.then:
        last = right["rounds"][-1:]
        if scenario.then == "damaged":
            damage(store)
        elif scenario.then == "reweighted":
            shutil.rmtree(processes.folder / job.model)
            [right] = processes.run(replace(scenario.reference, rounds=last, seed=1))
        [again] = processes.run(replace(job, rounds=last, seed=int(scenario.then == "reweighted")))
        results.append((right, again))
    return compared(scenario, results)


def damage(store: Path) -> None:
    """Flips one bit in every second record of a store."""
    from memstate.tiers.records import MAGIC  # late: it imports torch, which reads the environment that `main` sets

    for path in sorted(path for path in store.rglob("*") if path.is_file())[::2]:
        record = bytearray(path.read_bytes())
        if record.startswith(MAGIC):
            record[-len(record) // 2] ^= 1
            path.write_bytes(record)


def main() -> int:
    """Returns 0 if all scenarios passed, otherwise 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=["peers", *SCENARIOS], metavar="SCENARIO")
    parser.add_argument("--requests", type=int, metavar="N", help="of each scenario")
    parser.add_argument("--json", type=Path, metavar="PATH")
    chosen = parser.parse_args()
    os.environ |= VARIABLES
    import vllm
    from vllm import LLM  # noqa: F401 (for the forks)

    only = chosen.only or list(SCENARIOS)
    scenarios = {name: scenario for name, scenario in SCENARIOS.items() if name in only}
    scenarios |= PEERS if "peers" in only else {}
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory() as folder:
        processes = Processes(Path(folder))
        for name, scenario in scenarios.items():
            if chosen.requests:
                scenario = replace(scenario, job=replace(scenario.job, requests=chosen.requests))
            try:
                outcomes[name] = prove(scenario, processes)
            except RuntimeError as error:
                outcomes[name] = Outcome(failures=[str(error)])
            print(f"{name}: {outcomes[name]}", flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps({name: vars(outcome) for name, outcome in outcomes.items()}, indent=2))
    failed = [name for name, outcome in outcomes.items() if outcome.failures]
    total = Outcome.sum(outcome for name, outcome in outcomes.items() if not scenarios[name].wrong)
    print(f"vllm {vllm.__version__}: {total.text}: {'failed: ' + ', '.join(failed) if failed else 'ok'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
