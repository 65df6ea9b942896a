"""B51 and B52: a request that hits the cache, or shares a batch, has the states and tokens that it has alone.

`tests/proof/stateful` tests the same with random calls, down to the bytes.
"""

from itertools import product

import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.prefix.policies import Lru, LruPages
from tests.support.planes import every_strategy, fold
from tests.support.serving import EVERY, PAGE, Server
from tests.support.ways import every_strategy_and_order

CHUNK = 6
LENGTHS = sorted({n + d for n in (PAGE, CHUNK, EVERY, 2 * EVERY, 3 * EVERY) for d in (-1, 0, 1)})
BASES = [[(7 * n + base) % 50 for n in range(30)] for base in range(2)]


def server(backend: Backend, name: str, overlap: bool = True, cache: bool = True, **more: int) -> Server:
    prefix = ms.Prefix(states=Lru(), pages=LruPages()) if cache else False
    return Server(backend, name, overlap=overlap, prefix=prefix, **({"slots": 12, "rows": 5, "pages": 60} | more))


@every_strategy
def test_B51_every_length_around_pages_chunks_and_boundaries(name: str, backend: Backend) -> None:
    """Serves prompts with the same beginning, one of each length, one after the other. There is room for everything."""
    lengths = LENGTHS if backend.name == "reference" else [EVERY - 1, EVERY, 2 * EVERY + 1]
    at = server(backend, name, slots=60, pages=200)
    for length, goal in product(lengths, (1, 2)):
        match = at.mem.match(BASES[0][:length])
        assert at.turn(BASES[0][:length], goal, most=CHUNK) == match.length < length
        at.look(idle=True)
    assert at.mem.match(BASES[0]).length >= (3 * EVERY if backend.name == "reference" else EVERY)
    assert at.mem.stats().prefix.evicted_states == 0


@every_strategy_and_order
def test_B52_prompts_packed_into_one_batch_have_the_states_they_have_alone(
    name: str, overlap: bool, backend: Backend
) -> None:
    """The batch mixes hits and misses, equal and different prompts, chunks of different lengths, and padding."""
    at = server(backend, name, overlap, slots=20)
    first = BASES[0]
    at.turn(first[:16])
    prompts = [[*first[:16], 1, 2, 3], first[:11], first[:11], [*BASES[1][:23]], [*first[:16], 4]]
    rows = at.admit(*(ms.Request(n, tokens=prompt) for n, prompt in enumerate(prompts)))
    starts = [at.mem.info(row).length for row in rows]
    assert starts == [16, 0 if name == "none" else 8, 0 if name == "none" else 8, 0, 16]
    while any(at.mem.info(row).length < len(prompt) for row, prompt in zip(rows, prompts, strict=True)):
        left = [
            row if at.mem.info(row).length < len(prompt) else None for row, prompt in zip(rows, prompts, strict=True)
        ]
        at.run([None, *left], CHUNK)
        at.look()
    alone = [server(backend, name, overlap, cache=False) for _ in prompts]
    for row, prompt, other in zip(rows, prompts, alone, strict=True):
        twin = other.start(prompt)
        other.prefill(twin, CHUNK)
        for plane, reference in zip(at.mem.planes.values(), other.mem.planes.values(), strict=True):
            assert torch.equal(plane[:, at.slot(3 * row.index)], reference[:, other.slot(3 * twin.index)])
        assert int(at.mem.planes["long"][0, at.slot(3 * row.index), 0]) == fold(tuple(prompt))
    at.end(rows)
