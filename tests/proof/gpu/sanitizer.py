"""Runs compute-sanitizer and GSan, which look for invalid accesses, races and reads of uninitialised memory.

GSan, a part of newer releases of Triton, finds races between programs in global memory; compute-sanitizer finds those
in shared memory.

The tools run at the same time, each in its own process over all operations (`tests.proof.gpu.touch`). If a tool is
missing or does not know the device, its result is "unavailable", which is no failure. A complaint that names a kernel
of memstate is a failure. Complaints about other kernels, such as those of torch, are only counted.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from memstate.kernels.own import KERNELS
from tests.proof.gpu import touch
from tests.proof.gpu.machine import Machine, Result
from tests.proof.gpu_proof import begin, end
from tests.support.op_case import every

ROOT = Path(__file__).parents[3]
TOOLS = ("memcheck", "racecheck", "initcheck")
GSAN = "gsan"
TOUCH = [sys.executable, "-m", "tests.proof.gpu", "touch"]
OF_OTHERS = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # torch's cache of blocks would make them larger than their tensors
ENVIRONMENT = {GSAN: {"TRITON_INSTRUMENTATION_MODE": "gsan"}}
GSAN_FOUND = re.compile(r"(?:Read|Write) after (?:read|write) race detected.*")
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: .*?(\d+) (?:error|hazard)")
REFUSED = re.compile(r"(?i)device not supported|not supported on|unable to (?:load|find|open)|failed to initiali[sz]e")
TOUCHED = re.compile(r'"touched": (\[[^]]*\])')
NAMES = re.compile(r"^def (_\w+)\(", re.MULTILINE)
MARGIN = 5.0  # seconds between the end of the tools and the limit


def kernel_names() -> set[str]:
    """Returns the names of device functions of memstate and of operations of one's own. Complaints about them count."""
    files = (vars(sys.modules[kernel.launch.__module__]) for kernel in map(KERNELS.get, every()) if kernel)
    names = {name for file in files for name, function in file.items() if hasattr(function, "arg_names")}
    for path in (ROOT / "kernels").glob("*.py"):
        names |= set(NAMES.findall(path.read_text(encoding="utf-8")))
    return names


def no_gsan() -> str:
    """Returns why GSan cannot be used; "" if it can."""
    import triton

    try:
        is_there = find_spec("triton.experimental.gsan") is not None
    except ImportError:
        is_there = False
    return "" if is_there else f"Triton {triton.__version__} has no GSan"


def gsan_verdict(log: str, finished: bool) -> tuple[str, str]:
    """Returns how a run under GSan ended, as `verdict` does for other tools. A race ends the kernel and the run."""
    if race := GSAN_FOUND.search(log):
        return "failed", race[0]
    if not finished:
        return "unfinished", "ended at the limit; no race so far"
    last = (log.strip().splitlines() or ["no output"])[-1]  # if a tool does not work, this line names the error
    return ("ok", "no race") if '"failures": []' in log else ("unavailable", last)


def verdict(log: str, finished: bool, ours: set[str]) -> tuple[str, str]:
    """Judges the output of a tool. Returns ok, failed, unavailable or unfinished, and the reason.

    ours: the names of memstate's device functions.
    """
    complaints = [line for line in log.splitlines() if line.startswith("=========")]
    blamed = [line for line in complaints if re.search(r"\bat (?:0x\w+ in )?(\w+)", line)]
    mine = [line for line in blamed if any(re.search(rf"\b{name}\b", line) for name in ours)]
    counted = [int(number) for number in SUMMARY.findall(log)]
    if mine:
        return "failed", mine[0].strip("= ")
    if REFUSED.search(log) and '"touched"' not in log:
        return "unavailable", next(line for line in log.splitlines() if REFUSED.search(line)).strip("= ")
    if not finished:
        return "unfinished", "ended at the limit; nothing of ours named so far"
    if '"failures": []' not in log:
        return "failed", "the operations did not run through"
    if not counted:
        return "unavailable", "no summary in its output"
    others = f"{counted[-1]} complaints about kernels of others" if counted[-1] else "no complaint"
    return "ok", others


def prove(machine: Machine, result: Result) -> None:
    """Runs the tools at the same time. At toy sizes, only runs the operations that they would check."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if machine.toy:
        result["unavailable"] = "a CPU has no use for compute-sanitizer"
        touch.prove(machine, result)
        return
    commands = {}
    if tool is None:
        result.update(dict.fromkeys(TOOLS, "unavailable: no compute-sanitizer here"))
    else:
        commands = {name: [tool, "--tool", name, *TOUCH] for name in TOOLS}
    if why := no_gsan():
        result[GSAN] = f"unavailable: {why}"
    else:
        commands[GSAN] = [*TOUCH, "--gsan"]
    if not commands:
        result["unavailable"] = f"no compute-sanitizer here; {why}"
        return
    with tempfile.TemporaryDirectory() as folder:
        running = {}
        for name, command in commands.items():
            environment = os.environ | ENVIRONMENT.get(name, OF_OTHERS)
            log = Path(folder, name).open("w")  # noqa: SIM115
            running[name] = begin(command, environment, log), log
        try:
            for name, (process, log) in running.items():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(1.0, machine.left - MARGIN))
                finished = process.poll() is not None
                end(process)  # a tool runs the program in a child process
                log.close()
                text = Path(folder, name).read_text(errors="replace")
                word, why = gsan_verdict(text, finished) if name == GSAN else verdict(text, finished, kernel_names())
                result[name] = f"{word}: {why}"
                if touched := TOUCHED.search(text):
                    result["touched"] = json.loads(touched[1])
                print(f"== {name}: {word}: {why}\n{text[-8000:]}", flush=True)
                if word == "failed":
                    result["failures"].append(f"{name}: {why}")
                elif word == "unfinished":
                    result["incomplete"] = f"{result.get('incomplete', '')} {name}: {why}".strip()
                machine.keep(result)
        finally:  # runs even if the part itself is ended
            for process, _ in running.values():
                end(process)
        said = [str(result[name]) for name in running]
        if all(text.startswith("unavailable") for text in said):
            result["unavailable"] = said[0]
