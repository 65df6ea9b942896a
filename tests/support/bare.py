"""Makes a virtual environment with the packages of the running environment, without those of this project."""

import os
import sysconfig
import venv
from pathlib import Path


def bare(folder: Path) -> Path:
    """Makes the environment in a folder, and returns the path of its Python."""
    venv.create(folder, symlinks=True)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in os.scandir(place):
            if "memstate" not in entry.name and not entry.name.endswith(".pth"):  # a .pth file may point to a checkout
                (own / entry.name).symlink_to(entry.path)
    return folder / "bin" / "python"
