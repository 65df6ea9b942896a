"""The format of the Mooncake traces (FAST'25): one JSON object a line, plain or compressed by gzip.

Knows nothing of the content: the writer of the file decides whether equal ids mean equal prefixes.
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
    """One request.

    An id stands for its block *and* everything before it, so two requests share a prefix as long as their ids agree.
    The last block may hold fewer than 512 tokens.

    Args:
        timestamp: When it arrived, in milliseconds.
        input_length: Tokens given.
        output_length: Tokens generated.
        hash_ids: An id per block of the tokens given.
        kind: What it is, see `memstate.Request`; the traces of Mooncake have none.
        parts: Tokens at the end of its prompt that the next turn lacks, as it lacks the answer behind them. None: the
            next turn may go on from the answer, as in the traces of Mooncake.

    Raises:
        InvalidArgument: No request can be like this.
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
            if type(value) is not int or value < 0:  # once more here: a call for each of a million ids is felt
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
        """Tokens that the next turn begins with: prompt and answer, or the prompt up to where that turn parts."""
        return self.input_length + self.output_length if self.parts is None else self.input_length - self.parts


def read(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """Reads the requests of a file in its order, compressed or not, whatever its name; skips blank lines.

    Fields beyond the four, and `kind` and `parts`, which may be missing, are ignored.

    Args:
        path: The file.
        limit: Requests to stop after; what follows is not read.

    Raises:
        InvalidArgument: The file cannot be read, has a line of more than `memstate.cli.files.LONGEST_LINE` bytes, or
            holds anything else; names file and line in one line.

    Syncs: no.
    """
    if limit is not None and limit < 1:
        raise InvalidArgument(f"limit={limit}: expected a whole number from 1 on, or None for all requests")
    found: list[TraceRequest] = []
    for where, entry in islice(objects(path, f"{EXAMPLE}; {LOG}"), limit):
        try:
            if missing := [name for name in (*COUNTS, "hash_ids") if name not in entry]:
                raise InvalidArgument(f"{', '.join(missing)} missing: expected an object such as {EXAMPLE}; {LOG}")
            at, given, generated, ids = (entry[name] for name in (*COUNTS, "hash_ids"))
            ids = tuple(ids) if isinstance(ids, list) else ids
            found.append(TraceRequest(at, given, generated, ids, entry.get("kind"), entry.get("parts")))
        except InvalidArgument as error:
            raise InvalidArgument(f"{where}: {error}") from error
    if not found:
        raise InvalidArgument(f"{str(path)!r}: no request in it: expected lines such as {EXAMPLE}")
    return found


def write(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Writes a file that `read` gives back, whole or not at all; compressed if its name ends in .gz.

    The same requests give the same bytes (with the same zlib, where compressed). An old file is replaced.

    Raises:
        InvalidArgument: There are no requests, or no file can be there.
        OSError: The file cannot be written.

    Syncs: no.
    """
    path = Path(path)
    if not path.parent.is_dir() or (path.exists() and not path.is_file()):
        why = "is no file" if path.exists() else f"{str(path.parent)!r} is no directory"
        raise InvalidArgument(f"{str(path)!r}: cannot be written to: {why}")
    with replacing(path) as raw:
        if path.suffix == ".gz":
            with gzip.GzipFile("", "wb", 6, raw, mtime=0) as file:  # no name and no time in the header
                written = sum(file.write(_line(request)) for request in requests)
        else:
            written = sum(raw.write(_line(request)) for request in requests)
        if not written:
            raise InvalidArgument(f"{str(path)!r}: no requests to write: a trace has at least one")


def _line(request: TraceRequest) -> bytes:
    fields = {name: value for name, value in vars(request).items() if value is not None}  # few have a kind
    return json.dumps(fields).encode() + b"\n"


def _require_whole(name: str, value: Any) -> None:
    """Refuses all but whole numbers from 0 on; 1.0 and True are refused too."""
    if type(value) is not int or value < 0:
        raise InvalidArgument(f"{name}={short(value)}: expected a whole number from 0 on")
