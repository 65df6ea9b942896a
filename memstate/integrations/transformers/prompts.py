"""What a caller of `serve` gives and gets."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
from transformers import GenerationConfig, LogitsProcessor

from memstate.checks import shown
from memstate.errors import InvalidArgument
from memstate.integrations.transformers.own import vocabulary
from memstate.requests.handles import Session

MEDIA: Final = ("image_token_id", "video_token_id", "audio_token_id")  # of configurations: stand for other inputs
Reason = Literal["end", "length", "stop", "aborted", "timeout", "failed", "too_large", "no_room", "invalid"]
Top = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Prompt:
    """One request of `serve`.

    Args:
        tokens: all tokens so far; of a conversation, the turns before as well. A server copies them.
        id: a name, shown by audits and in results. None: `serve` and `stream` take its number in `requests`, and a
            server a name that no other request has.
        config: how to sample, when to stop. None: the model's own.
        most: new tokens at most. None: what `config` says in `max_new_tokens` or `max_length`, or 20, as in `generate`.
        seed: of the sampling; sample n of the request has `seed + n`. None: torch's generator.
        session: the conversation whose next turn this is.
        salt: equal tokens under different salts never share states.
        snapshot_at: lengths at which states are kept as well, see `memstate.Request`.
        processors: more processors of logits, called behind those of `config`.
        logprobs: how many of the most likely tokens each `Token` names in `top`, from 0 on; its own logprob comes with
            them. None: neither.
        priority: requests of higher priority start first, and read their prompts first.
        tenant: who asks. Among requests of one priority, that of the tenant with the fewest tokens starts first.
        timeout: seconds from its submission to its end. None: it has all the time.
        kind: what it is, see `memstate.Request`.
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
    logprobs: int | None = None
    priority: int = 0
    tenant: Hashable = None
    timeout: float | None = None
    kind: str | None = None


def require(prompt: Prompt, name: str, sound: bool, expected: str) -> None:
    """Requires a setting of a prompt to be sound.

    Args:
        prompt: the prompt.
        name: of the setting.
        sound: whether it is.
        expected: what is.

    Raises:
        InvalidArgument: it is not.
    """
    if not sound:
        raise InvalidArgument(f"prompt {prompt.id!r}: {name}={shown(getattr(prompt, name))}: expected {expected}")


def checked(model: Any, tokens: Any, of: str) -> list[int]:
    """Returns the tokens of a prompt.

    Args:
        model: the model that is to read them.
        tokens: a sequence, an array or a tensor, `token`.
        of: what they belong to, for messages.

    Raises:
        InvalidArgument: they are no row of ids, there are none, the vocabulary lacks one, or one stands for an image.

    Syncs: yes, if they are on a device.
    """
    try:
        found = np.asarray(tokens.tolist() if hasattr(tokens, "tolist") else tokens)
    except (ValueError, RuntimeError):  # rows of several lengths, or a tensor without data
        found = np.empty((len(tokens), 0))
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise InvalidArgument(
            f"{of} is a {type(tokens).__name__} of shape {found.shape}: expected a row of ids, such as "
            "tokenizer(text).input_ids"
        )
    if not found.size:
        raise InvalidArgument(f"{of} has no tokens")
    known = vocabulary(model)
    for name in MEDIA:
        if (media := getattr(model.config, name, None)) is not None and media in found:
            raise InvalidArgument(
                f"{of} has token {media}, the {name} of the model, and only text is read here: use generate with a "
                "StateCache without prompt="
            )
    for token in (int(found.min()), int(found.max())):
        if not 0 <= token < known:
            raise InvalidArgument(f"{of} has token {token}: the vocabulary of the model has {known}")
    whole: list[int] = found.tolist()
    return whole


@dataclass(frozen=True)
class Token:
    """One token of a running request.

    Attributes:
        id: of the request.
        token: the token.
        sample: number of the sample, where a request has several.
        text: what is sure of the text that its tokens add to the prompt, and no event had yet: whole characters, and
            nothing that a stop string may begin with. "" without `Server(tokenizer=)`.
        logprob: the natural logarithm of its probability in the model's own distribution, before processors and
            temperature. None where `Prompt(logprobs=)` does not ask for it.
        top: the most likely tokens in this distribution, each with its logprob, the most likely one first.
    """

    id: Hashable
    token: int
    sample: int = 0
    text: str = ""
    logprob: float | None = None
    top: Top = ()


@dataclass(frozen=True)
class Served:
    """A request that has ended, or one sample of it. Every sample has one result, also if it never starts.

    Attributes:
        id: of the request.
        tokens: the new tokens.
        reason: "end" (a token that ends text), "length", "stop" (a stop string), "aborted", "timeout" or "failed" (a
            forward or code of the request raised). Of a request that was refused: "too_large" (it can never fit: too
            many tokens or samples), "no_room" (caches, other servers or handles hold the room), or "invalid" (such as a
            turn of a closed session).
        cached: tokens of the prompt whose state was found: in the prefix cache, the session or the tiers.
        error: why it was refused or has failed; otherwise "".
        sample: number of the sample, where a request has several.
        guessed: new tokens that were guessed.
        right: guesses that were right.
        prefetch: how the prefetch from storage ended, in the words of `Fetch.outcome`: "complete", "partial", "stopped"
            (it had no more time), "missed", "short" and others; "" if there was none.
        text: what its tokens add to the prompt, up to a stop string. "" without `Server(tokenizer=)`.
        stop: the token or the stop string that ended it; None if none did.
        missed: why no more of the prompt was cached, as `RowInfo.missed` says.
    """

    id: Hashable
    tokens: list[int]
    reason: Reason
    cached: int = 0
    error: str = ""
    sample: int = 0
    guessed: int = 0
    right: int = 0
    prefetch: str = ""
    text: str = ""
    stop: int | str | None = None
    missed: str = ""


Event = Token | Served
