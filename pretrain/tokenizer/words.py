"""The words of the training texts, counted, and their characters: what WordPiece and Unigram are trained on.

The trainers of `tokenizers` number characters in the order in which a hash table gives them, another one every run.
Their characters are therefore chosen here, and the words that they see hold no others.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from zlib import crc32

from tokenizers import Tokenizer, pre_tokenizers

from pretrain.tokenizer.cut import cut_text

_SEPARATOR = "\0"
_BATCH_CHARS = 1 << 16


def count_words(texts: Iterable[str], tokenizer: Tokenizer) -> Counter[str]:
    """Returns how often each word stands in the texts, by the tokenizer's normalizer and pre-tokenizer.

    About 4 MB/s; memory for the words that differ.
    """
    normalizer, split = tokenizer.normalizer, tokenizer.pre_tokenizer
    words: Counter[str] = Counter()
    for text in texts:
        for piece in cut_text(text):
            plain = piece if normalizer is None else normalizer.normalize_str(piece)
            words.update(word for word, _ in split.pre_tokenize_str(plain))
    return words


def choose_alphabet(words: Counter[str], limit: int, coverage: float = 1.0) -> list[str]:
    """Returns the most frequent characters, no more than `limit`, until they make up `coverage` of the text.

    Of equals the lower code points come first. NUL is none: it parts words.
    """
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            counts[character] += count
    del counts[_SEPARATOR]
    needed = coverage * counts.total()
    chosen: list[str] = []
    for character, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if len(chosen) == limit or needed <= 0:
            break
        chosen.append(character)
        needed -= count
    return chosen


def most_frequent(words: Counter[str], limit: int) -> Counter[str]:
    """Returns the `limit` most frequent words; of equally frequent ones a choice that does not depend on spelling."""
    if len(words) <= limit:
        return words
    ranked = sorted(
        words.items(), key=lambda item: (-item[1], crc32(item[0].encode("utf-8", "surrogatepass")), item[0])
    )
    return Counter(dict(ranked[:limit]))


def repeat_words(words: Counter[str]) -> Iterator[str]:
    """Yields texts of the words, each as often as it was counted, for a trainer whose tokenizer has `split_words`."""
    batch: list[str] = []
    room = _BATCH_CHARS
    for word, count in words.items():
        most = max(1, _BATCH_CHARS // (len(word) + 1))
        for start in range(0, count, most):
            number = min(most, count - start)
            batch.append(_SEPARATOR.join([word] * number))
            room -= number * (len(word) + 1)
            if room <= 0:
                yield _SEPARATOR.join(batch)
                batch, room = [], _BATCH_CHARS
    if batch:
        yield _SEPARATOR.join(batch)


def split_words() -> pre_tokenizers.PreTokenizer:
    """Returns the pre-tokenizer that takes the texts of `repeat_words` apart."""
    return pre_tokenizers.Split(_SEPARATOR, "removed")
