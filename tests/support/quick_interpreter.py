"""Triton's interpreter without the work that it does again and again, for the same results.

It costs the tests most of their time. `install` leaves alone each part that this version of Triton does not have.
"""

import dataclasses
from collections.abc import Callable
from functools import wraps
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

from memstate.kernels.interpreter import mend_bounds


def install() -> None:
    """Makes the interpreter of this process faster; kernels compute what they computed before."""
    mend_bounds()  # before anything is remembered
    _leave_out_unused_checks()
    _remember_types()
    _remember_blocks()
    _remember_shapes()
    _remember_patches()


def _leave_out_unused_checks() -> None:
    """Every sum is checked for overflow, in 64 bits; without the debug option nobody reads what the check finds."""
    builder = interpreter.interpreter_builder
    options = builder.options
    if getattr(options, "sanitize_overflow", False) and getattr(options, "debug", True) is False:
        builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _remember_types() -> None:
    """The numpy type of a Triton type, looked up in a table that was built for each look."""
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
    """A block type checks and names its shape, which is nearly always one that was there before."""
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
    """A tensor wraps each number of its shape, which depends on its type alone."""
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
    """A launch puts its own functions into `triton.language`, and every function that a kernel calls does it again."""
    if not hasattr(interpreter, "_LangPatchScope"):
        return
    patch, scope_type = interpreter._patch_lang, interpreter._LangPatchScope
    Names = tuple[bool, bool]
    named: dict[Callable[..., Any], Names] = {}  # function -> which of the two modules it names
    known: dict[tuple[Names, ...], list[tuple[Any, str, Any]]] = {}  # what has patched so far -> what the last one set
    inside: list[Names] = []  # of the functions that have patched since the launch began

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
