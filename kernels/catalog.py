"""Lists what to compile: every kernel, with the types and constants of a real launch. Imports no Triton itself."""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

from memstate.kernels.dispatch import OPS


class CompileCase(NamedTuple):
    """A kernel with the arguments of one real launch.

    Args:
        name: name of the case.
        kernel: the function under `@triton.jit`.
        signature: argument -> Triton type ("*i32", "i64", ...).
        constexprs: argument -> value.
        divisible: arguments known to be multiples of 16 (pointers and strides).
        num_warps: warps of a program.
        plane_args: pointer arguments through which the bytes of planes move. If the kernel reads the addresses of
            planes from a table, the argument of this table.
        options: further compile options of the launch (enable_fp_fusion, ...).
        rare: whether the case is a less common shape of a kernel that has other cases.
        of_64: argument -> value, for the constexprs that have another value where warps have 64 threads.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    divisible: tuple[str, ...]
    num_warps: int
    plane_args: tuple[str, ...]
    options: Mapping[str, Any] = MappingProxyType({})
    rare: bool = False
    of_64: Mapping[str, Any] = MappingProxyType({})


def all_cases(every_shape: bool = False) -> list[CompileCase]:
    """Returns the cases of every kernel, in the order of the ops.

    Args:
        every_shape: whether to include the rare cases: all other lanes, warps, units and tiles that can be launched.
    """
    modules = dict.fromkeys(OPS.values())
    cases = [case for module in modules for case in import_module(f"memstate.kernels.{module}").compile_cases()]
    return [case for case in cases if every_shape or not case.rare]
