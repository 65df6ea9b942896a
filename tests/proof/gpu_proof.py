"""Proves on a GPU what can only be shown there: `python3 -m tests.proof.gpu_proof --out DIR`, at most 9 minutes.

Installs nothing and needs no network, make or git: torch, triton, numpy, einops, pytest and hypothesis, and the
checkout as the working directory. Every part is a process with a limit of its own; what it found is in DIR as soon as
it ends, and a part that fails or crashes does not keep the others from running. A part that runs out of time is
incomplete, which is no failure: what it did until then counts. The first part compiles, in parallel, the kernels that
the others launch; they load them from its cache. Where GPU time is short, `--seconds 420` fits all parts into 7
minutes; operations that no committed run has proved come first. At most 6 files, of at most 16 MB each:

    summary.json   machine, versions, commit, a hash of the files, and how each part ended
    proofs.json    what the parts found, by the names of `PARTS`
    gpu-tests.xml  those of the tests marked `gpu` that were chosen
    bench.json     `memstate bench` alloc, copy, state and track
    DEVICE.json    configurations as kernels/tuned/ takes them
    log.txt        what the parts printed

Exits with 0 where no part failed, and on a machine without a GPU, where there is nothing to prove; with 1 where one
failed, or where there is a GPU that torch cannot use; with 2 where DIR cannot be written.
`--toy` takes the same course on a CPU at sizes that prove nothing about a GPU.
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
SECONDS = 525.0  # in all; 9 minutes with what it takes to find the device and to end the last part
MOST_BYTES = 15 * 2**20  # of a file
LOG_BYTES = 1_500_000  # of each part
GRACE = 3.0  # seconds before its limit at which a part should have ended by itself
ASKED = 3.0  # seconds that a process has from the end of its time until it is killed
KILLED = 10.0  # seconds that a killed one is waited for: what hangs in the driver may not end at all
LEAST = 0.2  # share of its own time below which a part is not started
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
RUNNING = ("kernels", "memstate", "tests", "tools")  # folders of the checkout
FILES = ("summary.json", "proofs.json", "gpu-tests.xml", "bench.json", "log.txt")
PROGRAM = "{python} -m tests.proof.gpu.{name} --json {folder}/{name}.json --seconds {seconds}"


@dataclass(frozen=True)
class Part:
    """A command, its words separated by blanks, and the seconds that are kept for it.

    {folder}: where it writes, {name}.json first of all; {seconds}: what it is given. files: others that it leaves
    there, and their names in the output.
    """

    name: str
    seconds: float
    command: str = PROGRAM
    files: tuple[tuple[str, str], ...] = ()


PARTS = (  # what finds faults comes before what is timed
    Part("compiling", 55),
    Part("determinism", 25),
    Part("sanitizer", 40),
    Part("tests", 100, files=(("gpu-tests.xml", "gpu-tests.xml"),)),
    Part("serving", 35),
    Part("graphs", 35),
    Part("streams", 20),
    Part("stress", 60),
    Part("benches", 100, files=(("bench.json", "bench.json"),)),
    Part("sweep", 55),
)
FINE = ("ok", "unavailable")


class Proof:
    """Runs parts one after the other and keeps what they find.

    out: where files go. seconds: for all parts together. toy: parts get `--toy` and see no GPU. gpu: what to say of it.
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
        for name in (*FILES, tuned):  # those of an earlier run: what lies here is of this one
            if name and (out / name).is_file():
                (out / name).unlink()
        (out / "log.txt").write_text("", encoding="utf-8")
        self._write("summary.json", self.summary)

    def run(self, parts: Sequence[Part]) -> bool:
        """Whether no part failed.

        Where there is less time than the parts ask for, each gets as much less. What one leaves goes to the next.
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
        found = read_json(self._folder / f"{part.name}.json")
        if found is not None:
            self._proofs[part.name] = found
        self._collect(part, found)
        failures = found.get("failures", []) if isinstance(found, dict) else []
        incomplete = found.get("incomplete") if isinstance(found, dict) else None
        if failures:
            self._note(part, "failed", f"{len(failures)} failures, first: {failures[0]}", spent, status)
        elif status is None:
            self._note(part, "incomplete", f"ended after {seconds:.0f} s", spent)
        elif status < 0:
            self._note(part, "crashed", f"signal {-status}", spent)
        elif status > 0 or found is None:
            self._note(part, "failed", last_line(log) or "no result", spent, status)
        elif incomplete:
            self._note(part, "incomplete", str(incomplete), spent)
        elif isinstance(found, dict) and "unavailable" in found:
            self._note(part, "unavailable", str(found["unavailable"]), spent)
        else:
            self._note(part, "ok", "", spent)

    def _environment(self) -> dict[str, str]:
        """Compiled kernels are shared by the parts, and no configuration of the user's is looked into."""
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH", ""))))
        environment["PYTHONUNBUFFERED"] = "1"
        environment["OMP_NUM_THREADS"] = "1"  # of each of several processes
        environment["TRITON_CACHE_DIR"] = str(self._folder / "triton")
        environment["MEMSTATE_TUNED"] = str(self._folder / "tuned")
        environment.pop("TRITON_INTERPRET", None)
        if self.toy:
            environment |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
        return environment

    def _collect(self, part: Part, found: Any) -> None:
        """Puts the files of a part where they are kept."""
        for source, target in part.files:
            path = self._folder / source
            if path.exists() and path.stat().st_size <= MOST_BYTES:
                shutil.copyfile(path, self.out / target)
        if isinstance(found, dict) and "tuned" in found:
            self._write(str(found["file"]), found["tuned"])
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
        """Whole or not at all, within the limit."""
        text = json.dumps(data, indent=1) + "\n"
        if len(text.encode()) > MOST_BYTES:
            text = json.dumps({"left out": f"{len(text)} characters"}) + "\n"
        new = self.out / f"{name}.new"
        new.write_text(text, encoding="utf-8")
        new.replace(self.out / name)


def limited(command: Sequence[str], seconds: float, environment: dict[str, str], output: Any) -> int | None:
    """The exit status of a command, negative for a signal; None where it was ended at its limit, with all it began."""
    process = begin(command, environment, output)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end(process)


def begin(command: Sequence[str], environment: Mapping[str, str], output: Any) -> subprocess.Popen[bytes]:
    """A process in the root of the checkout that `end` ends with all it began."""
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process of `begin`, first by asking: then it keeps what it found, and ends what it began itself."""
    for sign, seconds in ((signal.SIGTERM, ASKED), (signal.SIGKILL, KILLED)):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, sign)  # the process itself, or what it has left behind
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


def read_json(path: Path) -> Any:
    """The content of a file; None where there is none, or where its writer was ended in the middle."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def last_line(path: Path) -> str:
    """Of a log."""
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def said(*command: str) -> str:
    """What a command prints; empty where it is not there, fails or hangs."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def commit() -> str:
    """Of the checkout, marked where files differ from it; "unknown" without git, where `tree` says what ran."""
    found = said("git", "rev-parse", "HEAD") if (ROOT / ".git").exists() else ""
    return f"{found}{'-changed' if said('git', 'status', '--porcelain') else ''}" if found else "unknown"


def tree(root: Path = ROOT) -> str:
    """A hash of the files that run, whether git is here or not: equal files have equal hashes, in any checkout."""
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
    """Clocks and such of every GPU, as the driver's tool says them."""
    lines = said("nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,noheader").splitlines()
    return [dict(zip(CLOCKS.split(","), map(str.strip, line.split(",")), strict=False)) for line in lines]


def machine() -> dict[str, Any]:
    """What the parts run on."""
    return {"python": platform.python_version(), "system": platform.platform(), "cpus": os.cpu_count()} | {
        "nvidia-smi": nvidia_smi()
    }


def versions() -> dict[str, str]:
    """Of the packages that matter; those that are missing are not there."""
    found = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


ASK = """
import json, torch
gpu = torch.cuda.get_device_properties(0)
print(json.dumps({
    "name": gpu.name, "capability": [gpu.major, gpu.minor], "memory": gpu.total_memory,
    "multiprocessors": gpu.multi_processor_count, "cuda": torch.version.cuda, "hip": torch.version.hip,
}))
"""


def find_gpu() -> tuple[Any, str]:
    """What torch says of the first GPU; None without one, and why. Another process asks: this one touches no device."""
    try:
        done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, timeout=90, check=False)
        if done.returncode == 0:
            return json.loads(done.stdout.splitlines()[-1]), ""
        return None, (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return None, f"{type(error).__name__}: {error}"


def main() -> int:
    """See the top of this file."""
    parser = argparse.ArgumentParser("python3 -m tests.proof.gpu_proof")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all parts together")
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a part is ended with this program
    left = given.seconds - (time.monotonic() - begun)
    try:
        proof = Proof(given.out, left, given.toy, gpu)
    except OSError as error:
        print(f"--out {given.out}: {error}")
        return 2
    good = proof.run(PARTS)
    late = [name for name, entry in proof.summary["parts"].items() if entry["status"] == "incomplete"]
    said = f"nothing failed; incomplete: {', '.join(late)}" if late else "proved"
    print(said if good else f"not proved: see {given.out / 'summary.json'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
