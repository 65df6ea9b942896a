"""Reads files of lines and of JSON lines, plain or compressed with gzip."""

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
MAGIC = b"\x1f\x8b"  # first bytes of a gzip file
# Bytes of a line, with its end. A line of a trace has one id for 512 tokens; a 64-bit id takes 22 characters. So a line
# has room for 190,000 ids, or 97 million tokens. The limit also bounds the memory that one parsed line takes.
LONGEST_LINE: Final = 4 << 20
REPORT_EVERY: Final = 256  # lines between two reports


def objects(path: Path, example: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (name of the line for messages, JSON object) for each line that is not blank.

    It reads at most `LONGEST_LINE` bytes of a line, and refuses a longer line.

    Args:
        path: The file, compressed with gzip or not. The name of the file does not matter.
        example: A valid line, for messages.

    Raises:
        InvalidArgument: The file cannot be read or has a line without a JSON object. The message is one line with the
            name of the file and the number of the line.
    """
    for number, line in lines(path, LONGEST_LINE, f"expected {example}"):
        if line.strip():
            where = f"{str(path)!r}, line {number}"
            yield where, _object(line, where, example)


def lines(path: Path, longest: int, expected: str, report: Progress | None = None) -> Iterator[tuple[int, bytes]]:
    """Yields (number, line) for each line of a file; numbers start at 1.

    Args:
        path: The file, compressed with gzip or not. The name of the file does not matter.
        longest: Largest number of bytes of a line, with its end. Of a longer line, one byte more is read.
        expected: End of the message about a longer line.
        report: Called every `REPORT_EVERY` lines with the bytes read so far and the size of the file. Not called for a
            pipe.

    Raises:
        InvalidArgument: The file cannot be read or has a longer line. The message is one line with the name of the file
            and the number of the line.
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
    except (OSError, ValueError) as error:  # ValueError: no file can have this name
        raise InvalidArgument(f"{shown}: {getattr(error, 'strerror', None) or error}") from error


def _object(line: bytes, where: str, example: str) -> dict[str, Any]:
    try:
        parsed = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"{where}: not UTF-8: byte {line[error.start]:#04x} at column {error.start + 1}"
        ) from error
    except json.JSONDecodeError as error:
        raise InvalidArgument(f"{where}: not JSON: {error.msg} at column {error.colno}: expected {example}") from error
    except (ValueError, RecursionError) as error:  # a number with thousands of digits, or deeply nested lists
        raise InvalidArgument(f"{where}: not JSON that can be read: {error}") from error
    if not isinstance(parsed, dict):
        raise InvalidArgument(f"{where}: {short(parsed)}: expected an object such as {example}")
    return parsed
