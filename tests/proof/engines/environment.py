"""Environments of engines: each has packages of its own, in the versions that its `pins.txt` names."""

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[2]
PIN: Final = re.compile(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!+_-]+")
TORCH: Final = "import torch, sys; sys.exit(torch.version.cuda is not None)"


def engines() -> list[str]:
    """Returns the engines that have a folder here."""
    return sorted(path.parent.name for path in HERE.glob("*/pins.txt"))


def pins(file: Path) -> list[str]:
    """Returns the packages that a file names.

    Args:
        file: One `name==version` a line; lines that begin with `#` are comments.

    Raises:
        ValueError: A line is something else.
    """
    lines = [line.strip() for line in file.read_text().splitlines()]
    found = [line for line in lines if line and not line.startswith("#")]
    if wrong := [line for line in found if not PIN.fullmatch(line)]:
        raise ValueError(f"{file}: {wrong[0]!r} is not an exact version; write name==version")
    return found


def build(name: str) -> Path:
    """Returns the interpreter of an engine's environment, in `build/engines`; makes it anew if a pin has changed.

    Nothing is installed that is not pinned, so no build of torch for GPUs comes with what requires one.

    Args:
        name: The engine.

    Raises:
        CalledProcessError: pip failed.
        RuntimeError: The package index has a torch for GPUs alone.
    """
    listed = pins(HERE / name / "pins.txt")
    digest = hashlib.sha256("\n".join([sys.version, *listed]).encode()).hexdigest()
    folder = ROOT / "build" / "engines" / name
    python, marker = folder / "bin" / "python", folder / "pins.sha256"
    if marker.is_file() and marker.read_text() == digest:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    print(f"{name}: making {folder.relative_to(ROOT)}, {len(listed)} packages", flush=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", *listed], check=True)
    if subprocess.run([python, "-c", TORCH]).returncode:
        raise RuntimeError(
            f"{name}: pip found no build of torch for a CPU; set PIP_EXTRA_INDEX_URL to torch's index of these builds"
        )
    marker.write_text(digest)
    return python
