"""Keeps everything that a manager knows, and puts it back into the same objects.

A manager cannot be copied, so the search restores it in place. A checkpoint visits all objects to which an object
refers, directly or not, and copies the contents of dictionaries, lists, arrays and tensors. It needs no list of classes
or fields, so it misses no field.
"""

from array import array
from collections import deque
from collections.abc import Callable
from enum import Enum
from itertools import count
from logging import Logger
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ReferenceType

import numpy as np
import torch

from memstate.kernels.dispatch import Backend
from memstate.state.layout import StateLayout

# types whose objects never change, or on whose objects no decision depends, such as the counts of a backend
FIXED = (
    str, int, float, bytes, slice, type(None), type, Enum, np.generic, torch.dtype, torch.device, FunctionType,
    MethodType, BuiltinFunctionType, ModuleType, ReferenceType, Backend, StateLayout, count, Logger,
    memoryview,  # their arrays are restored
)  # fmt: skip
_fixed: set[type] = set(FIXED) | {bool}  # FIXED and the subclasses seen so far: faster than isinstance


class Checkpoint:
    """The contents of all objects to which the object `root` refers, at the time of the checkpoint."""

    def __init__(self, root: object) -> None:
        self._fields: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._lists: list[tuple[Any, Any]] = []  # lists, bytearrays and arrays of the standard library
        self._others: list[tuple[Any, Callable[[Any], None], Any]] = []  # deques and sets
        self._slots: list[tuple[object, dict[str, Any]]] = []  # objects without a dictionary
        self._arrays: list[tuple[Any, Any]] = []
        self.seen: dict[int, object] = {}  # id -> object: kept alive here, so that no other object gets the same id
        self._tensors: dict[int, tuple[Any, Any]] = {}  # address -> (bytes of the storage, copy)
        self._walk(root)

    def _walk(self, root: object) -> None:
        left, seen = [root], self.seen
        while left:
            one = left.pop()
            kind = one.__class__
            if kind in _fixed or id(one) in seen:
                continue
            seen[id(one)] = one
            if kind is dict:
                self._keep_fields(one, left)
            elif kind is tuple or kind is frozenset:
                left.extend(one)
            elif kind is list:
                self._lists.append((one, list(one)))
                left.extend(one)
            elif kind is bytearray or kind is array:
                self._lists.append((one, one[:]))
            elif kind is np.ndarray:
                if one.flags.writeable:
                    self._arrays.append((one, one.copy()))
            elif kind is torch.Tensor:
                self._keep_tensor(one)
            elif isinstance(one, FIXED):
                _fixed.add(kind)
            elif isinstance(one, tuple):
                left.extend(one)
            elif isinstance(one, deque | set):
                self._others.append((one, one.extend if isinstance(one, deque) else one.update, kind(one)))
                left.extend(one)
            elif isinstance(one, dict):
                self._keep_fields(one, left)
            elif isinstance(one, list):
                raise TypeError(f"a {kind.__name__}: this walk does not know how to put its contents back")
            elif hasattr(one, "__dict__"):
                self._keep_fields(one.__dict__, left)
            elif hasattr(kind, "__slots__"):
                values = {name: getattr(one, name) for name in kind.__slots__ if name != "__weakref__"}
                self._slots.append((one, values))
                left.extend(values.values())
            else:
                raise TypeError(f"a {kind.__name__}: this walk does not know how to put its contents back")

    def _keep_fields(self, fields: dict[Any, Any], left: list[Any]) -> None:
        self._fields.append((fields, dict(fields)))
        left.extend(fields.values())

    def _keep_tensor(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in self._tensors:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            self._tensors[storage.data_ptr()] = whole, whole.copy()

    def restore(self) -> None:
        """Puts the kept contents back into all objects."""
        for fields, kept in self._fields:
            fields.clear()
            fields.update(kept)
        for one, values in self._lists:
            one[:] = values
        for one, fill, values in self._others:
            one.clear()
            fill(values)
        for one, values in self._slots:
            for name, value in values.items():
                object.__setattr__(one, name, value)
        for cells, content in (*self._arrays, *self._tensors.values()):
            cells[...] = content
