"""Makes tiny tokenizers of two kinds: byte pairs like GPT-2's, and word pieces like SentencePiece's."""

from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SAID: Final = "naïve €uros — 你好, 😀 and 👍🏽 went home. Stop! No: go on, and on"


def byte_level(size: int = 300) -> PreTrainedTokenizerFast:
    """Returns a tokenizer like GPT-2's: most tokens are parts of characters or of words. `<|end|>` is special."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    made.train_from_iterator([SAID], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made)


def words() -> PreTrainedTokenizerFast:
    """Returns a tokenizer like SentencePiece's: a token includes the space before it; unknown characters are bytes."""
    pieces = ["<unk>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), "▁", "▁and", "▁go", "▁home", "ing", "s", ".", "S"]
    known: Any = {piece: n for n, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocab=known, merges=[], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=made)
