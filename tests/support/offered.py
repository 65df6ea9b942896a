"""Lets `memstate` find the commands of the tools in the checkout, even if the tools are not installed.

A folder on the path gets the metadata of the tools, with their entry points, like a folder of `pip install`. Processes
that tests start inherit the path.
"""

import os
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

from tests import TOOLS


def write(folder: Path) -> None:
    """Writes the metadata of the tools into a folder."""
    project = tomllib.loads((TOOLS / "pyproject.toml").read_text())["project"]
    made = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    made.mkdir()
    (made / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
             for group, points in project["entry-points"].items()]  # fmt: skip
    (made / "entry_points.txt").write_text("\n".join(lines))


def offer() -> TemporaryDirectory[str]:
    """Puts the tools and a folder with their metadata on the path. Returns the folder, which must be kept."""
    folder = TemporaryDirectory(prefix="memstate-tools-")
    write(Path(folder.name))
    sys.path.insert(0, folder.name)
    given = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder.name, str(TOOLS), given)))
    return folder
