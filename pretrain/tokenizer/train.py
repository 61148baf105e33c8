"""Training of a tokenizer, of any kind, and the checks that need no text.

    texts -> normalizer, pre-tokenizer (`words.py`) -> trainer of the kind -> special tokens (`special_tokens.py`)

The same texts give the same bytes, independent of the number of threads: what `tokenizers` orders by a hash table is
chosen and ordered here.
"""

from collections import Counter
from collections.abc import Callable, Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pretrain.config.prepare import TokenizerConfig
from pretrain.errors import ConfigError
from pretrain.tokenizer.special_tokens import EOS, SpecialTokenLayout, finish, plan_layout
from pretrain.tokenizer.unigram import least_unigram_size, train_unigram
from pretrain.tokenizer.words import (
    build_normalizer,
    build_pre_tokenizer,
    choose_alphabet,
    count_words,
    repeat_words,
    split_words,
)

DEFAULT_VOCAB_SIZE = 8192

_PREFIX = "##"
_MAX_WORD_CHARS = 100
"""A longer word is the unknown token of WordPiece, as in BERT."""

_MAX_ALPHABET = 1000


def _train_bpe(tokenizer: Tokenizer, texts: Iterable[str], vocab_size: int, layout: SpecialTokenLayout) -> None:
    """Trains a byte-level BPE (Sennrich et al. 2016; GPT-2's pre-tokenizer, Radford et al. 2019, 2.2).

    Any text round-trips, once normalized: the 256 bytes are in the vocabulary. The vocabulary is smaller than
    `vocab_size` if the texts run out of pairs that occur twice. About 4 MB/s of text.
    """
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(layout.last),
        min_frequency=2,
        special_tokens=list(layout.first),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter(texts), trainer)


def _train_char(tokenizer: Tokenizer, texts: Iterable[str], vocab_size: int, layout: SpecialTokenLayout) -> None:
    """Builds a character-level vocabulary: ids are in the order of the characters seen, by code point.

    Without roles, an id is the rank of its character, and `<unk>`, which stands for a character never seen, and the
    end of a document come last. Only text without unseen characters round-trips.
    """
    assert layout.unk is not None
    normalizer = tokenizer.normalizer
    characters: set[str] = set()
    for text in texts:
        characters.update(text if normalizer is None else normalizer.normalize_str(text))
    entries = [*layout.first, *sorted(characters)]
    if layout.unk not in layout.first:
        entries.append(layout.unk)
    tokenizer.model = models.WordLevel({entry: number for number, entry in enumerate(entries)}, unk_token=layout.unk)
    tokenizer.decoder = decoders.Fuse()


def _train_wordpiece(tokenizer: Tokenizer, texts: Iterable[str], vocab_size: int, layout: SpecialTokenLayout) -> None:
    """Trains a WordPiece vocabulary (Wu et al. 2016; normalizer and pre-tokenizer of Devlin et al. 2019).

    It is not lossless: white space is only where words part, and a word is the unknown token if it has a character
    outside the vocabulary, which has the thousand most frequent ones at most. Pairs are merged by their frequency, as
    `tokenizers` and most others do it. About 2 MB/s of text.
    """
    assert layout.unk is not None
    words = count_words(texts, tokenizer)
    alphabet = choose_alphabet(words, min(_MAX_ALPHABET, (vocab_size - layout.num_special) // 2))
    known = frozenset(alphabet)
    spelled = Counter({w: count for w, count in words.items() if len(w) <= _MAX_WORD_CHARS and known.issuperset(w)})
    within = sorted({_PREFIX + character for word in spelled for character in word[1:]})
    learner = Tokenizer(models.WordPiece(unk_token=layout.unk))
    learner.pre_tokenizer = split_words()
    # As special tokens of the learner, the characters within words have ids in this order, not in that of a hash table.
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size - len(layout.last),
        min_frequency=2,
        special_tokens=[*layout.first, *within],
        initial_alphabet=alphabet,
        continuing_subword_prefix=_PREFIX,
        show_progress=False,
    )
    learner.train_from_iterator(repeat_words(spelled), trainer)
    vocab = dict(learner.get_vocab())
    tokenizer.model = models.WordPiece(vocab, unk_token=layout.unk, max_input_chars_per_word=_MAX_WORD_CHARS)
    tokenizer.decoder = decoders.WordPiece(_PREFIX)


_TRAINERS: dict[str, Callable[[Tokenizer, Iterable[str], int, SpecialTokenLayout], None]] = {
    "bpe": _train_bpe,
    "wordpiece": _train_wordpiece,
    "unigram": train_unigram,
    "char": _train_char,
}
"""Trainer by kind; the size of the vocabulary includes `layout.last`."""

TRAINED_KINDS = frozenset(_TRAINERS)

_SHAPING = ("lowercase", "normalizer", "split_digits", "roles", "sentinels")


def _check_size(kind: str, vocab_size: int, layout: SpecialTokenLayout) -> None:
    special = f"{layout.num_special} special tokens"
    if kind == "bpe":
        least = 256 + layout.num_special
        needs = f"the 256 bytes and {EOS if layout.first == (EOS,) else special}"
    elif kind == "wordpiece":
        least = layout.num_special + 2  # a character at the beginning of a word, and within
        needs = f"{special} and a character"
    elif kind == "unigram":
        least = least_unigram_size(layout)
        needs = f"the 256 bytes, {special} and the characters that spell them"
    else:
        return
    if vocab_size < least:
        usual = "; 30,000 are usual" if kind == "wordpiece" else ""
        raise ConfigError(f"vocab_size={vocab_size} has no room for {needs}", fix=f"use {least} or more{usual}")


def check_tokenizer(config: TokenizerConfig) -> None:
    """Checks a config without texts.

    Raises:
        ConfigError: Options that a given tokenizer cannot have, no room in the vocabulary, or a special token that
            could be confused with text.
    """
    if config.kind == "given":
        for name in _SHAPING:
            if getattr(config, name) != TokenizerConfig.model_fields[name].default:
                raise ConfigError(
                    f"tokenizer.{name}={getattr(config, name)} does not go with kind=given, which has its own",
                    fix="leave it out",
                )
        return
    _check_size(config.kind, config.vocab_size or DEFAULT_VOCAB_SIZE, plan_layout(config))


def train_tokenizer(texts: Iterable[str], config: TokenizerConfig) -> Tokenizer:
    """Trains the tokenizer of a config; the same texts give the same tokenizer.

    Raises:
        ConfigError: See `check_tokenizer`.
    """
    assert config.kind in TRAINED_KINDS, "a given tokenizer is read"
    layout, vocab_size = plan_layout(config), config.vocab_size or DEFAULT_VOCAB_SIZE
    _check_size(config.kind, vocab_size, layout)
    tokenizer = Tokenizer(models.BPE())
    if (normalizer := build_normalizer(config)) is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = build_pre_tokenizer(config.kind, config.split_digits)
    _TRAINERS[config.kind](tokenizer, texts, vocab_size, layout)
    return finish(tokenizer, layout)


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE with an end of document. Raises: ConfigError, where the bytes have no room."""
    return train_tokenizer(texts, TokenizerConfig(kind="bpe", vocab_size=vocab_size))


def train_char(texts: Iterable[str]) -> Tokenizer:
    """Builds a character-level tokenizer with an end of document."""
    return train_tokenizer(texts, TokenizerConfig(kind="char"))
