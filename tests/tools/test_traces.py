"""Tests files of traces, their refusals, and the block ids of made traces."""

import gzip
import hashlib
import os
import random
import tempfile
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memstate.cli import files
from memstate.cli.traces import BLOCK, TraceRequest, form
from memstate.errors import InvalidArgument
from memstate_tools.traces import make as making
from memstate_tools.traces.make import CONTEXT, KINDS, Context, Numbering, make

ROOT = Path(__file__).parents[2]
LINE = b'{"timestamp": 27, "input_length": 1025, "output_length": 52, "hash_ids": [46, 47, 2353]}\n'
REQUEST = TraceRequest(27, 1025, 52, (46, 47, 2353))
MIXED = [REQUEST, TraceRequest(0, 0, 0, ()), TraceRequest(99, 512, 1, (2**70,)), TraceRequest(99, 513, 1, (0, 0))]


def refusal(of: Callable[..., Any], *given: Any) -> str:
    """Returns the text of the InvalidArgument that a call raises; it is one printable line."""
    with pytest.raises(InvalidArgument) as caught:
        of(*given)
    text = str(caught.value)
    assert "\n" not in text and text.isprintable() and len(text) < 500
    return text


def stored(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


# Format


def test_the_form_is_the_published_one(tmp_path: Path) -> None:
    """A line of Mooncake's published files is read, and written again byte for byte."""
    assert form.read(stored(tmp_path / "a.jsonl", LINE)) == [REQUEST]
    form.write(tmp_path / "b.jsonl", [REQUEST, REQUEST])
    assert (tmp_path / "b.jsonl").read_bytes() == LINE + LINE


def test_a_request_may_have_a_kind(tmp_path: Path) -> None:
    requests = [replace(REQUEST, kind="chat"), REQUEST]
    form.write(tmp_path / "a.jsonl", requests)
    assert (tmp_path / "a.jsonl").read_bytes() == LINE.replace(b"}", b', "kind": "chat"}') + LINE
    assert form.read(tmp_path / "a.jsonl") == requests


def test_a_request_may_say_where_the_next_turn_parts_from_it(tmp_path: Path) -> None:
    requests = [replace(REQUEST, parts=0), replace(REQUEST, parts=1025), REQUEST]
    form.write(tmp_path / "a.jsonl", requests)
    lines = [LINE.replace(b"}", b', "parts": %d}' % parts) for parts in (0, 1025)]
    assert (tmp_path / "a.jsonl").read_bytes() == b"".join(lines) + LINE
    assert form.read(tmp_path / "a.jsonl") == requests
    assert [one.shared for one in requests] == [1025, 0, 1025 + 52]


WHOLE = st.integers(0, 2**40)
REQUESTS = st.lists(st.integers(0, 5), min_size=1, max_size=30).flatmap(
    lambda blocks: st.tuples(
        *(
            st.builds(
                lambda at, out, ids, missing: TraceRequest(at, max(0, len(ids) * BLOCK - missing), out, tuple(ids)),
                WHOLE, st.integers(0, 2**30), st.lists(WHOLE, min_size=n, max_size=n), st.integers(0, BLOCK - 1),
            )
            for n in blocks
        )
    )
)  # fmt: skip


@settings(deadline=None, max_examples=50)
@given(
    requests=REQUESTS,
    name=st.sampled_from(["x.jsonl", "x.jsonl.gz", "x", "x.gz.old"]),
    other=st.sampled_from(["y", "y.gz"]),
)
def test_round_trip_by_content_and_not_by_name(requests: tuple[TraceRequest, ...], name: str, other: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        form.write(path, iter(requests))
        assert (path.read_bytes()[:2] == b"\x1f\x8b") is name.endswith(".gz")
        assert form.read(path) == list(requests)
        assert form.read(path.rename(Path(folder) / other), len(requests)) == list(requests)


@pytest.mark.parametrize(
    "content",
    [
        b"\n \n" + LINE + b"\r\n" + LINE.rstrip(),
        LINE.replace(b"\n", b"\r\n") * 2,
        gzip.compress(LINE) + gzip.compress(b"\n" + LINE),
        LINE.replace(b"{", b'{"chat_id": -1.5, ') + LINE.replace(b" ", b""),
    ],
    ids=["blank lines", "CRLF", "two gzip members", "more fields"],
)
def test_what_may_differ_between_files(tmp_path: Path, content: bytes) -> None:
    assert form.read(stored(tmp_path / "x", content)) == [REQUEST, REQUEST]


def test_limit_counts_requests_and_looks_no_further(tmp_path: Path) -> None:
    path = stored(tmp_path / "x", b"\n" + LINE + b"\n" + LINE + b"\nrubbish")
    assert form.read(path, limit=1) == [REQUEST]
    assert form.read(path, limit=2) == [REQUEST, REQUEST]
    assert "line 6" in refusal(lambda: form.read(path, limit=3))
    assert "limit=0" in refusal(lambda: form.read(path, 0))


def test_same_requests_same_bytes_whatever_the_name(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.gz", "b.jsonl.gz", "c.jsonl")]
    for path in paths:
        form.write(path, MIXED)
    first, second, plain = (path.read_bytes() for path in paths)
    assert first == second and gzip.decompress(first) == plain
    assert first[4:8] == bytes(4) and not first[3] & 8  # the gzip header has no time and no name (RFC 1952)


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
@pytest.mark.parametrize("fails", [True, False], ids=["no more requests", "nothing to write"])
def test_what_fails_halfway_leaves_the_old_file_alone(tmp_path: Path, name: str, fails: bool) -> None:
    def cut_short() -> Iterator[TraceRequest]:
        yield from MIXED * 2000 if fails else ()
        if fails:
            raise KeyError("the source ran dry")

    path = tmp_path / name
    form.write(path, MIXED)
    with pytest.raises(KeyError if fails else InvalidArgument):
        form.write(path, cut_short())
    assert form.read(path) == MIXED
    assert os.listdir(tmp_path) == [name]
    form.write(path, MIXED[:1])
    assert form.read(path) == MIXED[:1]


def line(**changes: str) -> bytes:
    """Returns a line of a trace with changed fields; values are JSON, and "" leaves the field out."""
    fields = {"timestamp": "1", "input_length": "600", "output_length": "2", "hash_ids": "[3, 4]"} | changes
    return ("{" + ", ".join(f'"{name}": {value}' for name, value in fields.items() if value) + "}\n").encode()


BAD_LINES = {  # of other bad lines, tests/cli/refusals.txt has what `memstate replay` says
    "digits without end": (line(timestamp="1" * 5000), "not JSON that can be read"),
    "lists in lists": (b"[" * 100_000, "not JSON that can be read"),
    "Latin-1": (line(place='"\xe9"').decode().encode("latin-1"), "not UTF-8: byte 0xe9 at column"),
    "UTF-16": (line().decode().encode("utf-16"), "not UTF-8: byte 0xf"),
    "a word": (b'"' + b"w" * 1000 + b'"', "expected an object"),
    "vast": (line(input_length="9" * 4000), "2 hash_ids for input_length 9999"),
}


@pytest.mark.parametrize(("bad", "why"), BAD_LINES.values(), ids=BAD_LINES)
def test_bad_lines_are_named(tmp_path: Path, bad: bytes, why: str) -> None:
    packed = gzip.compress if len(bad) % 2 else bytes  # some cases are compressed, some are not
    path = stored(tmp_path / "tra\nce.jsonl", packed(line() + b"\n" + bad))
    text = refusal(form.read, path)
    assert text.startswith(f"{str(path)!r}, line 3: ") and why in text


@pytest.mark.parametrize("content", [b"", b" \n\n", gzip.compress(b"")], ids=["empty", "blank", "compressed"])
def test_files_without_a_request(tmp_path: Path, content: bytes) -> None:
    assert "no request in it" in refusal(form.read, stored(tmp_path / "x", content))


def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    assert "null" in refusal(form.read, tmp_path / "a\0b")


def test_gzip_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = gzip.compress(b"".join(line(timestamp=str(at)) for at in range(40)), mtime=0)
    for size in range(len(whole)):
        refusal(lambda size=size: form.read(stored(tmp_path / "x", whole[:size])))
    assert "after line 40: the gzip file is cut short or damaged" in refusal(
        lambda: form.read(stored(tmp_path / "x", whole[:-1]))
    )


# Untrusted lines: long lines, compression bombs and deep nesting

PACKED = pytest.mark.parametrize("packed", [bytes, gzip.compress], ids=["plain", "gzip"])


@PACKED
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""], ids=["LF", "CRLF", "no end"])
def test_a_line_has_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: Callable[[bytes], bytes], end: bytes
) -> None:
    monkeypatch.setattr(files, "LONGEST_LINE", size := 300)
    longest = LINE.rstrip().ljust(size - len(end)) + end
    assert form.read(stored(tmp_path / "x", packed(LINE + longest))) == [REQUEST] * 2
    for more in (LINE.rstrip().ljust(size - len(end) + 1) + end, b" " * (size + 1), b"x" * 10 * size):
        path = stored(tmp_path / "x", packed(LINE + b"\n" + more + LINE))
        assert refusal(form.read, path).startswith(f"{str(path)!r}, line 3: longer than 300 bytes")
        assert form.read(path, limit=1) == [REQUEST]


BOMB = 1 << 26  # length of one line, in bytes


@PACKED
@pytest.mark.parametrize("text", [b"[", b" ", b'{"a":'], ids=repr)
def test_a_line_that_is_too_long_is_not_read_into_memory(
    tmp_path: Path, text: bytes, packed: Callable[[bytes], bytes]
) -> None:
    """The line has 64 MiB, but takes little room: it is compressed to a few kilobytes, or a hole in a sparse file."""
    path = tmp_path / "x"
    if packed is bytes:
        stored(path, LINE + text * 9)
        os.truncate(path, BOMB)
    else:
        with gzip.open(path, "wb", 9) as file:
            file.write(LINE)
            for _ in range(BOMB >> 20):
                file.write((text * (1 << 20))[: 1 << 20])
        assert path.stat().st_size < BOMB >> 9
    tracemalloc.start()
    try:
        assert "line 2: longer than" in refusal(form.read, path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * files.LONGEST_LINE


@PACKED
@pytest.mark.parametrize("depth", [20, 1000, 500_000])
@pytest.mark.parametrize(("opens", "closes"), [(b"[", b"]"), (b'{"a": ', b"}")], ids=["lists", "objects"])
def test_nesting_is_refused_by_its_line(
    tmp_path: Path, depth: int, opens: bytes, closes: bytes, packed: Callable[[bytes], bytes]
) -> None:
    nested = opens * depth + b"1" + closes * depth
    for bad in (nested, LINE.replace(b"[46, 47, 2353]", nested), LINE.replace(b"27", nested, 1)):
        path = stored(tmp_path / "x", packed(LINE + b"\n" + bad))
        assert refusal(form.read, path).startswith(f"{str(path)!r}, line 3: ")


# Made traces

SIZE = 1000
SHARED_BLOCKS = {"chat": making.CHAT_SYSTEM // BLOCK, "agent": making.AGENT_PREAMBLE // BLOCK}


@pytest.fixture(scope="module")
def made() -> dict[str, list[TraceRequest]]:
    """A trace of each kind, with a random seed; MEMSTATE_SEED sets the seed."""
    seed = int(os.environ.get("MEMSTATE_SEED", random.SystemRandom().randrange(2**31)))
    print(f"MEMSTATE_SEED={seed}")
    return {kind: make(kind, SIZE, seed) for kind in KINDS}


def filled(request: TraceRequest) -> tuple[int, ...]:
    """Returns the ids of the filled blocks of a request."""
    return request.hash_ids[: request.input_length // BLOCK]


def test_equal_ids_mean_equal_tokens_and_different_ids_different_ones(generator: torch.Generator) -> None:
    """Two blocks have the same id exactly if all tokens from the start of their prompts to their ends are equal."""
    chance = random.Random(int(torch.randint(2**31, (), generator=generator)))
    texts = [(name, chance.choice((1, 7, 200, 511, 512, 513, 700, 1024))) for name in range(8)]
    contexts: list[Context] = [()]
    for _ in range(60):
        stem = chance.choice(contexts)
        contexts.append((*stem[: chance.randint(0, len(stem))], *chance.choices(texts, k=chance.randint(1, 3))))
    numbering = Numbering()
    by_tokens: dict[str, set[int]] = defaultdict(set)
    by_id: dict[int, set[str]] = defaultdict(set)
    for context in contexts * 2:
        tokens = [f"{name}:{place} " for name, length in context for place in range(length)]
        ids = numbering.ids(context)
        assert len(ids) == -(-len(tokens) // BLOCK)
        running = hashlib.sha256()
        for place, name in enumerate(ids):
            running.update("".join(tokens[place * BLOCK : (place + 1) * BLOCK]).encode())
            by_tokens[running.hexdigest()].add(name)
            by_id[name].add(running.hexdigest())
    assert {len(names) for names in by_tokens.values()} == {len(prefixes) for prefixes in by_id.values()} == {1}
    assert sorted(by_id) == list(range(len(by_id))) and len(by_id) > 20


@pytest.mark.parametrize("kind", KINDS)
def test_times_and_lengths(made: dict[str, list[TraceRequest]], kind: str) -> None:
    requests = made[kind]
    assert len(requests) == SIZE and requests[0].timestamp == 0
    assert [r.timestamp for r in requests] == sorted(r.timestamp for r in requests)
    assert all(0 < r.input_length <= CONTEXT and 0 < r.output_length <= 2000 for r in requests)
    assert max(r.output_length for r in requests) > 3 * median(r.output_length for r in requests)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_trace_and_a_longer_one_goes_on(kind: str) -> None:
    longer = make(kind, 120, 7)
    assert all(make(kind, size, 7) == longer[:size] for size in (1, 2, 33, 120))
    assert make(kind, 20, 8) != longer[:20]
    assert make(kind, 20, -7) != longer[:20]


def by_session(requests: list[TraceRequest], shared: int) -> list[list[TraceRequest]]:
    """Groups requests by their first block behind the shared ones; drops requests without such a block.

    Args:
        shared: Number of filled blocks with which all requests begin.
    """
    sessions: dict[int, list[TraceRequest]] = defaultdict(list)
    for request in requests:
        if len(filled(request)) > shared:
            sessions[filled(request)[shared]].append(request)
    return list(sessions.values())


def test_chat_turns_hold_all_before_and_the_answer_and_come_after_it(made: dict[str, list[TraceRequest]]) -> None:
    shared = SHARED_BLOCKS["chat"]
    assert len({filled(request)[:shared] for request in made["chat"]}) == 1
    sessions = by_session(made["chat"], shared)
    turns = [pair for session in sessions for pair in pairwise(session)]
    assert len(turns) > SIZE / 4 and max(map(len, sessions)) > 4
    for before, after in turns:
        assert after.input_length > before.input_length + before.output_length
        assert after.hash_ids[: len(filled(before))] == filled(before)
        assert after.timestamp - before.timestamp > making.TOKEN_MS * before.output_length
    assert 10_000 < median(after.timestamp - before.timestamp for before, after in turns) < 100_000


def test_requests_that_are_mixed_have_kinds(made: dict[str, list[TraceRequest]]) -> None:
    kinds = Counter(request.kind for request in made["mixed"])
    assert set(kinds) == {"chat", "shared-prompt", "agent", "retrieval"} and min(kinds.values()) > SIZE / 50
    assert all(request.kind is None for kind in KINDS if kind != "mixed" for request in made[kind])
    asked = [request for request in made["mixed"] if request.kind == "retrieval"]
    assert len({request.hash_ids[-1] for request in asked}) == len(asked)


def branchings(requests: list[TraceRequest], shared: int) -> int:
    """Returns how many filled blocks are followed by different blocks in different requests.

    shared: number of first blocks that do not count, because all requests begin with them.
    """
    children = defaultdict(set)
    for request in requests:
        for before, after in pairwise(filled(request)[shared:]):
            children[before].add(after)
    return sum(len(after) > 1 for after in children.values())


def test_only_agents_branch(made: dict[str, list[TraceRequest]]) -> None:
    assert branchings(made["chat"], SHARED_BLOCKS["chat"]) == 0
    assert branchings(made["agent"], SHARED_BLOCKS["agent"]) > 10


def test_branches_start_together_and_the_task_goes_on_behind_them() -> None:
    """A branch begins with the context of the call that started it.

    The next turn of the task comes after all branches.
    """
    draw = making._Draw("agent", 11)
    turns: list[making._Turn] = []
    start: Context = (draw.text(4000),)
    making._burst(draw, turns, start, 0.0, 0.95, 0.5)
    together = [group for group in grouped(turns).values() if len(group) > 1]
    assert len(together) > 2
    for group in together:
        stems = {turn.context[:-1] for turn in group}
        assert len(stems) == 1 and len({turn.context[-1] for turn in group}) == len(group)
        (stem,) = stems
        assert 2 <= len(group) <= 4
        (parent,) = [turn for turn in turns if turn.context == stem[:-1]]
        assert stem[-1][1] == parent.answer
        assert group[0].at == parent.at + making.FIRST_TOKEN_MS + making.TOKEN_MS * parent.answer
        inside = [turn for turn in turns if any(turn.context[: len(one.context)] == one.context for one in group)]
        later = [turn for turn in turns if turn.context[: len(stem)] == stem and turn not in inside]
        ends = [turn.at + making.FIRST_TOKEN_MS + making.TOKEN_MS * turn.answer for turn in inside]
        assert all(turn.at >= max(ends) for turn in later)
        # the next turn has a report of each branch
        assert all(len(turn.context) >= len(stem) + len(group) for turn in later)


def grouped(turns: list[Any]) -> dict[float, list[Any]]:
    """Returns the turns that arrive at each instant, by instant."""
    groups = defaultdict(list)
    for turn in turns:
        groups[turn.at].append(turn)
    return groups


def test_nobody_passes_the_longest_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of contexts is made small, so sessions reach it. They must end there."""
    monkeypatch.setattr(making, "CONTEXT", 9000)
    monkeypatch.setattr(making, "CHAT_OPENING", replace(making.CHAT_OPENING, most=8000))
    monkeypatch.setattr(making, "AGENT_TASK", replace(making.AGENT_TASK, most=5000))
    for kind in ("chat", "agent"):
        lengths = [request.input_length for request in make(kind, 400, 1)]
        assert 8000 < max(lengths) <= 9000


MADE_BEFORE = {  # hash of 40 requests of seed 3, as made before tails and thoughts existed
    "chat": "3e9b962ef5d8961e", "shared-prompt": "bca2c0e5be81457d",
    "agent": "eef8ce34fca4d33f", "mixed": "5a59cb5384ebfc90",
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_without_tails_and_thoughts_the_bytes_are_as_before(kind: str, tmp_path: Path) -> None:
    form.write(tmp_path / "a.jsonl", make(kind, 40, 3, tail=0, thoughts=0))
    assert hashlib.sha256((tmp_path / "a.jsonl").read_bytes()).hexdigest()[:16] == MADE_BEFORE[kind]


def alike(one: Context, other: Context) -> int:
    """Returns the number of tokens in the common beginning of two contexts."""
    pairs = zip([*one, (-1, 0)], [*other, (-2, 0)], strict=False)
    return sum(text[1] for text in one[: next(n for n, (a, b) in enumerate(pairs) if a != b)])


@pytest.mark.parametrize(("tail", "thoughts", "parts"), [(5, 0, 5), (0, 300, 0), (5, 300, 5), (0, 0, None)])
def test_the_next_turn_of_a_chat_lacks_tail_thoughts_and_the_answer_behind_them(
    tail: int, thoughts: int, parts: int | None
) -> None:
    plain = list(islice(making._chat(making._Draw("chat", 5)), 60))
    parted = list(islice(making._chat(making._Draw("chat", 5, tail, thoughts)), 60))
    for session, before in zip(parted, plain, strict=True):
        assert [turn.answer - thoughts for turn in session] == [turn.answer for turn in before]
        assert [turn.context[: len(turn.context) - (tail > 0)] for turn in session] == [turn.context for turn in before]
        assert all(not tail or turn.context[-1][1] == tail for turn in session)
        for turn, after in pairwise(session):
            assert turn.parts == parts
            length = sum(size for _, size in turn.context)
            assert alike(turn.context, after.context) == length - tail
            assert after.at - turn.at > making.TOKEN_MS * turn.answer
    assert sum(map(len, parted)) > 150


@pytest.mark.parametrize("tail", [0, 5])
def test_a_tool_loop_keeps_thoughts_until_the_next_question(tail: int) -> None:
    """The next question leaves out all thoughts of the loop.

    So its prompt begins with the loop's first prompt, and from there on differs from the later prompts of the loop.
    """
    sessions = list(islice(making._agent(making._Draw("agent", 5, tail, 80)), 40))
    back = calls = 0
    for session in sessions:
        for turn, after in pairwise(session):
            context, following = (one.context[: len(one.context) - (tail > 0)] for one in (turn, after))
            thoughts = [name for name, _ in following if name < 0]
            if not thoughts:
                assert turn.parts is not None
                assert alike(context, following) == sum(size for _, size in turn.context) - turn.parts
                back += turn.parts > 80
            elif following[: len(context)] == context:
                assert turn.parts == (tail or None) and len(thoughts) == sum(name < 0 for name, _ in context) + 1
                calls += 1
    assert back > 10 and calls > 100


@pytest.mark.parametrize("kind", KINDS)
def test_with_a_tail_nobody_passes_the_longest_context(kind: str) -> None:
    requests = make(kind, 200, 2, tail=making.MOST, thoughts=making.MOST)
    assert all(making.MOST < one.input_length <= CONTEXT and one.output_length > making.MOST for one in requests)


def test_prompts_are_long_few_and_chosen_by_zipf(made: dict[str, list[TraceRequest]]) -> None:
    counts = Counter(request.hash_ids[0] for request in made["shared-prompt"])
    ranked = [uses for _, uses in counts.most_common()]
    assert 10 < len(ranked) <= making.SHARED_PROMPTS
    weights = [rank**-making.SHARED_ZIPF for rank in range(1, making.SHARED_PROMPTS + 1)]
    assert abs(ranked[0] / SIZE - weights[0] / sum(weights)) < 0.1 and ranked[-1] < ranked[0] / 5


def test_a_kind_that_cannot_be_made_is_refused() -> None:
    assert "kind='talk': expected one of chat, shared-prompt, agent, mixed" in refusal(make, "talk", 1, 0)
