"""Speeds up Triton's interpreter, in which tests spend most of their time. It remembers what it computes repeatedly.

Results stay the same. `install` leaves out each change for which this version of Triton lacks the place.
"""

import dataclasses
from collections.abc import Callable
from functools import wraps
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

from memstate.kernels.interpreter import mend


def install() -> None:
    """Makes the interpreter of this process faster. Kernels give the same results."""
    mend()  # first: the other changes wrap the mended functions
    _leave_out_unused_checks()
    _remember_types()
    _remember_blocks()
    _remember_shapes()
    _remember_patches()


def _leave_out_unused_checks() -> None:
    """Turns off the check of each sum for overflow. Without the debug option, Triton does not use its result."""
    builder = interpreter.interpreter_builder
    options = builder.options
    if getattr(options, "sanitize_overflow", False) and getattr(options, "debug", True) is False:
        builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _remember_types() -> None:
    """Remembers the numpy type of each Triton type. Triton builds its table again for each look-up."""
    if not hasattr(interpreter, "_get_np_dtype"):
        return
    find, known = interpreter._get_np_dtype, dict[str, Any]()

    @wraps(find)
    def remembered(of: Any) -> Any:
        name = of.scalar.name
        if name not in known:
            known[name] = find(of.scalar)
        return known[name]

    interpreter._get_np_dtype = remembered


def _remember_blocks() -> None:
    """Remembers block types by element type and shape. Triton checks and names the shape of each new block type."""
    make, known = tl.block_type.__init__, dict[tuple[object, ...], dict[str, Any]]()

    @wraps(make)
    def remembered(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(shape)
        if not all(type(size) is int for size in sizes):
            return make(self, element_ty, shape)
        key = element_ty.name, getattr(element_ty, "address_space", None), sizes
        if key not in known:
            make(self, element_ty, shape)
            known[key] = dict(vars(self))
        vars(self).update(known[key])
        return None

    tl.block_type.__init__ = remembered


def _remember_shapes() -> None:
    """Remembers by type the shape of a tensor, whose numbers Triton wraps again for every tensor."""
    make, known = tl.tensor.__init__, dict[tuple[int, ...], Any]()
    probe = tl.tensor(None, tl.block_type(tl.int32, [2]))
    if set(vars(probe)) != {"handle", "shape", "numel", "type", "dtype"}:
        return

    @wraps(make)
    def remembered(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in known:
            make(self, handle, type)
            known[key] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[key]

    tl.tensor.__init__ = remembered


def _remember_patches() -> None:
    """Patches `triton.language` once per launch. Triton itself patches it for every function that a kernel calls."""
    if not hasattr(interpreter, "_LangPatchScope"):
        return
    patch, scope_type = interpreter._patch_lang, interpreter._LangPatchScope
    Names = tuple[bool, bool]
    named: dict[Callable[..., Any], Names] = {}  # function -> whether its globals have tl and tl.core
    known: dict[tuple[Names, ...], list[tuple[Any, str, Any]]] = {}  # names in order -> what their last patch set
    inside: list[Names] = []  # names of the functions that have patched since the launch began

    class Scope(scope_type):  # type: ignore[misc, valid-type]
        def restore(self) -> None:
            inside.clear()
            super().restore()

    @wraps(patch)
    def remembered(function: Callable[..., Any]) -> Any:
        if function not in named:
            values = list(map(id, function.__globals__.values()))
            named[function] = id(tl) in values, id(tl.core) in values
        names, scope = named[function], Scope()
        if names in inside:
            return scope
        inside.append(names)
        key = tuple(inside)
        if key in known:
            for owner, name, value in known[key]:
                scope.set_attr(owner, name, value)
        else:
            scope._changes = patch(function)._changes
            known[key] = [(owner, name, getattr(owner, name)) for owner, name, _ in scope._changes]
        return scope

    interpreter._patch_lang = remembered
