"""Tests that decode steps with tails have the bits of plain decode, whatever is accepted, pending and stored.

Each test runs a stream of tokens twice: with one token per step, and with several per step of which some are accepted.
Rejected tokens are NaN, and so is all memory that no step has written.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import ConvTail, Cursor, DeltaTail, SelectiveTail
from tests.kernels.test_decode_marks import columns as columns_of
from tests.kernels.test_decode_steps import DTYPES, KINDS, ODD, made
from tests.support.decode_case import Case, Row, rubbish, same_bits
from tests.support.sampling import PROOF
from tests.support.trees import Tree, chain, drawn, keep, parents_of

STREAM = 14 if PROOF else 8  # tokens of each row
ROWS = 3
TAILED = [kind for kind in KINDS if kind != "mamba3"]
WIDE = [  # (kind, settings): sizes that do not fill a block or need several, and several heads per key head or group
    *((kind, settings) for kind, settings in ODD if kind in TAILED),
    ("gdn", {"dims": (4, 2, 8, 48), "inputs": torch.bfloat16}),
    ("kda, gates", {"dims": (2, 1, 16, 34)}),
    *((kind, {"dims": (1, 1, 64, 16), "state": torch.bfloat16}) for kind in ("gdn", "gdn, value key")),
    *((kind, {"dims": (1, 1, 16, 64), "state": torch.bfloat16}) for kind in ("mamba2", "mamba2, state dim")),
]
each_tailed = pytest.mark.parametrize("kind", TAILED)
# For each op: the class of its tail; the input for each ring with another name; and the rings of values that the op
# itself computes.
KEPT: dict[str, tuple[Any, dict[str, str], tuple[str, ...]]] = {
    "conv_step": (ConvTail, {}, ()), "gated_delta_step": (DeltaTail, {"gate": "decay"}, ("gate", "beta")),
    "selective_step": (SelectiveTail, {}, ("dt",)),
}  # fmt: skip


def rings_of(case: Case, rows: int, ring: int, generator: torch.Generator) -> Any:
    """Returns rings of NaN for the op of a step, with gaps between rows."""
    tail, inputs, computed = KEPT[case.op]

    def ring_of(name: str) -> Tensor | None:
        given = case.inputs.get(inputs.get(name, name))
        if given is None:
            return None
        return empty(rows, ring, given.shape[2:], torch.float32 if name in computed else given.dtype, case, generator)

    return tail(*map(ring_of, tail._fields))


def empty(rows: int, ring: int, shape: Any, dtype: torch.dtype, case: Case, generator: torch.Generator) -> Tensor:
    size = torch.empty((ring, *shape), dtype=dtype, device="meta").nbytes
    apart = -(-size // 16) * 16 + 32
    whole = rubbish(rows * apart, case.memory.state.device, generator).view(dtype)
    inner = torch.empty((ring, *shape), device="meta").stride()
    return whole.as_strided((rows, ring, *shape), (apart // dtype.itemsize, *inner))


def with_tail(case: Case, generator: torch.Generator, ring: int, *columns: list[int]) -> list[Tensor]:
    """Gives a step rings of random tokens, for rows 1 to 3, and a cursor of these columns. Returns the rings."""
    tail = rings_of(case, 4, ring, generator)
    rings = [ring for ring in tail if ring is not None]
    for one in rings:
        one.copy_(torch.rand(one.shape, generator=generator).to(one))
    device = case.memory.state.device
    cursor = Cursor(*(torch.tensor(column, dtype=torch.int32, device=device) for column in columns))
    case.shared = case.shared | {"tail": tail, "cursor": cursor}
    return rings


class Plain(NamedTuple):
    """Results of plain decode: outputs `row token ..`, and states `row ..` before each token and at the end."""

    out: Tensor
    states: list[Tensor]


def plain(case: Case, backend: Backend) -> Plain:
    """Runs the stream with one token per step, in place."""
    case = case.twin()
    case.rows = [row._replace(write=row.read) for row in case.rows]
    live = [row.read for row in case.rows]
    outs, states = [], [case.memory.bytes_of(live)]
    for t in range(STREAM):
        outs.append(case.cut(list(range(ROWS)), t, t + 1).step(backend))
        states.append(case.memory.bytes_of(live))
    return Plain(torch.cat(outs, 1), states)


class Run:
    """A stream in steps of several tokens. It moves cursors on as a plan does, and checks each step against `plain`."""

    def __init__(
        self, case: Case, backend: Backend, generator: torch.Generator, most: int, ring: int, trees: bool = False
    ) -> None:  # fmt: skip
        self.case, self.backend, self.generator, self.most = case.twin(), backend, generator, most
        self.expected, self.ring, self.trees = plain(case, backend), ring, trees
        self.tail = rings_of(case, ROWS + 2, ring, generator)
        self.memory = [2, 4, 0]  # for each row, its row in the rings; the last row has no ring (0) and never speculates
        self.slot, self.spare = [row.read for row in case.rows], [4, 5, 6]
        self.label, self.pending = [0] * ROWS, [0] * ROWS

    def draw(self, most: int) -> int:
        return int(torch.randint(0, most + 1, (1,), generator=self.generator))

    def speculate(self) -> None:
        """Runs the whole stream. Chance decides what is accepted, pending and stored."""
        assert self.tail[0].shape[1] == self.ring
        most = self.most
        while max(left := [STREAM - label - pending for label, pending in zip(self.label, self.pending, strict=True)]):
            tokens, accepted, store = [], [], []
            trees: list[Tree] = []
            for pending, memory, rest in zip(self.pending, self.memory, left, strict=True):
                n = min(most, rest, self.ring - pending)
                plain = not memory or self.draw(3) == 0
                near = pending + 2 * most > self.ring  # else the next step could lack room in the ring
                kept = pending if near or rest <= most or self.draw(2) else self.draw(pending + 1) - 1
                tokens.append(n)
                trees.append(chain(n) if plain or not self.trees else drawn(n, self.generator))
                accepted.append(n if plain else len(trees[-1].path) if self.trees else self.draw(n))
                store.append(pending + n if plain else kept)
            self.step(tokens, accepted, store, in_place=bool(self.draw(1)), trees=trees if self.trees else ())
        self.step([0] * ROWS, [0] * ROWS, self.pending.copy())  # this step has no tokens: it folds the pending tokens
        assert self.label == [STREAM] * ROWS

    def step(
        self, tokens: list[int], accepted: list[int], store: list[int], in_place: bool = False,
        mark: tuple[int, int] | None = None, trees: Sequence[Tree] = (),
    ) -> None:  # fmt: skip
        """Runs and checks a step. tokens, accepted: one number per row. store: as in `Cursor`. mark: entry, offset."""
        paths = [tree.path for tree in trees or map(chain, tokens)]
        device = self.case.memory.state.device
        width = max(self.most, *tokens)
        given = {}
        for name, stream in self.case.inputs.items():
            size = ROWS * width * stream[0, 0].nbytes
            given[name] = rubbish(size, device, self.generator).view(stream.dtype).view(ROWS, width, *stream.shape[2:])
            for i in range(ROWS):
                at = self.label[i] + self.pending[i]
                given[name][i, paths[i][: accepted[i]]] = stream[i, at : at + accepted[i]]
        writes = [slot if in_place else spare for slot, spare in zip(self.slot, self.spare, strict=True)]
        rows = [Row(self.slot[i], writes[i], 7 if i == 1 and mark is None else 0, tokens[i]) for i in range(ROWS)]
        told = [at if memory else -5 for at, memory in zip(store, self.memory, strict=True)]
        columns = (self.memory, self.label, self.pending, told)
        cursor = Cursor(*(torch.tensor(column, dtype=torch.int32, device=device) for column in columns))
        memory = self.case.memory
        for slot in {7, *writes} - set(self.slot):  # slots that the step only writes are NaN before
            memory.spoil(slot)
        self.case.memory.before = self.case.memory.whole.clone()
        shared = self.case.shared | {"tail": self.tail, "cursor": cursor}
        shared |= {"marks": columns_of([(*mark, 7)], memory.state)} if mark else {}
        shared |= {"lengths": cursor.label.clone()} if "lengths" in shared else {}
        if trees:
            shared["parents"] = parents_of(trees, device)
        step = replace(self.case, rows=rows, inputs=given, shared=shared)
        out = step.step(self.backend)
        changed = {writes[i] for i in range(ROWS) if store[i] >= 0} | ({7} if mark or store[1] >= 0 else set())
        step.memory.check_changed_only(changed)
        if mark:
            at = self.label[mark[0]] + self.pending[mark[0]] + mark[1]
            assert same_bits(memory.bytes_of(7), self.expected.states[at][mark[0]])
        for i in range(ROWS):
            at = self.label[i] + self.pending[i]
            assert same_bits(out[i, paths[i][: accepted[i]]], self.expected.out[i, at : at + accepted[i]])
            assert not out[i, tokens[i] :].any()
            if store[i] >= 0:
                plain, label = store[i] > self.pending[i], self.label[i] + store[i]
                found = memory.bytes_of(writes[i])
                assert same_bits(found, self.expected.states[label][i]), (i, store[i], self.pending[i])
                if i == 1 and mark is None:
                    assert same_bits(memory.bytes_of(7), found)
                self.pending[i] = accepted[i] * (not plain) + max(self.pending[i] - store[i], 0)
                self.label[i] = label
                self.slot[i], self.spare[i] = writes[i], self.slot[i] if not in_place else self.spare[i]
            else:
                self.pending[i] += accepted[i]
        if trees:
            ends = (cursor.label + cursor.pending).tolist()
            record = [*(column.tolist() for column in cursor), ends, accepted, [ROWS]]
            keep(self.backend, self.tail, record, paths)


def tailed(
    kind: str, backend: Backend, generator: torch.Generator, dtype: str, most: int, ring: int | None = None,
    trees: bool = False, **settings: Any,
) -> Run:  # fmt: skip
    """Returns a run.

    ring: places of each ring, by default the smallest number that suffices. trees: whether drafts are trees.
    """
    state, inputs = DTYPES[dtype]
    rows = [Row(slot, slot, tokens=STREAM) for slot in (1, 2, 3)]
    given = {"rows": rows, "tokens": STREAM, "state": state, "inputs": inputs}
    made = KINDS[kind].make(backend, generator, **(given | KINDS[kind].small | settings))
    return Run(made, backend, generator, most, ring=ring or 3 * most - 1, trees=trees)


@pytest.mark.sample
@pytest.mark.parametrize("kind", TAILED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("most", [1, 3, 4])
def test_T1_a_row_that_speculates_has_the_bits_of_plain_decode(
    backend: Backend, generator: torch.Generator, kind: str, dtype: str, most: int
) -> None:
    """Each step folds all or some of the accepted tokens into the stored state, or stores no state."""
    tailed(kind, backend, generator, dtype, most).speculate()


@pytest.mark.sample(2)
@pytest.mark.parametrize(("kind", "settings"), WIDE, ids=str)
def test_T1_odd_sizes_groups_and_several_blocks(
    backend: Backend, generator: torch.Generator, kind: str, settings: dict[str, Any]
) -> None:
    tailed(kind, backend, generator, "fp32", 3, **settings).speculate()


@pytest.mark.sample(3)
@each_tailed
def test_a_mark_beside_a_tail(backend: Backend, generator: torch.Generator, kind: str) -> None:
    """Marks stand in rows with a tail and in rows without one.

    With a tail, offsets still count from the step's first token.
    """
    dtype = "fp32" if kind in ("gdn", "mamba1") else "bf16"
    run = tailed(kind, backend, generator, dtype, 3)
    run.step([2, 1, 3], [2, 1, 3], [-1, 0, 3], mark=(2, 2))
    run.step([3, 0, 2], [3, 0, 2], [1, 1, 2], mark=(0, 3))
    run.step([0, 1, 1], [0, 1, 1], [*run.pending[:2], 1], mark=(1, 1))


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["conv", "gdn", "mamba2"])
def test_a_ring_without_room_is_seen(backend: Backend, generator: torch.Generator, kind: str) -> None:
    """Two pending tokens and two new ones need four places. With three places the checks of this file fail."""
    for ring, seen in ((4, nullcontext()), (3, pytest.raises(AssertionError))):
        run = tailed(kind, backend, generator, "fp32", 2, ring=ring)
        with seen:
            for n, store in ((2, -1), (2, -1), (0, 4)):
                run.step([n] * ROWS, [n] * ROWS, [store, store, n])


@pytest.mark.sample(3)
@each_tailed
def test_rows_without_memory_have_the_step_without_a_tail(
    backend: Backend, generator: torch.Generator, kind: str
) -> None:
    """Rows without memory in the rings run as in a step without a tail: their cursors do not matter, and no byte of the
    rings changes.
    """
    case = made(kind, backend, generator, **KINDS[kind].small)
    plain, columns = (
        case.twin(),
        ([0, -1, 4, 2**31 - 1, 0], [3, -2, 0, 1, 2**31 - 1], [2, 1, -1, 9, 5], [0, 1, -1, 2, 9]),
    )
    rings = with_tail(case, generator, 5, *columns)
    before = [ring.clone() for ring in rings]
    assert same_bits(case.step(backend), plain.step(backend))
    assert same_bits(case.memory.whole, plain.memory.whole)
    assert all(map(same_bits, before, rings))


def one_off(ring: Tensor) -> Tensor:
    """Returns a ring of the same shape whose rows do not begin at multiples of 16 bytes."""
    apart = ring[0].numel() // 8 * 8 + 9
    return torch.zeros(len(ring) * apart).to(ring).as_strided(ring.shape, (apart, *ring.stride()[1:]))


# name -> (function that gets the arguments and their last ring, and spoils them; pattern of the message)
BAD: dict[str, tuple[Any, str]] = {
    "no cursor": (lambda given, _: given | {"cursor": None}, r"^tail, cursor: .*NoneType"),
    "no tail": (lambda given, _: given | {"tail": None}, r"^tail, cursor: .*NoneType"),
    "another's": (lambda given, _: given | {"tail": tuple(given["tail"])}, r"^tail, cursor: expected a \w+Tail"),
    "a longer cursor": (lambda given, _: told_by(given, lambda c: torch.cat([c, c])), r"^cursor\.row: expected"),
    "all elsewhere": (lambda given, _: told_by(given, lambda c: c.to("meta")), r"^cursor\.row: .* on meta"),
    "a float cursor": (lambda given, _: told_by(given, Tensor.float), r"^cursor\.row: .*float"),
    "another dtype": (lambda _, ring: ring.half(), "expected torch"),
    "another device": (lambda _, ring: ring.to("meta"), "expected on"),
    "no place": (lambda _, ring: ring[:, :0], "expected torch"),
    "a place fewer than others": (lambda _, ring: ring[:, 1:], "expected torch"),
    "a token wider": (lambda _, ring: torch.cat([ring, ring], -1), "expected torch"),
    "spread": (lambda _, ring: torch.stack([ring, ring], -1)[..., 0], "contiguous in each row"),
    "rows off 16 bytes": (lambda _, ring: one_off(ring), "rows that begin at multiples of 16"),
    "one row for all": (lambda _, ring: ring[:1].expand_as(ring), "slots share bytes"),
    "a graph": (lambda _, ring: ring.detach().requires_grad_(), "requires grad"),
    "no tensor": (lambda _, ring: ring.tolist(), "expected a tensor"),
}


def given_of(kind: str, backend: Backend, generator: torch.Generator) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns an op, and arguments of a step with a tail."""
    case = made(kind, backend, generator, **KINDS[kind].small)
    columns = torch.ones((4, len(case.rows)), dtype=torch.int32, device=backend.device)
    given = case.arguments() | {"tail": rings_of(case, 3, 5, generator), "cursor": Cursor(*columns)}
    return getattr(backend, case.op), given


def told_by(given: dict[str, Any], change: Any) -> dict[str, Any]:
    return given | {"cursor": Cursor(*map(change, given["cursor"]))}


@pytest.mark.parametrize("how", BAD)
@pytest.mark.parametrize("kind", ["conv", "gdn", "rwkv7", "mamba2", "mamba1"])
def test_G1_a_tail_that_does_not_fit_is_named(
    backend: Backend, generator: torch.Generator, kind: str, how: str
) -> None:
    """No byte of the state or the rings changes."""
    (op, given), (change, told) = given_of(kind, backend, generator), BAD[how]
    tail = given["tail"]
    if len(tail) == 1 and "others" in how:
        pytest.skip("one ring is as long as it is")
    field = [name for name, ring in tail._asdict().items() if ring is not None][-1]
    written = [ring for ring in (*tail, given["state"]) if ring is not None]
    before = [tensor.clone() for tensor in written]
    changed = change(given, getattr(tail, field))
    if not isinstance(changed, dict):
        told = rf"^tail\.{field}: .*{told}"
        changed = given | {"tail": tail._replace(**{field: changed})}
    with pytest.raises(ValueError, match=told):
        op(**changed)
    assert all(map(same_bits, before, written))


@pytest.mark.parametrize(("kind", "field", "of"), [("gdn", "a", "k"), ("rwkv7", "beta", "gate"), ("rwkv7", "b", None)])
def test_G1_rings_of_another_rule_are_named(
    backend: Backend, generator: torch.Generator, kind: str, field: str, of: str | None
) -> None:
    op, given = given_of(kind, backend, generator)
    given["tail"] = given["tail"]._replace(**{field: of and getattr(given["tail"], of)})
    with pytest.raises(ValueError, match=rf"^tail\.{field}: expected {'None' if of else 'a tensor'}"):
        op(**given)
