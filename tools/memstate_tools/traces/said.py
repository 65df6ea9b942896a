"""What a line of a log says about a request, and why a line that has a part of a prompt only is refused."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from memstate.checks import shown, whole

TOKEN: Final = 4  # bytes

# From a text or a list of messages, and the tools offered, to tokens: `TOKEN` bytes each, the last perhaps fewer
Tokens = Callable[[Any, Any], bytes]


class Partial(ValueError):
    """The line has a part of the prompt, which would pass for the whole; the text is one of few."""


@dataclass(frozen=True)
class Said:
    """What a line says about a request.

    Args:
        name: The id of the request.
        at: Time of the line in milliseconds, None without one.
        prompt: The tokens given; None if the line is about the answer or the salt only.
        answer: Tokens generated that the line tells of; None if it tells of none.
        salt: What else decides on the states: an adapter, a tenant's key, pictures. Prompts of other salts share none.
        media: Whether the prompt has pictures, sound or films, whose tokens no line has.

    Raises:
        ValueError: No request can be like this.
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
    """Returns tokens as bytes."""
    return array("i", ids).tobytes()


def salted(*given: Any) -> str:
    """Returns one salt of several values; an empty one if none of them is given."""
    return repr(given) if any(given) else ""
