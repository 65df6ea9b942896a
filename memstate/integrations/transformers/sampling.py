"""Chooses the next token of each row as `generate` does, with the model's own processors of logits."""

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

# model -> ((inputs, config that was made from them), ..)
LAST: Final[WeakKeyDictionary[Any, tuple[tuple[Any, GenerationConfig], ...]]] = WeakKeyDictionary()
REMEMBERED: Final = 8  # number of newest configs that are kept for a model


class Sampler:
    """Chooses the tokens of one sample of a request, and says when it ends.

    Args:
        model: the model.
        prompt: the request.
        tokenizer: tokenizer that decodes text for stop strings; None: no text and no stop strings.
        sample: number of the sample.

    Attributes:
        most: limit of the new tokens.
        samples: number of samples of the request.
        lookup: limit of the tokens of a guess that is looked up in the text so far; 0: no lookup.
        ngram: limit of the last tokens that the lookup compares; None: the default of Transformers.
        guesses: limit of the tokens to guess.
        text: the text of the answer.
        plain: whether the token with the largest logit is always chosen.

    Raises:
        InvalidArgument: the config asks for stop strings without a tokenizer; for `max_time`; for a mode of `generate`
            in which a row does not choose its tokens alone, such as beams; or for several samples that continue a
            session. Or the prompt is not shorter than `max_length`, or settings are not valid or contradict each other.
    """

    def __init__(self, model: Any, prompt: Prompt, tokenizer: Any = None, sample: int = 0) -> None:
        length, of, device = len(prompt.tokens), f"prompt {prompt.id!r}", model.device
        require(prompt, "config", isinstance(prompt.config, GenerationConfig | None), "a GenerationConfig")
        most = None if prompt.most is None else whole(f"{of}: most", prompt.most)
        try:
            config = copy(prepared(model, prompt.config or model.generation_config, device))
            ends = [] if config.eos_token_id is None else config.eos_token_id
            ends = torch.as_tensor(ends, dtype=torch.long, device="cpu")
        # for example: several greedy samples, or end tokens as a set
        except (TypeError, ValueError, RuntimeError) as error:
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
        if stops:  # the ids of special tokens end the answer as well: they have no text
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
            logits: logits after these tokens, `vocabulary`.

        Syncs: yes.
        """
        ids = torch.tensor([tokens], device=logits.device)
        scores = self._processors(ids, logits[None].to(torch.float32, copy=True))  # copied: processors may change it
        if scores.shape != (1, len(logits)):
            raise InvalidArgument(f"processors made logits of shape {tuple(scores.shape)}: expected (1, {len(logits)})")
        if not self._sample:
            return int(scores.argmax())
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))

    def stop(self, tokens: Sequence[int]) -> int | str | None:
        """Returns the token or the stop string that ends an answer; None if the answer goes on.

        Args:
            tokens: all tokens so far, which `text` has read.
        """
        return self.text.stop if self.text.stop is not None else self._ends.get(tokens[-1])

    def reason(self, tokens: Sequence[int], new: int) -> Reason | None:
        """Returns why a row ends, or None if it goes on.

        Args:
            tokens: all tokens so far.
            new: number of new tokens among them.
        """
        if (stop := self.stop(tokens)) is not None:
            return "stop" if isinstance(stop, str) else "end"
        return "length" if new >= self.most else None


def prepared(model: Any, config: GenerationConfig, device: torch.device) -> GenerationConfig:
    """Returns the config that `generate` makes of a config. Keeps results, because each takes longer than a forward.

    Args:
        model: the model.
        config: the request's config.
        device: the model's device.
    """
    given = (vars(config), vars(model.generation_config), device)
    last = LAST.get(model, ())  # read once, because another thread may replace the entry
    for known, kept in last:
        with suppress(RuntimeError, ValueError):  # tensors or arrays as end tokens cannot be compared
            if known == given:
                return kept
    key, mine = deepcopy(given), deepcopy(config)
    has_length = any(one.max_length is not None for one in (mine, model.generation_config))
    made: GenerationConfig = model._prepare_generation_config(mine)[0]
    if made.max_new_tokens is None and not has_length:  # the default max_length counts only new tokens
        made.max_new_tokens = made.max_length
    model._prepare_special_tokens(made, True, device=device)
    LAST[model] = ((key, made), *last[: REMEMBERED - 1])
    return made


def choose(samplers: Sequence[Sampler], tokens: Sequence[Sequence[int]], logits: Tensor) -> list[int | Exception]:
    """Returns the next token of each row, or the exception of its processors.

    Rows that take the largest logit share one launch.

    Args:
        samplers: the sampler of each row.
        tokens: all tokens of each row so far.
        logits: `batch vocabulary`.

    Syncs: yes.
    """
    largest = logits.argmax(-1).tolist()
    chosen: list[int | Exception] = []
    for entry, sampler in enumerate(samplers):
        try:
            chosen.append(largest[entry] if sampler.plain else sampler.choose(tokens[entry], logits[entry]))
        except Exception as error:
            chosen.append(error)
    return chosen


def logprobs(
    asked: Sequence[int | None], tokens: Sequence[int | Exception], logits: Tensor
) -> list[tuple[float | None, Top]]:
    """Returns for each row (logprob of its chosen token, its most likely tokens with their logprobs).

    A row that does not ask for them gets (None, ()).

    Args:
        asked: for each row, how many of the most likely tokens it asks for; None: it asks for no logprobs.
        tokens: the chosen token of each row, or the exception of its processors.
        logits: the model's own logits, `batch vocabulary`.

    Syncs: yes, if any row asks.
    """
    results: list[tuple[float | None, Top]] = [(None, ())] * len(asked)
    if rows := [n for n, token in enumerate(tokens) if asked[n] is not None and isinstance(token, int)]:
        scores = logits[rows].float().log_softmax(-1)
        own = scores[range(len(rows)), [tokens[n] for n in rows]].tolist()
        best = scores.topk(min(max(asked[n] or 0 for n in rows), scores.shape[1]))
        for n, logprob, values, ids in zip(rows, own, best.values.tolist(), best.indices.tolist(), strict=True):
            results[n] = logprob, tuple(zip(ids, values, strict=True))[: asked[n]]
    return results
