"""One request, a turn of a conversation, from its arrival to its end; and the batch of a step, padding included."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from memstate.requests.handles import Row
from memstate.requests.steps import Step
from memstate.tiers import Fetch
from memstate_tools.demo.answers import AnswerRule, noise
from memstate_tools.demo.config import DemoConfig
from memstate_tools.demo.corpus import Conversation
from memstate_tools.demo.meter import Asked
from memstate_tools.demo.stepper import Inputs, Results
from memstate_tools.demo.trees import Tree


@dataclass(eq=False)
class Work:
    """A request and how far it has come.

    Attributes:
        conversation: Its conversation.
        turn: Number of the turn.
        tokens: All that is known of the conversation so far, `prompt` of it given.
        rule: How the request ends.
        row: Its row while it runs.
        place: Its place in the batch.
        folded: Tokens folded into the state by planned steps; len(tokens) while a sampled token is on its way.
        resumed: Length that the row started from.
        given: Tokens known when it was admitted: the prompt and, after a retraction, a part of the answer.
        published: Tokens in whole pages that were offered to the cache.
        retractions: How often it was sent back.
        fetch: What is on its way from storage while it waits.
        waited_for: What there was too little of since it last arrived.
    """

    conversation: Conversation
    turn: int
    tokens: list[int]
    rule: AnswerRule
    prompt: int = field(init=False)
    row: Row | None = None
    place: int = -1
    folded: int = 0
    resumed: int = 0
    given: int = 0
    published: int = 0
    retractions: int = 0
    fetch: Fetch | None = None
    waited_for: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)

    @property
    def name(self) -> str:
        """The name that audits show."""
        return f"{self.conversation.number}.{self.turn}"

    @property
    def answer(self) -> list[int]:
        """Tokens generated so far."""
        return self.tokens[self.prompt :]

    @property
    def handle(self) -> Row:
        """The row of a running request."""
        assert self.row is not None  # only running requests are asked
        return self.row

    @property
    def sure_to_end(self) -> bool:
        """Whether the token on its way is the last one allowed, so that no step is planned for what follows."""
        return self.folded >= len(self.tokens) and len(self.tokens) + 1 - self.prompt >= self.rule.limit

    @property
    def begun(self) -> bool:
        """Whether a step has run since the row was taken; before that the device may not know the row."""
        return self.folded > self.resumed

    def start(self, row: Row, place: int, resumed: int, page_size: int) -> None:
        """Takes a row and a place in the batch, from a state of `resumed` tokens on."""
        self.row, self.place, self.fetch = row, place, None
        self.folded, self.resumed, self.given = resumed, resumed, len(self.tokens)
        self.published = resumed // page_size * page_size

    def stop(self) -> None:
        """Gives row and place up; the known tokens stay."""
        self.row, self.place = None, -1
        self.waited_for.clear()


@dataclass(eq=False)
class BatchEntry:
    """A request's part of a step.

    Attributes:
        work: The request.
        row: The row that it had then.
        place: Its place in the batch.
        after: Its length after the tokens that are no guesses, as far as it was known at the plan.
        samples: Whether the step samples its next token.
        drafts: Guesses behind the tokens that are known.
        candidates: Tokens that they are, by side: those behind the known ones, for every length that the row may have.
        shift: By how many tokens it was longer, once that is known.
    """

    work: Work
    row: Row
    place: int
    after: int
    samples: bool
    drafts: int
    candidates: list[list[int]]
    shift: int = 0

    def path(self, tree: Tree, sampled: Sequence[int]) -> list[int]:
        """Returns node 0 and the guesses that were right, by what was sampled behind each node."""
        nodes = range(1, self.drafts + 1)
        guesses = [self.candidates[tree.sides[node]][self.shift + tree.depths[node] - 1] for node in nodes]
        return tree.walk(guesses, sampled)

    @property
    def current(self) -> bool:
        """Whether the request still runs in the row it had then."""
        return self.work.row is self.row


@dataclass(frozen=True)
class Flight:
    """A step whose forward is submitted and whose results are not read."""

    step: Step
    results: Results
    entries: list[BatchEntry]
    decode_only: bool
    asked: Asked


@dataclass(frozen=True)
class Batch:
    """A step to be planned; rows and token counts by place, None and 0 for padding."""

    rows: list[Row | None]
    counts: list[int]
    drafts: list[int]
    inputs: Inputs
    entries: list[BatchEntry]

    @property
    def decode_only(self) -> bool:
        """Whether every row folds a single token that is known."""
        return all(n - drafts <= 1 for n, drafts in zip(self.counts, self.drafts, strict=True))


@dataclass(frozen=True)
class Going:
    """What a request does in the next step.

    Attributes:
        work: The request.
        tokens: Known ones that it folds, or the one on its way.
        drafts: Guesses that it verifies.
        candidates: By side, tokens from the first guess on, for every length that it may have.
        flying: Guesses of the step before, some of which may be right.
    """

    work: Work
    tokens: int
    drafts: int
    candidates: list[list[int]]
    flying: int


def assemble(config: DemoConfig, going: Sequence[Going]) -> Batch:
    """Returns the batch in which each request folds known tokens, or the one on its way, and verifies guesses."""
    longest, tree = max(one.tokens + one.drafts for one in going), config.tree
    width = min(width for width in (1, len(tree), config.chunk) if width >= longest)
    inputs = Inputs(config.batch, width, tree, config.slack)
    batch = Batch([None] * config.batch, [0] * config.batch, [0] * config.batch, inputs, [])
    for one in going:
        work, n, drafts, place = one.work, one.tokens, one.drafts, one.work.place
        after, known = work.folded + n, work.tokens[work.folded : work.folded + n]
        batch.rows[place], batch.counts[place], batch.drafts[place] = work.handle, n + drafts, drafts
        inputs.tokens[place, 0, : len(known)] = known
        for side, candidates in enumerate(one.candidates):
            inputs.tokens[place, side, n : n + len(candidates)] = candidates
        inputs.start[place], inputs.fed[place], inputs.drafts[place] = work.folded, not known, drafts
        samples = after >= len(work.tokens)
        for more in range(tree.depths[drafts] + tree.depths[one.flying] + 1 if samples else 0):
            inputs.noise[place, more] = noise(config.seed, work.conversation.number, after + more)
        batch.entries.append(BatchEntry(work, work.handle, place, after, samples, drafts, one.candidates))
    return batch
