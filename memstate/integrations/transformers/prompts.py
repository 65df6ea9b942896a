"""What a caller of `serve` gives and gets."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from transformers import GenerationConfig, LogitsProcessor

from memstate.requests.handles import Session

Reason = Literal["end", "length", "stop", "aborted", "refused"]


@dataclass(frozen=True)
class Prompt:
    """One request of `serve`.

    Args:
        tokens: all tokens so far; of a conversation, the turns before as well. A server copies them.
        id: a name, shown by audits and in results.
        config: how to sample, when to stop. None: the model's own.
        most: new tokens at most. None: what `config` says in `max_new_tokens`.
        seed: of the sampling; sample n of the request has `seed + n`. None: torch's generator.
        session: the conversation whose next turn this is.
        salt: equal tokens under different salts never share states.
        snapshot_at: lengths at which states are kept as well.
        processors: more processors of logits, called behind those of `config`.
    """

    tokens: Sequence[int] = field(repr=False)
    id: Hashable = None
    config: GenerationConfig | None = None
    most: int | None = None
    seed: int | None = None
    session: Session | None = None
    salt: Hashable = None
    snapshot_at: Sequence[int] = ()
    processors: Sequence[LogitsProcessor] = field(default=(), repr=False)


@dataclass(frozen=True)
class Token:
    """One token of a running request.

    Attributes:
        id: of the request.
        token: the token.
        sample: number of the sample, where a request has several.
    """

    id: Hashable
    token: int
    sample: int = 0


@dataclass(frozen=True)
class Served:
    """A request that has ended, or one sample of it. A request that ends before its samples start has one result.

    Attributes:
        id: of the request.
        tokens: the new tokens.
        reason: "end" (a token that ends text), "length", "stop" (a stop string), "aborted" or "refused".
        cached: tokens of the prompt whose state was found: in the prefix cache, the session or the tiers.
        error: why it was refused; "" if it was not.
        sample: number of the sample, where a request has several.
        guessed: new tokens that were guessed.
        right: guesses that were right.
    """

    id: Hashable
    tokens: list[int]
    reason: Reason
    cached: int = 0
    error: str = ""
    sample: int = 0
    guessed: int = 0
    right: int = 0


Event = Token | Served
