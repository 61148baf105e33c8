"""BLEU and chrF of translations by sacrebleu, with signatures and paired significance (Koehn 2004).

    tokenized    like the training text: hypotheses unchanged, references normalised; the BLEU that
                 papers report on lower-cased, Moses-tokenised text
    text         as people read it: hypotheses detokenised, references unchanged; BLEU by the
                 tokenizer 13a

A model of text without normalisation has the second only; compared with one that has some, both.
"""

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from pretrain.config.prepare import NormalizeConfig
from pretrain.errors import LaunchError, install_fix
from pretrain.preparation.normalize import build_detokenizer, build_normalizers

Form = Literal["tokenized", "text"]

RESAMPLES = 1000
_PURPOSE = "BLEU and chrF are computed by sacrebleu"


@dataclass(frozen=True, slots=True)
class Hypotheses:
    """One system's translations, in the order of the references."""

    name: str  # in reports
    texts: list[str]
    normalize: NormalizeConfig | None  # of its training text


@dataclass(frozen=True, slots=True)
class MetricScore:
    """A score by sacrebleu."""

    metric: str  # `bleu_tokenized`, `bleu`, `bleu_lowercase` or `chrf`
    score: float  # 0 to 100
    details: str  # further figures
    signature: str  # settings of the metric


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """One system against another in one metric."""

    metric: str
    baseline: str
    system: str
    difference: float  # the system's score less the baseline's
    p_value: float  # of a difference as large if both were equally good; 1 for equal scores
    baseline_ci: float  # half of the 95% interval
    system_ci: float
    signature: str  # with seed and resamples


@dataclass(frozen=True, slots=True)
class _Metric:
    name: str
    form: Form
    build: Callable[[], Any]


class Measure:
    """Scores systems against one set of references.

    `normalize` defines tokenised text, if there is any. With `preprocessed`, sources and references
    are already normalised, and their text is unknown. Raises: LaunchError: A package is missing.
    """

    def __init__(
        self, references: Sequence[str], normalize: NormalizeConfig | None, *, preprocessed: bool = False
    ) -> None:
        self._module = import_extra("sacrebleu.metrics", _PURPOSE)
        self._normalize, self._preprocessed = normalize, preprocessed
        self._to_tokens = None
        self._references: dict[Form, list[str]] = {}
        self._references["tokenized" if preprocessed else "text"] = list(references)
        if normalize is not None and not preprocessed:
            self._to_tokens = build_normalizers(normalize)[1]
            self._references["tokenized"] = [self._to_tokens(text) for text in references]
        self._metrics = self._choose_metrics()

    def _choose_metrics(self) -> list[_Metric]:
        bleu = partial(self._module.BLEU, force=True)
        chrf = self._module.CHRF
        lowercase = self._normalize is not None and "lowercase" in self._normalize.steps
        metrics: list[_Metric] = []
        if "tokenized" in self._references:
            metrics.append(_Metric("bleu_tokenized", "tokenized", partial(bleu, tokenize="none")))
        if self._preprocessed:
            return [*metrics, _Metric("chrf", "tokenized", chrf)]
        cased = partial(bleu, tokenize="13a")
        metrics.append(_Metric("bleu", "text", cased))
        if lowercase:  # a model without capitals is not judged by the cased score alone
            metrics.append(_Metric("bleu_lowercase", "text", partial(cased, lowercase=True)))
        return [*metrics, _Metric("chrf", "text", partial(chrf, lowercase=lowercase))]

    def score(self, system: Hypotheses) -> list[MetricScore]:
        """Returns the scores of a system."""
        scores = []
        for metric in self._metrics:
            scorer = metric.build()
            texts = self.in_form(system, metric.form)
            score = scorer.corpus_score(texts, [self._references[metric.form]])
            details = str(getattr(score, "_verbose", ""))
            signature = str(scorer.get_signature())
            scores.append(MetricScore(metric.name, float(score.score), details, signature))
        return scores

    def compare(self, baseline: Hypotheses, system: Hypotheses, resamples: int = RESAMPLES) -> list[PairedComparison]:
        """Returns the paired bootstrap of a system against a baseline in each metric, by sacrebleu."""
        significance = import_extra("sacrebleu.significance", _PURPOSE)
        compared = []
        for metric in self._metrics:
            named = {"baseline": baseline, "system": system}
            texts = [(name, self.in_form(one, metric.form)) for name, one in named.items()]
            references = [self._references[metric.form]]
            metrics = {metric.name: metric.build()}
            test = significance.PairedTest(texts, metrics, references, "bs", resamples)
            signatures, results = test()
            (key,) = (name for name in results if name != "System")
            first, second = results[key]
            # sacrebleu gives equal scores a small p-value.
            p_value = 1.0 if first.score == second.score else float(second.p_value)
            compared.append(
                PairedComparison(
                    metric=metric.name,
                    baseline=baseline.name,
                    system=system.name,
                    difference=float(second.score - first.score),
                    p_value=p_value,
                    baseline_ci=float(first.ci),
                    system_ci=float(second.ci),
                    signature=str(signatures[key]),
                )
            )
        return compared

    def in_form(self, system: Hypotheses, form: Form) -> list[str]:
        """Returns a system's texts in the form of a metric."""
        if self._preprocessed:
            return system.texts
        if form != "tokenized":
            detokenize = build_detokenizer(system.normalize)
            return [detokenize(text) for text in system.texts] if detokenize else system.texts
        assert self._to_tokens is not None
        if system.normalize == self._normalize:  # the output is in this form already
            return system.texts
        return [self._to_tokens(text) for text in system.texts]


def import_extra(module: str, purpose: str) -> Any:
    """Imports a package of the extra `eval`, and silences its log below errors. Raises: LaunchError."""
    try:
        imported = importlib.import_module(module)
    except ImportError:
        raise LaunchError(f"{purpose}, which is not installed", fix=install_fix("eval")) from None
    logging.getLogger(module.partition(".")[0]).setLevel(logging.ERROR)
    return imported
