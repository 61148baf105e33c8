"""Trainer of Unigram, as in SentencePiece, with byte fallback."""

import json
import re
from collections import Counter
from collections.abc import Iterable
from itertools import cycle

from tokenizers import Tokenizer, decoders, models, trainers

from pretrain.tokenizer.special_tokens import SpecialTokenLayout
from pretrain.tokenizer.words import SPACE, choose_alphabet, count_words, most_frequent, repeat_words, split_words

BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
COVERAGE = 0.9995
"""Share of the text that its alphabet covers, as in SentencePiece; the rest is spelled in bytes."""

MAX_WORD_CHARS = 1024
"""Longer words are trained on in parts of this length."""

MAX_WORDS = 1 << 17
"""Most frequent words that are trained on; the time is proportional to their number."""

_MARKS = frozenset(map(chr, range(0xF0000, 0xF0100)))
"""Characters for private use, which training reserves; a text spells them in bytes."""

_SCORE_DIGITS = 4
_PENALTY = 1e-4
_TRAINERS_UNK = "<UNK>"


def _spelling_alphabet(layout: SpecialTokenLayout) -> set[str]:
    """Returns characters that need pieces, so that no special token or byte is the best spelling of a text."""
    return {character for content in (*layout.first, *BYTES) for character in content}


def least_unigram_size(layout: SpecialTokenLayout) -> int:
    """Returns the smallest vocabulary: special tokens, the bytes, and the characters that spell both."""
    return layout.num_special + len(BYTES) + len(_spelling_alphabet(layout)) + 1


def train_unigram(tokenizer: Tokenizer, texts: Iterable[str], vocab_size: int, layout: SpecialTokenLayout) -> None:
    """Trains a Unigram language model (Kudo 2018) over words that begin with their space, in place.

    Any text round-trips, once normalized, but for the character U+2581, which is read as a space: what has no piece is
    spelled in bytes. The vocabulary is smaller than `vocab_size` if the texts have fewer pieces. The slowest kind to
    train by far: a minute and a half for 20 MB of text, and little more for more.
    """
    room = vocab_size - layout.num_special - len(BYTES)
    vocab = _build_vocab(_learn(count_words(texts, tokenizer), room, layout), layout)
    tokenizer.model = models.Unigram(vocab, layout.first.index(str(layout.unk)), byte_fallback=True)
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(SPACE, prepend_scheme="never"), decoders.Fuse()]
    )


def _learn(words: Counter[str], room: int, layout: SpecialTokenLayout) -> list[tuple[str, float]]:
    """Returns at most `room` pieces with their scores (log probabilities), the most likely first."""
    spelling = _spelling_alphabet(layout)
    chosen = choose_alphabet(words, max(0, room // 2 - len(spelling)), COVERAGE)
    alphabet = spelling.union(chosen).difference(_MARKS)
    spelled = most_frequent(_spell(words, alphabet), MAX_WORDS)
    if not spelled:
        return [(character, -1.0) for character in sorted(alphabet)]
    _mark(spelled, room)
    learner = Tokenizer(models.Unigram())
    learner.pre_tokenizer = split_words()
    trainer = trainers.UnigramTrainer(
        vocab_size=room + len(_MARKS), initial_alphabet=sorted(alphabet.union(_MARKS)), show_progress=False
    )
    learner.train_from_iterator(repeat_words(spelled), trainer)
    settled = _settle(json.loads(learner.to_str())["model"]["vocab"])
    return [(piece, score) for piece, score in settled if _MARKS.isdisjoint(piece)]


def _mark(spelled: Counter[str], limit: int) -> None:
    """Appends a mark, in place, to one occurrence of each of the most frequent words.

    The trainer's candidates are strings that different characters follow. A word is followed by its end only, and
    without the mark would be no candidate, however frequent. Each mark follows too few words for a piece of its own.
    """
    marks = cycle(sorted(_MARKS))
    for word in list(most_frequent(spelled, limit)):
        if spelled[word] > 1:
            spelled[word] -= 1
            spelled[word + next(marks)] = 1


def _spell(words: Counter[str], alphabet: set[str]) -> Counter[str]:
    """Splits words at characters outside the alphabet, at the trainer's own token, and at their largest length."""
    spelled: Counter[str] = Counter()
    foreign = re.compile(f"[^{re.escape(''.join(sorted(alphabet)))}]+")
    for word, count in words.items():
        for part in foreign.split(word.replace(_TRAINERS_UNK, _TRAINERS_UNK[0] + "\0" + _TRAINERS_UNK[1:])):
            for start in range(0, len(part), MAX_WORD_CHARS):
                spelled[part[start : start + MAX_WORD_CHARS]] += count
    return spelled


def _settle(pieces: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Returns the pieces with scores that are the same on every run.

    The trainer adds up in the order of a hash table, so that the last of sixteen digits change from run to run: scores
    are rounded. Characters that it dropped and has to bring back, it places above the lowest score, one `_PENALTY`
    after the other, in such an order too: they all get the lowest.
    """
    lowest = min(score for _, score in pieces)
    brought_back = lowest + _PENALTY * (1 + sum(len(piece) == 1 for piece, _ in pieces))
    settled = [
        (piece, round(lowest if len(piece) == 1 and score <= brought_back else score, _SCORE_DIGITS))
        for piece, score in pieces
    ]
    return sorted(settled, key=lambda item: (-item[1], item[0]))


def _build_vocab(pieces: list[tuple[str, float]], layout: SpecialTokenLayout) -> list[tuple[str, float]]:
    """Puts `first` and the bytes before the pieces, with a score below that of spelling them character by character."""
    reserved = (*layout.first, *BYTES)
    lowest = min(-1.0, *(score for _, score in pieces))
    unreachable = float(round(lowest * (1 + max(map(len, reserved)))) - 1)
    learned = [(piece, score) for piece, score in pieces if piece not in BYTES and not layout.is_reserved(piece)]
    return [*((content, unreachable) for content in reserved), *learned]
