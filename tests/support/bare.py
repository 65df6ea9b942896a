"""An environment that has the packages of this one, and no distribution of this project."""

import os
import sysconfig
import venv
from pathlib import Path


def bare(folder: Path) -> Path:
    """Makes it in a folder. Returns its interpreter."""
    venv.create(folder, symlinks=True)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in os.scandir(place):
            if "memstate" not in entry.name and not entry.name.endswith(".pth"):  # such a file leads to a checkout
                (own / entry.name).symlink_to(entry.path)
    return folder / "bin" / "python"
