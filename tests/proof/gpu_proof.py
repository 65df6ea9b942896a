"""Proves on a GPU what can only be shown there: `python3 -m tests.proof.gpu_proof --out DIR`, at most 9 minutes.

It needs torch, triton, numpy, einops, pytest and hypothesis, and the checkout as the working directory. It installs
nothing, and needs no network, make or git. Every part is a process with its own time limit. Its results are in DIR as
soon as it ends, and the other parts run even if it fails or crashes. A part that runs out of time is incomplete, not
failed: its results so far count. The first part compiles the kernels of the other parts in parallel, and they load them
from its cache. If GPU time is short, `--seconds 420` fits all parts into 7 minutes. Operations that no committed run
has proved come first. DIR gets at most 6 files, of at most 16 MB each:

    summary.json   machine, versions, commit, a hash of the files, and how each part ended
    proofs.json    name of a part in `PARTS` -> its results
    gpu-tests.xml  results of the chosen tests among those marked `gpu`
    bench.json     `memstate bench` alloc, copy, state and track
    DEVICE.json    launch configurations, in the format of kernels/tuned/
    log.txt        the output of the parts

Exits with 1 if a part failed or torch cannot use the GPU, with 2 if DIR cannot be written, otherwise with 0. Without a
GPU there is nothing to prove, so it exits with 0. `--toy` runs all parts on a CPU, at sizes that prove nothing about a
GPU.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 525.0  # seconds for all parts; with start and end of the program, it takes 9 minutes
MOST_BYTES = 15 * 2**20  # limit of a file in DIR
LOG_BYTES = 1_500_000  # bytes of the log that are kept per part
GRACE = 3.0  # seconds by which the time that a part is told is shorter than its limit, so that it ends by itself
ASKED = 3.0  # seconds between SIGTERM and SIGKILL
KILLED = 10.0  # seconds to wait after SIGKILL; a process that hangs in the driver may never end
LEAST = 0.2  # a part does not begin if a smaller share of its time is left
PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "einops",
    "pytest",
    "pytest-xdist",
    "hypothesis",
    "fla-core",
    "recurrent-memstate",
)
CLOCKS = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,temperature.gpu,power.draw,memory.total"
RUNNING = ("kernels", "memstate", "tests", "tools")  # folders whose files `tree` hashes
FILES = ("summary.json", "proofs.json", "gpu-tests.xml", "bench.json", "log.txt")
PROGRAM = "{python} -m tests.proof.gpu {name} --json {folder}/{name}.json --seconds {seconds}"


@dataclass(frozen=True)
class Part:
    """A part of the proof: a command, its words separated by blanks, and the seconds reserved for it.

    In the command, {folder} stands for the folder of its files, and {seconds} for its time. {name}.json in this folder
    has its results. files: (name in this folder, name in DIR) of each other file.
    """

    name: str
    seconds: float
    command: str = PROGRAM
    files: tuple[tuple[str, str], ...] = ()


PARTS = (  # checks come before measurements, except for those of decode steps, which are new
    Part("compiling", 55),
    Part("decode", 80),
    Part("determinism", 25),
    Part("sanitizer", 35),
    Part("tests", 85, files=(("gpu-tests.xml", "gpu-tests.xml"),)),
    Part("serving", 30),
    Part("graphs", 30),
    Part("streams", 20),
    Part("stress", 45),
    Part("benches", 75, files=(("bench.json", "bench.json"),)),
    Part("sweep", 45),
)
FINE = ("ok", "unavailable")


class Proof:
    """Runs parts one after the other, and keeps their results.

    out: folder for the files. seconds: time for all parts. toy: whether parts get `--toy` and see no GPU. gpu:
    properties of the GPU, for the summary.
    """

    def __init__(self, out: Path, seconds: float = SECONDS, toy: bool = False, gpu: Any = None) -> None:
        self.out, self.toy = out, toy
        self._end = time.monotonic() + seconds
        self._proofs: dict[str, Any] = {}
        self.summary: dict[str, Any] = {
            "ok": False, "complete": False, "toy": toy, "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit(), "tree": tree(), "gpu": gpu, "machine": machine(), "versions": versions(), "parts": {},
        }  # fmt: skip
        out.mkdir(parents=True, exist_ok=True)
        tuned = (read_json(out / "proofs.json") or {}).get("sweep", {}).get("file", "")
        for name in (*FILES, tuned):  # files of an earlier run
            if name and (out / name).is_file():
                (out / name).unlink()
        (out / "log.txt").write_text("", encoding="utf-8")
        self._write("summary.json", self.summary)

    def run(self, parts: Sequence[Part]) -> bool:
        """Runs the parts. Returns true if none failed.

        If there is less time than the parts need together, the time of each shrinks by the same factor. Time that a
        part does not use goes to the later parts.
        """
        with tempfile.TemporaryDirectory(prefix="proof-", ignore_cleanup_errors=True) as name:
            self._folder = Path(name)
            share = min(1.0, (self._end - time.monotonic()) / sum(part.seconds for part in parts))
            for at, part in enumerate(parts):
                later = share * sum(other.seconds for other in parts[at + 1 :])
                left = self._end - time.monotonic()
                given = min(left, max(share * part.seconds, left - later))
                if given < LEAST * part.seconds:
                    self._note(part, "incomplete", f"not begun: {max(0.0, left):.0f} s left, {part.seconds:.0f} meant")
                    continue
                self._run(part, given)
            ended = [entry["status"] for entry in self.summary["parts"].values()]
            self.summary["complete"] = all(status in FINE for status in ended)
            self.summary["ok"] = all(status in (*FINE, "incomplete") for status in ended)
            self.summary["clocks_after"] = nvidia_smi()
            self._write("summary.json", self.summary)
        return bool(self.summary["ok"])

    def _run(self, part: Part, seconds: float) -> None:
        print(f"-- {part.name}: up to {seconds:.0f} s", flush=True)
        inside = f"{max(1.0, seconds - GRACE):.0f}"
        words = {"python": sys.executable, "name": part.name, "folder": self._folder, "seconds": inside}
        command = [word.format(**words) for word in part.command.split()] + ["--toy"] * self.toy
        begun = time.monotonic()
        log = self._folder / f"{part.name}.log"
        with log.open("wb") as output:
            status = limited(command, seconds, self._environment(), output)
        spent = time.monotonic() - begun
        self._append_log(part, log)
        result = read_json(self._folder / f"{part.name}.json")
        if result is not None:
            self._proofs[part.name] = result
        self._collect(part, result)
        for bar, how in (result.get("bars", {}) if isinstance(result, dict) else {}).items():
            print(f"   {bar}: {how}", flush=True)
        failures = result.get("failures", []) if isinstance(result, dict) else []
        incomplete = result.get("incomplete") if isinstance(result, dict) else None
        if failures:
            self._note(part, "failed", f"{len(failures)} failures, first: {failures[0]}", spent, status)
        elif status is None:
            self._note(part, "incomplete", f"ended after {seconds:.0f} s", spent)
        elif status < 0:
            self._note(part, "crashed", f"signal {-status}", spent)
        elif status > 0 or result is None:
            self._note(part, "failed", last_line(log) or "no result", spent, status)
        elif incomplete:
            self._note(part, "incomplete", str(incomplete), spent)
        elif isinstance(result, dict) and "unavailable" in result:
            self._note(part, "unavailable", str(result["unavailable"]), spent)
        else:
            self._note(part, "ok", "", spent)

    def _environment(self) -> dict[str, str]:
        """Returns the environment of a part: the common cache of compiled kernels, and no settings of the user."""
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH", ""))))
        environment["PYTHONUNBUFFERED"] = "1"
        environment["OMP_NUM_THREADS"] = "1"  # several processes run at once
        environment["TRITON_CACHE_DIR"] = str(self._folder / "triton")
        environment["MEMSTATE_TUNED"] = str(self._folder / "tuned")
        environment.pop("TRITON_INTERPRET", None)
        if self.toy:
            environment |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
        return environment

    def _collect(self, part: Part, result: Any) -> None:
        """Copies the files of a part into DIR."""
        for source, target in part.files:
            path = self._folder / source
            if path.exists() and path.stat().st_size <= MOST_BYTES:
                shutil.copyfile(path, self.out / target)
        if isinstance(result, dict) and "tuned" in result:
            self._write(str(result["file"]), result["tuned"])
        self._write("proofs.json", self._proofs)

    def _note(self, part: Part, status: str, why: str, spent: float = 0.0, code: int | None = None) -> None:
        entry = {"status": status, "why": why[:2000], "seconds": round(spent, 1)}
        self.summary["parts"][part.name] = entry | ({} if code is None else {"exit": code})
        print(f"   {part.name}: {status}, {spent:.0f} s{f': {why[:300]}' if why else ''}", flush=True)
        self._write("summary.json", self.summary)

    def _append_log(self, part: Part, log: Path) -> None:
        text = log.read_bytes()
        kept = text[-LOG_BYTES:]
        with (self.out / "log.txt").open("ab") as file:
            file.write(f"\n==== {part.name}, {len(text)} bytes, the last {len(kept)} of them ====\n".encode() + kept)

    def _write(self, name: str, data: Any) -> None:
        """Writes a JSON file atomically. Leaves the data out if the file would be above the limit."""
        text = json.dumps(data, indent=1) + "\n"
        if len(text.encode()) > MOST_BYTES:
            text = json.dumps({"left out": f"{len(text)} characters"}) + "\n"
        new = self.out / f"{name}.new"
        new.write_text(text, encoding="utf-8")
        new.replace(self.out / name)


def limited(command: Sequence[str], seconds: float, environment: dict[str, str], output: Any) -> int | None:
    """Runs a command. At its limit, ends it with all its processes.

    Returns: its exit status, negative for a signal; None if it reached the limit.
    """
    process = begin(command, environment, output)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end(process)


def begin(command: Sequence[str], environment: Mapping[str, str], output: Any) -> subprocess.Popen[bytes]:
    """Starts a process in the root of the checkout. It gets a process group, so that `end` ends its children, too."""
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process of `begin` with its group. It gets SIGTERM first, so that it can write its results."""
    for sign, seconds in ((signal.SIGTERM, ASKED), (signal.SIGKILL, KILLED)):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, sign)  # other processes of the group may live longer
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file; None if it is missing or cut off."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def last_line(path: Path) -> str:
    """Returns the last line of a log."""
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def said(*command: str) -> str:
    """Returns the output of a command; "" if the command is missing, fails or hangs."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def commit() -> str:
    """Returns the commit of the checkout, with a mark if files were changed; "unknown" without git."""
    head = said("git", "rev-parse", "HEAD") if (ROOT / ".git").exists() else ""
    return f"{head}{'-changed' if said('git', 'status', '--porcelain') else ''}" if head else "unknown"


def tree(root: Path = ROOT) -> str:
    """Returns a hash of the files that run. It needs no git, and is the same for equal files in any checkout."""
    files = {
        path.relative_to(root).as_posix(): path
        for folder in RUNNING for path in (root / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }  # fmt: skip
    whole = sha256()
    for name in sorted(files):
        whole.update(f"{sha256(files[name].read_bytes()).hexdigest()} {name}\n".encode())
    return whole.hexdigest()


def nvidia_smi() -> list[dict[str, str]]:
    """Returns name, driver, clocks and more of every GPU, from nvidia-smi."""
    lines = said("nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,noheader").splitlines()
    return [dict(zip(CLOCKS.split(","), map(str.strip, line.split(",")), strict=False)) for line in lines]


def machine() -> dict[str, Any]:
    """Returns Python, system, CPUs and GPUs of this machine."""
    return {"python": platform.python_version(), "system": platform.platform(), "cpus": os.cpu_count()} | {
        "nvidia-smi": nvidia_smi()
    }


def versions() -> dict[str, str]:
    """Returns the versions of PACKAGES that are installed."""
    installed = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


ASK = """
import json, torch
gpu = torch.cuda.get_device_properties(0)
print(json.dumps({
    "name": gpu.name, "capability": [gpu.major, gpu.minor], "memory": gpu.total_memory,
    "multiprocessors": gpu.multi_processor_count, "cuda": torch.version.cuda, "hip": torch.version.hip,
}))
"""


def find_gpu() -> tuple[Any, str]:
    """Asks torch in another process for the first GPU. Returns its properties, or None, and why there is none."""
    try:
        done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, timeout=90, check=False)
        if done.returncode == 0:
            return json.loads(done.stdout.splitlines()[-1]), ""
        return None, (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return None, f"{type(error).__name__}: {error}"


def main(parts: Sequence[Part] = PARTS, seconds: float = SECONDS) -> int:
    """Runs parts of the proof from the command line, in so many seconds. Returns the exit status."""
    parser = argparse.ArgumentParser("python3 -m tests.proof.gpu_proof")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=seconds, help="for all parts together")
    parser.add_argument("--toy", action="store_true")
    given = parser.parse_args()
    if given.seconds <= 0 or str(given.out) == ".":
        parser.error(f"--seconds {given.seconds:g} --out {given.out}: expected more than 0 s, and a folder of its own")
    begun = time.monotonic()
    gpu, why = (None, "") if given.toy else find_gpu()
    if not given.toy and gpu is None:
        devices = nvidia_smi()
        if devices:
            print(f"{devices[0]['name']} is here, and torch of {sys.executable} cannot use it: {why}")
            return 1
        print(f"no GPU that {sys.executable} and its torch can use: nothing to prove here ({why})")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # SIGTERM to this program also ends the part
    left = given.seconds - (time.monotonic() - begun)
    try:
        proof = Proof(given.out, left, given.toy, gpu)
    except OSError as error:
        print(f"--out {given.out}: {error}")
        return 2
    good = proof.run(parts)
    late = [name for name, entry in proof.summary["parts"].items() if entry["status"] == "incomplete"]
    said = f"nothing failed; incomplete: {', '.join(late)}" if late else "proved" if gpu else "nothing failed, of toys"
    print(said if good else f"not proved: see {given.out / 'summary.json'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
