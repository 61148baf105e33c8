"""Training of a tokenizer, of any kind, and the checks that need no text.

    texts -> normalizer, pre-tokenizer (`words.py`) -> trainer of the kind
          -> special tokens (`special_tokens.py`)

The same texts give the same bytes, independent of the number of threads: alphabets and words, which
`tokenizers` orders by a hash table, are chosen and ordered here.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from itertools import cycle
from multiprocessing.pool import ThreadPool
from threading import Event

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pretrain.config.prepare import TokenizerConfig
from pretrain.errors import ConfigError
from pretrain.tokenizer.special_tokens import EOS, SpecialTokenLayout, finish, plan_layout
from pretrain.tokenizer.words import (
    SPACE,
    build_normalizer,
    build_pre_tokenizer,
    choose_alphabet,
    count_words,
    most_frequent,
    repeat_words,
    split_words,
)
from pretrain.utils.safe_read import parse_json

DEFAULT_VOCAB_SIZE = 8192

_PREFIX = "##"
_MAX_WORD_CHARS = 100
"""A longer word is the unknown token of WordPiece, as in BERT."""
_MAX_ALPHABET = 1000

_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_COVERAGE = 0.9995
"""Share of the text that the alphabet of Unigram covers; the rest is spelled in bytes."""
_MAX_PART_CHARS = 1024
"""Longer words are trained on in parts of this length."""
_MAX_WORDS = 1 << 17
"""Most frequent words that are trained on; the time is proportional to their number."""
_MARKS = frozenset(map(chr, range(0xF0000, 0xF0100)))
"""Characters for private use, which training reserves; a text spells them in bytes."""
_SCORE_DIGITS = 4
_PENALTY = 1e-4
_TRAINERS_UNK = "<UNK>"
_WAKE_S = 0.1


def _run_trainer(trainer: trainers.Trainer, learner: Tokenizer, texts: Iterable[str]) -> None:
    """Trains in a thread that Ctrl-C leaves at once: `tokenizers` looks for no signal, for up to minutes."""
    is_over = Event()

    def read() -> Iterator[str]:
        for text in texts:
            if is_over.is_set():
                raise CancelledError
            yield text

    with ThreadPool(1) as pool:
        try:
            result = pool.apply_async(learner.train_from_iterator, (read(), trainer))
            # A signal may be delivered to the other thread, which does not wake this one.
            while not result.ready():
                result.wait(_WAKE_S)
            result.get()
        finally:
            is_over.set()


def _train_bpe(tokenizer: Tokenizer, texts: Iterable[str], vocab_size: int, layout: SpecialTokenLayout) -> None:
    """Trains a byte-level BPE (Sennrich et al. 2016; GPT-2's pre-tokenizer, Radford et al. 2019, 2.2).

    Any text round-trips, once normalized: the vocabulary has the 256 bytes. It is smaller than
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
    _run_trainer(trainer, tokenizer, texts)


def _train_char(tokenizer: Tokenizer, texts: Iterable[str], vocab_size: int, layout: SpecialTokenLayout) -> None:
    """Builds a character-level vocabulary: ids are in the order of the characters by code point.

    Without roles, an id is the rank of its character, and `<unk>`, for characters never seen, and
    the end of a document come last. Only text without unseen characters round-trips.
    """
    assert layout.unk is not None
    normalizer = tokenizer.normalizer
    characters: set[str] = set()
    for text in texts:
        characters.update(text if normalizer is None else normalizer.normalize_str(text))
    entries = [*layout.first, *sorted(characters)]
    if layout.unk not in layout.first:
        entries.append(layout.unk)
    vocab = {entry: number for number, entry in enumerate(entries)}
    tokenizer.model = models.WordLevel(vocab, unk_token=layout.unk)
    tokenizer.decoder = decoders.Fuse()


def _train_wordpiece(tokenizer: Tokenizer, texts: Iterable[str], vocab_size: int, layout: SpecialTokenLayout) -> None:
    """Trains a WordPiece vocabulary (Wu et al. 2016; pre-tokenizer of Devlin et al. 2019).

    It is not lossless: white space is only where words part, and a word is the unknown token if it
    has a character outside the vocabulary, which has the thousand most frequent ones at most. Pairs
    are merged by their frequency, as in `tokenizers` and most others. About 2 MB/s of text.
    """
    assert layout.unk is not None
    words = count_words(texts, tokenizer)
    alphabet = choose_alphabet(words, min(_MAX_ALPHABET, (vocab_size - layout.num_special) // 2))
    characters = frozenset(alphabet)
    short = {word: count for word, count in words.items() if len(word) <= _MAX_WORD_CHARS}
    spelled = Counter({word: count for word, count in short.items() if characters.issuperset(word)})
    within = sorted({_PREFIX + character for word in spelled for character in word[1:]})
    learner = Tokenizer(models.WordPiece(unk_token=layout.unk))
    learner.pre_tokenizer = split_words()
    # As special tokens of the learner, the characters within words have ids in this order.
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size - len(layout.last),
        min_frequency=2,
        special_tokens=[*layout.first, *within],
        initial_alphabet=alphabet,
        continuing_subword_prefix=_PREFIX,
        show_progress=False,
    )
    _run_trainer(trainer, learner, repeat_words(spelled))
    tokenizer.model = models.WordPiece(
        dict(learner.get_vocab()), unk_token=layout.unk, max_input_chars_per_word=_MAX_WORD_CHARS
    )
    tokenizer.decoder = decoders.WordPiece(_PREFIX)


def _spelling_alphabet(layout: SpecialTokenLayout) -> set[str]:
    """Returns characters that need pieces: no special token or byte may spell a text best."""
    return {character for content in (*layout.first, *_BYTES) for character in content}


def _train_unigram(tokenizer: Tokenizer, texts: Iterable[str], vocab_size: int, layout: SpecialTokenLayout) -> None:
    """Trains a Unigram language model (Kudo 2018) over words that begin with their space, in place.

    Any text round-trips, once normalized, but for the character U+2581, which is read as a space:
    characters without a piece are spelled in bytes, as in SentencePiece. The vocabulary is smaller
    than `vocab_size` if the texts have fewer pieces. The slowest kind to train by far: a minute and
    a half for 20 MB of text, and little more for more.
    """
    room = vocab_size - layout.num_special - len(_BYTES)
    vocab = _build_vocab(_learn(count_words(texts, tokenizer), room, layout), layout)
    tokenizer.model = models.Unigram(vocab, layout.first.index(str(layout.unk)), byte_fallback=True)
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(SPACE, prepend_scheme="never"), decoders.Fuse()]
    )


def _learn(words: Counter[str], room: int, layout: SpecialTokenLayout) -> list[tuple[str, float]]:
    """Returns at most `room` pieces with their log probabilities, the most likely first."""
    spelling = _spelling_alphabet(layout)
    chosen = choose_alphabet(words, max(0, room // 2 - len(spelling)), _COVERAGE)
    alphabet = spelling.union(chosen).difference(_MARKS)
    spelled = most_frequent(_spell(words, alphabet), _MAX_WORDS)
    if not spelled:
        return [(character, -1.0) for character in sorted(alphabet)]
    _mark(spelled, room)
    learner = Tokenizer(models.Unigram())
    learner.pre_tokenizer = split_words()
    letters = sorted(alphabet.union(_MARKS))
    trainer = trainers.UnigramTrainer(vocab_size=room + len(_MARKS), initial_alphabet=letters, show_progress=False)
    _run_trainer(trainer, learner, repeat_words(spelled))
    settled = _settle(parse_json(learner.to_str())["model"]["vocab"])
    return [(piece, score) for piece, score in settled if _MARKS.isdisjoint(piece)]


def _mark(spelled: Counter[str], limit: int) -> None:
    """Appends a mark, in place, to one occurrence of each of the most frequent words."""
    # The trainer's candidates are strings that different characters follow. A word is followed by
    # its end only, and without the mark would be no candidate, however frequent. Each mark follows
    # too few words for a piece of its own.
    marks = cycle(sorted(_MARKS))
    for word in list(most_frequent(spelled, limit)):
        if spelled[word] > 1:
            spelled[word] -= 1
            spelled[word + next(marks)] = 1


def _spell(words: Counter[str], alphabet: set[str]) -> Counter[str]:
    """Splits words at foreign characters, at the trainer's own token, and at a largest length."""
    spelled: Counter[str] = Counter()
    foreign = re.compile(f"[^{re.escape(''.join(sorted(alphabet)))}]+")
    for word, count in words.items():
        escaped = word.replace(_TRAINERS_UNK, _TRAINERS_UNK[0] + "\0" + _TRAINERS_UNK[1:])
        for part in foreign.split(escaped):
            for start in range(0, len(part), _MAX_PART_CHARS):
                spelled[part[start : start + _MAX_PART_CHARS]] += count
    return spelled


def _settle(pieces: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Returns the pieces with scores that are the same on every run."""
    # The trainer adds up in the order of a hash table, so that the last of sixteen digits change
    # from run to run: scores are rounded. Characters that it dropped and has to bring back, it
    # places above the lowest score, one `_PENALTY` after the other: they all get the lowest.
    lowest = min(score for _, score in pieces)
    brought_back = lowest + _PENALTY * (1 + sum(len(piece) == 1 for piece, _ in pieces))
    settled = []
    for piece, score in pieces:
        is_back = len(piece) == 1 and score <= brought_back
        settled.append((piece, round(lowest if is_back else score, _SCORE_DIGITS)))
    return sorted(settled, key=lambda item: (-item[1], item[0]))


def _build_vocab(pieces: list[tuple[str, float]], layout: SpecialTokenLayout) -> list[tuple[str, float]]:
    """Puts `first` and the bytes before the pieces, with scores below their spellings'."""
    reserved = (*layout.first, *_BYTES)
    lowest = min(-1.0, *(score for _, score in pieces))
    unreachable = float(round(lowest * (1 + max(map(len, reserved)))) - 1)
    vocab = [(content, unreachable) for content in reserved]
    for piece, score in pieces:
        if piece not in _BYTES and not layout.is_reserved(piece):
            vocab.append((piece, score))
    return vocab


_TRAINERS: dict[str, Callable[[Tokenizer, Iterable[str], int, SpecialTokenLayout], None]] = {
    "bpe": _train_bpe,
    "wordpiece": _train_wordpiece,
    "unigram": _train_unigram,
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
        least = layout.num_special + len(_BYTES) + len(_spelling_alphabet(layout)) + 1
        needs = f"the 256 bytes, {special} and the characters that spell them"
    else:
        return
    if vocab_size < least:
        usual = "; 30,000 are usual" if kind == "wordpiece" else ""
        raise ConfigError(f"vocab_size={vocab_size} has no room for {needs}", fix=f"use {least} or more{usual}")


def check_tokenizer(config: TokenizerConfig) -> None:
    """Checks a config without texts.

    Raises:
        ConfigError: Options that a given tokenizer cannot have, no room in the vocabulary, or a
            special token that could be confused with text.
    """
    if config.kind == "given":
        for name in _SHAPING:
            if getattr(config, name) != TokenizerConfig.model_fields[name].default:
                text = f"tokenizer.{name}={getattr(config, name)} does not go with kind=given"
                raise ConfigError(f"{text}, which has its own", fix="leave it out")
        return
    _check_size(config.kind, config.vocab_size or DEFAULT_VOCAB_SIZE, plan_layout(config))


def train_tokenizer(texts: Iterable[str], config: TokenizerConfig) -> Tokenizer:
    """Trains the tokenizer of a config. Raises: ConfigError, as `check_tokenizer`."""
    layout = plan_layout(config)
    vocab_size = config.vocab_size or DEFAULT_VOCAB_SIZE
    _check_size(config.kind, vocab_size, layout)
    tokenizer = Tokenizer(models.BPE())
    if (normalizer := build_normalizer(config)) is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = build_pre_tokenizer(config.kind, config.split_digits)
    _TRAINERS[config.kind](tokenizer, texts, vocab_size, layout)
    return finish(tokenizer, layout)
