"""Byte-level BPE."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pretrain.errors import ConfigError
from pretrain.tokenizer.layout import DOCUMENT, EOS, Layout, finish
from pretrain.tokenizer.rules import PLAIN, TextRules

MIN_BPE_VOCAB_SIZE = 256 + 1
"""Every byte, and the end of a document."""


def check_bpe_size(vocab_size: int, layout: Layout = DOCUMENT) -> None:
    """Raises: ConfigError, where a byte-level BPE of this size has no room for the bytes."""
    least = 256 + layout.num_special
    if vocab_size < least:
        special = EOS if layout == DOCUMENT else f"{layout.num_special} special tokens"
        raise ConfigError(
            f"vocab_size={vocab_size} has no room for the 256 bytes and {special}", fix=f"use {least} or more"
        )


def train_bpe(texts: Iterable[str], vocab_size: int, layout: Layout = DOCUMENT, rules: TextRules = PLAIN) -> Tokenizer:
    """Trains a byte-level BPE (Sennrich et al. 2016; GPT-2's pre-tokenizer, Radford et al. 2019, 2.2).

    Any text round-trips, as it is once normalized: the 256 bytes are in the vocabulary. The vocabulary is smaller than
    `vocab_size` if the texts run out of pairs that occur twice. About 4 MB/s of text.

    Raises:
        ConfigError: `vocab_size` has no room for the bytes.
    """
    check_bpe_size(vocab_size, layout)
    tokenizer = Tokenizer(models.BPE())
    if normalizer := rules.normalize():
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = rules.split_bytes()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(layout.last),
        min_frequency=2,
        special_tokens=list(layout.first),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter(texts), trainer)
    return finish(tokenizer, layout)
