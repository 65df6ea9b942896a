"""The demo's model: a row's numbers do not depend on its place, its neighbours, the batch, or how its prompt is cut."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from memstate.cli.demo.arithmetic import (
    LIMIT,
    TERM_BITS,
    WEIGHT_BITS,
    attend,
    decaying_exp,
    fixed,
)
from memstate.cli.demo.corpus import Conversation
from memstate.cli.demo.engines import memory_of
from memstate.cli.demo.mixers import MIXERS, state_layout
from memstate.cli.demo.model import VOCABULARY, HybridModel, Slots
from memstate.cli.demo.sizes import ModelSize
from memstate.cli.demo.uncached import Uncached
from memstate.kernels.dispatch import Backend
from memstate.state.planes import Planes

SIZE = ModelSize(recurrent_layers=2)
PAGE = 4
PAGES_PER_ROW = 6
CHUNK = 5

every_mixer = pytest.mark.parametrize("mixer", MIXERS)


class Place(NamedTuple):
    """Where a sequence sits: its place in the batch, its row, its slot, its pages."""

    index: int
    row: int
    slot: int
    first_page: int


class Bench:
    """A model with memory for four slots and rows, poisoned."""

    def __init__(self, backend: Backend, mixer: str = "gdn") -> None:
        self.model = HybridModel(SIZE, 7, backend, mixer)
        self.device = backend.device
        self.state = Planes(state_layout(SIZE, mixer), 4, backend)
        self.kv = Planes(SIZE.page_layout(PAGE), 4 * PAGES_PER_ROW, backend)
        for plane in (*self.state.values(), *self.kv.values()):
            plane.fill_(float("nan"))
        table = torch.zeros(5, PAGES_PER_ROW, dtype=torch.int32, device=self.device)
        self.memory = memory_of(self.state, self.kv, table)

    def column(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def forward(self, batch: int, width: int, given: dict[Place, tuple[list[int], int]]) -> Tensor:
        """One step of a batch: place -> tokens and how many were folded before; everything else is padding."""
        tokens, start = torch.randint(VOCABULARY, (batch, width)), torch.zeros(batch, dtype=torch.int64)
        columns = {name: [0] * batch for name in Slots._fields if name != "marks"}
        for place, (content, before) in given.items():
            tokens[place.index, : len(content)] = torch.tensor(content)
            start[place.index] = before
            pages = range(place.first_page, place.first_page + PAGES_PER_ROW)
            self.memory.page_table[place.row] = self.column(list(pages))
            own = {"rows": place.row, "tokens": len(content), "read": place.slot if before else 0, "write": place.slot}
            for name, value in own.items():
                columns[name][place.index] = value
        slots = Slots(**{name: self.column(values) for name, values in columns.items()})
        return self.model.forward(tokens.to(self.device), start.to(self.device), slots, self.memory)

    def contents(self, place: Place, length: int) -> list[bytes]:
        """State and KV of a sequence, as bytes."""
        planes = [plane[:, place.slot].cpu() for plane in self.state.values()]
        pages = range(place.first_page, place.first_page + PAGES_PER_ROW)
        planes += [plane[0, list(pages)].flatten(0, 1)[:length].cpu() for plane in self.kv.values()]
        return [plane.contiguous().numpy().tobytes() for plane in planes]


def run_sequence(
    backend: Backend,
    tokens: list[int],
    cuts: list[int],
    batch: int,
    width: int,
    place: Place,
    seed: int,
    mixer: str = "gdn",
) -> tuple[bytes, list[bytes]]:
    """Logits, state and KV after a sequence cut at `cuts`, next to neighbours whose tokens come from `seed`."""
    bench, at = Bench(backend, mixer), 0
    draw = torch.Generator().manual_seed(seed)
    others = [Place((place.index + 1) % batch, (place.row % 4) + 1, (place.slot % 4) + 1, (place.first_page + 6) % 24)]
    for n in cuts:
        given = {place: (tokens[at : at + n], at)}
        if batch > 1:
            content = torch.randint(VOCABULARY, (width,), generator=draw).tolist()
            given[others[0]] = (content, 0)
        logits = bench.forward(batch, width, given)
        at += n
    return logits[place.index].cpu().numpy().tobytes(), bench.contents(place, at)


@every_mixer
def test_a_row_does_not_depend_on_place_neighbours_batch_or_cuts(backend: Backend, mixer: str) -> None:
    tokens = list(b"def reduce(function")[:13]
    alone = run_sequence(backend, tokens, [5, 5, 3], 1, CHUNK, Place(0, 1, 1, 1), 0, mixer)
    same = [
        run_sequence(backend, tokens, [5, 5, 3], 4, CHUNK, Place(2, 3, 4, 13), 1, mixer),  # another place and neighbour
        run_sequence(backend, tokens, [5, 5, 3], 3, CHUNK, Place(0, 2, 2, 7), 2, mixer),
        run_sequence(backend, tokens, [1, 4, 2, 5, 1], 2, 8, Place(1, 1, 3, 7), 3, mixer),  # other cuts, another width
        run_sequence(backend, tokens, [1] * 13, 2, 1, Place(0, 4, 1, 1), 4, mixer),  # token by token
    ]
    assert all(run == alone for run in same)
    other = run_sequence(backend, [*tokens[:3], 0, *tokens[4:]], [5, 5, 3], 1, CHUNK, Place(0, 1, 1, 1), 0, mixer)
    assert all(a != b for a, b in zip(alone[1], other[1], strict=True)) and alone[0] != other[0]


@every_mixer
def test_padding_changes_no_slot_and_no_page(backend: Backend, mixer: str) -> None:
    bench = Bench(backend, mixer)
    for plane in (*bench.state.values(), *bench.kv.values()):
        plane.copy_(torch.randn(plane.shape))
    before = {name: plane.clone() for name, plane in (dict(bench.state) | dict(bench.kv)).items()}
    bench.forward(3, CHUNK, {})
    for name, plane in (dict(bench.state) | dict(bench.kv)).items():
        assert torch.equal(plane[:, 1:], before[name][:, 1:]), name


def test_rubbish_in_the_null_page_and_beyond_the_length_is_not_seen(backend: Backend) -> None:
    clean = run_sequence(backend, [1, 2, 3], [3], 2, CHUNK, Place(0, 1, 1, 1), 0)
    bench = Bench(backend)
    for plane in bench.kv.values():
        plane[:] = float("inf")
    logits = bench.forward(2, CHUNK, {Place(0, 1, 1, 1): ([1, 2, 3], 0)})
    assert torch.isfinite(logits[0]).all()
    assert logits[0].cpu().numpy().tobytes() == clean[0]


def test_B52_the_chunk_size_changes_nothing(backend: Backend) -> None:
    conversation = Conversation(0, b"About heapq: ", (b"heappush?", b"nlargest?"))
    tiny = ModelSize(recurrent_layers=1, heads=1)
    lengths = [9, 24]
    runs = [Uncached(HybridModel(tiny, 1, backend), chunk, 12, 8, 0).answer(conversation, lengths) for chunk in (7, 16)]
    assert runs[0].tokens == runs[1].tokens and runs[0].states == runs[1].states and set(lengths) <= set(runs[0].states)
    assert {at: x.tobytes() for at, x in runs[0].logits.items()} == {
        at: x.tobytes() for at, x in runs[1].logits.items()
    }


def test_sums_are_exact_whatever_their_order() -> None:
    """The widest sums of the model, at the largest terms there can be, forwards, backwards and pairwise."""
    draw = torch.Generator().manual_seed(0)
    x = fixed(torch.randn(64, generator=draw) * LIMIT, TERM_BITS)
    weight = fixed(torch.randn(64, generator=draw) * 4, WEIGHT_BITS)
    terms = (x * weight).tolist()
    pairwise = (x * weight).view(2, 32).sum(1).sum().item()
    assert sum(terms) == sum(reversed(terms)) == sum(sorted(terms)) == pairwise == (x @ weight).item()


def test_attention_is_softmax_attention_with_a_close_exponential() -> None:
    draw = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, 2, n, 16, generator=draw) for n in (3, 9, 9))
    visible = torch.ones(2, 1, 3, 9, dtype=torch.bool).tril(4)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    assert torch.allclose(attend(q, k, v, visible), expected, atol=0.05)
    x = torch.linspace(-20, 0, 50)
    assert torch.allclose(decaying_exp(x), x.exp(), atol=0.003) and (decaying_exp(x).diff() > 0).all()
    assert decaying_exp(torch.tensor([0.0, -300.0])).tolist() == [1.0, 0.0]
    assert torch.equal(attend(q, k, v, torch.zeros_like(visible)), torch.zeros(2, 2, 3, 16))
