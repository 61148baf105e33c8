"""BLEU and chrF of translations by sacrebleu, each with its signature, and paired significance (Koehn 2004).

    tokenized    as the model was taught: hypotheses as they come, references through the same normalisation; BLEU is
                 what papers report on lower-cased, Moses-tokenised text
    text         as people read it: hypotheses detokenised, references as they are; BLEU by the tokenizer 13a

A model that was taught on text as it is has the second only; beside one that was not it has both.
"""

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pretrain.config.prepare import NormalizeConfig
from pretrain.errors import LaunchError
from pretrain.prepare.normalize import build_normalizers

Form = Literal["tokenized", "text"]

RESAMPLES = 1000
_PURPOSE = "BLEU and chrF are computed by sacrebleu"


@dataclass(frozen=True, slots=True)
class Hypotheses:
    """One system's translations.

    Attributes:
        name: What a report calls it.
        texts: In the order of the references, as the model says them.
        normalize: What the model was taught on went through. None: nothing.
    """

    name: str
    texts: list[str]
    normalize: NormalizeConfig | None


@dataclass(frozen=True, slots=True)
class MetricScore:
    """A score.

    Attributes:
        metric: `bleu_tokenized`, `bleu`, `bleu_lowercase`, `chrf`.
        score: 0 to 100.
        details: What sacrebleu prints after it.
        signature: Tells exactly what was computed.
    """

    metric: str
    score: float
    details: str
    signature: str


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """One system against another in one metric.

    Attributes:
        metric: Name as in `MetricScore`.
        baseline: Name of the baseline.
        system: Name of the system.
        difference: Score of the system less that of the baseline.
        p_value: Chance of a difference as large if they were equally good; 1 where the scores are equal.
        baseline_ci: Half of the baseline's 95% interval.
        system_ci: Half of the system's 95% interval.
        signature: With seed and number of resamples.
    """

    metric: str
    baseline: str
    system: str
    difference: float
    p_value: float
    baseline_ci: float
    system_ci: float
    signature: str


@dataclass(frozen=True, slots=True)
class _Metric:
    name: str
    form: Form
    build: Callable[[], Any]


class Measure:
    """Scores systems against one set of references.

    Args:
        references: References as written; with `preprocessed`, after normalisation.
        normalize: What defines tokenised text. None: there is none.
        preprocessed: Sources and references have been through it already: nothing is known of the text before.

    Raises:
        LaunchError: A package is missing.
    """

    def __init__(
        self, references: Sequence[str], normalize: NormalizeConfig | None, *, preprocessed: bool = False
    ) -> None:
        self._module = import_extra("sacrebleu.metrics", _PURPOSE)
        self._normalize, self._preprocessed = normalize, preprocessed
        self._to_tokens = build_normalizers(normalize)[1] if normalize is not None and not preprocessed else None
        self._references: dict[Form, list[str]] = {}
        if preprocessed or self._to_tokens is None:
            self._references["tokenized" if preprocessed else "text"] = list(references)
        else:
            self._references["text"] = list(references)
            self._references["tokenized"] = [self._to_tokens(text) for text in references]
        self._metrics = self._choose_metrics()

    def _choose_metrics(self) -> list[_Metric]:
        bleu, chrf = self._module.BLEU, self._module.CHRF
        lowercase = self._normalize is not None and "lowercase" in self._normalize.steps
        found = [_Metric("bleu_tokenized", "tokenized", lambda: bleu(tokenize="none", force=True))]
        if self._preprocessed:
            return [*found, _Metric("chrf", "tokenized", chrf)]
        found = found if "tokenized" in self._references else []
        found.append(_Metric("bleu", "text", lambda: bleu(tokenize="13a", force=True)))
        if lowercase:  # a model that has no capitals cannot have the cased score that its words deserve
            found.append(_Metric("bleu_lowercase", "text", lambda: bleu(tokenize="13a", lowercase=True, force=True)))
        return [*found, _Metric("chrf", "text", lambda: chrf(lowercase=lowercase))]

    def score(self, system: Hypotheses) -> list[MetricScore]:
        """Returns the scores of a system."""
        found = []
        for metric in self._metrics:
            scorer = metric.build()
            score = scorer.corpus_score(self._as(system, metric.form), [self._references[metric.form]])
            details = str(getattr(score, "_verbose", ""))
            found.append(MetricScore(metric.name, float(score.score), details, str(scorer.get_signature())))
        return found

    def compare(self, baseline: Hypotheses, system: Hypotheses, resamples: int = RESAMPLES) -> list[PairedComparison]:
        """Returns paired bootstrap resampling of a system against a baseline, by sacrebleu, in each metric."""
        significance = import_extra("sacrebleu.significance", _PURPOSE)
        found = []
        for metric in self._metrics:
            named = [("baseline", self._as(baseline, metric.form)), ("system", self._as(system, metric.form))]
            references = [self._references[metric.form]]
            signatures, results = significance.PairedTest(
                named, {metric.name: metric.build()}, references, "bs", resamples
            )()
            (key,) = (name for name in results if name != "System")
            first, second = results[key]
            # sacrebleu holds it for unlikely that equal scores are equal.
            p_value = 1.0 if first.score == second.score else float(second.p_value)
            found.append(
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
        return found

    def _as(self, system: Hypotheses, form: Form) -> list[str]:
        """Returns a system's texts in the form in which they are compared."""
        if self._preprocessed:
            return system.texts
        if form == "text":
            return detokenize(system.texts, system.normalize)
        assert self._to_tokens is not None
        # What the same normalisation taught is in this form already.
        return system.texts if system.normalize == self._normalize else [self._to_tokens(t) for t in system.texts]


def detokenize(texts: Sequence[str], normalize: NormalizeConfig | None) -> list[str]:
    """Returns texts without the spaces that Moses put around marks, where it did."""
    if normalize is None or "moses" not in normalize.steps:
        return list(texts)
    from sacremoses import MosesDetokenizer  # type: ignore[import-untyped]

    detokenizer = MosesDetokenizer(normalize.target_language or normalize.language)
    return [str(detokenizer.detokenize(text.split())) for text in texts]


def import_extra(module: str, purpose: str) -> Any:
    """Imports a package of the extra `eval`, and silences its log below errors.

    Args:
        module: Module to import, such as `sacrebleu.metrics`.
        purpose: First clause of the error message, such as "BLEU is computed by sacrebleu".

    Raises:
        LaunchError: The package is not installed.
    """
    try:
        found = importlib.import_module(module)
    except ImportError:
        raise LaunchError(
            f"{purpose}, which is not installed", fix="run: python -m pip install 'pretrain[eval]'"
        ) from None
    logging.getLogger(module.partition(".")[0]).setLevel(logging.ERROR)
    return found
