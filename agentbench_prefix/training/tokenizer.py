"""A whole-word tokenizer for a small domain that still round-trips any text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_word_tokenizer(texts: Iterable[str], vocabulary_size: int) -> Any:
    """Make a tokenizer whose tokens are the most frequent words of a domain.

    Text is cut into words, numbers, punctuation and white space, each with its leading space. A
    piece in the vocabulary is one token, any other piece is spelled in bytes, so that encoding then
    decoding gives back every text. All numbers from 0 to 99 are tokens.

    Args:
        texts: Sample of the domain.
        vocabulary_size: Number of tokens, special tokens and the 256 bytes included.

    Returns:
        A ``transformers.PreTrainedTokenizerFast`` with a chat template.

    Raises:
        ValueError: ``vocabulary_size`` cannot hold the bytes, numbers and special tokens.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(piece for piece, _ in splitter.pre_tokenize_str(text))
    required = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    numbers = [f"{space}{n}" for n in range(100) for space in ("", "\u0120")]
    required += [number for number in numbers if number not in required]
    if vocabulary_size < len(required):
        raise ValueError(f"vocabulary_size must be at least {len(required)}, got {vocabulary_size}")
    # Ties are broken by the text itself, so that the same sample gives the same vocabulary.
    words = sorted((w for w in counts if w not in set(required)), key=lambda w: (-counts[w], w))
    vocabulary = {token: i for i, token in enumerate([*required, *words][:vocabulary_size])}

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",  # noqa: S106
        eos_token="<|end|>",  # noqa: S106
        extra_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
