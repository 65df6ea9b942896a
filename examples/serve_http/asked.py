"""What clients may ask for. A field that is not here is refused, so that nobody takes it for done."""

from copy import copy
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, Field
from transformers import GenerationConfig


class Asked(BaseModel, extra="forbid"):
    """What both endpoints take. OpenAI's API has neither `session`, `fork`, `priority`, `timeout` nor `cache_salt`."""

    model: str
    max_tokens: int | None = Field(None, ge=1, validation_alias=AliasChoices("max_tokens", "max_completion_tokens"))
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int = Field(1, ge=1, le=128)
    seed: int | None = Field(None, ge=0, lt=2**32)
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: dict[Literal["include_usage"], bool] = {}
    user: str | None = None  # the tenant
    session: str | None = Field(None, min_length=1)  # the conversation whose next turn this is
    fork: str | None = Field(None, min_length=1)  # the session from which `session`, a new one, goes on
    priority: int = 0
    timeout: float | None = Field(None, gt=0)  # seconds
    cache_salt: str | None = None  # only requests with the same salt share states

    def config(self, own: GenerationConfig) -> GenerationConfig:
        """Returns how to sample.

        Args:
            own: the model's own way, for what the client does not say.
        """
        found = copy(own)
        found.num_return_sequences, found.stop_strings = self.n, self.stop or own.stop_strings
        found.do_sample = own.do_sample if self.temperature is self.top_p is None else self.temperature != 0
        found.temperature, found.top_p = self.temperature or own.temperature, self.top_p or own.top_p
        return found


class Chat(Asked):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, str]] = Field(min_length=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)

    def tokens(self, tokenizer: Any) -> list[int]:
        """Returns the prompt, in the model's template."""
        return tokenizer.apply_chat_template(self.messages, add_generation_prompt=True, return_dict=False)


class Completion(Asked):
    """The body of /v1/completions."""

    prompt: str | list[int]

    def tokens(self, tokenizer: Any) -> list[int]:
        """Returns the prompt."""
        return tokenizer(self.prompt).input_ids if isinstance(self.prompt, str) else self.prompt
