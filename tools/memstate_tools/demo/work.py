"""One request, which is a turn of a conversation, from arrival to end; and the padded batch of a step."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from memstate.requests.handles import Parked, Row
from memstate.requests.steps import Step
from memstate.tiers import Fetch
from memstate_tools.demo.answers import AnswerRule, noise
from memstate_tools.demo.config import DemoConfig
from memstate_tools.demo.corpus import ChatScript
from memstate_tools.demo.meter import DeviceCounts
from memstate_tools.demo.stepper import Inputs, Results
from memstate_tools.demo.trees import DraftTree


@dataclass(eq=False)
class Work:
    """A request and its progress.

    Attributes:
        conversation: The conversation that it belongs to.
        turn: Number of the turn.
        tokens: All known tokens of the conversation; the first `prompt` of them are given.
        rule: The rule by which the request ends.
        row: Its row while it runs.
        place: Its place in the batch.
        folded: Tokens folded into the state by planned steps; len(tokens) while a sampled token is not read yet.
        resumed: Length that the row started from.
        given: Tokens known at the admission: the prompt and, after a retraction, a part of the answer.
        published: Tokens in whole pages that were offered to the cache.
        retractions: Number of times that the request was sent back.
        leaves: Whether it is to be parked once its guesses are read.
        fetch: Its prefetch from storage while it waits.
        parked: Its handle while it is parked.
        parked_in: The row in which it was parked, while results of that row are still to be read.
        waited_for: Names of the resources for which it has waited since it last arrived.
    """

    conversation: ChatScript
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
    leaves: bool = False
    fetch: Fetch | None = None
    parked: Parked | None = None
    parked_in: Row | None = None
    waited_for: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)

    @property
    def name(self) -> str:
        """Name of the request in audits."""
        return f"{self.conversation.number}.{self.turn}"

    @property
    def answer(self) -> list[int]:
        """Tokens generated so far."""
        return self.tokens[self.prompt :]

    @property
    def handle(self) -> Row:
        """Row of a running request."""
        assert self.row is not None  # callers ask running requests only
        return self.row

    @property
    def sure_to_end(self) -> bool:
        """Whether the sampled token that is not read yet is the last one allowed, so no further step is planned."""
        return self.folded >= len(self.tokens) and len(self.tokens) + 1 - self.prompt >= self.rule.limit

    @property
    def begun(self) -> bool:
        """Whether a step has run since the row was taken. Before that, the device may not know the row."""
        return self.folded > self.resumed

    def start(self, row: Row, place: int, resumed: int, page_size: int) -> None:
        """Takes a row and a place in the batch. The row starts from a state of `resumed` tokens."""
        self.row, self.place, self.fetch, self.parked = row, place, None, None
        self.folded, self.resumed, self.given = resumed, resumed, len(self.tokens)
        self.published = resumed // page_size * page_size

    def stop(self) -> None:
        """Gives up row and place. The known tokens stay."""
        self.row, self.place, self.leaves = None, -1, False
        self.waited_for.clear()


@dataclass(eq=False)
class BatchEntry:
    """A request's part of a step.

    Attributes:
        work: The request that takes part in the step.
        row: Its row at the plan.
        place: Its place in the batch.
        after: Its length with the known tokens of the step and without guesses, as far as the host knew it at the plan.
        samples: Whether the step samples its next token.
        drafts: Number of guesses after the known tokens.
        candidates: Guessed tokens of each side (see `DraftTree`). They start after the known tokens and cover every
            length that the row may have.
        shift: Tokens by which the row was longer than `after` says; known only later than the plan.
    """

    work: Work
    row: Row
    place: int
    after: int
    samples: bool
    drafts: int
    candidates: list[list[int]]
    shift: int = 0

    def path(self, tree: DraftTree, sampled: Sequence[int]) -> list[int]:
        """Returns node 0 and the accepted guesses, given the token that was sampled after each node."""
        nodes = range(1, self.drafts + 1)
        guesses = [self.candidates[tree.sides[node]][self.shift + tree.depths[node] - 1] for node in nodes]
        return tree.walk(guesses, sampled)

    @property
    def current(self) -> bool:
        """Whether the request still runs in the row that it had at the plan, or was parked there."""
        return self.row in (self.work.row, self.work.parked_in)


@dataclass(frozen=True)
class Flight:
    """A step whose forward is submitted and whose results are not read."""

    step: Step
    results: Results
    entries: list[BatchEntry]
    decode_only: bool
    asked: DeviceCounts


@dataclass(frozen=True)
class NextStep:
    """A step to plan. Rows and token counts are ordered by place in the batch, with None and 0 for padding."""

    rows: list[Row | None]
    counts: list[int]
    drafts: list[int]
    inputs: Inputs
    entries: list[BatchEntry]

    @property
    def decode_only(self) -> bool:
        """Whether every row folds a single known token."""
        return all(n - drafts <= 1 for n, drafts in zip(self.counts, self.drafts, strict=True))


@dataclass(frozen=True)
class Going:
    """The next step of a request.

    Attributes:
        work: The request that takes part in the step.
        tokens: Number of known tokens that it folds; 1 if the token is sampled but not read yet.
        drafts: Number of guesses that it verifies.
        candidates: Guessed tokens of each side (see `DraftTree`), from the first guess on, for every length that the
            row may have.
        flying: Number of guesses in the previous step, if it is not yet known how many of them are accepted.
    """

    work: Work
    tokens: int
    drafts: int
    candidates: list[list[int]]
    flying: int


def assemble(config: DemoConfig, going: Sequence[Going]) -> NextStep:
    """Returns the batch in which each request folds known tokens, or the sampled one, and verifies guesses."""
    longest, tree = max(one.tokens + one.drafts for one in going), config.tree
    width = min(width for width in (1, len(tree), config.chunk) if width >= longest)
    inputs = Inputs(config.batch, width, tree, config.slack)
    batch = NextStep([None] * config.batch, [0] * config.batch, [0] * config.batch, inputs, [])
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
