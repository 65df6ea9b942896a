"""Misuse of a manager raises a named error and changes nothing: no row, no slot, no page, no label, no step."""

import re
from collections.abc import Callable

import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support import inside, owners
from tests.support.build import on
from tests.support.planes import LAYOUT
from tests.support.scan import scan


class Stage:
    """Two running rows, one ended row, one kept snapshot and one dropped snapshot."""

    def __init__(self, backend: Backend) -> None:
        paged = {"pages": 40, "page_size": 2, "pages_per_row": 8}
        self.mem = on(backend, LAYOUT, slots=16, max_requests=4, tracking=ms.PingPong(4), **paged)
        self.row, self.other, self.gone = self.mem.admit([ms.Request(name, length=8) for name in "abc"])
        for _ in range(4):
            self.mem.settle(self.mem.plan([self.row, self.other, self.gone]))
        self.dropped, self.kept, _ = self.mem.publish([self.row, self.other, self.gone])
        self.mem.end([self.gone])
        self.mem.drop([self.dropped])
        self.old = self.mem.plan([self.row])
        self.mem.settle(self.old)
        self.first = self.mem.plan([self.row, self.other])

    def observe(self) -> list[object]:
        self.mem.submit()
        mem, table = self.mem, inside.registers(self.mem).table
        device = [tensor.tolist() for tensor in (table.cells, table.bitmap, table.counters, mem.device.page_table)]
        rows = [(mem.info(row).length, mem.info(row).confirmed, mem.info(row).slots) for row in (self.row, self.other)]
        stats = mem.stats()
        counts = [stats.rows_used, stats.published, stats.dropped, stats.degraded]
        steps = (
            len(mem._parts.log.unsettled),
            mem._parts.log.times(owners.table(mem)).tolist(),
            owners.table(mem).confirmed.tolist(),
        )
        return [*device, rows, mem.free_slots, mem.free_pages, *counts, steps, owners.free(mem)]


Misuse = Callable[[Stage], object]
Cases = dict[str, tuple[str, Misuse]]  # name -> (pattern of the message, so that no other error passes; the call)
MISUSE: Cases = {
    "a row twice": (r"named twice in the batch: row 1, entries \[0, 1\]", lambda s: s.mem.plan([s.row, s.row])),
    "a number for a row": ("2 is no row: use the handles", lambda s: s.mem.plan([s.row, 2])),
    "a batch too large": ("the limit is max_batch=4", lambda s: s.mem.plan([s.row, *[None] * 4])),
    "no tokens": ("a row in the batch needs at least 1", lambda s: s.mem.plan([s.row], 0)),
    "negative tokens": (r"tokens\[1\]=-1: expected whole numbers", lambda s: s.mem.plan([s.row, s.other], [1, -1])),
    "tokens for another batch": ("tokens has 3 entries, expected 2", lambda s: s.mem.plan([s.row, s.other], [1, 1, 1])),
    "tokens that are no numbers": (r"tokens\[0\]='one': expected", lambda s: s.mem.plan([s.row], ["one"])),
    "True among tokens": (r"tokens\[1\]=True: expected", lambda s: s.mem.plan([s.row, s.other], [1, True])),
    "True among lengths": (
        r"lengths\[0\]=True: expected", lambda s: s.mem.end([s.row, s.other], keep="handle", lengths=[True, 1]),
    ),
    "more tokens than int32": ("tokens=2147483648: expected whole numbers", lambda s: s.mem.plan([s.row], 2**31)),
    "a chunk beyond its pages": ("row 1: 9 tokens, pages for 8", lambda s: s.mem.plan([s.other, s.row], [3, 3])),
    "results of another batch": ("expected 2 times True or False", lambda s: s.mem.settle(s.first, [True])),
    "releasing a row twice": (r"a row is named twice in \[1, 1\]", lambda s: s.mem.end([s.row, s.row])),
    "too few key lengths": (
        "lengths has 1 entries, expected 2", lambda s: s.mem.end([s.row, s.other], keep="handle", lengths=[4]),
    ),
    "key lengths that are no numbers": (
        r"lengths\[0\]='4': expected whole numbers", lambda s: s.mem.end([s.row], keep="handle", lengths=["4"]),
    ),
    "publishing nothing strictly": (
        "have no snapshot to publish", lambda s: s.mem.publish([s.other, s.row], strict=True),
    ),
    "dropping twice at once": ("a snapshot is named twice", lambda s: s.mem.drop([s.kept, s.kept])),
    "dropping a row": ("is no snapshot: use the handles", lambda s: s.mem.drop([s.kept, s.row])),
    "lengths for another batch": ("lengths has 2 entries, expected 1", lambda s: s.mem.extend([s.row], [8, 9])),
    "a state for a row that ran": (
        "a state arrives in a row that has folded no token", lambda s: s.mem.device.arrived([s.row], [5]),
    ),
}  # fmt: skip
MISUSE |= {  # arguments of the wrong kind
    "plan(row)": ("expected a sequence of rows", lambda s: s.mem.plan(s.row)),
    "plan(forged)": ("this table has rows 1..4", lambda s: s.mem.plan([ms.Row(1.0, s.row.generation)])),
    "abort(row)": ("expected a sequence of rows", lambda s: s.mem.end(s.row)),
    "release(None)": ("expected a sequence of rows", lambda s: s.mem.end(None)),
    "publish(row)": ("expected a sequence of rows", lambda s: s.mem.publish(s.row)),
    "extend(row)": ("expected a sequence of rows", lambda s: s.mem.extend(s.row, [4])),
    "arrived(row)": ("expected a sequence of rows", lambda s: s.mem.device.arrived(s.row, [4])),
    "read_slots(row)": ("expected a sequence of rows and snapshots", lambda s: s.mem.device.read_slots(s.row)),
    "admit(request)": ("expected a sequence of requests", lambda s: s.mem.admit(ms.Request("x"))),
    "fork(row, text)": ("expected a sequence of request ids", lambda s: s.mem.fork(s.row, "ab")),
    "reorder(rows, text)": ("expected a sequence of entries", lambda s: s.mem.reorder([s.other], "0")),
    "reorder beyond": (r"entries \[1\] of 1 rows: expected numbers below 1", lambda s: s.mem.reorder([s.other], [1])),
    "reorder from the end": (r"entries \[-1\] of 1 rows", lambda s: s.mem.reorder([s.other], [-1])),
    "reorder of a row twice": (r"a row is named twice in \[2, 2\]", lambda s: s.mem.reorder([s.other, s.other], [0])),
    "drop(snapshot)": ("expected a sequence of snapshots", lambda s: s.mem.drop(s.kept)),
    "settle(None)": ("is no step: use what plan", lambda s: s.mem.settle(None)),
    "cancel(None)": ("is no step: use what plan", lambda s: s.mem.cancel(None)),
    "accept(..) without tails": ("needs steps with drafts", lambda s: s.mem.accept(s.first, [1])),
    "finished ragged": ("expected 2 times True or False", lambda s: s.mem.settle(s.first, [[True], [True, False]])),
    "finished elsewhere": ("device='meta'", lambda s: s.mem.settle(s.first, torch.ones(2, device="meta"))),
    "finished numbers": ("expected 2 times True or False", lambda s: s.mem.settle(s.first, [0.5, 0.5])),
}
MISUSE |= {  # arguments that say where a state goes
    "keep a state": ("keep='state': expected None, 'handle' or 'cache'", lambda s: s.mem.end([s.row], keep="state")),
    "keep True": ("keep=True: expected None", lambda s: s.mem.end([s.row], keep=True)),
    "tokens and nothing kept": (
        "tokens= or keys= with keep=None: only keep='cache'", lambda s: s.mem.end([s.row], tokens=[[1]]),
    ),
    "tokens and a handle": ("tokens= or keys= with keep='handle'", lambda s: s.mem.publish([s.row], tokens=[[1]])),
    "lengths and nothing kept": ("lengths= without keep=", lambda s: s.mem.end([s.row], lengths=[4])),
    "publish nothing": ("keep=None: publish keeps states", lambda s: s.mem.publish([s.row], keep=None)),
}  # fmt: skip
STALE: Cases = {  # ended handles
    "a row that is gone": ("request 'c' was ended", lambda s: s.mem.plan([s.row, s.gone])),
    "settling twice": ("it was settled, accepted or cancelled", lambda s: s.mem.settle(s.old)),
    "cancelling what is settled": ("it was settled, accepted or cancelled", lambda s: s.mem.cancel(s.old)),
    "releasing what is gone": ("request 'c' was ended", lambda s: s.mem.end([s.row, s.gone], keep="handle")),
    "publishing what is gone": ("request 'c' was ended", lambda s: s.mem.publish([s.gone])),
    "dropping what is dropped": ("snapshot in register 15", lambda s: s.mem.drop([s.kept, s.dropped])),
    "resuming what is dropped": ("snapshot in register 15", lambda s: s.mem.admit([ms.Request("d", resume=s.dropped)])),
}
NO_CACHE: Cases = {  # calls that need a prefix cache
    "the cache that is none": ("needs a prefix cache", lambda s: s.mem.end([s.row], keep="cache", tokens=[[1]])),
}


@pytest.mark.parametrize("case", MISUSE | STALE | NO_CACHE)
def test_G1_misuse_raises_and_changes_nothing(case: str, backend: Backend) -> None:
    stage = Stage(backend)
    says, misuse = (MISUSE | STALE | NO_CACHE)[case]
    error = ms.StaleHandle if case in STALE else ms.ConfigurationError if case in NO_CACHE else ms.InvalidArgument
    before = stage.observe()
    with pytest.raises(error, match=says):
        misuse(stage)
    assert stage.observe() == before
    scan(stage.mem)


def test_G1_steps_are_settled_in_order_and_at_most_two_are_open(backend: Backend) -> None:
    stage = Stage(backend)
    second = stage.mem.plan([stage.row, stage.other])
    before = stage.observe()
    for says, misuse in (
        ("2 steps are unsettled, the limit before a plan is 1", lambda: stage.mem.plan([stage.row])),
        ("step 6: step 5 comes first (oldest unsettled)", lambda: stage.mem.settle(second)),
        ("step 5: step 6 comes first (newest unsettled)", lambda: stage.mem.cancel(stage.first)),
    ):
        with pytest.raises(ms.InvalidArgument, match=re.escape(says)):
            misuse()
        assert stage.observe() == before
    stage.mem.settle(stage.first)
    stage.mem.settle(second)
    stage.mem.settle(stage.mem.plan([stage.row]))


@pytest.mark.parametrize("how", ["steps", "an arrival", "drafts"])
def test_G1_a_length_beyond_int32_is_refused(backend: Backend, how: str) -> None:
    """Each step alone is small enough; their sum is not."""
    mem = on(
        backend, LAYOUT, slots=16, max_requests=4, tracking=ms.NoTracking(4), overlap=False, tail=2 * (how == "drafts")
    )
    (row,) = mem.admit([ms.Request("a")])
    if how == "steps":
        for tokens in (2**31 - 2, 1):
            mem.settle(mem.plan([row], tokens))
    elif how == "an arrival":
        mem.device.arrived([row], [2**31 - 1])
    else:
        mem.device.arrived([row], [2**31 - 3])
        mem.accept(mem.plan([row], 2, drafts=2), [2])
    with pytest.raises(ms.InvalidArgument, match=r"lengths \[2147483648\] after this step: a label holds 2147483647"):
        mem.plan([row])
    assert mem.info(row).length == 2**31 - 1
    scan(mem)


def test_generations_wrap_around(backend: Backend) -> None:
    """After 2^31 uses of a row, its generation starts again at 0, and the older handle is stale."""
    mem = on(backend, LAYOUT, slots=16, max_requests=4, tracking=ms.Redirect(4))
    owners.table(mem).generation[:] = 2**31 - 2
    owners.holdings(mem).generation = [2**31 - 1] * inside.registers(mem).count
    mem.recover(keep=False)
    assert owners.table(mem).generation.max() == 2**31 - 1 and set(owners.holdings(mem).generation) == {0}
    for _ in range(2):
        (row,) = mem.admit([ms.Request("a")])
        mem.settle(mem.plan([row], 4))
        (snapshot,) = mem.end([row], keep="handle")
        assert snapshot
        mem.drop([snapshot])
        for stale in (lambda row=row: mem.info(row).length, lambda snapshot=snapshot: mem.drop([snapshot])):
            with pytest.raises(ms.StaleHandle):
                stale()
    assert owners.table(mem).generation[1] == 1
    scan(mem)
