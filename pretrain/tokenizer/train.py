"""One tokenizer by its config: what can be refused before any text is read, and the trainer of each kind."""

from collections.abc import Callable, Iterable

from tokenizers import Tokenizer

from pretrain.config.prepare import TokenizerConfig
from pretrain.errors import ConfigError
from pretrain.tokenizer.bpe import check_bpe_size, train_bpe
from pretrain.tokenizer.char import train_char
from pretrain.tokenizer.layout import Layout, plan_layout
from pretrain.tokenizer.rules import TextRules, plan_rules
from pretrain.tokenizer.unigram import check_unigram_size, train_unigram
from pretrain.tokenizer.wordpiece import check_wordpiece_size, train_wordpiece

DEFAULT_VOCAB_SIZE = 8192

Train = Callable[[Iterable[str], int, Layout, TextRules], Tokenizer]
"""Texts, size of the vocabulary with `layout.last` in it, layout, rules."""

TRAINED_KINDS: dict[str, tuple[Callable[[int, Layout], None], Train]] = {
    "bpe": (check_bpe_size, train_bpe),
    "wordpiece": (check_wordpiece_size, train_wordpiece),
    "unigram": (check_unigram_size, train_unigram),
    "char": (lambda size, layout: None, lambda texts, size, layout, rules: train_char(texts, layout, rules)),
}
"""The check of its size, and the trainer, of each kind."""

_SHAPING = ("lowercase", "normalizer", "split_digits", "roles", "sentinels")


def check_tokenizer(config: TokenizerConfig) -> None:
    """Checks what can be checked before there are texts.

    Raises:
        ConfigError: Options that a given tokenizer cannot have, no room in the vocabulary, or a special token that
            could not be told from text.
    """
    if config.kind == "given":
        for name in _SHAPING:
            if getattr(config, name) != TokenizerConfig.model_fields[name].default:
                raise ConfigError(
                    f"tokenizer.{name}={getattr(config, name)} does not go with kind=given, which has its own",
                    fix="leave it out",
                )
        return
    check, _ = TRAINED_KINDS[config.kind]
    check(config.vocab_size or DEFAULT_VOCAB_SIZE, plan_layout(config))


def train_tokenizer(texts: Iterable[str], config: TokenizerConfig) -> Tokenizer:
    """Trains the tokenizer of a config; the same texts give the same tokenizer, whatever the number of threads.

    Raises:
        ConfigError: See `check_tokenizer`.
    """
    assert config.kind in TRAINED_KINDS, "a given tokenizer is read"
    _, train = TRAINED_KINDS[config.kind]
    return train(texts, config.vocab_size or DEFAULT_VOCAB_SIZE, plan_layout(config), plan_rules(config))
