"""Keeps trials in a file, one line of JSON each, so that a sweep goes on where an earlier one was interrupted."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from memstate.errors import InvalidArgument
from memstate.kernels.configs import Config
from memstate_tools.tuning.result import Trial

BEGIN = '{"of": "'  # of each line


class TrialFile:
    """A file of trials. A trial counts only for what it was made with: source, device, versions, batches.

    Args:
        path: The file; None keeps nothing.
        made: What all trials of this sweep are made with.

    Raises:
        InvalidArgument: The file cannot be read or written, or has other lines than trials.
    """

    def __init__(self, path: Path | None, made: Mapping[str, Any]) -> None:
        self._path, self._made = path, dict(made)
        self._found: dict[str, dict[str, Any]] = {}
        if path is None:
            return
        try:
            if path.exists() and not path.is_file():
                raise InvalidArgument(f"file {str(path)!r}: expected a file")
            with open(path, "a+", encoding="utf-8") as file:
                file.seek(0)
                lines = file.read().split("\n")
                for number, line in enumerate(lines, 1):
                    self._read(line, f"file {str(path)!r}, line {number}")
                if lines[-1]:  # the process that wrote it was killed
                    file.write("\n")
        except InvalidArgument:
            raise
        except (OSError, ValueError, RecursionError) as error:
            raise InvalidArgument(f"file {str(path)!r}: {error}") from error

    def _read(self, line: str, where: str) -> None:
        """Keeps the trial of a line. A line that was cut, because its process was killed, has none."""
        if not line.startswith(BEGIN[: len(line)]):
            raise InvalidArgument(f"{where}: {line[:40]!r} is no trial: name another file")
        with suppress(ValueError):
            trial = json.loads(line)
            self._found[trial["of"]] = trial

    def of(self, config: Config, key: str, source: str) -> Trial | None:
        """Returns the trial of a configuration; None if the file has none that was made with the same."""
        trial = self._found.get(self._hash(config, key, source))
        if trial is None:
            return None
        try:
            return Trial(**{name: value for name, value in trial.items() if name != "of"} | {"config": config})
        except TypeError as error:
            raise InvalidArgument(f"file {str(self._path)!r}: {error}: name another file") from error

    def add(self, trial: Trial, source: str) -> None:
        """Writes a trial at once."""
        if self._path is None:
            return
        line = {"of": self._hash(trial.config, trial.key, source), **vars(trial), "config": asdict(trial.config)}
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _hash(self, config: Config, key: str, source: str) -> str:
        made = {**self._made, "kernel": config.kernel, "config": asdict(config), "key": key, "source": source}
        return sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:16]
