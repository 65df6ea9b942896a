"""Computes one token of a layer from its projections with two launches, and checks that nothing is copied.

The results have the bits of contiguous inputs. Tests of each operation against float64: test_conv.py,
test_gated_delta.py, test_selective.py.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memstate.kernels.dispatch import Backend
from tests.kernels.test_decode_steps import made
from tests.support.decode_case import Row, same_bits
from tests.support.watch import real_launches

ROWS = [Row(1, 1, tokens=1), Row(2, 3, 4, 1), Row(0, 5, 0, 1), Row(0, 0, 0, 1)]
DELTA = {"gates": True}, "q k v", "- beta decay", 32
# kind of step -> its settings, the parts of a projection that go through the convolution, the other parts, and the size
# of the part "-", which the recurrence does not read
LAYERS: dict[str, tuple[dict[str, Any], str, str, int]] = {
    "gdn": DELTA, "gdn, value key": DELTA, "mamba2": ({}, "x b c", "z dt -", 4),
}  # fmt: skip


class Made(TorchDispatchMode):
    """Collects the names of the operations that torch runs, except views."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Records an operation, and runs it."""
        if not func.is_view:
            self.ops.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@contextmanager
def operations() -> Iterator[list[str]]:
    """Yields a list. It gets the torch operations of the block that make, copy or compute a tensor."""
    with Made() as made:
        yield made.ops


@pytest.mark.sample
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_D9_D13_a_layer_makes_two_outputs_from_its_projections_and_copies_nothing(
    backend: Backend, generator: torch.Generator, dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, mixed_names, names, unused = LAYERS[kind]
    some: dict[str, Any] = {"rows": ROWS, "tokens": 1, "inputs": dtype}
    state = torch.float32 if kind == "mamba2" else dtype
    step = made(kind, backend, generator, state=state, dims=(4, 2, 16, 8), **some, **settings)
    shapes = {name: step.inputs[name].shape[2:] for name in step.inputs} | {"-": torch.Size([unused])}
    mixed_sizes, sizes = ([shapes[name].numel() for name in each.split()] for each in (mixed_names, names))
    conv = made("conv", backend, generator, state=dtype, channels=sum(mixed_sizes), **some)
    projection = torch.randn(len(ROWS), 1, sum(mixed_sizes + sizes), generator=generator).to(conv.inputs["x"])
    projection[-1] = torch.nan  # the last row is padding
    to_conv, to_step = conv.arguments(), step.arguments()

    def run(part: Callable[[Tensor], Tensor] = lambda x: x) -> list[Tensor]:
        """Returns the outputs of convolution and recurrence. part: turns a slice of the projection into an input."""
        inputs, *rest = projection.split([sum(mixed_sizes), *sizes], -1)
        mixed = backend.conv_step(**to_conv | {"x": part(inputs)})
        parts = zip(f"{mixed_names} {names}".split(), (*mixed.split(mixed_sizes, -1), *rest), strict=True)
        given = {name: part(x).unflatten(-1, shapes[name]) for name, x in parts if name != "-"}
        return [mixed, getattr(backend, step.op)(**to_step | given)]

    memories = conv.memory, step.memory
    outputs = run()
    kept = [memory.whole.clone() for memory in memories]
    for memory in memories:
        memory.check_changed_only({1, 3, 4, 5})
        memory.whole.copy_(memory.before)
    assert all(map(same_bits, outputs, run(torch.Tensor.contiguous)))
    assert all(same_bits(memory.whole, was) for memory, was in zip(memories, kept, strict=True))
    assert all(out[:-1].isfinite().all() and not out[-1].any() for out in outputs)
    if backend.name != "reference":  # the reference makes tensors of its own
        with real_launches(monkeypatch) as launched:
            run()
        if backend.name == "interpreter":  # which makes tensors of its own, too
            monkeypatch.setattr("triton.runtime.interpreter.GridExecutor.__call__", lambda *_, **__: None)
        with operations() as ops:
            run()
        assert ops in (["new_empty"] * 2, ["empty"] * 2) and len(launched) == 2
