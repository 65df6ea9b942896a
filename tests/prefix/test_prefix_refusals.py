"""Tokens that a call names, whole or not at all, and refusals: what a refused call asked for has changed nothing."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import memstate as ms
from memstate.integrations.sglang.prefix import PrefixPart
from memstate.prefix import names
from memstate.tokens import Tokens, encode
from tests.proof.stateful.script import Play, script

T = [7 * n % 50 for n in range(60)]
PAGED = {"strategy": "redirect", "every": 64, "page_size": 4}
CACHED = {**PAGED, "prefix": True}


@script(**CACHED, at=("publish", "end", "cancel"))
def test_tokens_that_are_not_the_rows_are_refused(play: Play) -> None:
    """If they were taken, a state would be found under tokens that it does not stand for."""
    (row,) = play.admit(T[:9])
    play.run(row, T[:9])
    flight = play.step([row], run=False) if play.at == "cancel" else None
    named = flight.step if flight else [row]
    for wrong in ([*T[:5], 99, *T[6:12]], T[4:9], [99, *T[:9]]):
        call = partial(getattr(play.mem, play.at), named, keep="cache", tokens=[wrong])
        play.refuses(ms.InvalidArgument, call, "not those of its prompt")
    play.cancel(flight, how="told") if flight else play.end(row)
    play.match(T[:9])


@script(**CACHED)
def test_G1_what_came_after_a_prompt_must_be_handed_over(play: Play) -> None:
    """A session is told all tokens, and so is the cache: otherwise, no state would ever be found."""
    (a,) = play.open("a")
    row, turn, nameless = play.admit(T[:9], T[:10], None, sessions=[None, a, None])
    play.run(row, T[:10])
    play.run(turn, T[:10])
    for one in (row, turn):
        said = rf"row {one.index} \(request 'r\d'\): 8 tokens, and 10 are confirmed"
        play.refuses(ms.InvalidArgument, lambda one=one: play.mem.end([one], "cache", tokens=[T[:8]]), said)
    for call in (play.mem.end, play.mem.publish):
        play.refuses(ms.InvalidArgument, partial(call, [row], "cache"), "9 tokens, and 10 are")
        both = partial(call, [row, nameless], "cache", tokens=[T[:10], None])
        play.refuses(ms.InvalidArgument, both, "needs its tokens, and none are")
    play.end(row, lengths=[9])
    play.match(T[:9])
    play.end(turn)


@script(strategy="redirect", prefix=True, page_size=4)
def test_G1_of_a_fork_only_the_tokens_that_it_shares_are_known(play: Play) -> None:
    """Later tokens of a fork are not known: they may differ from those of the row's prompt."""
    (row,) = play.admit(T[:10])
    play.run(row, T[:4])
    (fork,) = play.fork(row, "fork")
    play.run(row, T[:8])
    play.run(fork, T[:8])
    for call in (play.mem.end, play.mem.publish):
        said = r"request 'fork'\): 4 tokens, and 8 are confirmed"
        play.refuses(ms.InvalidArgument, partial(call, [fork], keep="cache"), said)


@script(**PAGED)
def test_G1_what_needs_a_cache_says_so_where_there_is_none(play: Play) -> None:
    (row,) = play.admit(T[:5])  # tokens are allowed without a cache
    flight = play.step([row], run=False)
    for call in (
        lambda: play.mem.match(T),
        lambda: play.mem.publish([row], keep="cache", tokens=[T]),
        lambda: play.mem.end([row], keep="cache", tokens=[T]),
        lambda: play.mem.cancel(flight.step, keep="cache", tokens=[T]),
    ):
        play.refuses(ms.ConfigurationError, call, "prefix=ms")
    play.cancel(flight)


WRONG: dict[str, dict[str, Any]] = {
    "salt": {"tokens": T, "salt": ["a"]},
    "length": {"tokens": T, "length": -1},
    "mark": {"tokens": T, "snapshot_at": [-3]},
    "more pages than a row has": {"length": 4 * 41},
}


@script(**CACHED, slots=6, rows=3, pages=8)
def test_G1_a_salt_or_a_length_that_cannot_be_meant_changes_nothing(play: Play) -> None:
    play.turn(T[:8])
    play.refuses(ms.InvalidArgument, lambda: play.mem.match(T, salt=["a"]))
    for wrong in WRONG.values():
        requests = [ms.Request("a", tokens=T[:9]), ms.Request("b", **wrong)]
        play.refuses(ms.InvalidArgument, partial(play.mem.admit, requests))


# What a caller gives is read once


def plain(**more: Any) -> ms.StateManager:
    settings = {"slots": 8, "max_requests": 2, "pages": ms.Pages(size=4), "prefix": ms.Prefix(), "backend": "reference"}
    return ms.StateManager(ms.StateLayout([ms.Plane("ssm", (4,), torch.float32)], layers=1), **(settings | more))


def read_by(mem: ms.StateManager, tokens: Tokens, length: int = 16, **more: Any) -> ms.Row:
    """Returns a row that has read its prompt."""
    (row,) = mem.admit([ms.Request("a", tokens=tokens, length=length, **more)])
    mem.settle(mem.plan([row], length - mem.info(row).length))
    return row


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_what_a_request_was_admitted_with_is_read_once(
    kind: Callable[[list[int]], Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    mem, given, read = plain(), kind(T[:16]), list[int]()
    monkeypatch.setattr(names, "encode", lambda tokens: read.append(len(tokens)) or encode(tokens))
    for tokens in (given, kind(T[:16]), given):
        mem.end([read_by(mem, given)], keep="cache", tokens=[tokens])
    assert read == [16, 0, 16, 16, 16, 0] and mem.match([*T[:16], 1]).length == 16


def test_a_prompt_need_not_be_handed_over_again() -> None:
    """A publish while the prompt is read needs no tokens. An end right after the prompt needs none either."""
    sides = plain(), plain()
    for mem, again in zip(sides, (False, True), strict=True):
        (row,) = mem.admit([ms.Request("a", tokens=T[:18], length=18)])
        for n in (8, 8, 2):
            mem.settle(mem.plan([row], n))
            mem.publish([row], keep="cache", tokens=[T[:18]] if again else [None] if n == 8 else None)
        mem.end([row], keep="cache", tokens=[T[:18]] if again else None)
    matches = [mem.match(T[:24]) for mem in sides]
    assert matches[0].length == 16 and matches[0].lost == matches[1].lost and sides[0].stats() == sides[1].stats()


def test_a_list_that_has_changed_since_its_admission_counts_behind_its_prompt() -> None:
    mem, given = plain(), T[:12]
    row = read_by(mem, given)
    given[:] = [99] * 12 + T[12:16]
    mem.end([row], keep="cache", tokens=[given])
    assert mem.match([*T[:16], 1]).length == 16  # the first twelve tokens are those of the admission
    row = read_by(mem, given)
    del given[8:]
    with pytest.raises(ms.InvalidArgument, match="8 tokens, and 16 are confirmed"):
        mem.end([row], keep="cache", tokens=[given])


@pytest.mark.parametrize("prefix", [None, ms.Prefix()])
def test_B73_a_prompt_that_its_caller_changes_stands_for_what_was_read(prefix: ms.Prefix | None) -> None:
    mem, prompt = plain(prefix=prefix), T[:4]
    session = mem.sessions.open("a")
    row = read_by(mem, prompt, 4, session=session)
    prompt[:] = [50] * 4
    mem.end([row], keep="cache", tokens=[prompt])
    (row,) = mem.admit([ms.Request("b", tokens=[50] * 4 + [51], session=session)])
    assert mem.info(row).length == 0
    mem.end([row])
    mem.end([read_by(mem, T[:4], 4, session=session)], keep="cache")  # nothing was decoded, and the prompt is known
    (row,) = mem.admit([ms.Request("c", tokens=T[:5], session=session)])
    assert mem.info(row).length == 4


def test_a_hit_is_not_locked_whose_state_has_another_owner_by_now() -> None:
    """The engine has reused the id of the state: in the cache, this id now stands for another prompt."""
    cache = PrefixPart(2)
    cache.insert([1, 2, 3, 4], [10, 11], 7)
    hit = cache.match([1, 2, 3, 4, 5])
    assert cache.evict(states=1).states == [7]
    cache.insert([5, 6, 7, 8], [12, 13], 7)
    with pytest.raises(ms.InvalidArgument, match="has been evicted since it was matched"):
        cache.lock(hit)
    assert cache.evict(states=1).states == [7], "nothing is locked"
