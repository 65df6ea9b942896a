"""What a line of a log says about a request, as data; and the error for a line with only a part of a prompt."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from memstate.checks import shown, whole

TOKEN: Final = 4  # bytes of a token

# (text or messages, tools) -> tokens of `TOKEN` bytes each; the last may have fewer
Tokens = Callable[[Any, Any], bytes]


class Partial(ValueError):
    """Says that a line has only a part of the prompt, which must not count as the whole."""


@dataclass(frozen=True)
class Said:
    """What one line says about a request.

    Args:
        name: Id of the request.
        at: Time of the line in milliseconds; None if it has no time.
        prompt: Tokens of the prompt; None if the line is only about the answer or the salt.
        answer: Number of generated tokens; None if the line does not say it.
        salt: Everything else that changes the states: an adapter, a tenant's key, pictures. Prompts with different
            salts share no states.
        media: Whether the prompt has pictures, sound or films, whose tokens no line has.

    Raises:
        ValueError: A value is not valid.
    """

    name: str
    at: int | None
    prompt: bytes | None
    answer: int | None
    salt: str = ""
    media: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ValueError(f"request id {shown(self.name)}: expected a text")
        if self.prompt == b"":
            raise ValueError("the prompt is empty")
        if self.answer is not None:
            whole("tokens of the answer", self.answer, 0)


def packed(ids: list[int]) -> bytes:
    """Packs token ids into `TOKEN` bytes each."""
    return array("i", ids).tobytes()


def salted(*given: Any) -> str:
    """Returns one salt for several values; empty if none of them is given."""
    return repr(given) if any(given) else ""
