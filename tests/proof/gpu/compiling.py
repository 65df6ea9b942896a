"""Compiles the kernels of the other parts, in parallel processes, into the cache that all parts share.

Each process is one of the other parts with `--compile`: it launches each of its kernels as few times as possible.
Kernels that only the tests launch are compiled by the tests, which run in parallel anyway.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.proof.gpu.machine import Machine, Result
from tests.proof.gpu_proof import last_line, read_json

ROOT = Path(__file__).parents[3]
SHARES = {  # part -> number of processes among which its work is divided
    "decode": 12, "touch": 4, "determinism": 4, "benches": 4, "sweep": 4, "graphs": 1, "stress": 1, "serving": 1,
    "streams": 1,
}  # fmt: skip
TOY_SHARES = {"decode": 1, "stress": 1}
MARGIN = 2.0  # seconds between the end of the processes and the limit


def prove(machine: Machine, result: Result) -> None:
    """Runs all processes, as many at a time as there are CPUs. Ignores failures: the parts themselves report them."""
    shares = TOY_SHARES if machine.toy else SHARES
    shares = {machine.only: shares[machine.only]} if machine.only else shares
    waiting = [(name, at, of) for name, of in shares.items() for at in range(of)]
    running: dict[str, tuple[subprocess.Popen[bytes], float, Path]] = {}
    result["processes"] = {}
    with tempfile.TemporaryDirectory() as folder:

        def ended(name: str, status: str) -> None:
            process, begun, log = running.pop(name)
            outcome = read_json(log.with_suffix(".json")) or {}
            entry = {"status": status, "seconds": round(time.monotonic() - begun, 1), **outcome.get("kernels", {})}
            if status != "ended" or process.returncode:
                entry["why"] = (outcome.get("failures") or [last_line(log)])[0][-300:]
            result["processes"][name] = entry
            machine.keep(result)

        while waiting or running:
            while waiting and len(running) < max(1, os.cpu_count() or 1):
                name, at, of = waiting.pop(0)
                log = Path(folder, f"{name}-{at}.log")
                command = [
                    sys.executable, "-m", "tests.proof.gpu", name, "--json", str(log.with_suffix(".json")),
                    "--seconds", f"{machine.left - MARGIN:.0f}", "--compile", "--share", f"{at}/{of}",
                ]  # fmt: skip
                with log.open("wb") as output:
                    process = subprocess.Popen(
                        command + ["--toy"] * machine.toy, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
                    )
                running[f"{name} {at + 1} of {of}"] = process, time.monotonic(), log
            for name in [name for name, (process, *_) in running.items() if process.poll() is not None]:
                ended(name, "ended")
            if machine.left < MARGIN:
                late = [*running, *(f"{name} {at + 1} of {of}" for name, at, of in waiting)]
                for name in list(running):
                    running[name][0].kill()
                    running[name][0].wait()
                    ended(name, "ended at the limit")
                waiting.clear()
                if late:
                    result["incomplete"] = f"ended at the limit: {', '.join(late)}; the parts compile the rest"
            time.sleep(0.05)
    cache = os.environ.get("TRITON_CACHE_DIR")
    result["cached"] = sum(1 for _ in Path(cache).iterdir()) if cache and Path(cache).is_dir() else 0
