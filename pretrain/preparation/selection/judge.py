"""The rules that leave out a document on its own, in their order, built once a process.

    fields and lengths (filters.py) -> C4, which drops lines (quality.py) -> language
      -> Gopher, FineWeb (quality.py) -> decontamination: an n-gram in common with an evaluation set

    read_tested    evaluation sets -> hashes of their n-grams, by the words of one

Of an evaluation text with fewer words than an n-gram, all of it is looked for, from MIN_WORDS on;
shorter ones are counted, since they would be found everywhere.
"""

import hashlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from operator import attrgetter
from typing import Any

import numpy as np

from pretrain.config.prepare import FilterConfig, PrepareConfig
from pretrain.errors import ConfigError, DataError, LaunchError, install_fix
from pretrain.preparation.filters import CONTAMINATED, LANGUAGE, Document, LeftOut, limit_of, refuse, select
from pretrain.preparation.input_parts import Slice
from pretrain.preparation.inputs.listing import list_inputs
from pretrain.preparation.readers.dispatch import read_slices
from pretrain.preparation.selection.quality import REASONS_OF, RULES, clean_c4, split_words
from pretrain.preparation.selection.sketches import ngram_hashes, words_of
from pretrain.utils.units import plural

MIN_WORDS = 8
"""GPT-3 (Brown et al. 2020, appendix C) looks for n-grams of 8 to 13 words."""
LANGUAGE_CHARS = 4096
PACKAGES = {"near_duplicates": "rensa", "language": "py3langid"}

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluationTexts:
    """The n-grams of evaluation sets: sorted hashes, uint64, by the number of words of one."""

    hashes: dict[int, np.ndarray] = field(default_factory=dict)
    num_texts: int = 0
    num_short: int = 0  # texts that are too short to be looked for

    def identity(self) -> str:
        """Returns a hash of the n-grams."""
        content = [(size, self.hashes[size].tobytes()) for size in sorted(self.hashes)]
        return hashlib.sha256(repr(content).encode()).hexdigest()

    def occur_in(self, text: str) -> bool:
        """Returns whether a text has one of the n-grams."""
        words = words_of(text) if self.hashes else []
        return any(
            len(words) >= size and _has_any(hashes, ngram_hashes(words, size)) for size, hashes in self.hashes.items()
        )


def _has_any(hashes: np.ndarray, found: np.ndarray) -> bool:
    """Returns whether one of the values is among the sorted hashes: `np.isin` would sort all of them each time."""
    places = np.minimum(np.searchsorted(hashes, found), len(hashes) - 1)
    return bool((hashes[places] == found).any())


def load_tested(config: PrepareConfig) -> EvaluationTexts:
    """Checks the packages and languages of the rules; reads the evaluation sets, if there are some.

    Raises: ConfigError, LaunchError; the errors of reading them.
    """
    rules = config.filter
    for name, package in PACKAGES.items():
        if getattr(rules, name) is not None and find_spec(package) is None:
            raise LaunchError(
                f"filter.{name} needs {package}, which is not installed",
                fix=install_fix("web"),
            )
    for code in rules.language.keep if rules.language else ():
        labels = _load_identifier().labels
        if code not in labels:
            raise ConfigError(
                f"filter.language.keep: {code!r} is no language of py3langid",
                fix=f"use one of {', '.join(labels)}",
            )
    if rules.decontaminate is None:
        return EvaluationTexts()
    of_tests = config.model_copy(update={"inputs": rules.decontaminate.inputs, "kind": "text"})
    files = list_inputs(rules.decontaminate.inputs)
    slices = (Slice(file, 0, file.size) for file in files)
    left_out = LeftOut()
    limit = limit_of(of_tests, sum(file.num_bytes for file in files))
    documents = select(read_slices(of_tests, slices), attrgetter("refused"), None, left_out, limit)
    tested = read_tested(documents, rules.decontaminate.ngram)
    left_out.bad.check(limit, is_whole=True)
    if not tested.hashes:
        raise DataError(
            f"the evaluation sets have no text of {MIN_WORDS} words",
            where=files[0].shown,
            fix="choose its field by text_field",
        )
    if tested.num_short:
        text = "%s of the evaluation sets of fewer than %d words cannot be looked for"
        _log.warning(text, plural(tested.num_short, "text"), MIN_WORDS)
    return tested


def read_tested(documents: Iterable[Document], ngram: int) -> EvaluationTexts:
    """Returns the n-grams of the texts of evaluation sets. Raises: the errors of reading them."""
    by_size: dict[int, list[np.ndarray]] = {}
    num_texts = 0
    num_short = 0
    for document in documents:
        words = words_of(document.text)
        num_texts += 1
        if len(words) < min(MIN_WORDS, ngram):
            num_short += 1
            continue
        by_size.setdefault(min(ngram, len(words)), []).append(ngram_hashes(words, ngram))
    hashes = {size: np.unique(np.concatenate(by_size[size])) for size in sorted(by_size)}
    return EvaluationTexts(hashes, num_texts, num_short)


class Judge:
    """Returns the reason to leave out a document, or None; drops lines of one that stays.

    `reasons` are those of the rules that are on, besides those of every folder.
    """

    def __init__(self, config: FilterConfig, tested: EvaluationTexts) -> None:
        """Loads the model of languages, if it is asked for."""
        self._config = config
        self._tested = tested
        self._rules = [(rule, getattr(config, name)) for name, rule in RULES.items()]
        self._rules = [(rule, section) for rule, section in self._rules if section is not None]
        self._identifier = _load_identifier() if config.language is not None else None

    def __call__(self, document: Document) -> str | None:
        reason = refuse(document, self._config)
        if reason is not None:
            return reason
        if self._config.c4 is not None:
            text, reason = clean_c4(document.text, self._config.c4)
            if reason is not None:
                return reason
            if text != document.text:
                utf8 = text.encode()
                document.dropped_bytes = len(document.utf8) - len(utf8)
                document.text = text
                document.utf8 = utf8
        language = self._config.language
        if language is not None and self._identifier is not None:
            code, score = self._identifier.classify(document.text[:LANGUAGE_CHARS])
            if code not in language.keep or score < language.min_score:
                return LANGUAGE
        words = split_words(document.text) if self._rules else []
        for rule, section in self._rules:
            if (reason := rule(document.text, words, section)) is not None:
                return str(reason)
        return CONTAMINATED if self._tested.occur_in(document.text) else None


def reasons_of(config: FilterConfig) -> list[str]:
    """Returns the reasons of the rules that are on, besides the ones of every folder."""
    sets = [reasons for name, reasons in REASONS_OF.items() if getattr(config, name)]
    every = [reason for reasons in sets for reason in reasons]
    rules = {LANGUAGE: config.language, CONTAMINATED: config.decontaminate}
    return [*every, *(reason for reason, section in rules.items() if section)]


@cache
def _load_identifier() -> Any:
    from py3langid import langid

    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
