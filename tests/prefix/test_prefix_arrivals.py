"""States in the cache that no plain step computed: those that arrive from elsewhere, and those of windows."""

import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.prefix.policies import Lru, LruPages
from tests.support import owners
from tests.support.loops import Speculator
from tests.support.planes import every_snapshot, every_strategy, fold
from tests.support.serving import EVERY, TRACKING, Server

pytestmark = pytest.mark.sample(interpreter=0)  # without MEMSTATE_PROOF the reference alone


@every_snapshot
@pytest.mark.parametrize("direct", [False, True], ids=["copied", "read directly"])
def test_B51_windows_leave_and_find_the_same_states(name: str, direct: bool, backend: Backend) -> None:
    """Speculation: what is rejected is no part of any state; a hit is read until a window of it is accepted."""
    tracking = TRACKING[name](EVERY)
    settings = {"prefix": ms.Prefix(Lru(), LruPages()), "direct_hits": direct, "slots": 8, "rows": 2}
    loop = Speculator(backend, tracking, **settings)
    (row,) = loop.admit(ms.Request("a", tokens=[loop._next]))
    for accepted in (6, 6, 0, 6):
        loop.window([row], [accepted])
        loop.mem.publish([row], keep="cache", tokens=[loop.fed[row]])
    text = list(loop.fed[row])
    assert loop.mem.match(text).length == 2 * EVERY
    loop.mem.end([row], keep="cache", tokens=[text])
    (again,) = loop.admit(ms.Request("b", tokens=[*text[: 2 * EVERY], loop._next + 100]))  # of its second window
    loop.fed[again] = text[: 2 * EVERY]
    assert loop.mem.info(again).length == 2 * EVERY
    loop.window([again], [0])
    loop.mem.prefix.evict_states(9)  # type: ignore[union-attr]
    assert loop.mem.prefix.states == direct  # type: ignore[union-attr]
    loop.window([again], [3])
    assert loop.holds(loop.slot(again), again, 2 * EVERY + 3)
    loop.window([again], [6])
    assert loop.mem.publish([again], keep="cache", tokens=[loop.fed[again]]) != [None]
    for node in owners.nodes(loop.mem.prefix).values():  # type: ignore[union-attr]
        assert loop.holds(loop.node(node.snapshot), again, node.end)
    loop.mem.end([again])
    loop.mem.prefix.clear()  # type: ignore[union-attr]
    loop.mem.audit().raise_if_leaking()
    assert loop.mem.free_slots == 8


@pytest.mark.sample(interpreter=1)
@every_strategy
def test_states_that_arrive_are_cached_like_those_computed_here(name: str, backend: Backend) -> None:
    """Disaggregated: the prompt is computed elsewhere, its state written to the slot of a preallocated row."""
    prefix = ms.Prefix(Lru(), LruPages())
    at = Server(backend, name, whole=True, prefix=prefix, slots=12, rows=1, preallocated=2, pages=30)
    first, *others = ([100 * n + i for i in range(8)] for n in range(4))
    assert at.turn(first) == 0
    prompts = [[*others[0], 1, 2], others[1], [*others[2], 5]]
    rows = at.admit(*(ms.Request(n, tokens=tokens) for n, tokens in enumerate(prompts)))
    at.mem.submit()
    for row, prompt, slot in zip(rows, prompts, at.mem.device.read_slots(rows).wait().tolist(), strict=True):
        for plane_name, plane in at.mem.planes.items():
            plane[:, slot] = (fold(tuple(prompt)) * at.planes.weights[plane_name]).to(plane.dtype)
        for position, token in enumerate(prompt):
            at.kv[owners.pages_of(at.mem, row)[position // at.page], position % at.page] = token
        at.text[row].append(int(torch.randint(50, (1,))))  # the first token comes along
    at.mem.device.arrived(rows, [len(prompt) for prompt in prompts])
    assert [at.mem.info(row).length for row in rows] == [10, 8, 9]
    for _ in range(8):
        at.run(rows)
        at.look()
    at.end(rows)
    at.look(idle=True)
    for row, prompt in zip(rows, prompts, strict=True):
        assert at.mem.match(at.text[row]).kv_length == (len(prompt) + 8) // 4 * 4
        if name != "none":
            assert at.turn([*at.text[row][:16], 77]) == 16  # the boundary; and the prompt's end, where one was due
    assert at.mem.match([*others[1], 1]).length == (0 if name == "none" else 8)  # it arrived at the length of a mark
    assert at.turn([*first, 3]) == 8
