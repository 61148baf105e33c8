"""Trains small tokenizers for tests."""

from collections.abc import Iterable

from tokenizers import Tokenizer

from pretrain.config.prepare import TokenizerConfig
from pretrain.tokenizer import train_tokenizer


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE with an end of document."""
    return train_tokenizer(texts, TokenizerConfig(kind="bpe", vocab_size=vocab_size))


def train_char(texts: Iterable[str]) -> Tokenizer:
    """A character-level tokenizer with an end of document."""
    return train_tokenizer(texts, TokenizerConfig(kind="char"))
