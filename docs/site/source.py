"""Extends griffe, which reads the docstrings, for the source of memstate."""

import re
from pathlib import Path
from typing import Any

from griffe import Extension, Module, Object


class SourceExtension(Extension):
    """Loads folders without an `__init__.py`, and accepts the section `Example:`."""

    def on_module_members(self, *, mod: Module, **kwargs: Any) -> None:
        """Adds memstate.kernels and memstate.kernels.reference, whose files griffe would leave out."""
        if mod.path == "memstate":
            self._add(self._add(mod, "kernels"), "reference")

    def _add(self, parent: Module, name: str) -> Module:
        path = parent.filepath[0] if isinstance(parent.filepath, list) else parent.filepath.parent
        collections = {"lines_collection": parent.lines_collection, "modules_collection": parent.modules_collection}
        module = Module(name, filepath=[Path(path) / name], **collections)
        parent.set_member(name, module)
        return module

    def on_instance(self, *, obj: Object, **kwargs: Any) -> None:
        """Renames the section `Example:` to the heading that griffe expects."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
