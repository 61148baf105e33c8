"""Published rules for the quality of documents, each on or off: None turns a rule off.

Defaults are the published values. The rules are in preparation/selection/quality.py.
"""

from pydantic import Field

from pretrain.config.base import Section

_NGRAMS = {"5": 0.15, "6": 0.14, "7": 0.13, "8": 0.12, "9": 0.11, "10": 0.1}
_STOP_WORDS = ["the", "be", "to", "of", "and", "that", "have", "with"]


class GopherQualityConfig(Section):
    """Rules of Gopher (Rae et al. 2021, arXiv 2112.11446, A.1.1) for the words of a document."""

    min_words: int | None = Field(default=50, ge=1)
    """Fewest words, marks not counted."""
    max_words: int | None = Field(default=100_000, ge=1)
    """Most words, marks not counted."""
    min_word_chars: float | None = Field(default=3, ge=0)
    """Smallest mean length of a word."""
    max_word_chars: float | None = Field(default=10, ge=0)
    """Largest mean length of a word."""
    max_symbols: float | None = Field(default=0.1, ge=0)
    """Most hash signs, and most ellipses, a word."""
    max_bullet_lines: float | None = Field(default=0.9, ge=0, le=1)
    """Largest share of lines that begin with a bullet."""
    max_ellipsis_lines: float | None = Field(default=0.3, ge=0, le=1)
    """Largest share of lines that end with an ellipsis."""
    min_alphabetic: float | None = Field(default=0.8, ge=0, le=1)
    """Smallest share of words, marks included, with a letter."""
    min_stop_words: int | None = Field(default=2, ge=1)
    """Fewest different stop words."""
    stop_words: list[str] = Field(default=_STOP_WORDS, min_length=1)
    """Stop words, by default those of English."""


class GopherRepetitionConfig(Section):
    """Rules of Gopher (arXiv 2112.11446, table A1) for repetition: largest shares."""

    paragraphs: float | None = Field(default=0.3, ge=0, le=1)
    """Paragraphs that came before."""
    paragraph_chars: float | None = Field(default=0.2, ge=0, le=1)
    """Characters in paragraphs that came before."""
    lines: float | None = Field(default=0.3, ge=0, le=1)
    """Lines that came before."""
    line_chars: float | None = Field(default=0.2, ge=0, le=1)
    """Characters in lines that came before."""
    top_ngrams: dict[str, float] = Field(default={"2": 0.2, "3": 0.18, "4": 0.16})
    """Characters in the most frequent n-gram, by n. Empty: off."""
    ngrams: dict[str, float] = Field(default=_NGRAMS)
    """Characters in n-grams that came before, by n. Empty: off."""


class C4Config(Section):
    """Rules of C4 (Raffel et al. 2020, arXiv 1910.10683, 2.2): lines are dropped, and documents."""

    terminal_punctuation: bool = True
    """Keep only lines that end with a mark: `. ! ?` or a quotation mark."""
    min_line_words: int | None = Field(default=3, ge=1)
    """Fewest words of a line that is kept."""
    max_word_chars: int | None = Field(default=1000, ge=1)
    """Longest word of a line that is kept."""
    javascript: bool = True
    """Drop lines with the word Javascript."""
    policy: bool = True
    """Drop lines about cookies, terms of use and privacy."""
    citations: bool = True
    """Remove marks of citations, as [1] and [edit], from lines."""
    lorem_ipsum: bool = True
    """Drop documents with `lorem ipsum`."""
    curly_bracket: bool = True
    """Drop documents with a curly bracket."""
    min_sentences: int | None = Field(default=5, ge=1)
    """Fewest sentences of the lines that are kept."""


class FineWebConfig(Section):
    """Rules of FineWeb (Penedo et al. 2024, arXiv 2406.17557, 3.6) for lines."""

    min_terminal_lines: float | None = Field(default=0.12, ge=0, le=1)
    """Smallest share of lines that end with a mark."""
    max_short_lines: float | None = Field(default=0.67, ge=0, le=1)
    """Largest share of short lines."""
    short_line_chars: int = Field(default=30, ge=1)
    """Characters of a short line, at most."""
    max_duplicate_chars: float | None = Field(default=0.01, ge=0, le=1)
    """Largest share of characters in lines that came before."""
    max_newlines: float | None = Field(default=0.3, ge=0)
    """Most line ends a word."""


class LanguageConfig(Section):
    """Language of documents, by py3langid from their first 4,096 characters."""

    keep: list[str] = Field(min_length=1)
    """Codes of languages to keep, such as en."""
    min_score: float = Field(default=0.65, ge=0, le=1)
    """Smallest probability of the language."""
