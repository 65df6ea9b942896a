"""Writes the results of a sweep: a document for people and scripts, and the file that launches read."""

import json
import os
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from memstate.atomic import replacing
from memstate.errors import InvalidArgument
from memstate.kernels import tuned, tuned_files
from memstate_tools.tuning.result import Result, Trial


def document(outcome: Result) -> dict[str, Any]:
    """Returns the document: the content of the file and every trial, with the reason if it was excluded."""
    best = outcome.best
    trials = [
        _entry(trial) | {
            "why": trial.why, "details": trial.details, "us": trial.micros, "default": trial.is_default,
            "chosen": trial in best,
        }
        for trial in outcome.trials
    ]  # fmt: skip
    return contents(outcome) | {"complete": outcome.complete, "trials": trials}


def contents(outcome: Result) -> dict[str, Any]:
    """Returns the content of the file for `tuned_files`: the best configuration of each kernel and key."""
    return {
        "format": tuned_files.FORMATS[-1],
        "device": outcome.device,
        "date": datetime.now(UTC).date().isoformat(),
        "versions": versions(),
        "timed": outcome.timed,
        "yardstick": outcome.yardstick,
        "entries": [_entry(trial) | {"made": _made(trial, outcome)} for trial in outcome.best],
    }


def require_folder(folder: Path | None = None) -> None:
    """Requires that `store` can write to a folder. The folder is not made.

    Args:
        folder: The folder. Default: the user's.

    Raises:
        InvalidArgument: The folder cannot be written. The message says how to choose another.
    """
    folder = folder or tuned_files.user_folder()
    there = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    if not os.path.isdir(there) or not os.access(there, os.W_OK | os.X_OK):
        raise InvalidArgument(
            f"nothing can be stored in {folder}: {there} is no folder that can be written to;"
            " MEMSTATE_TUNED names another, --dry-run stores nothing"
        )


def store(outcome: Result, folder: Path | None = None) -> Path:
    """Writes the file of the device, whole or not at all, and makes this process read it.

    Entries of the old file stay if this sweep has none for their key, or if this process could not use them because
    they were measured with something else. Processes that store at the same time wait for each other. Timed
    configurations replace ranked ones.

    Args:
        outcome: The sweep whose results are stored.
        folder: The folder. Default: the user's.

    Returns:
        The path of the file.

    Raises:
        InvalidArgument: There is nothing to store, or it would take the place of timed configurations.
        ValueError: The old file cannot be read.
        OSError: The file cannot be written.
    """
    from fcntl import LOCK_EX, flock  # Windows has none, and no Triton

    new = contents(outcome)
    if not new["entries"]:
        raise InvalidArgument(f"nothing to store for {outcome.device}: every configuration is excluded")
    folder = folder or tuned_files.user_folder()
    path = folder / tuned_files.file_name(outcome.device)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f".{path.name}.lock", "a") as lock:
        flock(lock, LOCK_EX)
        new["entries"] += _kept(path, new, outcome)
        with replacing(path) as file:
            file.write(json.dumps(new, indent=2).encode() + b"\n")
            file.flush()
            tuned_files.read(Path(file.name))  # the old file is only replaced by one that launches can read
    tuned.forget()
    return path


def versions() -> dict[str, str]:
    """Returns the versions of torch and Triton."""
    return {name: str(import_module(name).__version__) for name in ("torch", "triton")}


def _kept(path: Path, new: dict[str, Any], outcome: Result) -> list[dict[str, Any]]:
    """Returns the entries of the old file that stay."""
    if not path.exists():
        return []
    old = tuned_files.read(path)
    if (old["device"], old["timed"]) == (new["device"], new["timed"]):
        replaced = {(trial.kernel, trial.key): type(trial.config) for trial in outcome.best}
        return [
            entry for entry in old["entries"] if (kind := replaced.get((entry["kernel"], entry["key"]))) is None
            or tuned_files.why_stale(kind, entry["made"], outcome.architecture)
        ]  # fmt: skip
    if old["timed"] or old["device"] != new["device"]:
        raise InvalidArgument(f"{path} has configurations that were timed on {old['device']}: nothing is stored there")
    return []


def _made(trial: Trial, outcome: Result) -> dict[str, str]:
    """Returns from what a trial was made, beside the versions."""
    made = {"architecture": outcome.architecture, "source": outcome.sources.get(trial.kernel, "")}
    return {name: value for name, value in made.items() if value}


def _entry(trial: Trial) -> dict[str, Any]:
    return {
        "kernel": trial.kernel, "key": trial.key, "config": asdict(trial.config),
        "value": trial.value, "unit": trial.unit, "checked": trial.checked,
        **({"rows": trial.rows} if trial.rows > 1 else {}),
    }  # fmt: skip
