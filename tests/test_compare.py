"""`memstate.testing.compare` passes engines that are right, and finds what their authors get wrong."""

import contextlib
import io
import re
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

import memstate as ms
from memstate.testing import EngineDiffers, compare
from tests.support.engine_faults import AHEAD, EXAMPLE, FAULTS, MARK, READ, WRITE, Change, engine
from tests.support.sources import ROOT

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
    found = compare(engine(EXAMPLE, *changes), CHATS)
    assert [run["requests"] for run in found.values()] == [4, 8, 8]
    assert all(run["states"] > run["tokens"] > run["unknown"] == 0 for run in found.values())
    assert found["together"]["hits"] and found["scarce"]["hits"] and not found["alone"]["hits"]
    assert found["scarce"]["aborted"] and found["scarce"]["faults"]


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
    rounds = ("more[:, None], 0.5 * state", "more[:, None], (0.5 + 1e-9 * len(fed)) * state")  # otherwise in each batch
    with pytest.raises(EngineDiffers, match="plane 'ssm', layer 0"):
        compare(engine(AHEAD, rounds), PROMPTS)
    assert compare(engine(AHEAD, rounds), PROMPTS, rtol=1e-6)["scarce"]["parted"] == 0


def test_masked_logits_do_not_hide_a_difference() -> None:
    masked = (
        "- 7 * state[1, :, :1]) % WORDS)",
        "- 7 * state[1, :, :1]) % WORDS).index_fill(1, torch.tensor([0]), -torch.inf)",
    )
    assert compare(engine(AHEAD, masked), PROMPTS, rtol=1e-6)["scarce"]["tokens"]
    with pytest.raises(EngineDiffers, match="the logits of its generated token 0 are wrong"):
        compare(engine(AHEAD, (masked[0], masked[1] + " + len(fed)")), PROMPTS, rtol=1e-6)


def test_with_a_tolerance_answers_may_part() -> None:
    other = ("int(scores.argmax())", "int(scores.argmax()) ^ (len(fed) > 1)")
    with pytest.raises(EngineDiffers, match=r"token 0 is .* from the same logits"):
        compare(engine(AHEAD, other), PROMPTS)
    assert compare(engine(AHEAD, other), PROMPTS, rtol=1e-6)["together"]["parted"] == 8


def test_a_wrong_state_is_told_before_what_the_engine_raises_behind_it() -> None:
    changes = (
        (MARK, "states[:, step.marks.slot[mark]] = 0"),
        ("abort = yield", "abort = 1 / (len(rows) < 4); yield"),
    )
    with pytest.raises(EngineDiffers, match="`mark`") as raised:
        compare(engine(EXAMPLE, *changes), CHATS)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_states_of_requests_with_other_ids_cannot_be_compared() -> None:
    with pytest.raises(ms.InvalidArgument, match=r"^4 prompts gave no state to compare: Request\(id\) is"):
        compare(engine(EXAMPLE, ("ms.Request(chat.number,", "ms.Request(str(chat.number),")), CHATS)
    with pytest.raises(ms.InvalidArgument, match=r"^0 prompts gave no state"):
        compare(engine(EXAMPLE), [])


def lines(text: str) -> list[str]:
    """The lines of a text that are not empty."""
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
