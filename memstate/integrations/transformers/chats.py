"""Makes the prompt of a chat, and finds by the chat template up to which lengths later prompts are equal to it."""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from itertools import takewhile
from typing import Any, Final

from memstate.errors import InvalidArgument
from memstate.integrations.transformers.line import shared
from memstate.integrations.transformers.prompts import Prompt

HEAD: Final = ("system", "developer")  # roles of messages at the start that many chats share
ANSWER: Final = {"role": "assistant", "content": "."}
QUESTION: Final = {"role": "user", "content": "."}
OTHER: Final = {"role": "user", "content": ")"}  # its beginning is unlike that of any real question
CALL: Final = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {}}}
CALLS: Final = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT: Final = {"role": "tool", "content": ".", "name": "f", "tool_call_id": CALL["id"]}


def chat(tokenizer: Any, messages: Iterable[Any], **template: Any) -> Prompt:
    """Returns the prompt of a chat. Its `snapshot_at` has the lengths up to which later prompts are equal to it.

    Templates drop thoughts, or end a prompt with tokens that no later prompt has. So the prompt is compared with up to
    three others that the template makes: the chat with a next question; the chat with a next tool call, if there are
    tools; and another chat with the same system prompt. If the template refuses one of them, that one is left out.

    Args:
        tokenizer: the model's tokenizer, with a chat template.
        messages: the chat, as `tokenizer.apply_chat_template` takes it.
        **template: other arguments of `apply_chat_template`, such as `tools=` or `enable_thinking=`.
            `add_generation_prompt` is True by default, unless `continue_final_message` is True.

    Returns:
        A prompt with these tokens and lengths. Use `dataclasses.replace` to set other fields.

    Raises:
        InvalidArgument: `tokenize=` or an argument `return_*=` is given, or there are several chats.
        Exception: the template raises it, if it refuses the messages.

    Syncs: no.

    Example:
        >>> from dataclasses import replace
        >>> class Letters:  # a tokenizer: each letter is a token
        ...     def apply_chat_template(self, messages, **template):
        ...         said = "".join(f"[{one['role']}] {one['content']} " for one in messages)
        ...         return [ord(letter) for letter in f"{said}[assistant] <think>"]
        >>> messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
        >>> prompt = replace(chat(Letters(), messages), most=200, priority=1)
        >>> [bytes(prompt.tokens[:length]).decode() for length in prompt.snapshot_at]
        ['[system] Be kind. [user] ', '[system] Be kind. [user] Hi [assistant] ']
    """

    def tokens(of: Sequence[Any], **given: Any) -> list[int]:
        ids: list[int] = tokenizer.apply_chat_template(of, tokenize=True, return_dict=False, **given)
        return ids

    if own := [name for name in template if name == "tokenize" or name.startswith("return_")]:
        raise InvalidArgument(f"leave out {'=, '.join(own)}=: mst.chat always returns a Prompt with the tokens")
    messages = list(messages)
    if messages and isinstance(messages[0], Sequence):
        raise InvalidArgument(f"{len(messages)} chats: expected one, so call mst.chat for each of them")
    given = {"add_generation_prompt": not template.get("continue_final_message"), **template}
    whole, later = tokens(messages, **given), {**given, "continue_final_message": False}
    lengths = set[int]()
    others = [[*messages, ANSWER, QUESTION], [*takewhile(lambda one: _role(one) in HEAD, messages), OTHER]]
    if template.get("tools"):
        others.append([*messages, CALLS, RESULT])
    for other in others:
        try:
            lengths.add(shared(whole, tokens(deepcopy(other), **later), 1))  # deepcopy: a tokenizer may change messages
        except Exception:  # any exception: each template refuses in its own way
            continue
    return Prompt(whole, snapshot_at=sorted(lengths - {0, len(whole)}))


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else getattr(message, "role", None)
