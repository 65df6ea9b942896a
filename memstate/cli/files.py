"""Reads files of lines and of JSON lines, plain or compressed by gzip."""

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from reprlib import repr as short
from typing import Any, Final

from memstate.errors import InvalidArgument

Progress = Callable[[int, int], None]
MAGIC = b"\x1f\x8b"  # how a gzip file begins
# Bytes of a line, its end included. A line of a trace has an id per 512 tokens, of 22 characters if it is a 64-bit
# number. So this is room for 190,000 ids, or 97 million tokens. It also bounds what one line can expand to as lists.
LONGEST_LINE: Final = 4 << 20
REPORT_EVERY: Final = 256  # lines


def objects(path: Path, example: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the JSON object of each line that is not blank, and a name of the line for messages.

    It reads at most `LONGEST_LINE` bytes of a line, and refuses a longer one.

    Args:
        path: The file, compressed by gzip or not, whatever its name.
        example: A line as it should be.

    Raises:
        InvalidArgument: The file cannot be read or holds anything else; names file and line in one line.
    """
    for number, line in lines(path, LONGEST_LINE, f"expected {example}"):
        if line.strip():
            where = f"{str(path)!r}, line {number}"
            yield where, _object(line, where, example)


def lines(path: Path, longest: int, expected: str, report: Progress | None = None) -> Iterator[tuple[int, bytes]]:
    """Yields the lines of a file with their numbers, from 1 on.

    Args:
        path: The file, compressed by gzip or not, whatever its name.
        longest: Bytes of a line at most, its end included; more are not read.
        expected: What the message about a longer line ends with.
        report: Called now and then with the bytes of the file that are read, and its size. Not called for a pipe.

    Raises:
        InvalidArgument: The file cannot be read or has a longer line; names file and line in one line.
    """
    shown, number = repr(str(path)), 0
    try:
        with open(path, "rb") as raw:
            size = os.fstat(raw.fileno()).st_size
            stream = gzip.GzipFile(fileobj=raw) if raw.peek(2)[:2] == MAGIC else raw
            while line := stream.readline(longest + 1):
                number += 1
                if len(line) > longest:
                    raise InvalidArgument(f"{shown}, line {number}: longer than {longest} bytes: {expected}")
                yield number, line
                if report and size and number % REPORT_EVERY == 0:
                    report(raw.tell(), size)
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
        raise InvalidArgument(f"{where}: not JSON: {error.msg} at column {error.colno}: expected {example}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists in lists in lists
        raise InvalidArgument(f"{where}: not JSON that can be read: {error}") from error
    if not isinstance(found, dict):
        raise InvalidArgument(f"{where}: {short(found)}: expected an object such as {example}")
    return found
