"""Compares a cached run with the uncached run: tokens one by one, logits and states byte by byte."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from memstate_tools.demo.corpus import ChatScript
from memstate_tools.demo.transcript import Sighting, Transcript
from memstate_tools.demo.uncached import Uncached


@dataclass
class Compared:
    """Counts of what was compared and what differed.

    Attributes:
        tokens: Tokens compared.
        logits: Positions whose logits were compared.
        states: States compared.
        wrong_tokens: Tokens that differ.
        wrong_logits: Positions whose logits differ.
        wrong_states: States that differ.
        differences: The first ten differences, in words.
    """

    tokens: int = 0
    logits: int = 0
    states: int = 0
    wrong_tokens: int = 0
    wrong_logits: int = 0
    wrong_states: int = 0
    differences: list[str] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        """Whether at least one token was compared and nothing differs."""
        return not (self.wrong_tokens or self.wrong_logits or self.wrong_states) and bool(self.tokens)

    def note(self, what: str) -> None:
        """Keeps the text of a difference; only the first ten are kept."""
        if len(self.differences) < 10:
            self.differences.append(what)


def compare(
    conversations: Sequence[ChatScript],
    cached: Mapping[int, Transcript],
    sightings: Sequence[Sighting],
    uncached: Uncached,
    progress: Callable[[int], None],
) -> Compared:
    """Runs every conversation alone without a cache, and compares it with the cached run.

    Args:
        conversations: All conversations of the run.
        cached: Conversation -> its transcript in the cached run.
        sightings: States that the cached run held. The uncached run keeps its states at the same lengths.
        uncached: Runs conversations alone.
        progress: Called with the number of requests done.

    Returns:
        The counts.

    Syncs: yes.
    """
    out, done = Compared(), 0
    for conversation in conversations:
        number, given = f"conversation {conversation.number}", cached[conversation.number]
        seen = [sighting for sighting in sightings if sighting.conversation == conversation.number]
        alone = uncached.answer(conversation, [sighting.length for sighting in seen])
        for turn, (mine, other) in enumerate(zip(given.answers, alone.answers, strict=True)):
            wrong = sum(a != b for a, b in zip_longest(mine, other))
            out.tokens += max(len(mine), len(other))
            out.wrong_tokens += wrong
            if wrong:
                out.note(f"{number}, turn {turn}: {wrong} of {max(len(mine), len(other))} tokens differ")
        _compare_logits(out, number, given, alone)
        for sighting in seen:
            out.states += 1
            if alone.states.get(sighting.length) != sighting.data:
                out.wrong_states += 1
                out.note(f"{number}: {sighting.what} at {sighting.length} tokens differs")
        done += len(conversation.turns)
        progress(done)
    return out


def _compare_logits(out: Compared, number: str, cached: Transcript, alone: Transcript) -> None:
    positions = sorted(cached.logits.keys() | alone.logits.keys())
    given, expected = ({at: row.tobytes() for at, row in run.logits.items()} for run in (cached, alone))
    wrong = [at for at in positions if given.get(at) != expected.get(at)]
    out.logits += len(positions)
    out.wrong_logits += len(wrong)
    if wrong:
        where = f"{len(wrong)} of {len(positions)} positions, first after {wrong[0]} tokens"
        out.note(f"{number}: logits differ at {where}")
