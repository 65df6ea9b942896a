"""Puts one step's batch together: a fixed number of places, padding included. Knows no manager."""

from collections.abc import Sequence
from dataclasses import dataclass

from memstate.cli.demo.answers import noise
from memstate.cli.demo.config import DemoConfig
from memstate.cli.demo.stepper import Inputs
from memstate.cli.demo.work import BatchEntry, Work
from memstate.requests.handles import Row


@dataclass(frozen=True)
class Batch:
    """A step to be planned; rows and token counts by place, None and 0 where nobody is."""

    rows: list[Row | None]
    counts: list[int]
    inputs: Inputs
    entries: list[BatchEntry]

    @property
    def decode_only(self) -> bool:
        """Whether every row folds a single token."""
        return self.inputs.width == 1


def assemble(config: DemoConfig, going: Sequence[tuple[Work, int]]) -> Batch:
    """The batch in which each request folds so many tokens: known ones, or the one that is still on its way."""
    width = config.chunk if any(n > 1 for _, n in going) else 1
    inputs = Inputs(config.batch, width)
    batch = Batch([None] * config.batch, [0] * config.batch, inputs, [])
    for work, n in going:
        place, after = work.place, work.folded + n
        known = work.tokens[work.folded : after]
        batch.rows[place], batch.counts[place] = work.handle, n
        inputs.tokens[place, : len(known)] = known
        inputs.start[place], inputs.fed[place] = work.folded, not known
        samples = after >= len(work.tokens)
        if samples:
            inputs.noise[place] = noise(config.seed, work.conversation.number, after)
        batch.entries.append(BatchEntry(work, work.handle, place, after, samples))
    return batch
