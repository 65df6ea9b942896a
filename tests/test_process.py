"""memstate works the same under any settings of torch in the process: default device and dtype, inference mode,
gradients.
"""

import ast
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch

import memstate as ms
from memstate.kernels.blocks import as_bytes
from memstate.kernels.dispatch import OPS, Backend
from memstate.kernels.reference import host
from memstate.slots.readback import Readback
from memstate.slots.upload import UploadRing
from tests.proof.stateful.operations import Operations
from tests.proof.stateful.program import Program
from tests.proof.stateful.script import Play
from tests.support import inside, op_cases
from tests.support.planes import LAYOUT
from tests.support.sources import sources

# functions of torch whose defaults come from the process; `Tensor`, the last one, has no arguments for them
FACTORIES = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "frombuffer", "full", "linspace", "logspace",
    "ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "zeros", "Tensor",
}  # fmt: skip
# functions that take their dtype from their values
OF_VALUES = {"arange", "as_tensor", "asarray", "randint", "randperm", "tensor"}
KINDS: dict[str, dict[str, Any]] = {"": {}, "tails": {"tail": True}, "keys": {"kv": "keys"}, "tiers": {"tiered": True}}
LENGTH = 40  # operations of a program
Mode = Callable[[], AbstractContextManager[object]]


@contextmanager
def set_by(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Gives the process a default device and a default dtype of its own."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


every_process = pytest.mark.parametrize(
    ("device", "dtype"), [("meta", torch.float64), ("cpu", torch.bfloat16)], ids=["meta float64", "cpu bfloat16"]
)
every_program = pytest.mark.parametrize(("seed", "kind"), list(enumerate(KINDS)), ids=["plain", *list(KINDS)[1:]])


def untold(tree: ast.AST) -> list[str]:
    """Returns the calls of factories that do not name a device, or name no dtype although no values give it."""
    lines = []
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name("torch"), attr=name)) if name in FACTORIES:
                wanted = {"device"} if name in OF_VALUES else {"device", "dtype"}
                if not wanted <= {keyword.arg for keyword in node.keywords}:
                    lines.append(f"{node.lineno}: {ast.unparse(node)}")
            case ast.ImportFrom(module="torch", names=names):
                lines += [f"{node.lineno}: {each.name}" for each in names if each.name in FACTORIES - {"Tensor"}]
    return lines


@pytest.mark.parametrize("folder", ["memstate", "kernels", "tools"])
def test_every_factory_names_its_device(folder: str) -> None:
    assert [f"{path}:{each}" for path, tree in sources(folder).items() for each in untold(tree)] == []


@pytest.mark.parametrize(
    "source",
    [
        "torch.zeros(3, dtype=torch.int32)", "torch.randn(3, device=device)", "torch.tensor([1])",
        "torch.Tensor([1])", "from torch import zeros",
    ],
)  # fmt: skip
def test_a_factory_that_names_no_device_is_found(source: str) -> None:
    assert untold(ast.parse(source)) != []
    assert untold(ast.parse("torch.zeros(3, dtype=torch.int32, device=device); torch.tensor(1, device=device)")) == []


def served(seed: int, kind: str, built: Mode, worked: Mode, ended: Mode) -> list[Any]:
    """Builds a manager under the mode `built`, runs a random program under `worked`, and ends it under `ended`.

    The model of the program compares every byte. Returns what the registers hold after each operation.
    """
    program, kept = Program.random(seed, LENGTH, **KINDS[kind]), list[Any]()
    with built():
        machine = Operations(program.drawn(), Backend("reference"))
    for name, number in program.operations:
        with worked():
            machine.run(name, number)
        kept.append(inside.registers(machine.mem).cells.tolist())
    with ended():
        machine.close()
    return kept


@pytest.mark.script
@every_program
@every_process
def test_programs_are_the_same_in_every_process(seed: int, kind: str, device: str, dtype: torch.dtype) -> None:
    there = served(seed, kind, *[lambda: set_by(device, dtype)] * 3)
    assert there == served(seed, kind, *[nullcontext] * 3)


@pytest.mark.script
@every_program
@pytest.mark.parametrize(
    "modes",
    [
        (torch.inference_mode, nullcontext, nullcontext), (nullcontext, torch.inference_mode, nullcontext),
        (torch.no_grad, nullcontext, torch.inference_mode),
    ],
    ids=["built inside", "used inside", "built without gradients"],
)  # fmt: skip
def test_a_manager_works_in_other_modes_than_it_was_built_in(
    seed: int, kind: str, modes: tuple[Mode, Mode, Mode]
) -> None:
    served(seed, kind, *modes)


def inference_tensors() -> list[torch.Tensor]:
    """Returns the tensors of this process that were made in inference mode."""
    host._same_memory.cache_clear()  # the cache of arguments has those of the last launches
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is torch.Tensor and one.is_inference()]


@pytest.mark.script
def test_nothing_that_is_made_in_inference_mode_is_kept() -> None:
    before = inference_tensors()  # what other tests have left
    with torch.inference_mode():
        play = Play(Backend("reference"), strategy="redirect", prefix=True, tails=True, tail=2)
        play.turn(range(9))
        (row,) = play.admit(range(12))
        play.step([row], 2, drafts=1)
        play.fork(row, "twin")
    known = set(map(id, [play.machine.store, *before]))
    kept = [one.shape for one in inference_tensors() if id(one) not in known]
    assert kept == [], "kept, and cannot be changed outside"
    play.finish()


def test_what_grows_in_inference_mode_is_used_outside() -> None:
    backend = Backend("reference")
    ring, numbers = UploadRing(backend, 4), np.arange(9, dtype=np.int32)
    with torch.inference_mode():
        ring.send(numbers)
        ids = Readback(9, backend)
    sent = ring.send(numbers + 1)
    ids.begin(sent)
    assert ids.wait().tolist() == [*range(1, 10)]


@pytest.mark.parametrize("allocate", [False, True])
def test_memory_that_an_engine_made_in_inference_mode_is_used_outside(allocate: bool) -> None:
    backend = Backend("reference")
    with torch.inference_mode():
        if allocate:
            planes = ms.Planes(LAYOUT, 4, backend, lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
        else:
            given = {plane.name: torch.empty(2, 5, *plane.shape, dtype=plane.dtype) for plane in LAYOUT.planes}
            planes = ms.Planes.from_tensors(LAYOUT, given, backend)
        planes["long"][:, 1:] = 7
    planes.scrub_null()
    planes.scatter("short", torch.tensor([1]), torch.ones(2, 1, 5, dtype=torch.int32))
    planes.zero(torch.tensor([2]))
    planes.copy(torch.tensor([3]), torch.tensor([1]))
    assert planes["long"][0, :, 0].tolist() == [0, 7, 0, 7, 7]


@every_process
@pytest.mark.parametrize("op", OPS)
def test_references_are_the_same_in_every_process(op: str, device: str, dtype: torch.dtype) -> None:
    case = op_cases.made(op, 0)
    reference = case.module("memstate.kernels.reference")
    here = case.run(reference)
    with set_by(device, dtype):
        there = case.run(reference)
    for one, other in zip(here, there, strict=True):
        assert one.dtype == other.dtype and torch.equal(as_bytes(one), as_bytes(other))
