"""States under the keys of an engine's own KV blocks, and how far its KV reaches."""

import logging
from collections import deque
from itertools import takewhile
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

import memstate as ms
from memstate.events import Feed
from memstate.tokens import encode_keys
from memstate_tools.traces.make import make

K = [2**40 + 1, 2**64 - 1, 2**40 + 3, 2**40 + 4, 2**40 + 5]
LAYOUT = ms.StateLayout([ms.Plane("ssm", (4,), torch.float32)], layers=1)


def manager(size: int = 4, slots: int = 8, **settings: Any) -> ms.StateManager:
    """Returns a manager for an engine that keeps its KV in blocks of `size` tokens."""
    settings = {"prefix": ms.Prefix(keyed=True), "pages": ms.Pages(size=size)} | settings
    return ms.StateManager(
        LAYOUT, slots=slots, max_requests=4, tracking=ms.Redirect(every=size), forward=ms.Forward(grid=1),
        overlap=False, backend="reference", debug=True, **settings,
    )  # fmt: skip


def run(mem: ms.StateManager, rows: Any, tokens: int) -> None:
    """Runs one step that reads `tokens` tokens of a row, or of each row of a sequence."""
    step = mem.plan([rows] if isinstance(rows, ms.Row) else rows, tokens)
    for slot in (*step.write.tolist(), *step.marks.slot[: step.marked].tolist()):
        mem.planes["ssm"][:, slot] = 1.0
    mem.settle(step)


def read(mem: ms.StateManager, keys: list[Any], length: int, **given: Any) -> ms.Row:
    """Reads a prompt of `length` tokens. `keys` are the keys of the blocks of this prompt that have KV already."""
    (row,) = mem.admit([ms.Request("a", keys=keys, length=length, **given)])
    run(mem, row, length - mem.info(row).length)
    return row


def filed(mem: ms.StateManager, keys: list[Any], **given: Any) -> None:
    """Reads a prompt of these blocks and one more token, and keeps its states in the cache."""
    mem.end([read(mem, [], len(keys) * mem.pages.size + 1, **given)], keep="cache", keys=[keys])


def found(mem: ms.StateManager, keys: list[Any], **given: Any) -> int:
    """Returns the length of the longest cached state for these keys, whose blocks all have KV."""
    return mem.match(keys=keys, length=100, **given).length


def test_K1_a_request_starts_at_the_longest_state_of_the_blocks_that_are_there() -> None:
    mem = manager()
    filed(mem, K[:3])
    assert mem.match(keys=K[:3], length=14).length == 12 and mem.match(keys=K[:2], length=14).length == 0
    assert mem.match(keys=K[:3], length=12).length == 0  # the last token is computed in any case
    match = mem.match(keys=K[:2], length=14)
    assert (match.tokens, match.kv_length, match.reason) == (14, 8, "no_snapshot")
    (row,) = mem.admit([ms.Request("b", keys=K[:3], length=21)])
    assert mem.info(row).length == 12
    stats = mem.stats().prefix
    assert stats and (stats.prompt_tokens, stats.hit_tokens) == (13 + 21, 12)
    mem.end([row])
    mem.audit().raise_if_leaking()


def test_reach_says_how_much_kv_there_is_and_keys_name_the_rest() -> None:
    mem = manager()
    filed(mem, K[:2])
    match = mem.match(keys=K[:4], length=17, reach=8)
    assert (match.length, match.kv_length) == (8, 8) and found(mem, K[:4], reach=7) == 0
    (row,) = mem.admit([ms.Request("b", keys=K[:4], length=17, reach=0)])
    run(mem, row, 17)
    with pytest.raises(ms.InvalidArgument, match="keys are not those of its prompt"):
        mem.publish([row], "cache", keys=[[*K[:2], K[4]]])
    mem.end([row], keep="cache", keys=[K[:4]])
    assert found(mem, K[:4]) == 16


def test_marks_see_the_whole_prompt() -> None:
    mem = manager(size=4, slots=12)
    mem.end([read(mem, K[:1], 18, snapshot_at=[8])], keep="cache", keys=[K[:4]])  # a branch at 4, the end at 16
    cache = mem.prefix
    assert cache and sorted(node.end for node in cache.stated()) == [1, 2, 4]
    (row,) = mem.admit([ms.Request("b", keys=[], length=18)])
    mem.snapshot_at(row, [12, 40])  # 40 is behind the prompt
    run(mem, row, 18)
    mem.end([row], keep="cache", keys=[K[:4]])
    assert sorted(node.end for node in cache.stated()) == [1, 2, 3, 4]


def test_a_state_that_was_evicted_is_told_from_one_that_never_was() -> None:
    mem = manager()
    filed(mem, K[:2])
    assert mem.prefix and mem.prefix.evict_states(1) == 1
    match = mem.match(keys=K[:3], length=20)
    assert (match.length, match.evicted_length, match.kv_length) == (0, 8, 12)


def test_K2_what_is_forgotten_goes_first_and_comes_back_with_its_kv() -> None:
    mem = manager(slots=4)
    filed(mem, K[:1])
    filed(mem, [2**50])
    mem.forget([2**50, 2**51])
    assert found(mem, [2**50]) == 4  # the state stays until its slot is needed
    (reader,) = mem.admit([ms.Request("r", keys=[2**50], length=9)])
    mem.forget([2**50])
    assert mem.prefix and mem.prefix.evict_states(2) == 1  # the state that `reader` is about to read stays
    assert found(mem, [2**50]) == 4 and found(mem, K[:1]) == 0
    mem.end([reader])
    assert mem.prefix.superseded_states == 1 and mem.prefix.evict_states(1) == 1 and found(mem, [2**50]) == 0
    mem.audit().raise_if_leaking()


@pytest.mark.parametrize("again", ["used", "filed"])
def test_a_forgotten_state_counts_as_before_once_its_kv_is_back(again: str) -> None:
    mem = manager()
    filed(mem, K[:1])
    mem.forget(K)
    assert mem.prefix and mem.prefix.superseded_states == 1
    if again == "used":
        mem.end(mem.admit([ms.Request("b", keys=K[:1], length=9)]))
    else:
        filed(mem, K[:1])
    assert mem.prefix.superseded_states == 0


def test_K2_forget_marks_a_key_under_every_salt() -> None:
    mem = manager()
    for salt in ("a", "b"):
        filed(mem, K[:1], salt=salt)
    assert found(mem, K[:1]) == 0 and found(mem, K[:1], salt="a") == 4
    mem.forget(K[:1])
    assert mem.prefix and mem.prefix.superseded_states == 2


def test_recover_keeps_the_keys() -> None:
    mem = manager()
    filed(mem, K[:2])
    mem.recover()
    assert found(mem, K[:2]) == 8
    mem.forget([K[1]])
    assert mem.prefix and mem.prefix.superseded_states == 1
    mem.prefix.clear()
    mem.forget([K[1]])
    assert mem.prefix.superseded_states == 0 and not mem.prefix.by_key


def test_K3_keys_one_block_off_are_refused_by_a_row_that_started_warm() -> None:
    mem = manager()
    filed(mem, K[:3])
    row = read(mem, K[:3], 18)
    with pytest.raises(ms.InvalidArgument, match="the keys are not those of its prompt"):
        mem.end([row], keep="cache", keys=[K[1:5]])
    with pytest.raises(ms.InvalidArgument, match=r"keys of 12 tokens, and 18 are confirmed: give all of them as keys"):
        mem.end([row], keep="cache", keys=[K[:3]])
    mem.end([row], keep="cache", keys=[K[:4]])


def test_publish_with_fewer_keys_keeps_the_longer_states_for_later() -> None:
    mem = manager(slots=12)
    row = read(mem, [], 13)
    (first,) = mem.publish([row], "cache", keys=[K[:1]])
    assert first is None and found(mem, K[:3]) == 0
    (second,) = mem.publish([row], "cache", keys=[K[:3]])
    assert second and second.length == 12
    mem.end([row], keep="cache", keys=[K[:3]])


def test_publish_encodes_only_keys_that_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    mem, seen = manager(slots=12), list[int]()
    monkeypatch.setattr(
        "memstate.prefix.names.encode_keys", lambda keys, page: seen.append(len(keys)) or encode_keys(keys, page)
    )
    row = read(mem, [], 13)
    for n in (2, 2, 3):
        mem.publish([row], "cache", keys=[K[:n]])
    assert seen == [0, 2, 1, 2] and found(mem, K[:3]) == 12
    mem.publish([row], "cache", keys=[[K[4], K[1], K[2]]])
    assert seen[-1:] == [1] and found(mem, K[:3]) == 12  # the last key stands for all before it
    for keys in ([K[4], K[1]], [K[0], K[1], K[4]]):
        with pytest.raises(ms.InvalidArgument, match="not those of its prompt"):
            mem.publish([row], "cache", keys=[keys])


def test_a_fork_goes_on_with_blocks_of_its_own() -> None:
    mem = manager(slots=12)
    row = read(mem, [], 6)
    (other,) = mem.fork(row, ["b"]).rows
    for each in (row, other):
        run(mem, each, 2)
    mem.end([row], keep="cache", keys=[K[:2]])
    mem.end([other], keep="cache", keys=[[K[0], K[4]]])
    assert found(mem, K[:2]) == 8 == found(mem, [K[0], K[4]])


def test_K3_a_key_at_two_places_finds_nothing_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    mem = manager(slots=12)
    with caplog.at_level(logging.WARNING):
        for first in (K[0], K[2], K[0], K[2]):
            filed(mem, [first, K[1]])
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and told[0].startswith("two prefixes blocks=")
    assert not any(found(mem, [first, K[1]]) for first in K)
    mem.audit().raise_if_leaking()


def test_a_key_at_two_places_waits_for_its_reader() -> None:
    mem = manager(slots=12)
    filed(mem, [K[0], K[1]])
    (reader,) = mem.admit([ms.Request("r", keys=[K[0], K[1]], length=9)])
    filed(mem, [K[2], K[1]])
    assert mem.prefix and mem.prefix.superseded_states == 0  # a first step is about to read it
    mem.end([reader])
    assert mem.prefix.superseded_states == 1 and found(mem, [K[2], K[1]]) == 0


def test_keys_that_look_like_ids_of_blocks_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        mem = manager()
        mem.match(keys=[], length=9)
        for _ in range(2):
            mem.match(keys=[3, 1], length=9)
        mem = manager()
        mem.match(keys=[3, 2**60], length=9)
        manager().match(keys=[b"\1"], length=9)
        manager().forget(torch.tensor([3, 1]))
    assert [record.getMessage()[:21] for record in caplog.records] == [
        "keys like ids keys='[",
        'keys like ids keys="[',
        "keys like ids keys='t",
    ]


@pytest.mark.parametrize(
    "kind",
    [tuple, np.uint64, torch.tensor, lambda keys: [key.to_bytes(8, "little") for key in keys]],
    ids=["tuple", "numpy", "tensor", "bytes"],
)
def test_keys_come_in_any_sequence(kind: Any) -> None:
    mem, keys = manager(), [2**40 + n for n in range(40)]
    mem.end([read(mem, [], 161)], keep="cache", keys=[kind(keys)])
    assert mem.match(keys=kind(keys), length=200).length == 160 and mem.match(keys=np.array([]), length=9).length == 0
    assert found(mem, kind([*keys[:20], 1])) == 0


def test_K4_wide_keys_are_whole() -> None:
    mem = manager()
    long = [b"a" * 31 + last for last in (b"b", b"c", b"\0")]
    filed(mem, long[:1])
    assert [found(mem, [key]) for key in long] == [4, 0, 0]
    for other in (b"a" * 31, 7):
        with pytest.raises(ms.InvalidArgument, match=r"keys=.* of \d+ bytes, and of 32 before"):
            found(mem, [other])
    numbers = manager()
    filed(numbers, [2**40])
    with pytest.raises(ms.InvalidArgument, match="of 8 bytes, and of 0 before; 0: numbers"):
        found(numbers, [(2**40).to_bytes(8, "little")])


@pytest.mark.parametrize(
    "keys",
    [
        [-1],
        [1.5],
        ["a"],
        [2**64],
        [b"a" * 33],
        b"abc",
        [b"x", 3],
        [b"x", b"yy"],
        5,
        [[1]],
        [None],
        [0] * 40 + [-1],
        [b""],
        bytearray(8),
        memoryview(b"abc"),
        np.array([b"ab"]),
        {3: 4},
    ],
)
def test_K4_what_is_no_key_is_refused(keys: Any) -> None:
    mem = manager()
    with pytest.raises(ms.InvalidArgument, match="keys"):
        mem.match(keys=keys, length=1000)
    with pytest.raises(ms.InvalidArgument, match="keys"):
        mem.forget(keys)
    mem.audit().raise_if_leaking()


REFUSED: dict[str, Any] = {
    "tokens": ({"tokens": [1, 2]}, "this cache takes keys="),
    "no length": ({"keys": K}, "keys of 20 tokens, length=None"),
    "too short": ({"keys": K, "length": 19}, "keys of 20 tokens, length=19"),
    "no token": ({"keys": [], "length": 0}, "length=0: expected all tokens"),
    "reach of nothing": ({"reach": 4}, "length=None|match what"),
    "reach": ({"keys": K, "length": 21, "reach": 21}, "reach=21: expected a number of tokens up to the 20"),
    "no reach": ({"keys": K, "length": 21, "reach": -1}, "reach=-1: expected"),
}


@pytest.mark.parametrize(("given", "said"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_a_keyed_cache_is_refused(given: Any, said: str) -> None:
    mem = manager()
    with pytest.raises(ms.InvalidArgument, match=said):
        mem.admit([ms.Request("a", **given)])
    with pytest.raises(ms.InvalidArgument, match=said):
        mem.match(**given)
    assert len(mem.rows) == 0
    mem.audit().raise_if_leaking()


def test_a_session_is_refused_with_keys_and_with_reach() -> None:
    mem, tokens = manager(), manager(prefix=ms.Prefix())
    for each, given in ((mem, {"keys": K[:1], "length": 9}), (tokens, {"tokens": [1] * 9, "reach": 4})):
        session = each.sessions.open("s")
        with pytest.raises(ms.InvalidArgument, match="reach= with session=, tiers or Pages"):
            each.admit([ms.Request("a", session=session, **given)])
        with pytest.raises(ms.InvalidArgument, match="reach= with session=, tiers or Pages"):
            each.match(session=session, **given)


def test_keys_are_refused_where_the_cache_is_not_keyed() -> None:
    mem = manager(prefix=ms.Prefix())
    (row,) = mem.admit([ms.Request("b", tokens=[1, 2])])
    run(mem, row, 2)
    calls = (
        lambda: mem.admit([ms.Request("a", keys=K, length=30)]),
        lambda: mem.match(keys=K, length=30),
        lambda: mem.forget(K),
        lambda: mem.publish([row], "cache", keys=[K]),
        lambda: mem.end([row], keep="cache", keys=[K]),
    )
    for call in calls:
        with pytest.raises(ms.InvalidArgument, match="this cache takes tokens="):
            call()
    with pytest.raises(ms.InvalidArgument, match="match what"):
        mem.match()
    mem.end([row], keep="cache", tokens=[[1, 2]])


def test_a_keyed_cache_needs_an_engine_that_keeps_its_kv() -> None:
    for settings in ({"pages": ms.Pages(size=4, count=8, per_row=4)}, {"tiers": ms.Tiers("m", host_slots=4)}):
        with pytest.raises(ms.ConfigurationError, match="with tiers or Pages"):
            manager(**settings)
    with pytest.raises(ms.ConfigurationError, match="the engine tells of its blocks"):
        Feed(manager())


def test_cancel_takes_keys() -> None:
    mem = manager(slots=12)
    row = read(mem, [], 9)
    step = mem.plan([row], 1)
    (state,) = mem.cancel(step, "cache", keys=[K[:2]])
    assert state and state.length == 8 and found(mem, K[:2]) == 8


# `reach=` with tokens instead of keys


def test_K1_a_request_starts_from_no_state_beyond_its_reach() -> None:
    mem, text = manager(prefix=ms.Prefix(), slots=12), [*range(30)]
    (row,) = mem.admit([ms.Request("a", tokens=text[:17], snapshot_at=[8])])
    run(mem, row, 17)
    mem.end([row], keep="cache", tokens=[text[:17]])
    assert [mem.match(text, reach=reach).length for reach in (30, 16, 15, 8, 7, 0)] == [16, 16, 8, 8, 0, 0]
    match = mem.match(text, reach=15)
    assert (match.tokens, match.kv_length, match.lost["no_snapshot"]) == (30, 12, 4)
    (row,) = mem.admit([ms.Request("b", tokens=text, reach=15)])
    assert mem.info(row).length == 8
    mem.end([row])


def test_reach_is_refused_where_the_manager_keeps_the_kv() -> None:
    for settings in (
        {"prefix": ms.Prefix(), "pages": ms.Pages(size=4, count=8, per_row=4)},
        {"prefix": ms.Prefix(), "tiers": ms.Tiers("m", host_slots=4)},
    ):
        with pytest.raises(ms.InvalidArgument, match="reach= with session=, tiers or Pages"):
            manager(**settings).admit([ms.Request("a", tokens=[1], reach=0)])


def test_K5_two_managers_that_are_told_the_same_keys_stay_equal() -> None:
    """For example, a scheduler sends its calls to its workers, or ranks make the same calls; no tokens are sent."""
    both = manager(slots=9), manager(slots=9)
    draw, rows = Random(7), dict[int, tuple[list[int], int]]()
    trees = [[draw.getrandbits(60)] for _ in range(3)]
    for number in range(400):
        if rows and draw.random() < 0.5:
            index = draw.choice([*rows])
            keys, length = rows.pop(index)
            for mem in both:
                (row,) = (one for one in mem.rows if one.index == index)
                run(mem, row, length - mem.info(row).length)
                mem.end([row], keep="cache", keys=[keys])
            continue
        keys = [*draw.choice(trees), *(draw.getrandbits(60) for _ in range(draw.randrange(3)))]
        trees[draw.randrange(3)] = keys[: draw.randrange(1, 6)]
        length, held = len(keys) * 4 + draw.randrange(1, 4), draw.randrange(len(keys) + 1)
        seen = []
        for mem in both:
            try:
                (row,) = mem.admit([ms.Request(number, keys=keys, length=length, reach=held * 4)])
                seen.append((row.index, mem.info(row).length))
            except (ms.OutOfSlots, ms.OutOfRows) as error:
                seen.append(str(error))
            mem.forget(keys[:1] if number % 7 == 0 else [])
        assert seen[0] == seen[1]
        if isinstance(seen[0], tuple):
            rows[seen[0][0]] = keys, length
    assert both[0].stats().prefix == both[1].stats().prefix
    for mem in both:
        mem.end([*mem.rows])
        mem.audit().raise_if_leaking()


def test_keys_that_were_refused_leave_nothing() -> None:
    mem = manager(slots=12)
    row = read(mem, [], 13, reach=0)
    mem.publish([row], "cache", keys=[K[:1]])
    bad = [[K[4], K[3], K[1]], [K[0], -1], [K[0], K[2], 1.5]]
    for keys in bad[1:]:
        with pytest.raises(ms.InvalidArgument, match="keys="):
            mem.publish([row], "cache", keys=[keys])
    warm = mem.admit([ms.Request("b", keys=K[:3], length=13, reach=0)])
    run(mem, warm[0], 13)
    with pytest.raises(ms.InvalidArgument, match="not those of its prompt"):
        mem.publish(warm, "cache", keys=[bad[0]])
    assert [state and state.length for state in mem.publish(warm, "cache", keys=[[*K[:3]]])] == [12]
    mem.end([row, *warm], keep="cache", keys=[K[:3], None])


def test_keys_cost_no_launch_and_no_upload() -> None:
    def counts(keyed: bool) -> Any:
        mem = manager(slots=12, prefix=ms.Prefix(keyed=keyed))
        for length in (13, 17, 9):
            text = [*range(length)]
            asked = {"keys": K[: length // 4], "length": length} if keyed else {"tokens": text}
            (row,) = mem.admit([ms.Request("a", **asked)])
            run(mem, row, length - mem.info(row).length)
            run(mem, row, 1)
            named: Any = {"keys": [K[: (length + 1) // 4]]} if keyed else {"tokens": [[*text, 7]]}
            mem.publish([row], "cache", **named)
            mem.end([row], keep="cache", **named)
        return vars(mem.backend.counts)

    assert counts(keyed=True) == counts(keyed=False)


@pytest.mark.parametrize("number", [np.int16, np.uint8, np.int64])
def test_lengths_of_numpy_are_plain_numbers(number: Any) -> None:
    mem = manager(slots=12)
    for _ in range(3):
        (row,) = mem.admit([ms.Request("a", keys=K[:2], length=number(14), reach=number(8))])
        assert all(type(count) is int for count in vars(mem.stats().prefix).values())
        run(mem, row, 14 - mem.info(row).length)
        mem.end([row], keep="cache", keys=[K[:3]])
    long = [2**40 + n for n in range(40)]
    tokens = manager(prefix=ms.Prefix(), slots=12)
    for each, given in ((mem, {"keys": long, "length": 161}), (tokens, {"tokens": [*range(161)]})):
        (row,) = each.admit([ms.Request("b", reach=0, **given)])
        run(each, row, 161)
        each.end([row], keep="cache", **({"keys": [long]} if each is mem else {"tokens": [[*range(161)]]}))
    assert (
        mem.match(keys=long, length=161, reach=np.uint8(160)).length
        == 160
        == tokens.match(range(161), reach=np.uint8(160)).length
    )


@pytest.mark.parametrize("call", ["publish", "end"])
def test_a_key_at_two_places_in_one_call_leaks_no_slot(call: str) -> None:
    mem = manager(slots=12)
    rows = mem.admit([ms.Request(n, keys=[], length=1) for n in range(2)])
    for tokens in (8, 1):
        run(mem, rows, tokens)
    keys = [[K[0], K[1]], [K[2], K[1]]]
    if call == "publish":
        mem.publish(rows, "cache", keys=keys)
        mem.end(rows)
    else:
        mem.end(rows, keep="cache", keys=keys)
    mem.audit().raise_if_leaking()
    for n in range(14):
        (row,) = mem.admit([ms.Request(n, keys=[], length=1)])
        for tokens in (4, 1):
            run(mem, row, tokens)
        mem.end([row], keep="cache", keys=[[2**50 + n]])
    mem.audit().raise_if_leaking()


def test_a_row_that_has_keys_takes_any_sequence_and_refuses_the_rest() -> None:
    mem = manager(slots=12)
    row = read(mem, [], 13)
    mem.publish([row], "cache", keys=[K[:1]])
    for keys in (5, {1, 2}, {3: 4}, map(int, K), (key for key in K), np.array(5)):
        with pytest.raises(ms.InvalidArgument, match="keys="):
            mem.publish([row], "cache", keys=[keys])
    for kind in (deque, lambda keys: [np.uint64(key) for key in keys]):
        mem.publish([row], "cache", keys=[kind(K[:2])])
    mem.end([row], keep="cache", keys=[deque(K[:3])])
    assert found(mem, [np.uint64(key) for key in K[:3]]) == 12


def test_texts_speak_of_keys() -> None:
    mem = manager()
    row = read(mem, [], 9)
    with pytest.raises(ms.InvalidArgument, match="tokens= or keys= with keep='handle'"):
        mem.end([row], keep="handle", keys=[K[:2]])
    with pytest.raises(ms.InvalidArgument, match="keys of 2 rows, expected 1"):
        mem.end([row], keep="cache", keys=K[:2])
    with pytest.raises(ms.InvalidArgument, match="keep='cache' needs its keys, and none are known: give keys="):
        mem.end([row], keep="cache")
    mem.end([row])


def test_a_prompt_without_tokens_is_refused_with_a_reach_too() -> None:
    mem = manager(prefix=ms.Prefix())
    with pytest.raises(ms.InvalidArgument, match="no tokens; a prompt has at least one"):
        mem.admit([ms.Request("a", tokens=[], reach=0)])
    assert len(mem.rows) == 0


@pytest.mark.parametrize("kind", ["chat", "agent"])
def test_a_trace_of_block_hashes_is_a_list_of_keys(kind: str) -> None:
    """The ids of a trace name whole prefixes, so they are keys: hits are those of the tokens that they stand for."""
    trace, block, seen = make(kind, requests=60, seed=3), 512, set[int]()
    keyed, tokens = (manager(size=block, slots=40, prefix=ms.Prefix(keyed=on)) for on in (True, False))
    for request in trace:
        whole, length = request.input_length // block, request.input_length
        keys = [2**40 + number for number in request.hash_ids[:whole]]
        text = np.concatenate([np.repeat(keys, block), np.zeros(length - whole * block, np.int64)]).astype(np.int64)
        starts, reach = [], block * sum(1 for _ in takewhile(seen.__contains__, keys))
        seen.update(keys)
        for mem, asked in ((keyed, {"keys": keys, "length": length, "reach": reach}), (tokens, {"tokens": text})):
            (row,) = mem.admit([ms.Request("a", **asked)])
            starts.append(mem.info(row).length)
            run(mem, row, length - mem.info(row).length)
            mem.end([row], keep="cache", **({"keys": [keys]} if mem is keyed else {"tokens": [text]}))
        assert starts[0] == starts[1]
    hits = [mem.stats().prefix.hit_tokens for mem in (keyed, tokens)]
    assert hits[0] == hits[1] > 0
