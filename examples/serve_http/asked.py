"""The bodies of requests. An unknown field is refused, so that no client relies on a feature that is missing."""

from copy import copy
from inspect import signature
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, Field, Json, field_validator, model_validator
from transformers import GenerationConfig

from memstate import InvalidArgument
from memstate.integrations.transformers import Prompt, chat

CHOICES = 128  # answers to one request at most
Name = Annotated[str, Field(min_length=1, max_length=256)]
Ids = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True, max_length=CHOICES)]
Rows = Annotated[list[Ids], Field(fail_fast=True, max_length=CHOICES)]


def words(error: Any) -> str:
    """Returns what is wrong with a field. If this server lacks a feature, its list must be empty."""
    if error["type"] == "too_long" and not error["ctx"]["max_length"]:
        return f"this server has no {error['loc'][-1]}"
    if error["type"] == "string_type" and error["loc"][1:-2] == ("messages",):
        return "fields of messages beyond content and tool_calls must be texts"
    if error["type"] == "extra_forbidden" and error["loc"][-1] == "max_completion_tokens":
        return "max_tokens is there, too: give one of the two"
    return "Input should be an object" if error["type"].startswith(("model", "dict")) else error["msg"]


def wrong(errors: Any) -> str:
    """Returns what is wrong with a body, by place. Pydantic names types in places: `content.list[MessagePart].0`."""
    faults = dict[str, dict[str, None]]()
    for error in errors[:32]:
        place = ".".join(str(name) for name in error["loc"][1:] if name != "str" and "[" not in str(name))
        faults.setdefault(f"character {place}" if place.isdigit() else place or "the body", {})[words(error)] = None
    return "; ".join(f"{place}: {', or '.join(texts)}" for place, texts in [*faults.items()][:8])


class StrictModel(BaseModel, extra="forbid", strict=True, allow_inf_nan=False):
    """An object that refuses unknown fields and wrong types."""

    cache_control: Any = Field(None, exclude=True)  # ignored: states are always cached

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, body: Any) -> Any:
        """Returns the object without null fields, which then get their defaults."""
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body


class Usual(StrictModel):
    """Fields of OpenAI's API that this server lacks. Only their neutral values are accepted."""

    presence_penalty: Literal[0] = 0
    frequency_penalty: Literal[0] = 0
    logit_bias: dict[str, float] = Field({}, max_length=0)
    metadata: dict[str, Any] = {}  # labels of the client, which are not kept
    store: Literal[False] = False
    service_tier: Literal["auto", "default"] = "auto"


class Body(Usual):
    """The fields of both endpoints. OpenAI's API lacks `session`, `fork`, `priority`, `timeout` and `cache_salt`."""

    model: str
    max_tokens: int | None = Field(None, ge=1, validation_alias=AliasChoices("max_tokens", "max_completion_tokens"))
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int = Field(1, ge=1, le=CHOICES)
    seed: int | None = Field(None, ge=0, lt=2**32)
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    stream: bool = False
    stream_options: dict[Literal["include_usage"], bool] = {}
    user: str | None = None  # tenant of the request
    session: Name | None = None  # the conversation whose next turn this is; each salt has its own names
    fork: Name | None = None  # an open session, from which the new `session` goes on
    priority: int = 0
    timeout: float | None = Field(None, gt=0)  # seconds
    cache_salt: str | None = None  # only requests with the same salt share states

    @field_validator("temperature")
    @classmethod
    def finite(cls, value: float | None) -> float | None:
        """Returns the temperature; refuses values so small that logits divided by them may overflow."""
        if value is not None and 0 < value < 1e-6:
            raise ValueError("expected 0, or at least 1e-6")
        return value

    def config(self, own: GenerationConfig) -> GenerationConfig:
        """Returns the settings of sampling.

        Args:
            own: settings of the model, for fields that the client leaves out.
        """
        config = copy(own)
        config.num_return_sequences, config.stop_strings = self.n, self.stop or own.stop_strings
        config.do_sample = own.do_sample if self.temperature is self.top_p is None else self.temperature != 0
        config.temperature, config.top_p = self.temperature or own.temperature, self.top_p or own.top_p
        return config


class MessagePart(StrictModel):
    """A part of a message."""

    type: Literal["text"]
    text: str


def parts(content: Any) -> Any:
    """Returns the content of a message as a list of parts. A text is one part."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class Called(StrictModel):
    """The function that a call names. OpenAI's API has its arguments as JSON text, but templates want an object."""

    name: Name
    arguments: Annotated[Json[dict[str, Any]], BeforeValidator(lambda text: "{}" if text == "" else text)]


class ToolCall(StrictModel):
    """A call of a tool, in a message of the assistant."""

    id: str
    type: Literal["function"]
    function: Called
    index: int = Field(0, exclude=True)  # streams number calls


class Message(StrictModel, extra="allow"):
    """A message. Templates also see its other fields, such as `tool_call_id`, `name` and `reasoning_content`."""

    __pydantic_extra__: dict[str, str]
    role: Name
    content: Annotated[list[MessagePart], BeforeValidator(parts)] = []
    tool_calls: list[ToolCall] = []

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, body: Any) -> Any:
        """Returns the message without its empty fields."""
        return {name: value for name, value in body.items() if value} if isinstance(body, dict) else body

    def said(self, texts: bool = False) -> dict[str, Any]:
        """Returns the message for templates, with its content as one text.

        Args:
            texts: whether the arguments of calls are JSON texts; otherwise they are objects.
        """
        fields = self.model_dump(exclude_defaults=True, round_trip=texts)
        return {**fields, "content": "".join(part.text for part in self.content)}


class Function(StrictModel, extra="allow"):
    """A function as templates describe it, with fields such as `description` and `parameters`."""

    name: Name


class Tool(StrictModel):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


class ChatBody(Body):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, fail_fast=True)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: list[Tool] = Field([], fail_fast=True)
    tool_choice: Literal["none", "auto"] = "auto"
    parallel_tool_calls: bool = True  # accepted, but not enforced
    response_format: dict[Literal["type"], Literal["text"]] = {}
    modalities: list[Literal["text"]] = []
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] = {}

    def prompts(self, tokenizer: Any) -> list[Prompt]:
        """Returns the prompt in the model's template, with the lengths at which later prompts may differ from it."""
        given = self.model_dump(include={"reasoning_effort"}, exclude_none=True) | self.chat_template_kwargs
        if own := signature(tokenizer.apply_chat_template).parameters.keys() & given.keys():
            raise InvalidArgument(f"chat_template_kwargs: leave out {', '.join(sorted(own))}: no switch of a template")
        tools = [tool.model_dump() for tool in self.tools if self.tool_choice == "auto"] or None
        messages = [one.said() for one in self.messages]
        try:
            made = chat(tokenizer, messages, tools=tools, **given)
        except TypeError:  # some templates treat the arguments as a text
            messages = [one.said(texts=True) for one in self.messages]
            made = chat(tokenizer, messages, tools=tools, **given)
        given["add_generation_prompt"] = True
        if tools and made.tokens == tokenizer.apply_chat_template(messages, **given).input_ids:
            raise InvalidArgument("tools: the template of this model shows it none; leave them out")
        return [made]


class Completion(Body):
    """The body of /v1/completions."""

    prompt: str | Ids | Texts | Rows
    best_of: Literal[1] = 1
    echo: Literal[False] = False
    suffix: Literal[""] = ""

    def prompts(self, tokenizer: Any) -> list[Prompt]:
        """Returns a `Prompt` for each prompt of the body."""
        several = isinstance(self.prompt, list) and self.prompt and not isinstance(self.prompt[0], int)
        prompts: Any = self.prompt if several else [self.prompt]
        return [Prompt(tokenizer(one).input_ids if isinstance(one, str) else one) for one in prompts]
