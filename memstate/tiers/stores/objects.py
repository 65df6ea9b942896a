"""Stores records as objects of S3, GCS or Azure, of a folder, or of this process's memory, through `obstore`.

The record `state-<digest>` is the object `state/<digest>` below the URL, because stores list whole segments of names.
This module does not check the contents of records: the reader does.
"""

import errno
import importlib
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import numpy as np
from torch import Tensor

from memstate.checks import whole
from memstate.errors import ConfigurationError, InvalidArgument
from memstate.sizes import format_bytes
from memstate.tiers.stores.base import (
    RECORD,
    Bytes,
    Outcome,
    faults_of,
    faults_since,
    reason_of,
    require_buffers,
    require_names,
)

INSTALL = "pip install '.[objects]' in a checkout of memstate"
URL = re.compile(r"(?:(?:s3|gs|az)://[\w.-]+|(?:file|memory)://(?=/))(?:/[^?#@]*)?")
SECRETS = re.compile(r"(?<=:).*[?#@].*", re.DOTALL)  # part of a URL that errors must not show
THREADS = 16  # requests under way at a time: each mostly waits for the server
KINDS = ("state", "kv", "row")
PART = 16  # capacity / PART: bytes that are written before the records are listed again


class Objects:
    """A `Store` in a bucket, a container or a folder, which any number of machines may share, or in memory of its own.

    A call has at most 16 requests under way, and reads take memory for a second copy of these records. If 16 in a row
    fail, the rest of its records fail without a request: a server that says nothing costs a call about twice the
    `timeout`. If a process forks while it uses the store, the child must make its own store.

    Args:
        url: s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, file:///folder or memory:///. It has no
            credentials: give them by `options`, or by the provider's variables of the environment.
        capacity: Limit of the bytes of all records, None for no limit. When it is reached, the records that were
            written first are deleted. Each process may exceed it by a sixteenth, and by what it is writing.
        timeout: Seconds in which the server must connect, and begin or go on to answer. A whole record gets 30.
        options: Settings of `obstore` for this kind of URL, such as `endpoint`, `region` and `client_options`. An
            endpoint that begins with http:// is used without encryption.

    Attributes:
        faults: For each cause, the number of requests that failed with it: HTTP_503, TimedOut, ConnectionRefused, or
            another name that `obstore` gives. EFBIG: a record is larger than the capacity.
        evicted: Number of records that this process has asked to delete, to make room. Others may delete the same ones.

    Raises:
        InvalidArgument: The URL, the capacity or the timeout is not valid.
        ConfigurationError: `obstore` is not installed or refuses the options, or the server does not list the records.

    Example:
        >>> Objects("memory:///").exists(["state-" + "0" * 64])
        [False]
    """

    def __init__(self, url: str, capacity: int | None = None, timeout: float = 2.0, **options: Any) -> None:
        if not isinstance(url, str) or not URL.fullmatch(url):
            raise InvalidArgument(
                f"url {SECRETS.sub('***', str(url))!r}: expected s3://bucket/prefix, gs://bucket/prefix, "
                "az://container/prefix, file:///folder or memory:///; credentials go to options or the environment"
            )
        if not isinstance(timeout, int | float) or not 0.001 <= timeout <= 3600:
            raise InvalidArgument(f"timeout={timeout!r}: expected seconds, from 0.001 to 3600")
        self.url, self.timeout = url, timeout
        self.capacity = None if capacity is None else whole("capacity", capacity)
        self.faults: Counter[str] = Counter()
        self.evicted = self._left = 0  # _left: bytes that may be written before the records are listed again
        self._count, self._room = threading.Lock(), threading.Lock()
        self._pool = ThreadPoolExecutor(THREADS, "memstate-objects")
        told, seconds = sorted(options), timedelta(seconds=timeout)
        asked = options.pop("client_options", {})
        plain = str(options.get("endpoint", os.environ.get("AWS_ENDPOINT_URL"))).startswith("http://")
        backoff = {"init_backoff": seconds / 40, "max_backoff": seconds / 4, "base": 2}
        options = {"retry_config": {"max_retries": 3, "retry_timeout": seconds, "backoff": backoff}, **options}
        options |= {"mkdir": True} if url.startswith("file:") else {}
        try:
            self._obstore: Any = importlib.import_module("obstore")
            of = importlib.import_module("obstore.store").from_url
            client = {"connect_timeout": seconds, "allow_http": plain, **asked}
            # An upload is silence to `read_timeout`. So uploads have none, and another request goes before them.
            self._store = self._uploads = of(url, client_options=client, **options)
            if not url.startswith("memory:"):
                self._store = of(url, client_options={"read_timeout": seconds, **client}, **options)
            next(iter(self._obstore.list(self._store, KINDS[0])), None)
        except ImportError as error:
            raise ConfigurationError(f"objects need obstore, which cannot be loaded: {error}; {INSTALL}") from error
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            # A panic of obstore is no Exception. No text of an error is shown, because it may have a credential.
            raise ConfigurationError(
                f"objects in {url}, options {told}: {cause_of(error)}; expected options of obstore, a server that "
                "answers, a bucket that exists, and credentials that may list, read, write and delete"
            ) from None

    def __repr__(self) -> str:
        limit = "no limit" if self.capacity is None else f"at most {format_bytes(self.capacity)}"
        return f"Objects({self.url!r}, {limit}, {self.faults.total()} faults)"

    def register(self, memory: Tensor) -> None:
        """Does nothing, because objects can be read into any memory."""

    def close(self) -> None:
        """Ends the threads of the store, after the requests under way."""
        self._pool.shutdown()

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Returns for each name whether its record is there. If the request fails: False, and `faults` counts it.

        Raises:
            InvalidArgument: A name is not valid.
            OSError: The requests failed for all names. The text has the causes.
        """
        require_names(names)
        before = faults_of(self)
        outcomes = self._each(lambda path: self._obstore.head(self._store, path), names)
        if names and set(outcomes) == {Outcome.FAILED}:
            raise OSError(f"exists of {len(names)} records with {self!r}: {faults_since(self, before)}")
        return [outcome is Outcome.DONE for outcome in outcomes]

    def get(self, names: Sequence[str], buffers: Sequence[Bytes]) -> list[Outcome]:
        """Reads each record into its buffer. If its size is wrong, the record is deleted, because it is damaged.

        Raises:
            InvalidArgument: Names or buffers are not valid; nothing was read.
        """
        require_buffers(names, buffers, written=True)
        return self._each(self._get, names, buffers)

    def put(self, names: Sequence[str], buffers: Sequence[Bytes]) -> list[Outcome]:
        """Writes each record that is not there yet. Replaces a record of a wrong size.

        Raises:
            InvalidArgument: Names or buffers are not valid; nothing was written.
        """
        require_buffers(names, buffers, written=False)
        return self._each(self._put, names, buffers, gone=Outcome.FAILED)

    def discard(self, names: Sequence[str]) -> None:
        """Deletes records whose contents are wrong, so that they can be written again."""
        require_names(names)
        self._each(lambda path: self._obstore.delete(self._store, path), names)

    def _each(
        self, work: Callable[..., Any], *columns: Sequence[Any], gone: Outcome = Outcome.MISSING
    ) -> list[Outcome]:
        """Calls a function for each record, several at a time. Counts a request that fails, and goes on.

        After `THREADS` failures in a row, the records that are left fail for the same cause, without a request.

        Args:
            work: The function. Its arguments: the path of the object, then those in `columns`. It returns an outcome,
                or anything else for DONE.
            columns: For each record: its name, then further arguments of the function.
            gone: The outcome if there is no such object; for an upload, there is no bucket.
        """
        failed: list[str] = []  # causes of the failures since a request succeeded

        def one(name: str, *more: Bytes) -> Outcome:
            last = failed[-THREADS:]
            outcome, cause = Outcome.FAILED, last[-1] if len(last) == THREADS else ""
            if not cause:
                try:
                    done = work(name.replace("-", "/", 1), *more)
                    outcome = done if isinstance(done, Outcome) else Outcome.DONE
                except Exception as error:
                    outcome = gone if isinstance(error, FileNotFoundError) else Outcome.FAILED
                    cause = cause_of(error) if outcome is Outcome.FAILED else ""
                failed.append(cause) if cause else failed.clear()
            if cause:
                with self._count:
                    self.faults[cause] += 1
            return outcome

        try:
            return list(self._pool.map(one, *columns))
        except RuntimeError as error:  # of the pool; `one` raises nothing
            raise OSError(f"{self!r} is closed: give each manager a store of its own") from error

    def _get(self, path: str, buffer: Bytes) -> Outcome:
        found = self._obstore.get(self._store, path)
        # Its blocks, one by one, would cost ten times as long, with Python's lock. A file may become shorter meanwhile.
        if found.meta["size"] == len(buffer) == len(body := found.bytes()):
            buffer[:] = np.frombuffer(body, np.uint8)
            return Outcome.DONE
        with suppress(Exception):  # it may be deleted already
            self._obstore.delete(self._store, path)
        return Outcome.DAMAGED

    def _put(self, path: str, buffer: Bytes) -> Outcome:
        with suppress(FileNotFoundError):
            if self._obstore.head(self._store, path)["size"] == len(buffer):
                return Outcome.DONE
        if self.capacity is not None:
            self._reserve(len(buffer), self.capacity)
        # In one request, so that nobody sees a part. A store in memory keeps what it is given, so it gets a copy.
        data = buffer.tobytes() if self._uploads is self._store else buffer.data
        self._obstore.put(self._uploads, path, data, use_multipart=False)
        return Outcome.DONE

    def _reserve(self, nbytes: int, capacity: int) -> None:
        """Reserves room for a record. Deletes those that were written first, by the server's clock, for more room."""
        if nbytes > capacity:
            raise OSError(errno.EFBIG, f"a record of {nbytes} bytes, capacity {capacity}")
        with self._room:
            if self._left < nbytes:
                listed = (one for kind in KINDS for part in self._obstore.list(self._store, kind) for one in part)
                found = sorted((one["last_modified"], one["path"], one["size"]) for one in listed if _is_record(one))
                room, freed = max(nbytes, capacity // PART), np.cumsum([0, *(size for *_, size in found)])
                gone = [path for _, path, _ in found[: int(np.searchsorted(freed, freed[-1] + room - capacity))]]
                try:
                    self._obstore.delete(self._store, gone)
                except FileNotFoundError:  # another process has deleted one of them: a folder keeps the others then
                    for path in gone:
                        with suppress(FileNotFoundError):
                            self._obstore.delete(self._store, path)
                self._left, self.evicted = room, self.evicted + len(gone)
            self._left -= nbytes


def _is_record(listed: Any) -> bool:
    """Returns whether a listed object is a record; others may have theirs in state/, such as terraform.tfstate."""
    return RECORD.fullmatch(listed["path"].replace("/", "-", 1)) is not None


def cause_of(error: BaseException) -> str:
    """Returns the cause of a failed request in one word, and nothing of a URL or a credential."""
    told = re.sub(r'"(?:\\.|[^"\\])*"', "", str(error).partition("Debug source:")[2])
    if status := re.search(r"status: (\d+)", told):
        return f"HTTP_{status[1]}"
    words: list[str] = re.findall(r"\s([A-Z]\w+)(?=[,({\s])", told)
    return words[-1] if words else reason_of(error)
