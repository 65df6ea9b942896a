"""Gets the tests of others: the source archive of the installed version, or a source tree that a variable names."""

import os
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[3]
BUILD: Final = ROOT / "build" / "peers"


class CannotRun(Exception):
    """A suite cannot run here; the text says why."""


def tree(variable: str, commit: str, of: str) -> Path:
    """Returns the source tree that an environment variable names.

    Args:
        variable: The variable.
        commit: The commit of the tree with which `lost.txt` was made.
        of: The repository, as `owner/name`.

    Raises:
        CannotRun: The variable names no folder.
    """
    folder = Path(os.environ.get(variable, "-"))
    if not folder.is_dir():
        raise CannotRun(f"{variable} names no source tree of {of}; clone it at {commit}")
    return folder


def version(package: str, python: Path) -> str:
    """Returns the version of a package in the environment of a Python."""
    command = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([python, "-c", command], check=True, capture_output=True, text=True).stdout.strip()


def archive(package: str, release: str, python: Path, variables: dict[str, str] | None = None) -> tarfile.TarFile:
    """Returns the opened source archive of a release. It is downloaded once.

    Args:
        package: The package.
        release: Its version.
        python: The interpreter whose pip downloads it.
        variables: Environment variables for pip, which runs the archive's `setup.py` to learn its name.

    Raises:
        CannotRun: pip cannot get it.
    """
    path = BUILD / "archives" / f"{package}-{release}.tar.gz"
    if not path.is_file():
        options = ["--no-deps", "--no-binary=:all:", f"--dest={path.parent}"]
        isolated = [] if variables is None else ["--no-build-isolation"]
        command = [python, "-m", "pip", "download", "-q", *options, *isolated, f"{package}=={release}"]
        done = subprocess.run(command, env=os.environ | (variables or {}), capture_output=True, text=True)
        if not path.is_file():
            raise CannotRun(f"pip cannot get the source archive of {package} {release}: {done.stderr[-300:].strip()}")
    return tarfile.open(path)


def unpack(source: tarfile.TarFile, inner: str, folder: Path) -> None:
    """Writes the files of an archive below its path `inner` into a folder."""
    with source:
        for member in source:
            _, _, path = member.name.partition("/")  # behind the folder of the whole archive
            if path.startswith(inner + "/") and member.isfile():
                member.name = path.removeprefix(inner + "/")
                source.extract(member, folder, filter="data")


def packages(name: str, python: Path, pins: Sequence[str]) -> Path:
    """Returns a folder with packages that only the tests of others need. Installs them if it is not there.

    Args:
        name: The suite.
        python: The interpreter that will import them.
        pins: The packages, each as `name==version`.
    """
    folder = BUILD / "packages" / name
    if pins and not folder.is_dir():
        command = [python, "-m", "pip", "install", "-q", "--no-deps", f"--target={folder}", *pins]
        subprocess.run(command, check=True)
    return folder
