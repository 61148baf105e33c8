"""WordPiece, as in BERT."""

from collections import Counter
from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, trainers

from pretrain.errors import ConfigError
from pretrain.tokenizer.layout import Layout, finish
from pretrain.tokenizer.rules import PLAIN, TextRules
from pretrain.tokenizer.words import choose_alphabet, count_words, repeat_words, split_words

PREFIX = "##"
"""Of a piece that continues a word."""

MAX_WORD_CHARS = 100
"""A longer word is unknown, as in BERT."""

MAX_ALPHABET = 1000


def check_wordpiece_size(vocab_size: int, layout: Layout) -> None:
    """Raises: ConfigError, where there is no room for a character, at the beginning of a word and within."""
    if vocab_size < layout.num_special + 2:
        raise ConfigError(
            f"vocab_size={vocab_size} has no room for {layout.num_special} special tokens and a character",
            fix=f"use {layout.num_special + 2} or more; 30,000 are usual",
        )


def train_wordpiece(texts: Iterable[str], vocab_size: int, layout: Layout, rules: TextRules = PLAIN) -> Tokenizer:
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


def _learn(words: Counter[str], alphabet: list[str], vocab_size: int, layout: Layout) -> dict[str, int]:
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
