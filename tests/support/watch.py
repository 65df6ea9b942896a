"""Counts torch operations and Triton launches that really reach the device. Uses no counters of the library."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import memstate as ms
from memstate.kernels.dispatch import OPS
from tests.support import inside


class Watch(TorchDispatchMode):
    """Counts the torch operations that would reach a device, except calls that `let_pass` names."""

    FREE = (
        "empty", "view", "slice", "select", "as_strided", "alias", "detach", "reshape", "unsqueeze", "squeeze",
        "split",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.inside = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        if not self.inside and not name.startswith(self.FREE):
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))

    def outside(self, call: Callable[..., object]) -> Callable[..., object]:
        def called(*args: object, **kwargs: object) -> object:
            self.inside += 1
            try:
                return call(*args, **kwargs)
            finally:
                self.inside -= 1

        return called

    def let_pass(self, mem: ms.StateManager, *rings: ms.slots.upload.UploadRing) -> None:
        """From now on, does not count the launches and uploads of a manager, and the uploads of these rings."""
        for op in OPS:
            setattr(mem.backend, op, self.outside(getattr(mem.backend, op)))
        for ring in (inside.commands(mem).ring, *rings):
            ring.push = self.outside(ring.push)  # type: ignore[method-assign,assignment]


@contextmanager
def real_launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Collects the names of the kernels that Triton runs during the block."""
    seen: list[str] = []
    if torch.cuda.is_available():
        from triton import knobs

        def launched(metadata) -> None:  # type: ignore[no-untyped-def]
            seen.append(metadata.get()["name"])

        knobs.runtime.launch_enter_hook.add(launched)
        yield seen
        knobs.runtime.launch_enter_hook.remove(launched)
    elif "MEMSTATE_COMPILED" in os.environ:
        from tests.support.ptx.device import LAUNCHED

        before = Counter(LAUNCHED)
        yield seen
        seen += (Counter(LAUNCHED) - before).elements()
    else:
        from triton.runtime.interpreter import GridExecutor

        run = GridExecutor.__call__

        def launched_here(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            seen.append(self.fn.__name__)
            return run(self, *args, **kwargs)

        monkeypatch.setattr(GridExecutor, "__call__", launched_here)
        yield seen
