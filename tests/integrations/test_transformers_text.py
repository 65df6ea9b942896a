"""Tests the text of tokens that come one by one against the text of all tokens, with and without stop strings."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from memstate.integrations.transformers.text import CONTEXT, HALF, MOST, Text
from tests.support.tiny_tokenizers import SAID, byte_level, words


class Counting:
    """A tokenizer that notes how many tokens each call of `decode` got."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.given = tokenizer, list[int]()

    def decode(self, tokens: Sequence[int], **settings: Any) -> str:
        self.given.append(len(tokens))
        text: str = self._tokenizer.decode(tokens, **settings)
        return text


def told(tokenizer: Any, prompt: list[int], answer: list[int], stops: Sequence[str] = ()) -> tuple[list[str], Text]:
    """Returns the text that each token of an answer adds, up to a stop string, and the `Text`."""
    text, parts = Text(tokenizer, prompt, stops), list[str]()
    for n in range(1, len(answer) + 1):
        parts.append(text.read([*prompt, *answer[:n]], last=n == len(answer)))
        if text.stop is not None:
            break
    assert "".join(parts) == str(text)
    return parts, text


def whole(tokenizer: Any, prompt: list[int], answer: list[int]) -> str:
    """Returns the text that an answer adds, decoded from all tokens at once."""
    before, both = (tokenizer.decode(part, skip_special_tokens=True) for part in (prompt, prompt + answer))
    assert both.startswith(before)
    return str(both[len(before) :])


@pytest.mark.parametrize("seed", range(40))
def test_bytes_join_to_the_text_of_all_tokens_whatever_they_are(seed: int) -> None:
    tokenizer, random = byte_level(), Random(seed)
    said = tokenizer(SAID).input_ids
    answer = [random.choice([random.choice(said), random.randrange(len(tokenizer))]) for _ in range(60)]
    answer = random.choice([answer, said, [token for token in said if token % 3]])
    parts, _ = told(tokenizer, said[:9], answer)
    assert "".join(parts) == whole(tokenizer, said[:9], answer)


def test_no_part_of_a_sound_text_has_half_a_character() -> None:
    tokenizer = byte_level(257)  # each token is a byte
    said = tokenizer(SAID).input_ids
    for start, characters in ((0, 0), (1, 1), (9, 6)):  # the last prompt ends inside a character
        parts, _ = told(tokenizer, said[:start], said[start:])
        assert "".join(parts) == SAID[characters:]
        assert max(map(len, parts)) == 1


@pytest.mark.parametrize("seed", range(20))
def test_words_keep_the_spaces_between_them_and_bytes_wait_for_their_character(seed: int) -> None:
    tokenizer, random = words(), Random(seed)
    known = tokenizer.convert_tokens_to_ids(["▁and", "▁go", "▁home", "ing", "s", ".", "</s>"])
    odd = ["é", "€", "😀", "你好"]
    answer = list[int]()
    for _ in range(40):
        more = random.choice([[random.choice(known)], [2 + byte for byte in random.choice(odd).encode()]])
        answer += more
    prompt = tokenizer.convert_tokens_to_ids(["▁and", "▁go"])
    parts, _ = told(tokenizer, prompt, answer)
    assert "".join(parts) == whole(tokenizer, prompt, answer)
    assert not any(HALF in part for part in parts)


@pytest.mark.parametrize("seed", range(60))
def test_text_ends_before_the_first_stop_string_and_no_part_begins_one(seed: int) -> None:
    tokenizer, random = byte_level(), Random(seed)
    said = tokenizer(SAID).input_ids
    answer = [token for _ in range(3) for token in random.sample(said, len(said))]
    alone = whole(tokenizer, [], answer)
    stops = [
        alone[at : at + random.randint(1, 5)] for at in random.sample(range(len(alone) // 2), random.randint(1, 3))
    ]
    stops = [stop for stop in stops if HALF not in stop] + ["never, said"]
    parts, text = told(tokenizer, [], answer, stops)
    ends = [(alone.index(stop) + len(stop), alone.index(stop), stop) for stop in stops if stop in alone]
    _, length, stop = min(ends, default=(0, len(alone), None))
    assert ("".join(parts), text.stop) == (alone[:length], stop)
    assert stop is None or text.read([*answer, answer[0]], last=False) == ""  # no text follows a stop string


def test_text_that_begins_a_stop_string_is_held_back_until_it_is_clear() -> None:
    tokenizer = byte_level(257)
    tokens = tokenizer("a Sto Stop").input_ids
    parts, text = told(tokenizer, [], tokens, ["Stop"])
    assert (parts, text.stop) == (["a", " ", "", "", "", "Sto ", "", "", "", ""], "Stop")
    parts, text = told(tokenizer, [], tokens[:-1], ["Stop"])
    assert (parts[-1], text.stop) == ("Sto", None)  # the last token gives out the text that was held back
    assert text.read(tokens[:-1], last=True) == ""  # a repeated read adds nothing


def test_each_token_decodes_a_few_tokens_however_long_the_answer_is() -> None:
    tokenizer = Counting(byte_level(257))
    said = byte_level(257)(SAID * 40).input_ids
    told(tokenizer, said[:500], said[500:])
    assert max(tokenizer.given) <= 2 * CONTEXT + 4
    assert len(tokenizer.given) <= 1.2 * (len(said) - 500)


def test_a_read_that_was_interrupted_can_be_repeated() -> None:
    tokenizer, text = byte_level(257), Text(byte_level(257), [], ["go"])
    tokens = tokenizer("yes, gone").input_ids
    assert text.read(tokens[:3], last=False) == "yes"
    assert text.read(tokens[:6], last=False) == ", "  # three tokens at once; "g" is held, as it may begin "go"
    before = text._at
    added = text.read(tokens[:7], last=False)
    assert (added, text.stop) == ("", "go")
    text._at, text.stop = before, None  # as if an interrupt came before the last assignments
    assert text.read(tokens[:7], last=False) == ""
    assert (str(text), text.stop) == ("yes, ", "go")


def test_without_a_tokenizer_there_is_no_text() -> None:
    parts, text = told(None, [1, 2], [3, 4])
    assert (parts, str(text)) == (["", ""], "")


class Maps:
    """A tokenizer whose text of a token comes from a function."""

    def __init__(self, text: Callable[[int], str]) -> None:
        self._text = text

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return "".join(map(self._text, tokens))


def test_half_a_character_that_a_prompt_ends_with_for_good_is_no_part_of_the_answer() -> None:
    parts, _ = told(Maps(lambda token: HALF if token == 8 else chr(97 + token)), [3, 8], [0, 8, 1])
    assert parts == ["a", "", f"{HALF}b"]


@pytest.mark.parametrize("text", ["", HALF])
def test_tokens_without_a_character_are_not_decoded_again_for_ever(text: str) -> None:
    tokenizer = Counting(Maps(lambda token: text if token else "a"))
    parts, _ = told(tokenizer, [5], [*range(1, 400), 0])
    assert max(tokenizer.given) <= MOST + 1
    assert "".join(parts) == text * 399 + "a"
