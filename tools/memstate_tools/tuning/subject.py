"""Says what a sweep tries: a kernel of memstate on the states of a model, or a kernel of one's own on its case."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

from memstate.errors import ConfigurationError, InvalidArgument
from memstate.kernels import own
from memstate.kernels.configs import CONFIGS, Config
from memstate.kernels.dispatch import OPS, Backend
from memstate.kernels.own import Kernel
from memstate.kernels.tuned_files import digest, source_of
from memstate_tools.models import Model, toy_of
from memstate_tools.workload import Workload, make, same_bytes


@dataclass(frozen=True)
class Subject:
    """A kernel, and what it runs on.

    Attributes:
        kernel: Name of a kernel of memstate, or a kernel of one's own.
        model: The model with the states; None for a kernel of one's own.
    """

    kernel: str | Kernel
    model: Model | None

    @property
    def kind(self) -> type[Config]:
        """Class of the configurations."""
        return CONFIGS[self.kernel] if isinstance(self.kernel, str) else self.kernel.kind

    def workload(self, batch: int, backend: Backend, seed: int, toy: bool = False, padded: bool = False) -> Workload:
        """Returns the calls of the kernel; see `memstate_tools.workload.make`.

        Args:
            batch: Slots that are moved, or rows of a step.
            backend: Runs the calls.
            seed: Seed of all values.
            toy: Whether states are so small that an interpreter can run the kernel. A case of one's own stays as it is.
            padded: Whether some rows have slot 0.
        """
        model = self.model
        if toy and model is not None:
            model = toy_of(model, self.kind.kernel)
        return make(self.kernel, model, batch, backend, seed, padded)

    @cached_property
    def source_of_launch(self) -> str:
        """Hash of the kernel and of what chooses its launch."""
        return source_of(self.kind)

    @cached_property
    def source(self) -> str:
        """Hash of the kernel, its reference, its case, and of the states: what a trial depends on."""
        if isinstance(self.kernel, Kernel):
            own = self.kernel
            functions = own.launch, own.reference, own.case, own.key, own.nbytes
            parts: tuple[str, ...] = digest(*functions), repr(list(own.state))
        else:
            references = [getattr(Backend, op) for op, module in OPS.items() if module == self.kernel]
            parts = self.source_of_launch, digest(*references), repr(self.model)
        return sha256(repr(parts).encode()).hexdigest()[:16]

    def require_steady(self) -> None:
        """Raises InvalidArgument if two cases of one seed differ, so that nothing could be compared with them."""
        one, two = (self.workload(1, Backend("reference"), 1).written for _ in range(2))
        if differ := [name for name, each in one.items() if not same_bytes(each, two[name])]:
            raise InvalidArgument(
                f"kernel {self.kind.kernel!r}: {differ[0]} differs between two cases of the same seed;"
                " take all random values from `make`"
            )


def subjects(kernels: object, models: Iterable[Model]) -> list[Subject]:
    """Returns what to try.

    Args:
        kernels: "all" (every kernel that has states in the model), a name, a kernel of one's own, or several of them.
        models: Models with the states, for kernels of memstate.

    Raises:
        InvalidArgument: A name is unknown or taken, or a model has no state for a kernel that was named.
        ConfigurationError: A kernel that an installed package names cannot be loaded.
    """
    if isinstance(kernels, str | Kernel):
        kernels = (kernels,)
    if not isinstance(kernels, Sequence) or not kernels:
        raise InvalidArgument(f"kernels {kernels!r}: expected {', '.join(CONFIGS)}, all, or a Kernel of your own")
    failed = own.load()
    found: list[Subject] = []
    for kernel in kernels:
        known = own.KERNELS.get(kernel, kernel) if isinstance(kernel, str) else kernel
        if isinstance(known, str) and known in failed:
            raise ConfigurationError(failed[known])
        if isinstance(known, Kernel):
            others = {each.kind.kernel for each in found if each.kernel is not known}
            if known.name in others | (CONFIGS.keys() - own.KERNELS):
                raise InvalidArgument(f"kernel {known.name!r}: the name is taken; give another one as `name=`")
            found.append(Subject(known, None))
        elif known != "all" and known not in CONFIGS:
            raise InvalidArgument(f"kernel {known!r}: expected {', '.join(CONFIGS)}, all, or a Kernel of your own")
        else:
            found += [subject for model in models for subject in _of_memstate(known, model)]
    return list(dict.fromkeys(found))


def _of_memstate(kernel: str, model: Model) -> list[Subject]:
    if kernel == "all":
        return [Subject(name, model) for name in CONFIGS if name not in own.KERNELS and model.has(name)]
    if not model.has(kernel):
        raise InvalidArgument(f"kernel {kernel!r}: there is no state for it in {model.layout}")
    return [Subject(kernel, model)]
