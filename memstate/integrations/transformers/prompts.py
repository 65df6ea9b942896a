"""Requests and results of `serve`: `Prompt`, and the events `Token` and `Served`."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from transformers import GenerationConfig, LogitsProcessor

from memstate.checks import shown
from memstate.errors import InvalidArgument
from memstate.integrations.transformers.own import vocabulary
from memstate.requests.handles import Session

# entries of configurations that name tokens which stand for pictures, videos or sound
MEDIA: Final = ("image_token_id", "video_token_id", "audio_token_id")
Reason = Literal["end", "length", "stop", "aborted", "timeout", "failed", "too_large", "no_room", "invalid"]
Top = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Prompt:
    """One request of `serve`.

    Args:
        tokens: all tokens so far; in a conversation, also those of earlier turns. A server copies them.
        id: a name for audits and results. None: `serve` and `stream` take the request's number in `requests`, and a
            server takes a name that no other request has.
        config: how to sample and when to stop. None: the model's own config.
        most: limit of the new tokens. None: `max_new_tokens` or `max_length` of `config`, or 20, as in `generate`.
        seed: seed of the sampling; sample n of the request has `seed + n`. None: torch's global generator.
        session: the session of which this request is the next turn.
        salt: equal tokens under different salts never share states.
        snapshot_at: more lengths at which states are kept, see `memstate.Request`.
        processors: more processors of logits; they run after those of `config`.
        logprobs: how many of the most likely tokens, 0 or more, each `Token` lists in `top`; it then also has its own
            logprob. None: no logprobs.
        priority: requests with a higher number start first, and read their prompts first.
        tenant: who makes the request. Within a priority, the tenant that has used the fewest tokens starts first.
        timeout: seconds after submission at which the request is ended. None: no limit.
        kind: kind of request, see `memstate.Request`.
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
    """Raises an error unless a setting of a prompt is valid.

    Args:
        prompt: the prompt.
        name: name of the setting.
        sound: whether it is valid.
        expected: text that says which values are valid, for the error.

    Raises:
        InvalidArgument: the setting is not valid.
    """
    if not sound:
        raise InvalidArgument(f"prompt {prompt.id!r}: {name}={shown(getattr(prompt, name))}: expected {expected}")


def checked(model: Any, tokens: Any, of: str) -> list[int]:
    """Checks the tokens of a prompt, and returns them as a list.

    Args:
        model: the model that will read them.
        tokens: a sequence, an array or a tensor, `token`.
        of: the name of the prompt, for errors.

    Raises:
        InvalidArgument: the tokens are not one row of ids; there are none; or an id is not in the vocabulary, or stands
            for a picture, a video or sound.

    Syncs: yes, if the tokens are on a device.
    """
    try:
        ids = np.asarray(tokens.tolist() if hasattr(tokens, "tolist") else tokens)
    except (ValueError, RuntimeError):  # a list of rows with different lengths, or a tensor without data
        ids = np.empty((len(tokens), 0))
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise InvalidArgument(
            f"{of} is a {type(tokens).__name__} of shape {ids.shape}: expected a row of ids, such as "
            "tokenizer(text).input_ids"
        )
    if not ids.size:
        raise InvalidArgument(f"{of} has no tokens")
    known = vocabulary(model)
    for name in MEDIA:
        if (media := getattr(model.config, name, None)) is not None and media in ids:
            raise InvalidArgument(
                f"{of} has token {media}, the {name} of the model, and only text is read here: use generate with a "
                "StateCache without prompt="
            )
    for token in (int(ids.min()), int(ids.max())):
        if not 0 <= token < known:
            raise InvalidArgument(f"{of} has token {token}: the vocabulary of the model has {known}")
    whole: list[int] = ids.tolist()
    return whole


class Token(NamedTuple):
    """One token of a running request.

    Attributes:
        id: id of the request.
        token: the token.
        sample: number of the sample, if the request has several.
        text: the new text, as far as it is certain: only whole characters, and no characters that may begin a stop
            string. "" without `Server(tokenizer=)`.
        logprob: the natural logarithm of the token's probability in the model's own distribution, before processors and
            temperature. None unless `Prompt(logprobs=)` asks for it.
        top: the most likely tokens in this distribution, each with its logprob, the most likely first.
    """

    id: Hashable
    token: int
    sample: int = 0
    text: str = ""
    logprob: float | None = None
    top: Top = ()


@dataclass(frozen=True)
class Served:
    """The result of a request or of one of its samples. Every sample gets one result, even if it never starts.

    Attributes:
        id: id of the request.
        tokens: the new tokens.
        reason: why the request ended: "end" (by a token that ends text), "length", "stop" (by a stop string),
            "aborted", "timeout" or "failed" (a forward or code of the request raised). A refused request has
            "too_large" (it can never fit: too many tokens or samples), "no_room" (caches, other servers or handles use
            the memory), or "invalid" (for example a turn of a closed session).
        cached: number of tokens of the prompt that a state covered, in the prefix cache, the session or the tiers.
        error: why the request was refused or failed; otherwise "".
        sample: number of the sample, if the request has several.
        guessed: number of new tokens that were guessed.
        right: number of guesses that were right.
        prefetch: how the prefetch from storage ended, as in `Fetch.outcome`: "complete", "partial", "stopped" (it took
            too long), "missed", "short" and others; "" if there was no prefetch.
        text: the text that the new tokens add to the prompt, up to a stop string. "" without `Server(tokenizer=)`.
        stop: the token or stop string that ended the answer; None if it ended for another reason.
        missed: why no more of the prompt was cached, see `RowInfo.missed`.
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
