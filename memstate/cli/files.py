"""Files of JSON lines that are read, and files that are written whole or not at all."""

import gzip
import json
import os
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from reprlib import repr as short
from typing import IO, Any

from memstate.errors import InvalidArgument

MAGIC = b"\x1f\x8b"  # how a gzip file begins


def objects(path: Path, example: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the JSON object of each line that is not blank, and a name of the line for messages.

    Args:
        path: The file, compressed by gzip or not, whatever its name.
        example: A line as it should be.

    Raises:
        InvalidArgument: The file cannot be read or holds anything else; names file and line in one line.
    """
    shown, number = repr(str(path)), 0
    try:
        with open(path, "rb") as raw:
            for number, line in enumerate(gzip.GzipFile(fileobj=raw) if raw.peek(2)[:2] == MAGIC else raw, 1):
                if line.strip():
                    yield (where := f"{shown}, line {number}"), _object(line, where, example)
    except InvalidArgument:
        raise
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InvalidArgument(
            f"{shown}, after line {number}: the gzip file is cut short or damaged: {error}"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise InvalidArgument(f"{shown}: {getattr(error, 'strerror', None) or error}") from error


def _object(line: bytes, where: str, example: str) -> dict[str, Any]:
    try:
        found = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"{where}: not UTF-8: byte {line[error.start]:#04x} at column {error.start + 1}"
        ) from error
    except json.JSONDecodeError as error:
        raise InvalidArgument(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists in lists in lists
        raise InvalidArgument(f"{where}: not JSON that can be read: {error}") from error
    if not isinstance(found, dict):
        raise InvalidArgument(f"{where}: {short(found)}: expected an object such as {example}")
    return found


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Opens a temporary file that takes the place of `path` when the block ends without an error."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".memstate-", suffix=".part", delete=False) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(file.name)
            raise
