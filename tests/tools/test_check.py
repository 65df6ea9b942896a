"""Tests `memstate check`: a right pool passes, and for each planted fault a few calls show the violated behaviours."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from memstate.errors import InvalidArgument
from memstate.testing import behaviours
from memstate.testing.behaviours import BEHAVIOURS
from memstate.testing.check import Finding, check
from memstate_tools.check import POOLS, factory_of
from memstate_tools.check.ours import Manager
from tests.support.command import memstate
from tests.support.toy_pool import Toy, made

TOY = "tests.support.toy_pool:right"
RANDOM = {"G1", "G3"}  # behaviours whose faults only some random programs find
CASES = {each.number for each in BEHAVIOURS} - RANDOM
EXAMPLES = 12


def broken(factory: Callable[[], Any], only: set[str] = CASES, examples: int = EXAMPLES) -> dict[str, list[str]]:
    """Returns a dict. Its keys are the numbers of violated behaviours. A value has the shortest calls that show this.

    The line that says what is wrong is left out.
    """
    findings = check(factory, sorted(only), examples=examples)
    assert all((each.holds is False) == bool(each.sequence) for each in findings)
    return {each.behaviour: each.sequence[:-1] for each in findings if each.holds is False}


def test_a_right_pool_has_every_behaviour() -> None:
    assert {each.behaviour: each.holds for each in check(Toy, examples=EXAMPLES)} == dict.fromkeys(CASES | RANDOM, True)


class Mistyped(Toy):
    """An adapter with a misspelt name in `claim`. The check takes the exception of this mistake for a refusal."""

    def claim(self, n: int) -> list[int] | None:
        return self.slts[:n]  # type: ignore[attr-defined, no-any-return]


class Strict(Toy):
    """A pool that, if a release repeats a slot, refuses the whole release."""

    def release(self, ids: list[int]) -> None:
        if len(set(ids)) < len(ids):
            raise ValueError(f"{ids}: each slot once")
        super().release(ids)


class Grouped(Toy):
    """A pool that cannot open a group and cannot be made in another size."""

    def open_group(self, n: int) -> None:
        raise AttributeError("opn_group")

    def of_size(self, slots: int) -> Toy:
        raise AttributeError("off_size")


class Tensors(Toy):
    """A pool that returns tensors."""

    def claim(self, n: int) -> Any:
        ids = super().claim(n)
        return None if ids is None else torch.tensor(ids)

    def slots_of(self, row: int) -> Any:
        return torch.tensor(super().slots_of(row), dtype=torch.int64)


class Nonsense(Toy):
    """A pool that returns a slot that is no whole number."""

    def slots_of(self, row: int) -> Any:
        return [1.5]


def test_what_a_pool_may_do_in_another_way_is_right() -> None:
    assert broken(Strict) == broken(Tensors) == {}


def test_what_never_works_does_not_hold() -> None:
    assert set(broken(Grouped)) >= {"B9", "B9a", "B9b", "B9c", "B11"}
    [finding] = check(Nonsense, ["B21"], examples=EXAMPLES)
    assert finding.sequence[-1] == "# slots_of returned [1.5]: expected whole numbers"


@pytest.mark.parametrize("capacity", [None, "8", 4.0, 0, -1])
def test_a_capacity_that_is_no_number_is_refused(capacity: object) -> None:
    def factory() -> Any:
        pool: Any = Toy()
        pool.capacity = capacity
        return pool

    with pytest.raises(InvalidArgument, match="expected a whole number of slots"):
        check(factory, ["B1"])


@pytest.mark.parametrize("number", sorted(CASES | RANDOM))
def test_an_adapter_with_a_mistake_is_no_crash(number: str) -> None:
    [finding] = check(Mistyped, [number], examples=EXAMPLES)
    if number == "B1":
        assert "no attribute 'slts'" in finding.sequence[0] and not finding.holds


def test_B9a_B9b_B9c_memstates_own_pool_has_every_behaviour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behaviours, "SIZES", (1, 33, 1000))
    assert broken(Manager, CASES | RANDOM, 5) == {}


@pytest.mark.parametrize(
    ("fault", "calls"),
    [
        ("highest first", {"B2": 1}),
        ("any count", {"B3": 2}),
        ("releases one", {"B4": 4, "B2": 3, "B5": 5, "B6": 4, "B8": 4, "B11": 3, "B31": 10}),
        ("frees twice", {"B5": 3}),
        ("frees 0", {"B6": 2}),
        ("keeps the list", {"B8": 4}),
        ("groups keep the rest", {"B9": 3, "B9a": 5}),
        ("groups replace groups", {"B9a": 5}),
        ("clear keeps groups", {"B9b": 3}),
        ("groups do not count", {"B9c": 1}),
        ("clear keeps requests", {"B10": 4}),
        ("more than 32 slots", {"B11": 2}),
        ("rows from 0", {"B12": 1}),
        ("half an admission", {"B17": 3}),
        ("generations start again", {"B19": 3}),
        ("a hidden slot", {"B21": 1, "B12": 3, "B17": 2, "B28": 4, "B29": 2, "B31": 7}),
        ("publishes anything", {"B28": 2, "B31": 4}),
        ("states outlive requests", {"B29": 4}),
        ("end forgets a slot", {"B29": 3}),
        ("publishes the wrong slot", {"B31": 3}),
        ("a refusal costs a slot", {"B17": 3}),
    ],
)  # fmt: skip
def test_a_fault_breaks_what_it_should_in_as_few_calls_as_can_be(fault: str, calls: dict[str, int]) -> None:
    assert {number: len(sequence) for number, sequence in broken(made(fault)).items()} == calls


def test_a_slot_that_no_pool_has_breaks_the_first_claim() -> None:
    assert broken(made("slot 0"))["B1"] == ["pool.claim(6) -> [0, 2, 3, 4, 5, 6]"]


@pytest.mark.parametrize(
    ("fault", "sequences"),
    [
        ("frees twice", {"G3": ["pool.release([1])"]}),
        (
            "a refusal costs a slot",
            {"G1": ["pool.claim(7)  # MemoryError: 7"], "G3": ["pool.claim(7)  # MemoryError: 7"]},
        ),
        ("clear keeps groups", {"G3": ["pool.open_group(1)", "pool.clear()"]}),
    ],
)
def test_random_programs_shrink_to_the_shortest(fault: str, sequences: dict[str, list[str]]) -> None:
    assert broken(made(fault), RANDOM, 100) == sequences


def test_a_part_that_a_pool_lacks_is_not_offered() -> None:
    class Plain:
        """A pool that has slots, but none of the optional functions."""

        def __init__(self) -> None:
            toy = Toy()
            self.capacity, self.claim, self.release, self.free = toy.capacity, toy.claim, toy.release, toy.free

    results = {each.behaviour: each.holds for each in check(Plain, examples=EXAMPLES)}
    assert {number for number, holds in results.items() if holds} == RANDOM | {f"B{n}" for n in (1, 2, 3, 4, 5, 6, 8)}
    assert not {number for number, holds in results.items() if holds is False}


def test_the_same_seed_finds_the_same() -> None:
    first, second = (check(made("frees twice"), examples=20, seed=7) for _ in range(2))
    assert first == second


def test_a_read_that_fails_is_a_violation() -> None:
    class Counts(Toy):
        """A pool whose count of free slots raises."""

        def free(self) -> int:
            raise RuntimeError("no count")

    (finding,) = check(Counts, ["B4"], examples=1)
    assert finding.sequence == ["pool.release([])", "# free(): RuntimeError('no count')"]


def test_report_and_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = memstate("check", "--pool", TOY, "--only", "B5,B9a", "--examples", "5", "--json", tmp_path / "report.json")
    assert (done.status, done.err) == (0, "")
    assert done.out == (
        "B5   yes          a second release frees nothing\n"
        "B9a  yes          a group opened in a group loses no slot\n\n"
        "2 hold, 0 do not, 0 are not offered\n"
    )
    assert json.loads((tmp_path / "report.json").read_text())[0] == {
        "behaviour": "B5", "title": "a second release frees nothing", "holds": True, "sequence": [], "promised": True,
    }  # fmt: skip

    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("from tests.support.toy_pool import made\nwrong = made('frees twice')\n")
    done = memstate("check", "--pool", "mine:wrong", "--only", "B5,B6", "--examples", "9")
    assert done.status == 1 and not done.err
    assert done.out.splitlines()[:5] == [
        "B5   no           a second release frees nothing",
        "       pool.claim(1) -> [1]",
        "       pool.release([1, 1])",
        "       [pool.claim(1) for _ in range(8)] -> [1, 1, 2, 3, 4, 5, 6]",
        "       # slot 1 has two owners",
    ]
    done = memstate("check", "--pool", "mine:wrong", "--only", "B5,B6", "--examples", "9", "--json", "-")
    assert done.status == 1 and [each["holds"] for each in json.loads(done.out)] == [False, True]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["mine.py", "report.json"]


def test_what_is_a_choice_of_memstates_fails_nobody() -> None:
    done = memstate("check", "--pool", "tests.support.toy_pool:highest", "--examples", "5")
    assert done.status == 0 and "B2   no (choice)  a claim gives the lowest free slots\n" in done.out
    assert all(len(line) <= 80 for line in done.out.splitlines())


def found_in(name: str) -> list[Finding]:
    """Returns the findings for an engine's pool; skips the test if the engine is not installed."""
    try:
        return check(factory_of(name), examples=EXAMPLES)
    except InvalidArgument as error:
        pytest.skip(f"{name} cannot be used: {error}")


def test_sglangs_pool_and_ours_in_its_place() -> None:
    theirs, ours = found_in("sglang"), found_in("memstate.sglang")
    assert {each.behaviour for each in theirs if each.broken} >= {"B3", "B5", "B6", "B9a", "B9b", "B9c", "B17"}
    assert [each for each in ours if each.holds is not True and each.promised] == []


def test_vllms_pool() -> None:
    results = {each.behaviour: each.holds for each in found_in("vllm")}
    assert (results["B5"], results["B17"], results["B9"]) == (False, True, None)


def test_every_pool_has_a_name_that_the_help_says() -> None:
    done = memstate("check", "--help")
    assert all(name in done.out for name in POOLS)
