"""Batch handles (`Rows`): their parts and sums, plans of them, and what they refuse."""

import copy
import pickle

import numpy as np
import pytest
import torch

import memstate as ms

LAYOUT = ms.StateLayout([ms.Plane("ssm", (2,), torch.float64)], layers=1)


@pytest.fixture
def mem() -> ms.StateManager:
    return ms.StateManager(LAYOUT, slots=12, max_requests=6, backend="reference")


def admitted(mem: ms.StateManager, n: int = 4) -> ms.Rows:
    return mem.admit([ms.Request(f"r{i}") for i in range(n)])


def test_parts_and_sums_are_batches_of_the_same_handles(mem: ms.StateManager) -> None:
    rows = admitted(mem)
    single = list(rows)
    assert single == [rows[i] for i in range(4)] and all(type(row) is ms.Row for row in single)
    assert rows[1:3] == single[1:3] and rows[[0, 2]] == [single[0], single[2]] and rows[np.array(1)] == single[1]
    assert rows[np.array([True, False, False, True])] == [single[0], single[3]] and len(rows[[]]) == 0
    assert rows[:2] + rows[2:] == rows and hash(rows[:2] + rows[2:]) == hash(rows) and rows[-1] == single[-1]
    assert not rows[[0, 0]].distinct and rows.distinct and copy.deepcopy(rows) is rows is copy.copy(rows)


@pytest.mark.parametrize("at", [None, True, [[0, 1], [2, 3]], 1.0, "a", ...], ids=repr)
def test_what_is_no_place_in_a_batch_is_refused(mem: ms.StateManager, at: object) -> None:
    with pytest.raises(ms.InvalidArgument, match=r"^rows\[.*: expected a number, a slice"):
        admitted(mem)[at]  # type: ignore[call-overload]


def test_a_batch_is_planned_settled_and_released_as_it_is(mem: ms.StateManager) -> None:
    rows = admitted(mem)
    mem.settle(mem.plan(rows, 3), [False, True, False, False])
    mem.settle(mem.plan(rows[[0, 2]] + rows[1:2] + rows[1:2]))  # the finished row is padding, however often it is named
    assert [mem.info(row).length for row in rows] == [4, 3, 4, 3]
    with pytest.raises(ms.InvalidArgument, match="named twice"):
        mem.plan(rows[[0, 0]])
    mem.end(rows[:2])
    with pytest.raises(ms.StaleHandle, match="request 'r0' was ended"):
        mem.plan(rows)
    mem.end(rows[2:])
    with pytest.raises(ms.StaleHandle, match="request 'r3' was ended"):
        mem.info(rows[3])
    assert mem.free_slots == 12 and mem.audit().free == 12


@pytest.mark.parametrize("index", [True, 1.0, np.int64(1)], ids=repr)
def test_what_only_equals_the_number_of_a_row_is_no_row(mem: ms.StateManager, index: object) -> None:
    (row,) = mem.admit([ms.Request("a")])
    forged = ms.Row(index, row.generation)  # type: ignore[arg-type]
    for use in (lambda: mem.plan([forged]), lambda: mem.end([forged]), lambda: mem.info(forged).length):
        with pytest.raises(ms.InvalidArgument, match="this table has rows"):
            use()
    assert forged != row and mem.plan([row]).numbers.tolist() == [row.index]


def test_a_batch_has_the_tokens_that_were_named_for_it(mem: ms.StateManager) -> None:
    """A plan uses the counts of the last batch again only if the number of rows and the tokens of each row are the
    same.
    """
    a, b, c = admitted(mem, 3)
    for rows, tokens, expected in (
        ([a, None], 1, [1, 0]), ([a, b], 1, [1, 1]), ([a, b], 3, [3, 3]), ([a, b, c], 3, [3, 3, 3]),
        ([b, c], 3, [3, 3]), ([b, c], [3, 2], [3, 2]), ([c, b], 3, [3, 3]),
    ):  # fmt: skip
        step = mem.plan(rows, tokens)
        assert step.tokens_of.tolist() == step.tokens.tolist() == expected
        mem.settle(step)


def test_batches_cannot_be_changed_or_sent_away(mem: ms.StateManager) -> None:
    rows = admitted(mem)
    made = ms.Rows(given := list(rows[:2]), rows.table)
    given.clear()
    assert made == rows[:2]
    with pytest.raises(ValueError, match="read-only"):
        rows.indices[0] = 2
    with pytest.raises(TypeError, match="belong to a manager"):
        pickle.dumps(rows)


def test_errors_can_be_sent_to_another_process() -> None:
    for error in (ms.OutOfSlots(5, 4), ms.StaleHandle("row 3", 1, 2, "request 'a' was aborted"), ms.Asleep()):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)


@pytest.mark.parametrize("tokens", [np.array([1, 2]), torch.tensor([1, 2])], ids=["numpy", "torch"])
def test_tokens_in_an_array_are_taken_behind_a_plan_with_a_number(mem: ms.StateManager, tokens: object) -> None:
    rows = admitted(mem)[:2]
    mem.settle(mem.plan(rows, 1))
    assert mem.plan(rows, tokens).tokens_of.tolist() == [1, 2]  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [True, 1.0, np.array([1])], ids=["True", "1.0", "one for two"])
def test_what_only_equals_the_tokens_of_the_last_plan_is_refused(mem: ms.StateManager, tokens: object) -> None:
    rows = admitted(mem)[:2]
    mem.settle(mem.plan(rows, 1))
    with pytest.raises(ms.InvalidArgument, match="tokens"):
        mem.plan(rows, tokens)  # type: ignore[arg-type]
