"""What a sweep leaves: a document for people and scripts, the file that launches read, and a log to resume from."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from math import isfinite
from pathlib import Path
from typing import Any
from zlib import crc32

from memstate.atomic import replacing
from memstate.cli.tune.trials import SweepResult, Trial, is_default
from memstate.errors import InvalidArgument
from memstate.kernels import tuned
from memstate.kernels.tuned import Config


def document(outcome: SweepResult) -> dict[str, Any]:
    """Returns the content of the file, with every trial and what was excluded and why."""
    best = outcome.best
    trials = [
        _entry(trial) | {
            "why": trial.why, "details": trial.details, "us": trial.micros, "default": is_default(trial),
            "chosen": trial in best,
        }
        for trial in outcome.trials
    ]  # fmt: skip
    return contents(outcome) | {"complete": outcome.complete, "trials": trials}


def contents(outcome: SweepResult) -> dict[str, Any]:
    """Returns what `memstate.kernels.tuned` reads: the best configuration of each kernel and key."""
    return {
        "format": tuned.FORMAT,
        "device": outcome.device,
        "date": datetime.now(UTC).date().isoformat(),
        "versions": versions(),
        "timed": outcome.timed,
        "yardstick": outcome.yardstick,
        "entries": [_entry(trial) for trial in outcome.best],
    }


def require_folder(folder: Path | None = None) -> None:
    """Checks that `store` could write to a folder, without making it.

    Args:
        folder: Where. Default: the user's.

    Raises:
        InvalidArgument: Says how to choose another.
    """
    folder = folder or tuned.user_folder()
    there = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    if not os.path.isdir(there) or not os.access(there, os.W_OK | os.X_OK):
        raise InvalidArgument(
            f"nothing can be stored in {folder}: {there} is no folder that can be written to;"
            " MEMSTATE_TUNED names another, --dry-run stores nothing"
        )


def store(outcome: SweepResult, folder: Path | None = None) -> Path:
    """Writes the file of the device whole or not at all, and makes this process read it.

    Entries of the old file stay where this sweep has none for their key and they were made alike: timed or not, with
    the same versions.

    Args:
        outcome: The sweep.
        folder: Where. Default: the user's.

    Raises:
        InvalidArgument: Nothing is left to store.
        OSError: The file cannot be written.
    """
    new = contents(outcome)
    if not new["entries"]:
        raise InvalidArgument(f"nothing to store for {outcome.device}: every configuration is excluded")
    folder = folder or tuned.user_folder()
    path = folder / tuned.file_name(outcome.device)
    new["entries"] += _kept(path, new)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(json.dumps(new, indent=2).encode() + b"\n")
        file.flush()
        tuned.read(Path(file.name))  # nothing is put there that a launch would refuse
    tuned.forget()
    return path


class SweepLog:
    """Trials in a file of JSON lines: a sweep that is interrupted goes on from there.

    The first line says what the trials depend on. A file that says something else is replaced.

    Args:
        device: Name of the device or target.
        timed: Whether trials are timed.
        model: Name of the model.
        folder: Where. Default: the user's.
    """

    def __init__(self, device: str, timed: bool, model: str, folder: Path | None = None) -> None:
        self.path = log_path(device, folder)
        head = {"format": tuned.FORMAT, "device": device, "timed": timed, "model": model, "versions": versions()}
        head["kernels"] = _sources()
        self._known: dict[tuple[str, str, Config], Trial] = {}
        lines = _lines(self.path)
        for line in lines[1:] if lines[:1] == [head] else ():
            if (trial := _trial(line)) is not None:
                self._known[trial.kernel, trial.key, trial.config] = trial
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _write(self.path, [head, *map(_line, self._known.values())])  # without what was cut off or damaged

    def __len__(self) -> int:
        return len(self._known)

    def find(self, kernel: str, key: str, config: Config) -> Trial | None:
        """Returns the trial of a configuration, None if there was none."""
        return self._known.get((kernel, key, config))

    def add(self, trial: Trial) -> None:
        """Appends a trial; one whose results were wrong is tried again."""
        if trial.checked:
            self._append(_line(trial))

    def _append(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _sources() -> int:
    """Returns a sum over the text of the kernels: what was measured of other kernels is no measure."""
    paths = sorted(Path(tuned.__file__).parent.glob("*.py"))
    return crc32(b"".join(path.read_bytes() for path in paths))


def log_path(device: str, folder: Path | None = None) -> Path:
    """Returns where the trials of an unfinished sweep are kept."""
    return (folder or tuned.user_folder()) / tuned.file_name(device).replace(".json", ".sweep.jsonl")


def end_log(outcome: SweepResult, folder: Path | None = None) -> None:
    """Forgets the trials of the kernels of a finished sweep; those of an interrupted sweep of others stay."""
    path, kernels = log_path(outcome.device, folder), {trial.kernel for trial in outcome.trials}
    head, *lines = _lines(path) or [{}]
    if others := [line for line in lines if (trial := _trial(line)) is not None and trial.kernel not in kernels]:
        _write(path, [head, *others])
    else:
        path.unlink(missing_ok=True)


def _write(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Writes a log, whole or not at all."""
    with replacing(path) as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines).encode())


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; a last one that was cut off is left out, and nothing is there if another line is broken."""
    with suppress(OSError, ValueError, RecursionError):
        whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]
    return []


def _line(trial: Trial) -> dict[str, Any]:
    return _entry(trial) | {"why": trial.why, "details": trial.details, "us": trial.micros}


def _trial(line: Any) -> Trial | None:
    """Returns the trial that a line tells of; None if the line is damaged."""
    try:
        trial = Trial(
            line["kernel"], line["key"], tuned.CONFIGS[line["kernel"]](**line["config"]), line["checked"],
            line["value"], line["unit"], line["why"], line["details"], line["us"],
        )  # fmt: skip
    except (KeyError, TypeError, ValueError):
        return None
    texts = all(isinstance(text, str) for text in (trial.kernel, trial.key, trial.unit, trial.why))
    numbers = all(number is None or _finite(number) for number in (trial.value, trial.micros))
    whole = texts and numbers and isinstance(trial.checked, bool) and isinstance(trial.details, dict)
    return trial if whole else None


def _finite(number: object) -> bool:
    return type(number) in (int, float) and isfinite(number)  # type: ignore[arg-type]


def versions() -> dict[str, str]:
    """Returns the versions of what compiled the kernels, as far as they are known."""
    found = {}
    for package in ("torch", "triton"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def text_of(config: Config) -> str:
    """Returns a configuration in one line."""
    return " ".join(f"{field.name}={getattr(config, field.name)}" for field in fields(config))


def marks(trial: Trial, outcome: SweepResult) -> list[str]:
    """Returns what a trial is: "chosen", "default", both or neither."""
    found = {"chosen": trial in outcome.best, "default": is_default(trial)}
    return [name for name, holds in found.items() if holds]


def in_order(outcome: SweepResult) -> list[Trial]:
    """Returns the trials kernel by kernel, the chosen one first and the excluded last."""
    best = outcome.best
    kernels = list(dict.fromkeys(trial.kernel for trial in outcome.trials))
    return sorted(
        outcome.trials,
        key=lambda trial: (kernels.index(trial.kernel), trial not in best, not trial.value, -trial.goodness),
    )


def table(outcome: SweepResult, stored: str | None) -> tuple[tuple[str, tuple[str, ...]], list[list[str]]]:
    """Returns title, headings, and a row per trial, those of a kernel together."""
    how = "timed" if outcome.timed else "NOT timed (no GPU): ranked by compiled code, launches keep their defaults"
    where = f"stored in {stored}" if stored else "nothing stored"
    headings = ("kernel", "key", "configuration", "us", "value", "unit", "note")
    rows = []
    for trial in in_order(outcome):
        value, micros = ("" if number is None else f"{number:.4g}" for number in (trial.value, trial.micros))
        note = trial.why or ", ".join(marks(trial, outcome))
        rows.append([trial.kernel, trial.key, text_of(trial.config), micros, value, trial.unit, note])
    how += "" if outcome.complete else "; INCOMPLETE: run it again to go on"
    return (f"{outcome.device}, {how}; {where}", headings), rows


def _kept(path: Path, new: dict[str, Any]) -> list[dict[str, Any]]:
    try:
        old = tuned.read(path)
    except ValueError:  # not there, or of no use to a launch either
        return []
    alike = all(old[name] == new[name] for name in ("device", "timed", "versions"))
    replaced = {(entry["kernel"], entry["key"]) for entry in new["entries"]}
    return [entry for entry in old["entries"] if alike and (entry["kernel"], entry["key"]) not in replaced]


def _entry(trial: Trial) -> dict[str, Any]:
    return {
        "kernel": trial.kernel, "key": trial.key, "config": asdict(trial.config),
        "value": trial.value, "unit": trial.unit, "checked": trial.checked,
    }  # fmt: skip
