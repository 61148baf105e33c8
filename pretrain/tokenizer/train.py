"""Byte-level BPE."""

from collections import Counter
from collections.abc import Callable, Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pretrain.config.prepare import TokenizerConfig
from pretrain.errors import ConfigError
from pretrain.tokenizer.special_tokens import (
    CHAR_DOCUMENT,
    DOCUMENT,
    EOS,
    PLAIN,
    SpecialTokenLayout,
    TextRules,
    finish,
    plan_layout,
    plan_rules,
    split_characters,
)
from pretrain.tokenizer.unigram import check_unigram_size, train_unigram
from pretrain.tokenizer.words import choose_alphabet, count_words, repeat_words, split_words

MIN_BPE_VOCAB_SIZE = 256 + 1

"""Every byte, and the end of a document."""


def check_bpe_size(vocab_size: int, layout: SpecialTokenLayout = DOCUMENT) -> None:
    """Raises: ConfigError, where a byte-level BPE of this size has no room for the bytes."""
    least = 256 + layout.num_special
    if vocab_size < least:
        special = EOS if layout == DOCUMENT else f"{layout.num_special} special tokens"
        raise ConfigError(
            f"vocab_size={vocab_size} has no room for the 256 bytes and {special}", fix=f"use {least} or more"
        )


def train_bpe(
    texts: Iterable[str], vocab_size: int, layout: SpecialTokenLayout = DOCUMENT, rules: TextRules = PLAIN
) -> Tokenizer:
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


# The character level.


def train_char(texts: Iterable[str], layout: SpecialTokenLayout = CHAR_DOCUMENT, rules: TextRules = PLAIN) -> Tokenizer:
    """Builds a character-level tokenizer: ids are in the order of the characters seen, by code point.

    Without roles, an id is the rank of its character, and `<unk>`, which stands for a character never seen, and the
    end of a document come last. Only text without unseen characters round-trips.
    """
    assert layout.unk is not None
    normalizer = rules.normalize()
    characters: set[str] = set()
    for text in texts:
        characters.update(text if normalizer is None else normalizer.normalize_str(text))
    entries = [*layout.first, *sorted(characters)]
    if layout.unk not in layout.first:
        entries.append(layout.unk)
    vocab = {entry: number for number, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=layout.unk))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = split_characters()
    tokenizer.decoder = decoders.Fuse()
    return finish(tokenizer, layout)


# WordPiece, as in BERT.


PREFIX = "##"

"""Of a piece that continues a word."""

MAX_WORD_CHARS = 100

"""A longer word is unknown, as in BERT."""

MAX_ALPHABET = 1000


def check_wordpiece_size(vocab_size: int, layout: SpecialTokenLayout) -> None:
    """Raises: ConfigError, where there is no room for a character, at the beginning of a word and within."""
    if vocab_size < layout.num_special + 2:
        raise ConfigError(
            f"vocab_size={vocab_size} has no room for {layout.num_special} special tokens and a character",
            fix=f"use {layout.num_special + 2} or more; 30,000 are usual",
        )


def train_wordpiece(
    texts: Iterable[str], vocab_size: int, layout: SpecialTokenLayout, rules: TextRules = PLAIN
) -> Tokenizer:
    """Trains a WordPiece vocabulary (Wu et al. 2016; normalizer and pre-tokenizer of Devlin et al. 2019).

    It is not lossless: white space is only where words part, and a word is the unknown token if it has a character
    that is not in the vocabulary, which holds the thousand most frequent ones at most. Pairs are joined by how often
    they stand together, as `tokenizers` and most others do it. About 2 MB/s of text.

    Raises:
        ConfigError: `vocab_size` has no room for the special tokens and a character.
    """
    check_wordpiece_size(vocab_size, layout)
    assert layout.unk is not None
    tokenizer = Tokenizer(models.WordPiece(unk_token=layout.unk, max_input_chars_per_word=MAX_WORD_CHARS))
    tokenizer.normalizer, tokenizer.pre_tokenizer = rules.normalize_bert(), rules.split_bert()
    words = count_words(texts, tokenizer)
    room = vocab_size - layout.num_special
    vocab = _learn(words, choose_alphabet(words, min(MAX_ALPHABET, room // 2)), vocab_size, layout)
    tokenizer.model = models.WordPiece(vocab, unk_token=layout.unk, max_input_chars_per_word=MAX_WORD_CHARS)
    tokenizer.decoder = decoders.WordPiece(PREFIX)
    return finish(tokenizer, layout)


def _learn(words: Counter[str], alphabet: list[str], vocab_size: int, layout: SpecialTokenLayout) -> dict[str, int]:
    """Returns the model's vocabulary: `first`, the characters within words, those that begin one, what is joined."""
    known = frozenset(alphabet)
    spelled = Counter({w: count for w, count in words.items() if len(w) <= MAX_WORD_CHARS and known.issuperset(w)})
    within = sorted({PREFIX + character for word in spelled for character in word[1:]})
    learner = Tokenizer(models.WordPiece(unk_token=layout.unk))
    learner.pre_tokenizer = split_words()
    # Given as special tokens, the characters within words have ids in this order, not in that of a hash table. They
    # are special to the learner only.
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size - len(layout.last),
        min_frequency=2,
        special_tokens=[*layout.first, *within],
        initial_alphabet=alphabet,
        continuing_subword_prefix=PREFIX,
        show_progress=False,
    )
    learner.train_from_iterator(repeat_words(spelled), trainer)
    return dict(learner.get_vocab())


# One tokenizer by its config: what can be refused before any text is read, and the trainer of each
# kind.


DEFAULT_VOCAB_SIZE = 8192

Train = Callable[[Iterable[str], int, SpecialTokenLayout, TextRules], Tokenizer]

"""Texts, size of the vocabulary with `layout.last` in it, layout, rules."""

TRAINED_KINDS: dict[str, tuple[Callable[[int, SpecialTokenLayout], None], Train]] = {
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
