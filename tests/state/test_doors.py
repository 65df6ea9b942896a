"""Lists all that names one plane, so that no numbers of a state are moved without their scales, nor scales alone."""

import ast
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import memstate as ms
from memstate.errors import InvalidArgument, LayoutMismatch
from memstate.kernels.dispatch import Backend
from memstate.kernels.reference.scaled import SHARED, TOP
from memstate.kernels.tables import StepMarks
from memstate.state.layout import NUMBERS, Plane, StateLayout
from memstate.state.planes import Planes
from memstate.state.presets import from_config
from memstate.state.presets.families import SHARED as MULTIPLE
from memstate.state.sharding import Part
from memstate.tiers import Tiers
from memstate.tiers.host.packing import Packing, in_records
from memstate.viz.inspector import page
from tests.support.build import on
from tests.support.refusals import refusals
from tests.support.sources import sources

DELTA = {
    "model_type": "qwen3_next", "num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
PAIR = "ssm", "ssm_scale"
SHOW = "viz", "metrics", "cli"  # folders that move no state
NAMED = "plane", "planes", "int8", "sources", "saved", "tensors"  # parameters that name planes
ONE, TWO = (torch.tensor([slot], dtype=torch.int32) for slot in (1, 2))


def filled(backend: Backend, dtype: torch.dtype = torch.int8, order: Any = "layer_major") -> Planes:
    """Returns planes of three slots with random bytes."""
    planes = Planes(from_config(DELTA, ssm_dtype=dtype, order=order, tail=2), 3, backend, rows=1)
    for at, arena in enumerate(planes.arenas):
        arena.copy_(torch.randint(0, 256, arena.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(at)))
    return planes


def batch(planes: Planes, name: str) -> Tensor:
    return torch.zeros_like(planes[name][:, 1:2])


def marked(planes: Planes, **states: Tensor) -> None:
    """Stores the state behind the only token of a step in slot 2, because of a mark."""
    marks = StepMarks(*(torch.tensor([at], dtype=torch.int32) for at in (1, 0, 1, 2)))
    planes.scatter_states(states, marks, torch.tensor([0, 1], dtype=torch.int32), ONE, ONE)


def manager(name: str) -> ms.StateManager:
    tiers, layout = Tiers("m", host_slots=1, int8={name: 1}), from_config(DELTA, ssm_dtype=torch.int8)
    return ms.StateManager(layout, slots=4, max_requests=1, prefix=ms.Prefix(), pages=ms.Pages(size=4), tiers=tiers)


def adopted(planes: Planes, name: str) -> Planes:
    others = {each: planes[each] for each in planes if each != name}
    return Planes.from_tensors(planes.layout, others, planes.backend)


# What names a plane of a state, and so could move one plane alone: a call that must be refused.
REFUSED: dict[str, Callable[[Planes, str], object]] = {
    "Planes.copy": lambda planes, name: planes.copy(TWO, ONE, planes=[name, "conv"]),
    "Planes.count": lambda planes, name: planes.count([name], copied=1),
    "Planes.table_of": lambda planes, name: planes.table_of({name}),
    "Planes.gather": lambda planes, name: planes.gather(name, ONE),
    "Planes.scatter": lambda planes, name: planes.scatter(name, ONE, batch(planes, name)),
    "Planes.scatter_states": lambda planes, name: marked(planes, **{name: batch(planes, name)}),
    "Planes.load": lambda planes, name: planes.load({name: batch(planes, name)}, ONE),
    "Planes.from_tensors": adopted,
    "StateManager.__init__": lambda planes, name: ms.StateManager(
        planes.layout, slots=3, max_requests=1, tensors={name: planes[name]}
    ),
    "in_records": lambda planes, name: in_records(planes.layout, {name: 1}),
    "Packing.__init__": lambda planes, name: Packing(planes, {name: 1}),
    "Tiers": lambda _, name: manager(name),
}
# What names a plane, and moves no state.
TELLS = {
    "Planes.__getitem__": "gives the tensor to a step, which requires scales for such a state",
    "Planes.tail": "rings of rows have inputs of tokens",
    "Planes.of": "says where a plane lies",
    "Planes.require_awake": "takes the name of an operation",
    "World.__init__": "hands tensors to `Planes.from_tensors`",
    "adopt": "does the work of `Planes.from_tensors`",
    "scales_of": "says the name of scales in records",
    "StatePlace": "Transformers' own states, which have no scales",
    "WrongBytes": "a result", "ForwardFault.__init__": "a result", "BufferInfo": "a result",
}  # fmt: skip


@pytest.mark.parametrize("name", PAIR)
@pytest.mark.parametrize("door", REFUSED)
def test_B40a_numbers_and_scales_are_not_moved_alone(door: str, name: str) -> None:
    planes = filled(Backend("reference"))
    before = [arena.clone() for arena in planes.arenas]
    with pytest.raises((InvalidArgument, LayoutMismatch), match=r"\bssm"):
        REFUSED[door](planes, name)
    assert all(map(torch.equal, before, planes.arenas))


def doors() -> set[str]:
    """Returns all that names planes: public calls of `Planes` with a text, and what has such a parameter or field."""
    calls = inspect.getmembers(Planes, lambda member: inspect.isfunction(member) or inspect.ismethod(member))
    found = {
        f"Planes.{name}" for name, call in calls
        if (name[0] != "_" or name == "__getitem__") and "str" in str(inspect.signature(call)).split("->")[0]
    }  # fmt: skip
    for path, tree in sources("memstate").items():
        for owner in ast.walk(tree) if path.parts[1] not in SHOW else ():
            for node in owner.body if isinstance(owner, ast.Module | ast.ClassDef) else ():
                names = [owner.name] if isinstance(owner, ast.ClassDef) else []
                if isinstance(node, ast.FunctionDef) and (node.name[0] != "_" or node.name == "__init__"):
                    given = [(one.arg, one.annotation) for one in (*node.args.args, *node.args.kwonlyargs)]
                    names.append(node.name)
                else:
                    given = [(ast.unparse(node.target), node.annotation)] if isinstance(node, ast.AnnAssign) else []
                if any(name in NAMED and kind and "str" in ast.unparse(kind) for name, kind in given):
                    found.add(".".join(names))
    return found


def test_a_call_that_names_a_plane_is_in_the_list() -> None:
    assert doors() == {*REFUSED, *TELLS}


@pytest.mark.parametrize(("dtype", "order"), [*itertools.product(NUMBERS, ("layer_major", "slot_major"))])
def test_B40a_numbers_and_scales_are_moved_together(backend: Backend, dtype: torch.dtype, order: str) -> None:
    def slot(number: int) -> list[list[int]]:
        return [planes[name][:, number].reshape(-1).view(torch.uint8).tolist() for name in planes]

    planes = filled(backend, dtype, order)
    first, conv = slot(1), slot(2)[0]
    planes.copy(TWO, ONE, planes=PAIR)
    assert slot(2) == [conv, *first[1:]]
    planes.load(planes.save(ONE), TWO)
    assert slot(2) == first
    planes.zero(TWO)
    assert not any(map(any, slot(2)))  # a zero state, because its numbers and its scales are zeros
    packing = Packing(planes)
    bodies = torch.zeros((1, packing.nbytes), dtype=torch.uint8)
    packing.pack(None, ONE, torch.zeros_like(ONE), bodies)
    packing.unpack(None, TWO, torch.zeros_like(ONE), bodies)
    assert slot(2) == first
    planes.zero(TWO)
    marked(planes)  # without a source, memstate copies the state at the end of the step
    assert slot(2) == first
    planes[PAIR[1]][:, 0] = torch.nan
    planes.scrub_null()
    assert not any(map(any, slot(0)))


def test_a_manager_of_whole_numbers_warms_up_and_is_shown(backend: Backend) -> None:
    mem = on(backend, from_config(DELTA, ssm_dtype=torch.int16), slots=2, max_requests=1)
    assert ms.warm_up(mem) > 0 and not mem.planes[PAIR[0]][:, 0].any()
    assert all(name in page(mem.inspect()) for name in PAIR)


HEADS = (Part("head", 4),)
WHOLE = Plane("x", (4, 16, 8), torch.int8, parts=HEADS)


def layout(scales: Plane, numbers: Plane = WHOLE) -> StateLayout:
    return StateLayout((numbers, scales), layers=2)


test_scales_lie_and_move_like_their_numbers = refusals(
    InvalidArgument,
    (Plane("x_scale", (4, 8), torch.float16, parts=HEADS), "x_scale.* has the scales of Plane"),
    (Plane("x_scale", (4, 8), torch.float32), "without an axis behind 0"),
    (Plane("x_scale", (16, 8), torch.float32), "x_scale"),
    (Plane("x_scale", (4, 8), torch.float32, parts=HEADS, layers=1), "x_scale"),
    (Plane("x_scale", (4, 8), torch.float32, parts=HEADS, rewritten_each_step=False), "x_scale"),
    (Plane("x_scale", (4, 4, 8), torch.float32, parts=HEADS), "x_scale"),
    call=layout,
)


def test_only_whole_numbers_have_scales() -> None:
    good = layout(Plane("x_scale", (4, 16), torch.float32, parts=HEADS))
    assert [plane.shape for plane in good.shard(2).planes] == [(2, 16, 8), (2, 16)]
    other = Plane("x", (4, 16, 8), torch.float32)
    assert layout(Plane("x_scale", (3,), torch.float32), other).planes[0] == other
    assert set(NUMBERS) == set(TOP) and MULTIPLE == SHARED
