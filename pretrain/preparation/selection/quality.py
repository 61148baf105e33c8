"""Published rules for the quality of documents: Gopher, C4 and FineWeb.

    text -> words and marks -> the first rule that it breaks, as a reason of `left_out`

Reasons and decisions are those of datatrove 0.10 for the same words and sentences; its words are
those of spaCy, ours are runs of letters and digits, and single marks.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import regex

from pretrain.config.texts.quality import (
    C4Config,
    FineWebConfig,
    GopherQualityConfig,
    GopherRepetitionConfig,
)

ELLIPSES = ("...", "\u2026")
BULLETS = ("\u2022", "-")
C4_ENDS = (".", "?", "!", '"', "'")
POLICIES = (
    "terms of use",
    "privacy policy",
    "cookie policy",
    "uses cookies",
    "use of cookies",
    "use cookies",
)

_WORDS = re.compile(r"\w+(?:['\u2019]\w+)*|[^\w\s]")
_SENTENCE = re.compile(r"""(?<![.!?])[.!?]++["'\u201d\u2019)\]]*+(?=\s|$)""")
_PARAGRAPHS = re.compile(r"\n{2,}")
_LINES = re.compile("\n+")
_CITATIONS = re.compile(r"\[\d*]|\[edit]|\[citation needed]")
_TERMINAL = regex.compile(r"\p{Sentence_Terminal}\Z")
# Marks that are no words; C0 and C1 are control characters.
_MARKS = frozenset(
    string.punctuation
    + "\u00ab\u00b4\u00bb\u2013\u2014\u2019\u201c\u201d\u201e\u2026\u2236\u2501\u25ba\u3001\u3002"
    + "\u3008\u3009\u300a\u300b\u300c\u300d\u3010\u3011\uff01\uff05\uff08\uff09\uff0c\uff0e\uff11"
    + "\uff1a\uff1b\uff1f\uff5e"
    + "".join(map(chr, (*range(9), 11, 12, *range(13, 32), *range(127, 160))))
)


def split_words(text: str) -> list[str]:
    """Returns the words and marks of a text."""
    return _WORDS.findall(text)


def count_sentences(text: str) -> int:
    """Returns the number of sentences of a line: its ends, or one without any."""
    return max(1, len(_SENTENCE.findall(text)))


def _is_word(word: str) -> bool:
    return any(char not in _MARKS and not _TERMINAL.match(char) for char in word)


def gopher_quality(text: str, words: Sequence[str], config: GopherQualityConfig) -> str | None:
    """Returns the rule that a document breaks, or None."""
    return _first_broken(_gopher_rules(text, words, config))


def _first_broken(rules: Iterator[tuple[str, bool]]) -> str | None:
    return next((name for name, is_broken in rules if is_broken), None)


def _gopher_rules(text: str, words: Sequence[str], config: GopherQualityConfig) -> Iterator[tuple[str, bool]]:
    """Yields the rules of Gopher in order, and whether a document breaks them."""
    lengths = [len(word) for word in words if _is_word(word)]
    yield "gopher_short_doc", _is_under(config.min_words, len(lengths))
    yield "gopher_long_doc", _is_over(config.max_words, len(lengths))
    if not lengths:
        return
    mean = sum(lengths) / len(lengths)
    yield "gopher_below_avg_threshold", _is_under(config.min_word_chars, mean)
    yield "gopher_above_avg_threshold", _is_over(config.max_word_chars, mean)
    yield "gopher_too_many_hashes", _is_over(config.max_symbols, text.count("#") / len(words))
    yield "gopher_too_many_ellipsis", _is_over(config.max_symbols, sum(map(text.count, ELLIPSES)) / len(words))
    lines = [line.strip() for line in text.splitlines()]
    share = _share(line.startswith(BULLETS) for line in lines)
    yield "gopher_too_many_bullets", _is_over(config.max_bullet_lines, share)
    share = _share(line.endswith(ELLIPSES) for line in lines)
    yield "gopher_too_many_end_ellipsis", _is_over(config.max_ellipsis_lines, share)
    share = _share(any(map(str.isalpha, word)) for word in words)
    yield "gopher_below_alpha_threshold", _is_under(config.min_alphabetic, share)
    num_stop_words = len(set(config.stop_words).intersection(words))
    yield "gopher_enough_stop_words", _is_under(config.min_stop_words, num_stop_words)


def gopher_repetition(text: str, words: Sequence[str], config: GopherRepetitionConfig) -> str | None:
    """Returns the rule that a document breaks, or None."""
    for items, limit, char_limit, name in (
        (_PARAGRAPHS.split(text.strip()), config.paragraphs, config.paragraph_chars, "para"),
        (_LINES.split(text), config.lines, config.line_chars, "line"),
    ):
        num_repeated, num_chars = _repeated(items)
        if _is_over(limit, num_repeated / len(items)):
            return f"gopher_dup_{name}_frac"
        if _is_over(char_limit, num_chars / len(text)):
            return f"gopher_dup_{name}_char_frac"
    for size, share in config.top_ngrams.items():
        counts = Counter(" ".join(one) for one in _ngrams(words, int(size)))
        if counts:
            ngram, count = counts.most_common(1)[0]
            if len(ngram) * count / len(text) > share:
                return f"gopher_top_{size}_gram"
    for size, share in config.ngrams.items():
        if _repeated_ngram_chars(words, int(size)) / len(text) > share:
            return f"gopher_duplicated_{size}_n_grams"
    return None


def clean_c4(text: str, config: C4Config) -> tuple[str, str | None]:
    """Returns the lines of a document that are kept, and the rule that it breaks, or None."""
    lines = []
    for line in map(str.strip, text.splitlines()):
        words = line.split()
        if config.citations:
            line = _CITATIONS.sub("", line)
        if _is_bare(line, words, config):
            continue
        lower = line.lower()
        if config.lorem_ipsum and "lorem ipsum" in lower:
            return text, "c4_lorem_ipsum"
        if config.javascript and "javascript" in lower:
            continue
        if config.curly_bracket and "{" in line:
            return text, "c4_curly_bracket"
        if config.policy and any(policy in lower for policy in POLICIES):
            continue
        lines.append(line)
    if _is_under(config.min_sentences, sum(map(count_sentences, lines))):
        return text, "c4_too_few_sentences"
    return "\n".join(lines).strip(), None


def _is_bare(line: str, words: Sequence[str], config: C4Config) -> bool:
    """Returns whether a line is no sentence of some words of a usual length."""
    is_ended = line.endswith(C4_ENDS) and not line.endswith("...")
    if config.terminal_punctuation and not is_ended:
        return True
    longest = max(map(len, words), default=0)
    return _is_over(config.max_word_chars, longest) or _is_under(config.min_line_words, len(words))


def fineweb(text: str, words: Sequence[str], config: FineWebConfig) -> str | None:
    """Returns the rule that a document breaks, or None."""
    return _first_broken(_fineweb_rules(text, words, config))


def _fineweb_rules(text: str, words: Sequence[str], config: FineWebConfig) -> Iterator[tuple[str, bool]]:
    """Yields the rules of FineWeb in order, and whether a document breaks them."""
    lines = [line for line in text.split("\n") if line.strip()]
    yield "fineweb_empty", not lines
    share = _share(bool(_TERMINAL.search(line)) for line in lines)
    yield "fineweb_line_punct_ratio", _is_under(config.min_terminal_lines, share)
    share = _share(len(line) <= config.short_line_chars for line in lines)
    yield "fineweb_short_line_ratio", _is_over(config.max_short_lines, share)
    share = _repeated(lines)[1] / len(text.replace("\n", ""))
    yield "fineweb_char_dup_ratio", _is_over(config.max_duplicate_chars, share)
    num_allowed = None if config.max_newlines is None else config.max_newlines * len(words)
    yield "fineweb_list_ratio", _is_over(num_allowed, text.count("\n"))


REASONS_OF: dict[str, tuple[str, ...]] = {
    "gopher_quality": (
        "gopher_short_doc",
        "gopher_long_doc",
        "gopher_below_avg_threshold",
        "gopher_above_avg_threshold",
        "gopher_too_many_hashes",
        "gopher_too_many_ellipsis",
        "gopher_too_many_bullets",
        "gopher_too_many_end_ellipsis",
        "gopher_below_alpha_threshold",
        "gopher_enough_stop_words",
    ),
    "gopher_repetition": (
        *("gopher_dup_para_frac", "gopher_dup_para_char_frac"),
        *("gopher_dup_line_frac", "gopher_dup_line_char_frac"),
        *(f"gopher_top_{size}_gram" for size in range(2, 5)),
        *(f"gopher_duplicated_{size}_n_grams" for size in range(5, 11)),
    ),
    "c4": ("c4_lorem_ipsum", "c4_curly_bracket", "c4_too_few_sentences"),
    "fineweb": (
        "fineweb_empty",
        "fineweb_line_punct_ratio",
        "fineweb_short_line_ratio",
        "fineweb_char_dup_ratio",
        "fineweb_list_ratio",
    ),
}
"""Reasons of each set of rules; n-grams of other sizes have reasons of the same form."""

# The rules that judge words, in order, with their keys of the config.
RULES: dict[str, Callable[..., str | None]] = {
    "gopher_repetition": gopher_repetition,
    "gopher_quality": gopher_quality,
    "fineweb": fineweb,
}


def _is_under(limit: float | None, value: float) -> bool:
    return limit is not None and value < limit


def _is_over(limit: float | None, value: float) -> bool:
    return limit is not None and value > limit


def _share(flags: Iterator[bool]) -> float:
    values = list(flags)
    return sum(values) / len(values)


def _repeated(items: Sequence[str]) -> tuple[int, int]:
    """Returns the number of items that came before, and their characters."""
    counts = Counter(items)
    pairs = [(count - 1, (count - 1) * len(item)) for item, count in counts.items() if count > 1]
    return sum(number for number, _ in pairs), sum(chars for _, chars in pairs)


def _ngrams(words: Sequence[str], size: int) -> Iterator[tuple[str, ...]]:
    return zip(*(words[start:] for start in range(size)), strict=False)


def _repeated_ngram_chars(words: Sequence[str], size: int) -> int:
    """Returns the characters of n-grams that came before, each counted once."""
    seen: set[str] = set()
    num_chars = 0
    start = 0
    while start <= len(words) - size:
        ngram = "".join(words[start : start + size])
        if ngram in seen:
            num_chars += len(ngram)
            start += size
        else:
            seen.add(ngram)
            start += 1
    return num_chars
