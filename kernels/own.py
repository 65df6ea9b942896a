"""Adds operations of one's own: each is a kernel, its reference and a case, in one file inside or outside of memstate.

ema = Kernel(launch, reference, case, {"BLOCK": (512, 256, 1024), "warps": (4, 2, 8)}, state=["state"])
ema.register()                      # or a line of the package's entry points, in the group `memstate.kernels`
Backend("auto", "cuda").ema(x=.., state=..)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, make_dataclass
from functools import cache, cached_property, wraps
from importlib.metadata import entry_points
from inspect import signature
from keyword import iskeyword
from typing import Any, TypeAlias

from torch import Tensor

from memstate.kernels import tuned
from memstate.kernels.configs import CONFIGS, Config, axis
from memstate.kernels.dispatch import add_op
from memstate.kernels.tuned import config_of

MOST = 2**31 - 1  # largest number of an axis
GROUP = "memstate.kernels"  # entry points that name instances of `Kernel`
KERNELS: dict[str, "Kernel"] = {}  # name -> what is registered
Given: TypeAlias = dict[str, Any]  # name of an argument -> the argument


class OwnConfig(Config):
    """The launch configuration of an operation of one's own. Its fields are the axes of `Kernel.space`."""

    @classmethod
    def key_of(cls, *static: Any) -> str:
        """Returns the key of a launch. `static` are pairs of a name and a number."""
        if wrong := [f"{name}={number!r}" for name, number in static if not isinstance(number, int)]:
            raise ValueError(f"kernel {cls.kernel!r}: key {wrong[0]}, expected whole numbers")
        return ",".join(f"{name}={int(number)}" for name, number in static) or "any=0"


@dataclass(frozen=True, eq=False)
class Kernel:
    """An operation of one's own: how it is launched, what it must compute, on what, and what can be chosen.

    Args:
        launch: Launches the kernel. It takes the arguments of a case by name, and one number for each axis of `space`.
        reference: Computes the same in plain torch, on the arguments of a case.
        case: (batch, make) -> arguments by name. `make` is a `memstate_tools.tuning.Maker`, which makes the tensors:
            `make.normal`, `make.empty`, `make.rows`. Two calls with one seed must give the same values.
        space: Axis -> whole numbers to try, the default first.
        state: Names of the arguments that hold states; their bytes must move 16 at a time in each lane.
        key: Arguments -> sizes that are static for a launch, by name. Each key has a configuration of its own.
        nbytes: Arguments -> bytes that a call reads and writes. Default: the bytes of all tensors.
        name: Name of the operation. Default: the name of `launch`.

    Raises:
        ValueError: There is no reference, an axis has no values, or a name is no Python name.

    Example:
        >>> double = Kernel(launch_double, lambda x, out: out.copy_(2 * x), case, {"BLOCK": (512, 1024)})
        >>> double.register()
        >>> Backend("reference").launch_double(x=torch.ones(2), out=torch.empty(2))
    """

    launch: Callable[..., Any]
    reference: Callable[..., Any]
    case: Callable[[int, Any], Given]
    space: Mapping[str, Sequence[int]]
    state: Sequence[str] = ()
    key: Callable[[Given], Mapping[str, int]] = lambda given: {}
    nbytes: Callable[[Given], int] | None = None
    name: str = ""

    def __post_init__(self) -> None:
        name = self.name or getattr(self.launch, "__name__", "")
        object.__setattr__(self, "name", name)
        if not callable(self.reference) or not callable(self.launch) or not callable(self.case):
            raise ValueError(f"kernel {name!r}: expected three functions: launch, reference, case")
        if not _usable(name) or name == "all":
            raise ValueError(f"kernel {name!r}: expected a Python name; give another one as `name=`")
        if bad := [of for of in self.space if not _usable(of) or hasattr(OwnConfig, of)]:
            raise ValueError(f"kernel {name!r}: axis {bad[0]!r}: expected another Python name")
        taken = signature(self.launch).parameters.values()
        named = {each.name for each in taken if each.kind not in (each.POSITIONAL_ONLY, each.VAR_POSITIONAL)}
        if not any(each.kind is each.VAR_KEYWORD for each in taken) and (unknown := self.space.keys() - named):
            raise ValueError(f"kernel {name!r}: `launch` has no parameter {min(unknown)!r}, an axis of `space`")
        for of, values in self.space.items():
            whole = isinstance(values, Sequence) and all(type(value) is int and value >= 0 for value in values)
            if not values or not whole:
                raise ValueError(f"kernel {name!r}: axis {of!r} has {values!r}, expected whole numbers")

    @cached_property
    def kind(self) -> type[Config]:
        """The class of the configurations."""
        axes = [(of, int, axis(*values, least=0, most=MOST)) for of, values in self.space.items()]
        own = {"kernel": self.name, "key": (), "functions": (self.launch,), "__module__": __name__}
        return make_dataclass(f"{self.name}_config", axes, bases=(OwnConfig,), frozen=True, namespace=own)

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(signature(self.reference).parameters)

    def __call__(self, *args: Any, **given: Any) -> Any:
        """Launches the kernel with the configuration of the device's file, or else the default.

        Arguments without a name are in the order of the reference.

        Syncs: no.
        """
        given = dict(zip(self._names, args, strict=False)) | given
        if (first := next(tensors_in(given), None)) is None:
            raise ValueError(f"kernel {self.name!r}: no argument is a tensor")
        device = first[1].device
        config = config_of(self.kind, device, *self.key(given).items())  # type: ignore[arg-type]  # classes are hashable
        return self.launch(**given, **vars(config))

    def register(self) -> None:
        """Makes this an operation of every `Backend`, and a kernel that sweeps know by name.

        It takes the place of a kernel with the same `launch`, so that a cell of a notebook can run again.

        Raises:
            ValueError: The name is taken.
        """
        name, kind, known = self.name, self.kind, KERNELS.get(self.name)
        if known is None or _name(known.launch) != _name(self.launch):
            if name in CONFIGS:
                raise ValueError(f"kernel {name!r}: the name is taken; give another one as `name=`")

            @wraps(self.reference)
            def reference(*args: Any, **given: Any) -> Any:
                return KERNELS[name].reference(*args, **given)

            add_op(name, reference, lambda *args, **given: KERNELS[name](*args, **given))
        CONFIGS[name], KERNELS[name] = kind, self
        tuned.forget()  # what files say of this kernel was skipped


def tensors_in(given: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors in arguments, with names such as `x` or `kept[0]`; also those in lists, tuples and dicts."""
    if isinstance(given, Tensor):
        yield name, given
    elif isinstance(given, Mapping):
        for key, each in given.items():
            yield from tensors_in(each, f"{name}[{key!r}]" if name else str(key))
    elif isinstance(given, list | tuple):
        for at, each in enumerate(given):
            yield from tensors_in(each, f"{name}[{at}]")


def _usable(name: str) -> bool:
    return name.isidentifier() and not iskeyword(name) and not name.startswith("_")


def _name(function: Callable[..., Any]) -> object:
    """Returns what two versions of one function share; a function that another one made shares nothing."""
    name = getattr(function, "__qualname__", "<locals>")
    return function if "<locals>" in name else (function.__module__, name)


@cache
def load() -> dict[str, str]:
    """Registers the kernels that installed packages name as entry points.

    Returns:
        Name of an entry point -> why it cannot be loaded. The others are registered.
    """
    failed = {}
    for point in entry_points(group=GROUP):
        try:
            kernel = point.load()
            if kernel.name != point.name:
                raise ValueError(f"its kernel has the name {kernel.name!r}: give both one name")
            kernel.register()
        except Exception as error:  # code of another package
            of = point.dist.name if point.dist else "?"
            failed[point.name] = f"entry point {point.name} = {point.value} of {of}: {type(error).__name__}: {error}"
    return failed
