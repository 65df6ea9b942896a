"""Makes a small model, and requests with their right answers."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.tiny_models import tiny
from tests.support.tiny_served import alone
from tests.support.tiny_tokenizers import byte_level

TOPICS, VOCABULARY = 8, 300
MARGIN = 1e-3  # smallest distance of the two largest logits, as a share of the largest one; rounding is far smaller
TEMPLATE = "{% for one in messages %}<{{ one.role }}> {{ one.content }}\n{% endfor %}<assistant> "


class Case(NamedTuple):
    """A request and its right answer."""

    path: str
    body: dict[str, Any]
    tokens: list[int]
    answer: str


def prepare(folder: Path, cases: int = 30, longest: int = 80) -> list[Case]:
    """Saves a model with its tokenizer to a folder. Returns requests. The last one has the longest answer."""
    model = tiny("qwen3_next", changes=(("vocab_size", VOCABULARY), ("max_position_embeddings", 2048)))
    tokenizer, draw = byte_level(VOCABULARY), random.Random(0)
    tokenizer.chat_template = TEMPLATE
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    def asked(path: str, tokens: list[int], most: int, **body: Any) -> Iterator[Case]:
        known: dict[Any, Any] = {}
        answer = alone(model, tokens, known, most)
        pairs = [(logits.topk(2).values, logits.abs().max()) for logits in known.values()]
        if all(first - second > MARGIN * largest for (first, second), largest in pairs):
            yield Case(path, {**body, "max_tokens": most}, tokens, tokenizer.decode(answer, skip_special_tokens=True))

    def chat(most: int) -> Iterator[Case]:
        said = [{"role": "user", "content": "".join(draw.choices("adehmnopstw .", k=draw.randrange(8, 60)))}]
        tokens = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
        return asked("/v1/chat/completions", tokens, most, messages=said)

    topics = [draw.choices(range(1, VOCABULARY), k=draw.randrange(16, 120)) for _ in range(TOPICS)]
    made, ends = list[Case](), tokenizer("x").input_ids  # each prompt ends with a whole character
    while len(made) < cases:
        tokens = draw.choice(topics) + draw.choices(range(1, VOCABULARY), k=draw.randrange(4, 40)) + ends
        made += asked("/v1/completions", tokens, draw.randrange(4, 25), prompt=tokens)
        made += chat(draw.randrange(4, 25))
    while not (last := list(chat(longest))):
        pass
    return made + last
