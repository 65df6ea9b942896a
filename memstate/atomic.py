"""Writes files whole or not at all."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


def write(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all. A link stays a link. A device or a pipe is written to directly.

    Args:
        path: Path of the file.
        content: The bytes to write.

    Raises:
        OSError: The file cannot be written.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    with replacing(Path(os.path.realpath(path))) as file:
        file.write(content)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Opens a temporary file that takes the place of `path` when the block ends without an error.

    The temporary file is beside `path`, so that it can be moved there in one step. On an error it is removed. Only a
    process that is killed leaves it behind. The new file has the mode of the file that it replaces.

    Args:
        path: The file to replace. If it is a link, the link is replaced, not its target.

    Raises:
        OSError: The file cannot be written.
    """
    part = path.with_name(f".memstate-{secrets.token_hex(8)}.part")
    with open(part, "xb") as file:  # the process's umask decides who can read it, as for any new file
        try:
            yield file
            file.flush()
            with suppress(FileNotFoundError):
                shutil.copymode(path, part)
            os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(part)
            raise
