"""Chooses the next token of each row as `generate` does, by the model's own processors of logits."""

from collections.abc import Sequence
from contextlib import suppress
from copy import copy, deepcopy
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList

from memstate.checks import is_whole, items, whole
from memstate.errors import InvalidArgument
from memstate.integrations.transformers.prompts import Prompt, Reason, Top, require
from memstate.integrations.transformers.text import Text

LAST: Final[WeakKeyDictionary[Any, tuple[tuple[Any, GenerationConfig], ...]]] = WeakKeyDictionary()  # given and made
REMEMBERED: Final = 8  # configurations of a model, the newest first


class Sampler:
    """How one request samples and when it stops.

    Args:
        model: the model.
        prompt: the request.
        tokenizer: for text and stop strings; None: there are none.
        sample: number of the sample.

    Attributes:
        most: new tokens at most.
        samples: samples of the request.
        lookup: tokens to look up in the text so far; 0: none.
        ngram: the most last tokens that must be equal for that; None: what Transformers takes.
        guesses: tokens to guess at most.
        text: of the answer.
        plain: whether the largest logit decides.

    Raises:
        InvalidArgument: stop strings without a tokenizer, `max_time`, a mode of `generate` in which a row does not
            choose its tokens alone, such as beams, several samples that continue a session, a prompt that leaves no
            room below `max_length`, or settings that cannot be meant or contradict each other.
    """

    def __init__(self, model: Any, prompt: Prompt, tokenizer: Any = None, sample: int = 0) -> None:
        length, of, device = len(prompt.tokens), f"prompt {prompt.id!r}", model.device
        require(prompt, "config", isinstance(prompt.config, GenerationConfig | None), "a GenerationConfig")
        most = None if prompt.most is None else whole(f"{of}: most", prompt.most)
        try:
            config = copy(prepared(model, prompt.config or model.generation_config, device))
            ends = [] if config.eos_token_id is None else config.eos_token_id
            ends = torch.as_tensor(ends, dtype=torch.long, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:  # such as several greedy samples, or a set of end tokens
            raise InvalidArgument(f"{of}: {error}") from error
        others = [name for name in ("max_time", "token_healing") if getattr(config, name, None)]
        if others or config.get_generation_mode() not in ("greedy_search", "sample", "assisted_generation"):
            what = others[0] if others else config.get_generation_mode().value
            raise InvalidArgument(f"{of} asks for {what}: use generate with a StateCache, or Prompt(timeout=)")
        self.samples: int = config.num_return_sequences or 1
        if self.samples > 1 and prompt.session is not None:
            raise InvalidArgument(f"{of}: {self.samples} samples, and a session goes on with one answer")
        self.lookup: int = config.prompt_lookup_num_tokens or 0
        self.ngram: int | None = config.max_matching_ngram_size
        self.guesses: int = self.lookup or config.num_assistant_tokens
        if prompt.logprobs is not None:
            whole(f"{of}: logprobs", prompt.logprobs, least=0)
        given = config.stop_strings
        stops = items(f"{of}: stop_strings", [given] if isinstance(given, str) else given or [], str)
        if not all(stops):
            raise InvalidArgument(f"{of}: stop_strings {given!r}: an empty text would end each answer at once")
        if stops and tokenizer is None:
            raise InvalidArgument(f"{of} has stop strings: give serve the tokenizer=")
        self._ends: dict[int, int | str] = {id: id for id in ends.flatten().tolist()}
        if stops:  # special tokens have no text
            special = {str(token): id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
            self._ends |= {special[stop]: stop for stop in stops if stop in special}
        self.text = Text(tokenizer, prompt.tokens, stops)
        config.max_new_tokens = config.max_new_tokens if most is None else most
        if config.max_new_tokens is None and config.max_length <= length:
            raise InvalidArgument(
                f"{of} has {length} tokens, and max_length={config.max_length} counts them: give max_new_tokens"
            )
        config.max_length = config.max_length if config.max_new_tokens is None else length + config.max_new_tokens
        self.most: int = max(1, config.max_length - length)
        self._sample = bool(config.do_sample)
        ids = torch.tensor([prompt.tokens], device=device)
        try:
            self._processors = model._get_logits_processor(
                config,
                input_ids_seq_length=ids.shape[1],
                encoder_input_ids=ids,
                device=str(device),
                logits_processor=LogitsProcessorList(prompt.processors),
            )
        except ValueError as error:  # a setting out of range, such as a temperature of 0
            raise InvalidArgument(f"{of}: {error}") from error
        self.plain = not self._sample and not self._processors
        self._generator = None
        if (seed := prompt.seed) is not None:
            known = is_whole(seed) and -(2**63) <= int(seed) <= 2**64 - self.samples
            require(prompt, "seed", known, "a whole number of 64 bits")
            self._generator = torch.Generator(device=device).manual_seed(int(seed) + sample)

    def choose(self, tokens: Sequence[int], logits: Tensor) -> int:
        """Returns the next token.

        Args:
            tokens: all tokens so far.
            logits: `vocabulary`.

        Syncs: yes.
        """
        ids = torch.tensor([tokens], device=logits.device)
        scores = self._processors(ids, logits[None].to(torch.float32, copy=True))  # which processors may change
        if scores.shape != (1, len(logits)):
            raise InvalidArgument(f"processors made logits of shape {tuple(scores.shape)}: expected (1, {len(logits)})")
        if not self._sample:
            return int(scores.argmax())
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))

    def stop(self, tokens: Sequence[int]) -> int | str | None:
        """Returns the token or the stop string that ends an answer, None as long as none does.

        Args:
            tokens: all tokens so far, which `text` has read.
        """
        return self.text.stop if self.text.stop is not None else self._ends.get(tokens[-1])

    def reason(self, tokens: Sequence[int], new: int) -> Reason | None:
        """Returns why a row has ended, or None.

        Args:
            tokens: all tokens so far.
            new: how many of them are new.
        """
        if (stop := self.stop(tokens)) is not None:
            return "stop" if isinstance(stop, str) else "end"
        return "length" if new >= self.most else None


def prepared(model: Any, config: GenerationConfig, device: torch.device) -> GenerationConfig:
    """Returns what `generate` makes of a config, which requests share: to make it costs more than a small forward.

    Args:
        model: the model.
        config: of the request.
        device: of the model.
    """
    given = (vars(config), vars(model.generation_config), device)
    last = LAST.get(model, ())  # another thread may replace it at any time
    for known, found in last:
        with suppress(RuntimeError, ValueError):  # several end tokens in a tensor or an array
            if known == given:
                return found
    key, mine = deepcopy(given), deepcopy(config)
    has_length = any(one.max_length is not None for one in (mine, model.generation_config))
    made: GenerationConfig = model._prepare_generation_config(mine)[0]
    if made.max_new_tokens is None and not has_length:  # the default does not count the prompt
        made.max_new_tokens = made.max_length
    model._prepare_special_tokens(made, True, device=device)
    LAST[model] = ((key, made), *last[: REMEMBERED - 1])
    return made


def choose(samplers: Sequence[Sampler], tokens: Sequence[Sequence[int]], logits: Tensor) -> list[int | Exception]:
    """Returns the next token of each row, or what its processors raised.

    The rows that take the largest logit share one launch.

    Args:
        samplers: of the rows.
        tokens: all tokens of each row so far.
        logits: `batch vocabulary`.

    Syncs: yes.
    """
    largest = logits.argmax(-1).tolist()
    found: list[int | Exception] = []
    for entry, sampler in enumerate(samplers):
        try:
            found.append(largest[entry] if sampler.plain else sampler.choose(tokens[entry], logits[entry]))
        except Exception as error:
            found.append(error)
    return found


def logprobs(
    asked: Sequence[int | None], tokens: Sequence[int | Exception], logits: Tensor
) -> list[tuple[float | None, Top]]:
    """Returns the logprob of each chosen token, and the most likely tokens with theirs, for the rows that ask.

    Args:
        asked: how many of the most likely tokens each row asks for; None: it asks for nothing.
        tokens: the chosen tokens; of a row whose processors raised, the exception.
        logits: the model's own, `batch vocabulary`.

    Syncs: yes, if a row asks.
    """
    found: list[tuple[float | None, Top]] = [(None, ())] * len(asked)
    rows = [n for n, token in enumerate(tokens) if asked[n] is not None and isinstance(token, int)]
    if rows:
        scores = logits[rows].float().log_softmax(-1)
        own = scores[range(len(rows)), [tokens[n] for n in rows]].tolist()
        best = scores.topk(min(max(asked[n] or 0 for n in rows), scores.shape[1]))
        for n, logprob, values, ids in zip(rows, own, best.values.tolist(), best.indices.tolist(), strict=True):
            found[n] = logprob, tuple(zip(ids, values, strict=True))[: asked[n]]
    return found
