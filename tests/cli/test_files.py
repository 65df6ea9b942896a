"""Lines of JSON in files from strangers: a line has a limit; bombs and deep nesting are not read into memory."""

import gzip
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from memstate.cli import files
from memstate.cli.traces import BLOCK, TraceRequest, form
from memstate.errors import InvalidArgument

LINE = b'{"timestamp": 27, "input_length": 1025, "output_length": 52, "hash_ids": [46, 47, 2353]}\n'
REQUEST = TraceRequest(27, 1025, 52, (46, 47, 2353))


def refusal(path: Path) -> str:
    """What is said of a file, in one line."""
    with pytest.raises(InvalidArgument) as caught:
        form.read(path)
    text = str(caught.value)
    assert "\n" not in text
    return text


def stored(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


PACKED = pytest.mark.parametrize("packed", [bytes, gzip.compress], ids=["plain", "gzip"])


@PACKED
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""], ids=["LF", "CRLF", "no end"])
def test_a_line_has_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: Callable[[bytes], bytes], end: bytes
) -> None:
    monkeypatch.setattr(files, "LONGEST_LINE", size := 300)
    longest = LINE.rstrip().ljust(size - len(end)) + end
    assert form.read(stored(tmp_path / "x", packed(LINE + longest))) == [REQUEST] * 2
    for more in (LINE.rstrip().ljust(size - len(end) + 1) + end, b" " * (size + 1), b"x" * 10 * size):
        path = stored(tmp_path / "x", packed(LINE + b"\n" + more + LINE))
        assert refusal(path).startswith(f"{str(path)!r}, line 3: longer than 300 bytes")
        assert form.read(path, limit=1) == [REQUEST]


def test_the_limit_has_room_for_the_longest_contexts() -> None:
    """Ten million tokens, with an id of 64 bits for each block, take an eighth of it."""
    blocks = 10_000_000 // BLOCK
    longest = form._line(TraceRequest(2**40, blocks * BLOCK, 2**20, (2**64 - 1,) * blocks))
    assert 8 * len(longest) < files.LONGEST_LINE


BOMB = 1 << 26  # bytes of one line


@PACKED
@pytest.mark.parametrize("text", [b"[", b"[],", b" ", b"1", b'{"a":'], ids=repr)
def test_a_line_that_is_too_long_is_not_read_into_memory(
    tmp_path: Path, text: bytes, packed: Callable[[bytes], bytes]
) -> None:
    """64 MiB in one line; as a file of a few kilobytes, or with a hole of that size."""
    path = tmp_path / "x"
    if packed is bytes:
        stored(path, LINE + text * 9)
        os.truncate(path, BOMB)
    else:
        with gzip.open(path, "wb", 9) as file:
            file.write(LINE)
            for _ in range(BOMB >> 20):
                file.write((text * (1 << 20))[: 1 << 20])
        assert path.stat().st_size < BOMB >> 9
    tracemalloc.start()
    try:
        assert "line 2: longer than" in refusal(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * files.LONGEST_LINE


@PACKED
@pytest.mark.parametrize("depth", [20, 900, 990, 1000, 5_000, 500_000])
@pytest.mark.parametrize(("opens", "closes"), [(b"[", b"]"), (b'{"a": ', b"}")], ids=["lists", "objects"])
def test_nesting_is_refused_by_its_line(
    tmp_path: Path, depth: int, opens: bytes, closes: bytes, packed: Callable[[bytes], bytes]
) -> None:
    nested = opens * depth + b"1" + closes * depth
    for bad in (nested, LINE.replace(b"[46, 47, 2353]", nested), LINE.replace(b"27", nested, 1)):
        path = stored(tmp_path / "x", packed(LINE + b"\n" + bad))
        assert refusal(path).startswith(f"{str(path)!r}, line 3: ")
