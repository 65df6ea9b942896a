"""Builds the environments of engines, each with packages in the versions that its `pins.txt` names."""

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
# Prints those requirements of an installed package that the other installed packages do not meet.
UNMET: Final = """
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from packaging.requirements import Requirement
for one in map(Requirement, requires(sys.argv[1]) or ()):
    if one.marker and not one.marker.evaluate({"extra": ""}): continue
    try: met = one.specifier.contains(version(one.name), prereleases=True)
    except PackageNotFoundError: continue
    if not met: print(f"{one.name}{one.specifier}")
"""


def engines() -> list[str]:
    """Returns the names of the engines, each of which has a folder here."""
    return sorted(path.parent.name for path in HERE.glob("*/pins.txt"))


def pins(file: Path) -> list[str]:
    """Returns the pinned packages of a file.

    Args:
        file: One `name==version` per line; lines that begin with `#` are comments.

    Raises:
        ValueError: A line is neither a pin nor a comment.
    """
    lines = [line.strip() for line in file.read_text().splitlines()]
    packages = [line for line in lines if line and not line.startswith("#")]
    if wrong := [line for line in packages if not PIN.fullmatch(line)]:
        raise ValueError(f"{file}: {wrong[0]!r} is not an exact version; write name==version")
    return packages


def build(name: str, newest: bool = False) -> Path:
    """Returns the Python of an engine's environment in `build/engines`. Builds it first, unless all pins are the same.

    Only pinned packages are installed, so that no requirement installs a build of torch for GPUs.

    Args:
        name: The engine.
        newest: Whether to install the newest release of the engine. Of the pinned packages, the versions that this
            release requires are then installed. Such an environment is always rebuilt. Packages that are required but
            not pinned are not installed; the log of the engine names them.

    Raises:
        CalledProcessError: pip failed.
        RuntimeError: The package index has only builds of torch for GPUs.
    """
    listed = pins(HERE / name / "pins.txt")
    digest = hashlib.sha256("\n".join([sys.version, *listed]).encode()).hexdigest()
    folder = ROOT / "build" / "engines" / (f"{name}-newest" if newest else name)
    python, marker = folder / "bin" / "python", folder / "pins.sha256"
    if not newest and marker.is_file() and marker.read_text() == digest:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    print(f"{name}: making {folder.relative_to(ROOT)}, {len(listed)} packages", flush=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [python, "-m", "pip", "install", "-q", "--no-deps"]
    subprocess.run([*pip, *listed], check=True)
    if newest:
        _renew(next(pin for pin in listed if pin.startswith(name)), python, pip)
    if subprocess.run([python, "-c", TORCH]).returncode:
        raise RuntimeError(
            f"{name}: pip found no build of torch for a CPU; set PIP_EXTRA_INDEX_URL to torch's index of these builds"
        )
    marker.write_text(digest)
    return python


def _renew(pin: str, python: Path, pip: list[str | Path]) -> None:
    """Installs the newest release of a pinned package, and the versions of other packages that it requires."""
    package = pin.partition("==")[0]
    subprocess.run([*pip, "--upgrade", package], check=True)
    unmet = subprocess.run([python, "-c", UNMET, package], check=True, capture_output=True, text=True).stdout.split(
        "\n"
    )
    asked = [one for one in unmet if one and not one.startswith("torch")]  # builds of torch can have gigabytes
    if asked:
        subprocess.run([*pip, *asked], check=True)
    command = [python, "-c", f"from importlib.metadata import version; print(version({package!r}))"]
    latest = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    print(
        f"{package} {latest}, pinned {pin.partition('==')[2]}; with it {', '.join(asked) or 'nothing else'}", flush=True
    )
