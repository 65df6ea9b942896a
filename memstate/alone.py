"""Refuses to be imported if the package folder also has files of the other package called memstate.

The name `memstate` on the package index belongs to another project, which is imported as `memstate` too. An installer
puts both into one folder, and each replaces files of the other, such as `__init__.py`. So `__init__.py` imports this
module, and so does `memstate.errors`, which all modules need.
"""

from pathlib import Path

FOREIGN = ("backends/__init__.py", "constants.py", "exceptions.py", "storage.py")  # files that memstate never has

if strays := [name for name in FOREIGN if (Path(__file__).parent / name).is_file()]:
    raise ImportError(
        f"{Path(__file__).parent} has files of another package called memstate: {', '.join(strays)}; it is imported by "
        "the same name as this one, recurrent-memstate: run `pip uninstall memstate recurrent-memstate`, then "
        "`pip install .` in a checkout of this one"
    )
