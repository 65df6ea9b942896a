"""Lists typical faults of engines: which lines of an engine are replaced, and which error its check must then give."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import memstate as ms
from memstate.testing import EngineDiffers
from tests.support.sources import ROOT

EXAMPLE, AHEAD = ((ROOT / path).read_text() for path in ("examples/engine.py", "tests/support/engine_ahead.py"))
Change = tuple[str, str]


def engine(source: str, *changes: Change) -> Any:
    """Returns the class `Engine` of a source text with some lines replaced. It runs on the reference backend."""
    if source is EXAMPLE:
        reference = ('Backend("auto")', 'Backend("reference")'), ("debug=debug", 'debug=debug, backend="reference"')
        changes = (*reference, *changes)
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    made = ModuleType("engine")
    exec(source, vars(made))
    return made.Engine


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
