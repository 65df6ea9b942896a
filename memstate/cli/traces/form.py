"""Reads and writes the format of the Mooncake traces (FAST'25): one JSON object per line, plain or in gzip.

The writer of a file decides whether equal ids mean equal prefixes; this module does not check it.
"""

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from reprlib import repr as short
from typing import Any, Final

from memstate.atomic import replacing
from memstate.checks import INT32_MAX, require_kind
from memstate.cli.files import objects
from memstate.errors import InvalidArgument

BLOCK: Final = 512  # tokens that one id stands for
COUNTS: Final = ("timestamp", "input_length", "output_length")
LOG: Final = "a log? First make a trace of it: memstate trace vllm, sglang or openai --from LOG --out FILE"
EXAMPLE: Final = '{"timestamp": 0, "input_length": 600, "output_length": 50, "hash_ids": [0, 1]}'


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace.

    An id stands for its block *and* everything before it, so two requests share a prefix as long as their ids agree.
    The last block may hold fewer than 512 tokens.

    Args:
        timestamp: Time of arrival, in milliseconds.
        input_length: Tokens of the prompt.
        output_length: Tokens of the answer.
        hash_ids: One id for each block of the prompt.
        kind: Kind of the request, see `memstate.Request`. The traces of Mooncake have none.
        parts: Tokens at the end of the prompt that the next turn does not have; it does not have the answer either.
            None: the next turn may go on from the answer, as in the traces of Mooncake.

    Raises:
        InvalidArgument: A value is out of range.
    """

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    kind: str | None = None
    parts: int | None = None

    def __post_init__(self) -> None:
        for name in COUNTS:
            _require_whole(name, getattr(self, name))
        require_kind(self.kind)
        if not isinstance(self.hash_ids, tuple):
            raise InvalidArgument(f"hash_ids={short(self.hash_ids)}: expected a list of whole numbers")
        for place, value in enumerate(self.hash_ids):
            # `_require_whole` inlined: a million ids would take a million calls
            if type(value) is not int or value < 0:
                _require_whole(f"hash_ids[{place}]", value)
        blocks = -(-self.input_length // BLOCK)
        if len(self.hash_ids) != blocks:
            raise InvalidArgument(
                f"{len(self.hash_ids)} hash_ids for input_length {short(self.input_length)}: "
                f"expected {short(blocks)}, one per block of {BLOCK} tokens and one for the rest"
            )
        if self.input_length + self.output_length > INT32_MAX:
            raise InvalidArgument(
                f"input_length {short(self.input_length)}, output_length {short(self.output_length)}: "
                f"expected at most {INT32_MAX} tokens together"
            )
        if self.parts is not None:
            _require_whole("parts", self.parts)
            if self.parts > self.input_length:
                raise InvalidArgument(f"parts={self.parts}: a prompt of {self.input_length} tokens has not so many")

    @property
    def shared(self) -> int:
        """Tokens with which the next turn begins: prompt and answer, or only the part of the prompt that it shares."""
        return self.input_length + self.output_length if self.parts is None else self.input_length - self.parts


def read(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """Reads the requests of a file, in its order. Blank lines are skipped.

    `kind` and `parts` may be missing. Other fields that are not in `TraceRequest` are ignored.

    Args:
        path: The file, compressed with gzip or not. The name of the file does not matter.
        limit: Largest number of requests. Later lines are not read.

    Returns:
        The requests.

    Raises:
        InvalidArgument: The file cannot be read, has a line of more than `memstate.cli.files.LONGEST_LINE` bytes, or
            has a line that is no request. The message is one line with the name of the file and the number of the line.

    Syncs: no.
    """
    if limit is not None and limit < 1:
        raise InvalidArgument(f"limit={limit}: expected a whole number from 1 on, or None for all requests")
    requests: list[TraceRequest] = []
    for where, entry in islice(objects(path, f"{EXAMPLE}; {LOG}"), limit):
        try:
            if missing := [name for name in (*COUNTS, "hash_ids") if name not in entry]:
                raise InvalidArgument(f"{', '.join(missing)} missing: expected an object such as {EXAMPLE}; {LOG}")
            at, given, generated, ids = (entry[name] for name in (*COUNTS, "hash_ids"))
            ids = tuple(ids) if isinstance(ids, list) else ids
            requests.append(TraceRequest(at, given, generated, ids, entry.get("kind"), entry.get("parts")))
        except InvalidArgument as error:
            raise InvalidArgument(f"{where}: {error}") from error
    if not requests:
        raise InvalidArgument(f"{str(path)!r}: no request in it: expected lines such as {EXAMPLE}")
    return requests


def write(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Writes a file that `read` can read. It is compressed if its name ends in .gz.

    An old file is replaced when all is written; if the write fails, the old file stays. The same requests give the same
    bytes; for a compressed file, this needs the same zlib.

    Raises:
        InvalidArgument: There are no requests, or the path cannot be a file.
        OSError: The file cannot be written.

    Syncs: no.
    """
    path = Path(path)
    if not path.parent.is_dir() or (path.exists() and not path.is_file()):
        why = "is no file" if path.exists() else f"{str(path.parent)!r} is no directory"
        raise InvalidArgument(f"{str(path)!r}: cannot be written to: {why}")
    with replacing(path) as raw:
        if path.suffix == ".gz":
            # the header has no name and no time, so that bytes are reproducible
            with gzip.GzipFile("", "wb", 6, raw, mtime=0) as file:
                written = sum(file.write(_line(request)) for request in requests)
        else:
            written = sum(raw.write(_line(request)) for request in requests)
        if not written:
            raise InvalidArgument(f"{str(path)!r}: no requests to write: a trace has at least one")


def _line(request: TraceRequest) -> bytes:
    fields = {name: value for name, value in vars(request).items() if value is not None}  # most requests have no kind
    return json.dumps(fields).encode() + b"\n"


def _require_whole(name: str, value: Any) -> None:
    """Requires a whole number from 0 on; 1.0 and True are refused too."""
    if type(value) is not int or value < 0:
        raise InvalidArgument(f"{name}={short(value)}: expected a whole number from 0 on")
