"""`memstate.testing.compare` passes engines that are right, and finds what their authors get wrong."""

import contextlib
import io
import re
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

import memstate as ms
from memstate.testing import EngineDiffers, compare
from tests.support.sources import ROOT, Change, changed

EXAMPLE, AHEAD = ((ROOT / path).read_text() for path in ("examples/engine.py", "tests/support/engine_ahead.py"))


def engine(source: str, *changes: Change) -> Any:
    """Returns the class `Engine` of a source text with some lines replaced. It runs on the reference backend."""
    reference = ('Backend("auto")', 'Backend("reference")'), ("debug=debug", 'debug=debug, backend="reference"')
    return changed(source, *(reference if source is EXAMPLE else ()), *changes).Engine


READ, WRITE = "states[:, step.read[entry]]", "states[:, step.write[entry]] = state"
OFFSET = "int(step.marks.offset[mark])"
MARK = f"states[:, step.marks.slot[mark]] = after[int(step.marks.entry[mark]), {OFFSET}]"
END = "mem.end([chat.row], keep"
PLAN = "step = mem.plan(rows, [len(tokens) for tokens in fed])\n"
BUFFER = "vars(self)[str(step.rows[entry])]"
SKIP = """fed = [fed[at][row not in vars(self) and lengths[at] > 0 :] or [0] for at, row in enumerate(rows)]
                vars(self).update(dict.fromkeys(rows))
                """
OLD = "        old = vars(self).setdefault(len(fed), step.write.clone())\n"
TEXTS = "tokens=[chat.tokens for chat in running]"
NINES = """tokens=[
                    [*chat.tokens[: chat.goal - ANSWER], *[9] * (len(chat.tokens) - chat.goal + ANSWER)]
                    for chat in running
                ]"""


class Fault(NamedTuple):
    """A fault of an engine.

    changes: pairs of a line and the line that replaces it.
    said: pattern of the message of the expected error.
    kind: class of the expected error.
    source: source text of the engine.
    """

    changes: Sequence[Change]
    said: str
    kind: type[Exception] = EngineDiffers
    source: str = EXAMPLE


FAULTS = {
    "stores where it reads": Fault([(WRITE, WRITE.replace("write", "read"))], "changed plane 'ssm'", ms.ForwardFault),
    "reads where it stores": Fault([(READ, READ.replace("read", "write"))], "did not store plane", ms.ForwardFault),
    "stores with vectors of an older step": Fault(
        [("[0], {}\n", "[0], {}\n" + OLD), (WRITE, WRITE.replace("step.write", "old"))],
        "changed plane 'ssm'",
        ms.ForwardFault,
    ),
    "forgets marks": Fault([(MARK, "pass")], "at a mark", ms.ForwardFault),
    "stores marks a token late": Fault(
        [(MARK, MARK.replace(OFFSET, f"min({OFFSET} + 1, len(fed[int(step.marks.entry[mark])]))"))],
        "prompt 0: .* wrong state of 8 tokens in its slot of `mark`.* state of prompt 0 after 9 tokens",
    ),
    "stores another snapshot": Fault(
        [("ms.Redirect", "ms.PingPong"), (WRITE, WRITE + "; states[:, step.snapshot[entry]] = state.flip(0)")],
        "in its slot of `snapshot`",
    ),
    "forgets settle": Fault([("mem.settle(step)", "pass")], "settle step 0 first", ms.InvalidArgument),
    "reads the state of another row": Fault([(READ, "states[:, step.read[entry - 1]]")], "in its slot of `write`"),
    "reads KV of another row": Fault(
        [("seen = kv[pages]", "seen = kv[self.mem.device.page_table[step.rows[0]]]")],
        "`write`: plane 'ssm', layer 1, .* the layers below are right: page table",
    ),
    "reads KV that is not there yet": Fault([("[: at + 1]", "[: at + 2]")], "plane 'ssm', layer 1"),
    "counts positions from the chunk": Fault(
        [("int(step.before[entry]) + offset - 1", "offset - 1")], "plane 'ssm', layer 1"
    ),
    "skips a token behind a hit": Fault(
        [(PLAN, SKIP + PLAN)], "`write`: plane 'ssm', layer 0, .* the state of 8 tokens was right"
    ),
    "does not empty what it keeps for a row": Fault(
        [
            ("+ EMBED[token]  #", "+ EMBED[token] + vars(self).get(str(step.rows[entry]), 0)  #"),
            ("after[entry, offset] = state", f"{BUFFER} = EMBED[token]; after[entry, offset] = state"),
        ],
        "what the forward keeps for each row",
    ),
    "stores in a slot of another": Fault(
        [(WRITE, WRITE + "; states[:, -1 - int(step.write[entry])] = state")], "it is the state of"
    ),
    "files states under other tokens": Fault(
        [(TEXTS, NINES)], r"prompt 0: `tokens=` of .* `publish` has \[9\] behind its prompt, and its answer is"
    ),
    "files the end of an answer under other tokens": Fault(
        [("tokens=[chat.tokens])", "tokens=[[*chat.tokens[:-1], 0] if not chat.messages else chat.tokens])")],
        r"prompt 1: `tokens=` of `end` .* has \[.*, 0\] behind its prompt, and its answer is",
    ),
    "resumes from the snapshot of another row": Fault(
        [("zip(ends, kept,", "zip([*ends[1:], *ends[:1]], kept,")],
        "in its slot of `read`.* `resume=`: it is the state of prompt",
        source=AHEAD,
    ),
    "resumes from a length that is too large": Fault(
        [("[: state.length])", "[: state.length + 1])")], "the logits of its generated token 0 are wrong", source=AHEAD
    ),
    "takes the logits of another row": Fault(
        [("EMBED @ after[entry, len(tokens)][1]", "EMBED @ after[0, len(fed[0])][1]")],
        r"its generated token 0 are wrong, but all states before them are right \(the last: step \d+, behind 3 tokens",
    ),
    "samples another token in a batch": Fault(
        [("int(scores.argmax())", "int(scores.argmax()) ^ (len(rows) > 1)")], "from the same logits"
    ),
    "loses a request that is refused": Fault(
        [("return  # the", "waiting.popleft(); return  # the")], "ends after 0 tokens, alone after"
    ),
    "goes on after its end": Fault(
        [("len(chat.tokens) == chat.goal:", "len(chat.tokens) == chat.goal + (chat.number == 1 < len(rows)):")],
        "alone, the answer ends before token 6",
    ),
    "loses a row": Fault(
        [(END, f"chat.messages and {END}")],
        r"rows of the requests \[0\] are left",
        ms.errors.LeakFound,
    ),
    "loses the rows of aborted requests": Fault(
        [(END, f"abort or {END}")], r"rows of the requests \[6, 7\] are left", ms.errors.LeakFound
    ),
    "loses a slot": Fault([("mem.poll()", "mem.poll(), mem.pool.claim(1)")], "leaked", ms.errors.LeakFound),
}

BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n^```text\n(.*?)^```)?", re.DOTALL | re.MULTILINE)
SYSTEM = [1, 2, 3, 4, 5, 6, 7, 8]
CHATS = [[[*SYSTEM, 10], [20, 21]], [[5, 6, 7]], [[5, 6, 7, 9, 9, 9, 9, 9, 9, 1]], [[*SYSTEM, *range(30, 39)]]]
PROMPTS = [[*SYSTEM, 9], [*SYSTEM[::-1], 9], [*SYSTEM, 10, 11], [3, 3, 3]]
RIGHT: dict[str, Sequence[Change]] = {
    "as it is": (),
    "ping-pong": (
        ("ms.Redirect", "ms.PingPong"),
        (WRITE, "states[:, step.write[entry]] = states[:, step.snapshot[entry]] = state"),
    ),
    "in place": (("ms.Forward(grid=1)", "ms.Forward(in_place=True)"), (READ, "states[:, step.write[entry]]")),
    "no host memory": (('tiers=ms.Tiers("toy", host_slots=host_slots, kv=self.kv),', ""),),
}


@pytest.mark.parametrize("changes", RIGHT.values(), ids=RIGHT)
def test_an_engine_that_is_right_passes(changes: Sequence[Change]) -> None:
    runs = compare(engine(EXAMPLE, *changes), CHATS)
    assert [run["requests"] for run in runs.values()] == [4, 8, 8]
    assert all(run["states"] > run["tokens"] > run["unknown"] == 0 for run in runs.values())
    assert runs["together"]["hits"] and runs["scarce"]["hits"] and not runs["alone"]["hits"]
    assert runs["scarce"]["aborted"] and runs["scarce"]["faults"]


def test_an_engine_that_plans_ahead_passes() -> None:
    assert compare(engine(AHEAD), PROMPTS)["together"]["tokens"] == 16


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_found(fault: Any) -> None:
    with pytest.raises(fault.kind, match=fault.said) as raised:
        compare(engine(fault.source, *fault.changes), CHATS if fault.source is EXAMPLE else PROMPTS)
    assert any(note.startswith("compare: run ") for note in raised.value.__notes__)


def test_a_difference_says_where_it_is() -> None:
    with pytest.raises(EngineDiffers) as raised:
        compare(engine(EXAMPLE, *FAULTS["stores marks a token late"].changes), CHATS)
    error = raised.value
    where = error.prompt, error.vector, error.length, error.plane, error.layer, error.step
    assert where == (0, "mark", 8, "ssm", 0, 0)


def test_rounding_needs_a_tolerance() -> None:
    # the change makes rounding depend on the size of the batch
    rounds = ("more[:, None], 0.5 * state", "more[:, None], (0.5 + 1e-9 * len(fed)) * state")
    with pytest.raises(EngineDiffers, match="plane 'ssm', layer 0"):
        compare(engine(AHEAD, rounds), PROMPTS)
    assert compare(engine(AHEAD, rounds), PROMPTS, rtol=1e-6)["scarce"]["parted"] == 0


@pytest.mark.parametrize("mask", ["-torch.inf", "-1e9", "torch.finfo().min", "torch.nan"])
def test_masked_logits_do_not_hide_a_difference(mask: str) -> None:
    masked = (
        "- 7 * state[1, :, :1]) % WORDS)",
        f"- 7 * state[1, :, :1]) % WORDS).index_fill(1, torch.tensor([0]), {mask})",
    )
    for rtol in (0, 1e-6):
        assert compare(engine(AHEAD, masked), PROMPTS, rtol=rtol)["scarce"]["tokens"]
    with pytest.raises(EngineDiffers, match="the logits of its generated token 0 are wrong"):
        compare(
            engine(AHEAD, (masked[0], masked[1].replace(".index_fill", ".add(len(fed)).index_fill"))),
            PROMPTS,
            rtol=1e-6,
        )


def test_with_a_tolerance_answers_may_part() -> None:
    other = ("int(scores.argmax())", "int(scores.argmax()) ^ (len(fed) > 1)")
    with pytest.raises(EngineDiffers, match=r"token 0 is .* from the same logits"):
        compare(engine(AHEAD, other), PROMPTS)
    assert compare(engine(AHEAD, other), PROMPTS, rtol=1e-6)["together"]["parted"] == 8


def test_a_state_that_was_wrong_before_answers_part_is_told() -> None:
    changes = (
        ("int(scores.argmax())", "int(scores.argmax()) ^ (len(fed) > 1)"),
        ("step.write.long()] = state", "step.write.long()] = state + (len(fed) > 1) * torch.tensor([[[1]], [[0]]])"),
    )
    with pytest.raises(EngineDiffers, match="plane 'ssm', layer 0"):
        compare(engine(AHEAD, *changes), PROMPTS, rtol=1e-6)


def test_a_wrong_state_is_told_before_what_the_engine_raises_behind_it() -> None:
    changes = (
        (MARK, "states[:, step.marks.slot[mark]] = 0"),
        ("abort = yield", "abort = 1 / (len(rows) < 4); yield"),
    )
    with pytest.raises(EngineDiffers, match="`mark`") as raised:
        compare(engine(EXAMPLE, *changes), CHATS)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_states_of_requests_with_other_ids_cannot_be_compared() -> None:
    with pytest.raises(ms.InvalidArgument, match=r"^4 prompts gave no state: `serve` yields, Request\(id\) is"):
        compare(engine(EXAMPLE, ("ms.Request(chat.number,", "ms.Request(str(chat.number),")), CHATS)
    with pytest.raises(ms.InvalidArgument, match=r"^0 prompts gave no state"):
        compare(engine(EXAMPLE), [])
    with pytest.raises(ms.InvalidArgument, match=r"^4 prompts gave no state"):
        compare(engine(EXAMPLE, ("ms.Request(chat.number,", "ms.Request(chat.number + 1,")), CHATS)
    with pytest.raises(ms.InvalidArgument, match="request 1: expected the number of one of 1 prompts"):
        compare(engine(EXAMPLE, ("abort = yield chat.number,", "abort = yield chat.number + 1,")), CHATS)


@pytest.mark.parametrize("wrong", [{"rtol": -1}, {"rtol": float("nan")}, {"rtol": float("inf")}, {"seed": "x"}])
def test_arguments_are_checked_first(wrong: dict[str, Any]) -> None:
    with pytest.raises(ms.InvalidArgument, match=f"^{next(iter(wrong))}"):
        compare(lambda **_: pytest.fail("made an engine"), CHATS, **wrong)


def test_an_engine_must_hand_debug_on() -> None:
    with pytest.raises(ms.InvalidArgument, match=r"StateManager\(debug=\)"):
        compare(engine(EXAMPLE, ("debug=debug", "debug=False")), CHATS)


def lines(text: str) -> list[str]:
    """Returns the lines of a text that are not empty."""
    return list(filter(None, text.splitlines()))


def test_the_page_builds_the_engine_and_checks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = BLOCK.findall((ROOT / "docs" / "integrate.md").read_text())
    programs = [(code, printed) for code, printed in blocks if printed]
    assert lines("".join(code for code, printed in blocks if not printed)) == lines(EXAMPLE)
    monkeypatch.setitem(sys.modules, "engine", SimpleNamespace(Engine=engine(EXAMPLE)))  # type: ignore[arg-type]
    names, output = dict[str, Any](), io.StringIO()
    with contextlib.redirect_stdout(output):
        for code, _ in programs:
            exec(code, names)
    assert len(programs) == 2 and lines(output.getvalue()) == lines("".join(printed for _, printed in programs))
