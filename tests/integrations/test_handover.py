"""Tests the hand-over of records to another tensor-parallel split: a target gets a usable length, or nothing."""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from memstate.errors import InvalidArgument, LayoutMismatch
from memstate.integrations.handover.handover import HandOver
from memstate.tiers.stores.base import Bytes, Outcome
from memstate.tiers.stores.file import FileStore
from tests.integrations.test_resplit import scaled
from tests.support.splits import EVERY, HEAD, KV, PAGE, TOKENS, Model, toy

CALLS = ("exists", "get", "put", "discard")


MODELS = {
    "both": Model(), "states alone": Model(kv=None), "KV alone": Model(None), "latent": Model(kv=KV["latent"]),
    "kimi_linear": Model(toy("kimi_linear"), KV["latent"]),
    "qwen3_next": Model(toy("qwen3_next", ssm_dtype=torch.int8)),
}  # fmt: skip


@pytest.mark.sample
@pytest.mark.parametrize(("ranks", "to_ranks"), [(1, 2), (8, 2), (2, 4), (4, 4), (4, 1)])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_handed_over_is_found_there(name: str, ranks: int, to_ranks: int, tmp_path: Path) -> None:
    model, names = MODELS[name], set()
    source, target = FileStore(tmp_path / "source"), FileStore(tmp_path / "target")
    model.put(source, ranks, states=(0, 3), salt="tenant")
    length = (4 if model.state else 5) * PAGE
    count = (length // PAGE if model.kv else 0) + bool(model.state)
    for rank in range(to_ranks):
        assert model.found(target, to_ranks, rank, "tenant") == 0
        hand_over = model.hand_over(source, ranks, target, to_ranks, rank, batch=3)
        done = hand_over.run(TOKENS, "tenant")
        assert (done.length, done.written, done.present, done.faults) == (length, count, 0, Counter())
        assert model.found(target, to_ranks, rank, "tenant") == length
        again = hand_over.run(np.array(TOKENS), "tenant")
        assert (again.length, again.written, again.present, again.faults) == (length, 0, count, Counter())
        assert hand_over.run(TOKENS).length == hand_over.run(TOKENS, "another").length == 0
        assert hand_over.run([1, *TOKENS[1:]], "tenant").length == hand_over.run(TOKENS[:3], "tenant").length == 0
        names |= {model.name("kv", page, to_ranks, rank, "tenant") for page in range(length // PAGE) if model.kv}
        names |= {model.name("state", 3, to_ranks, rank, "tenant")} if model.state else set()
    assert {path.name for path in (tmp_path / "target").rglob("*") if path.name.startswith(("kv-", "state-"))} == names
    assert len(names) == to_ranks * count


@pytest.mark.parametrize(("ranks", "to_ranks"), [(4, 2), (2, 8), (4, 4)])
def test_one_store_serves_both_sides(ranks: int, to_ranks: int, tmp_path: Path) -> None:
    model, store = Model(), FileStore(tmp_path)
    model.put(store, ranks)
    for rank in range(to_ranks):
        done = model.hand_over(store, ranks, store, to_ranks, rank).run(TOKENS)
        assert (done.length, done.written, done.present) == ((20, 0, 6) if ranks == to_ranks else (20, 6, 0))
    assert [model.found(store, to_ranks, rank) for rank in range(to_ranks)] == [20] * to_ranks
    assert [model.found(store, ranks, rank) for rank in range(ranks)] == [20] * ranks


class Shelf:
    """A store in memory that takes only registered buffers, and has the faults in `bad`.

    `bad` has names of calls, which raise, and faults of a record. `lost NAME`: the store says that it has the record.
    `refused NAME`: it can neither write nor read the record. `stuck NAME`: it cannot delete the record.
    """

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}
        self.bad: set[str] = set()
        self.memory: list[Bytes] | None = None
        self.puts: list[str] = []

    def register(self, memory: Tensor) -> None:
        self.memory = [*(self.memory or []), memory.numpy()]

    def exists(self, names: Sequence[str]) -> list[bool]:
        self._enter("exists")
        return [name in self.records or f"lost {name}" in self.bad for name in names]

    def get(self, names: Sequence[str], buffers: Sequence[Bytes]) -> list[Outcome]:
        self._enter("get", buffers)
        return list(map(self._get, names, buffers))

    def put(self, names: Sequence[str], buffers: Sequence[Bytes]) -> list[Outcome]:
        self._enter("put", buffers)
        self.puts += names
        taken = [f"refused {name}" not in self.bad for name in names]
        for name, buffer, takes in zip(names, buffers, taken, strict=True):
            if takes:
                self.records.setdefault(name, buffer.tobytes())
        return [Outcome.DONE if takes else Outcome.FAILED for takes in taken]

    def discard(self, names: Sequence[str]) -> None:
        self._enter("discard")
        for name in names:
            if f"stuck {name}" not in self.bad:
                del self.records[name]

    def _enter(self, call: str, buffers: Sequence[Bytes] = ()) -> None:
        if call in self.bad:
            raise OSError(f"{call} is broken")
        for buffer in buffers if self.memory is not None else ():
            assert any(np.shares_memory(buffer, memory) for memory in self.memory or ()), "memory not registered"

    def _get(self, name: str, buffer: Bytes) -> Outcome:
        if f"refused {name}" in self.bad or name not in self.records:
            return Outcome.MISSING if name not in self.records else Outcome.FAILED
        if len(self.records[name]) != buffer.size:
            del self.records[name]
            return Outcome.DAMAGED
        buffer[:] = np.frombuffer(self.records[name], np.uint8)
        return Outcome.DONE

    def spoil(self, name: str, at: int = -1) -> None:
        data = bytearray(self.records[name])
        data[at] ^= 4
        self.records[name] = bytes(data)


class Case:
    """A source store with records of four ranks, and an empty target.

    Rank 0 of the target's two ranks needs the records of ranks 0 and 1.
    """

    def __init__(self) -> None:
        self.model, self.source, self.target = Model(kv=KV["4 heads"]), Shelf(), Shelf()
        self.model.put(self.source, 4)

    def hand_over(self, rank: int, batch: int = 8) -> HandOver:
        """Returns a hand-over. Both stores have only the memory of this hand-over registered."""
        self.source.memory, self.target.memory = self.source.memory or [], self.target.memory or []
        return self.model.hand_over(self.source, 4, self.target, 2, rank, batch)

    def readable(self) -> int:
        """Returns the length that a reader with memory of its own finds in the target, once no call of the target
        raises.
        """
        self.target.memory = None
        self.target.bad -= {"exists", "get", "put", "discard"}
        return self.model.found(self.target, 2, 0)

    def theirs(self, kind: str, page: int, rank: int = 1) -> str:
        return self.model.name(kind, page, 4, rank)

    def own(self, kind: str, page: int) -> str:
        return self.model.name(kind, page, 2, 0)

    def lose(self, kind: str, page: int, *ranks: int) -> None:
        for rank in ranks or (1,):
            del self.source.records[self.theirs(kind, page, rank)]

    def bad(self, *what: str, kind: str = "kv", page: int = 3) -> None:
        """Adds faults to the target: calls that raise, and faults of its record of a kind and page."""
        self.target.bad |= {word if word in CALLS else f"{word} {self.own(kind, page)}" for word in what}

    def change(self, name: str, data: Callable[[bytes], bytes]) -> None:
        self.source.records[name] = data(self.source.records[name])

    def give(self, kind: str, page: int) -> str:
        """Writes a right record of the target in advance, and returns its name."""
        self.target.records[self.own(kind, page)] = self.model.record(kind, page, 2, 0).tobytes()
        return self.own(kind, page)


SHORT = ["kv0", "kv1", "kv2", "state2"]  # records for a length of three pages
WHOLE = ["kv0", "kv1", "kv2", "kv3", "kv4", "state4"]
CUT = "a page of the source is cut"
MISHAPS: dict[str, tuple[Callable[[Case], object], int, list[str], dict[str, int]]] = {
    "a page": (lambda c: c.lose("kv", 3), 12, SHORT, {"missing": 1}),
    "a page on both, and one that is not asked for beyond that gap": (
        lambda c: (c.lose("kv", 1, 0, 1), c.lose("kv", 2)), 4, ["kv0", "state0"], {"missing": 2}),
    "the first page": (lambda c: c.lose("kv", 0, 0), 0, [], {"missing": 1}),
    "a page between the two calls": (
        lambda c: (c.source.bad.add(f"lost {c.theirs('kv', 3)}"), c.lose("kv", 3)), 12, SHORT, {"missing": 1}),
    "a page is spoilt": (lambda c: c.source.spoil(c.theirs("kv", 3)), 12, SHORT, {"checksum": 1}),
    CUT: (lambda c: c.change(c.theirs("kv", 3), lambda data: data[:-1]), 12, SHORT, {"damaged": 1}),
    "another page": (lambda c: c.change(c.theirs("kv", 3), lambda _: c.source.records[c.theirs("kv", 2)]),
                     12, SHORT, {"foreign": 1}),
    "the target refuses a state": (lambda c: c.bad("refused", kind="state", page=4), 0, WHOLE[:-1], {"failed": 1}),
    "the target has what is lost": (
        lambda c: (c.lose("kv", 3), c.lose("state", 4, 0), c.give("kv", 3), c.give("state", 4)), 20, WHOLE, {}),
    "a page of the target is spoilt": (lambda c: c.target.spoil(c.give("kv", 3)), 20, WHOLE, {"checksum": 1}),
    "a spoilt page cannot be deleted": (
        lambda c: (c.target.spoil(c.give("kv", 3)), c.bad("stuck")), 12, [*SHORT, "kv3"], {"checksum": 1}),
    "the target cannot read its page": (
        lambda c: (c.give("kv", 3), c.bad("refused")), 12, [*SHORT, "kv3"], {"failed": 1}),
    "the target says it has a page": (lambda c: c.bad("lost"), 20, WHOLE, {}),
    # Three lengths are tried. Each fails at the state of one rank, so the state of the other rank is not read
    "no get": (lambda c: c.source.bad.add("get"), 0, [], {"failed": 3}),
    "no exists": (lambda c: c.source.bad.add("exists"), 0, [], {"missing": 2}),
}  # fmt: skip


@pytest.mark.sample
@pytest.mark.parametrize("batch", [1, 2, 8])
@pytest.mark.parametrize("mishap", MISHAPS)
def test_mishaps_cost_length_and_nothing_else(mishap: str, batch: int) -> None:
    case, (happen, length, there, faults) = Case(), MISHAPS[mishap]
    happen(case)
    before = dict(case.source.records)
    done = case.hand_over(0, batch).run(TOKENS)
    names = {f"{kind}{page}": case.own(kind, page) for kind in ("kv", "state") for page in EVERY}
    assert (done.length, done.faults) == (length, Counter(faults))
    assert set(case.target.records) == {names[name] for name in there}
    gone = {case.theirs("kv", 3)} if mishap == CUT else set()  # stores delete only records of another size
    assert before.items() - case.source.records.items() == {(name, before[name]) for name in gone}
    assert done.written == len([name for name in case.target.puts if f"refused {name}" not in case.target.bad])
    assert case.readable() == length


@pytest.mark.parametrize("bad", [("refused",), ("put",), ("exists", "get", "put")])
@pytest.mark.parametrize("batch", [1, 2, 8])
def test_a_target_that_takes_nothing_is_asked_once(bad: tuple[str, ...], batch: int) -> None:
    """Pages behind the refused page may be in the same call. Then they fail, too."""
    case = Case()
    case.bad(*bad)
    done = case.hand_over(0, batch).run(TOKENS)
    page_alone = bad == ("refused",)
    assert (done.length, done.faults) == (12 * page_alone, Counter(failed=1 if page_alone else min(batch, 5)))
    assert len(case.target.puts) == len(set(case.target.puts))
    assert case.readable() == done.length


def test_ranks_that_start_alike_run_again_with_the_least() -> None:
    """The first rank lacks a page of its sources, the second rank has all. `most` is a number of tokens."""
    case = Case()
    case.lose("kv", 3)
    ranks = [case.hand_over(rank) for rank in range(2)]
    lengths = [each.run(TOKENS).length for each in ranks]
    assert lengths == [12, 20]
    assert [each.run(TOKENS, most=min(lengths)).length for each in ranks] == [12, 12]
    assert [ranks[1].run(TOKENS, most=most).length for most in (0, 3, 4, 11, 19, 20, 10**9)] == [0, 0, 4, 4, 12, 20, 20]
    with pytest.raises(InvalidArgument, match="most -1"):
        ranks[1].run(TOKENS, most=-1)


def test_the_last_token_of_a_prompt_is_left_to_compute() -> None:
    """A request computes its last token itself, so a hand-over leaves it out.

    With `most`, a longer prompt uses the whole length.
    """
    case = Case()
    case.model.put(case.source, 4, states=EVERY, pages=())
    assert case.hand_over(0).run(TOKENS[: 3 * PAGE]).length == 8
    assert case.target.puts == [case.own("kv", 0), case.own("kv", 1), case.own("state", 1)]
    assert case.hand_over(0).run(TOKENS[: 3 * PAGE + 1]).length == 12
    assert case.hand_over(0).run(TOKENS[: 4 * PAGE], most=4 * PAGE).length == 16
    alone, source = Model(None), Shelf()
    alone.put(source, 4)
    for tokens, length in ((TOKENS[:PAGE], 0), (TOKENS[: PAGE + 1], 4), (TOKENS[: 3 * PAGE], 8), ([], 0)):
        assert alone.hand_over(source, 4, Shelf(), 2, 0).run(tokens).length == length


def expected(case: Case, sound: set[str]) -> int:
    """Returns the deepest length in tokens that undamaged records allow.

    Args:
        sound: names of the undamaged records.
    """

    def can(kind: str, page: int) -> bool:
        return case.own(kind, page) in sound or {case.theirs(kind, page, rank) for rank in (0, 1)} <= sound

    ends = [page + 1 for page in EVERY if can("state", page) and all(can("kv", before) for before in range(page + 1))]
    return PAGE * max(ends, default=0)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_lost_or_spoilt_the_length_is_the_deepest(seed: int, generator: torch.Generator) -> None:
    case, chance = Case(), random.Random(f"{generator.initial_seed()} {seed}")
    case.model.put(case.source, 4, states=EVERY, pages=())
    for kind, page in itertools.product(("state", "kv"), EVERY):
        if chance.random() < 0.4:
            case.give(kind, page)
    names = {case.theirs(kind, page, rank) for kind in ("state", "kv") for page in EVERY for rank in range(4)}
    sound = names | set(case.target.records)
    for shelf, likely in ((case.source, 0.1), (case.target, 0.3)):
        for name in sorted(shelf.records):
            if chance.random() < likely:
                sound.discard(name)
                empty = partial(shelf.records.__setitem__, name, b"")
                chance.choice((partial(shelf.spoil, name), partial(shelf.records.pop, name), empty))()
    done = case.hand_over(0, chance.choice((1, 2, 8))).run(TOKENS)
    assert done.length == expected(case, sound)
    for kind, page in itertools.product(("state", "kv"), EVERY):
        own, read = case.own(kind, page), {case.theirs(kind, page, rank) for rank in (0, 1)}
        if own in case.target.puts:
            assert read <= sound and own not in sound
            assert case.target.records[own] == case.model.record(kind, page, 2, 0).tobytes()
    assert done.written == len(case.target.puts) == len(set(case.target.puts))


NO_SPLIT = scaled((4, 5), (5,), HEAD, ())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [({"model": Model(None, None)}, InvalidArgument, "nothing to hand over"),
     ({"ranks": 3}, InvalidArgument, "8 units of 2 for 3 ranks"), ({"batch": 0}, InvalidArgument, "batch 0"),
     ({"rank": 2}, InvalidArgument, "rank 2: .* 0 to 1"), ({"model": Model(NO_SPLIT)}, LayoutMismatch, "without int8")],
)  # fmt: skip
def test_what_cannot_be_handed_over_is_refused_at_once(change: dict[str, Any], error: Any, message: str) -> None:
    arguments = {"source": Shelf(), "ranks": 4, "target": Shelf(), "to_ranks": 2, "rank": 0, "batch": 1} | change
    model = arguments.pop("model", Model())
    with pytest.raises(error, match=message):
        model.hand_over(**arguments)
    assert arguments["source"].memory is arguments["target"].memory is None
