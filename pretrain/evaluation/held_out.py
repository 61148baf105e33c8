"""Evaluates a model on prepared data: loss and scores by source, alone or against a baseline.

CorpusOptions -> Setting -> Corpus -> every batch once, a share on each rank -> SourceLoss
"""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

from pretrain.artifact.open import find_device, load_model
from pretrain.artifact.source import ModelSource
from pretrain.config.objective import ObjectiveConfig
from pretrain.errors import ConfigError, DataError
from pretrain.evaluation.bootstrap import RESAMPLES, Difference
from pretrain.evaluation.corpus import Corpus, CorpusOptions, check_length, settle
from pretrain.evaluation.distributed import current, open_together, with_bar
from pretrain.evaluation.evaluation_log import Data, Subject, find_subject
from pretrain.evaluation.label_scores import (
    Answers,
    LabelScores,
    compare_labels,
    read_answers,
    score_labels,
    sum_documents,
)
from pretrain.evaluation.row_loss import (
    LossReport,
    ModelLoss,
    RowSums,
    compare_exact,
    compare_rows,
    evaluate_loss,
    pool,
    sum_rows,
)
from pretrain.kinds.heads import HEADS
from pretrain.kinds.objective import NOTHING_SHOWN, Shown
from pretrain.kinds.objectives import OBJECTIVES
from pretrain.model import LanguageModel
from pretrain.objective import build_loss, shown_of
from pretrain.types import Batch

ALL = "all"


@dataclass(frozen=True, slots=True)
class SourceLoss:
    """Scores of a model and of a baseline on a source, or on all of them (`ALL`)."""

    source: str
    report: LossReport
    bits_per_byte: float | None  # None: the text's size is unknown, or not all is predicted
    left_out: int  # pairs that are longer than a row
    labels: LabelScores | None = None  # of a classifier
    baseline: LossReport | None = None
    differences: dict[str, Difference] = field(default_factory=dict)
    chooses: bool = True  # the model chooses among answers; not of a head of pixels
    exact: float | None = None  # share of captions that greedy decoding writes as they are
    scores_words: bool = True  # the loss is one of words (`ObjectiveConfig.scores_words`)
    shown: Shown = NOTHING_SHOWN  # of `LossReport.shown`

    def facts(self) -> dict[str, Any]:
        """Returns plain values."""
        facts = self._of(self.report)
        facts |= {"bits_per_byte": self.bits_per_byte, "left_out": self.left_out}
        if self.exact is not None:
            facts["exact_match"] = self.exact
        if self.labels is not None:
            facts["labels"] = self.labels.facts()
        if self.baseline is not None:
            facts["baseline"] = self._of(self.baseline)
            facts["differences"] = {name: asdict(one) for name, one in self.differences.items()}
        return facts

    def _of(self, report: LossReport) -> dict[str, Any]:
        hidden = set() if self.scores_words else {"perplexity"}
        hidden |= set() if self.chooses else {"accuracy", "correct"}
        facts = {name: value for name, value in report.facts().items() if name not in hidden}
        return facts | self.shown.metrics(report.shown)

    def lines(self, baseline: str | None) -> list[str]:
        """Returns the lines of the report; `baseline` is the path of the baseline."""
        report = self.report
        indent = " " * 15
        bits = "" if self.bits_per_byte is None else f"  bits per byte {self.bits_per_byte:.4f}"
        perplexity = f"  perplexity {report.perplexity:.3f}" if self.scores_words else ""
        accuracy = f"accuracy {report.accuracy:.4f}  " if self.chooses else ""
        left_out = f"  ({self.left_out:,} pairs longer than a row)" if self.left_out else ""
        lines = [
            f"  {self.source:<12} loss {report.loss:.4f}{perplexity}{bits}  "
            f"{accuracy}{report.num_targets:,} targets{left_out}"
        ]
        for name, value in self.shown.metrics(report.shown).items():
            lines.append(f"{indent}{name.replace('_', ' ')} {value:.4f}")
        if self.exact is not None:
            how = "greedy decoding of whole captions"
            lines.append(f"{indent}exact match {self.exact:.4f} ({how})")
        if self.labels is not None:
            lines += [indent + line for line in self.labels.lines()]
        if self.baseline is not None:
            lines.append(f"{indent}against {baseline}")
        for name, difference in self.differences.items():
            lines.append(f"{indent}  {name:<9} {difference.line()}")
        return lines


@dataclass(frozen=True, slots=True)
class HeldOutReport:
    """Losses by source, all sources together last; `subject` is the checkpoint of a run."""

    model: str
    baseline: str | None
    objective: str
    split: str
    losses: list[SourceLoss]
    data: list[Data]
    subject: Subject | None

    def facts(self) -> dict[str, Any]:
        """Returns plain values."""
        facts = {"kind": "loss", "model": self.model, "objective": self.objective, "split": self.split}
        baseline = {} if self.baseline is None else {"baseline": self.baseline}
        return facts | baseline | {"sources": {loss.source: loss.facts() for loss in self.losses}}

    def lines(self) -> list[str]:
        """Returns the lines of the report."""
        lines = [f"{self.model}: {self.objective}, {self.split}"]
        return lines + [line for loss in self.losses for line in loss.lines(self.baseline)]


def evaluate_held_out(
    path: Path, choice: CorpusOptions, *, other: Path | None = None, resamples: int = RESAMPLES, device: str = "cpu"
) -> HeldOutReport:
    """Measures a model on every token of a split, once. Collective: all ranks return the same.

    `path` and `other` are runs, checkpoints, model folders or Hugging Face folders: the model, and
    a baseline, which reads the same rows, made by the model's config. `device` is that of
    `open_artifact`.

    Raises:
        ConfigError: The objective does not fit the model or the data.
        DataError: Data are missing or damaged, or of another tokenizer or other labels.
    """
    described = open_together(path)
    subject = find_subject(described)
    setting = settle(described, choice)
    rank, world_size = current()
    corpus = Corpus(setting, choice, described.config, rank=rank, world_size=world_size)
    corpus.check_model(described)
    models = [(path.name, described)]
    if other is not None:
        theirs = open_together(other)
        _check_fits(theirs, corpus.objective)
        check_length(theirs, max(setting.lengths.target, setting.lengths.source or 0))
        corpus.check_model(theirs)
        models.append((other.name, theirs))
    losses = _measure(corpus, models, resamples, device)
    kinds = "+".join(task.kind for task in corpus.objective.tasks)
    baseline = None if other is None else str(other)
    return HeldOutReport(str(path), baseline, kinds, choice.split, losses, corpus.data, subject)


def _check_fits(source: ModelSource, objective: ObjectiveConfig) -> None:
    for task in objective.tasks:
        if OBJECTIVES[task.kind].whole_batch:
            text = f"--compare pairs the losses of rows, and objective.kind={task.kind} has none"
            raise ConfigError(text, where=str(source.path), fix="give --retrieval or --sts too")
        shapes = OBJECTIVES[task.kind].shapes
        if source.config.shape not in shapes:
            raise ConfigError(
                f"objective.kind={task.kind} needs a model with {' or '.join(shapes)}, this one "
                f"has {source.config.shape}",
                where=str(source.path),
                fix="compare models of one shape",
            )


def _measure(
    corpus: Corpus, models: Sequence[tuple[str, ModelSource]], resamples: int, device: str
) -> list[SourceLoss]:
    """Returns the scores of the first model on each source, compared with the second."""
    by_row = len(models) > 1 or corpus.has_captions
    measured: list[list[Any]] = []
    for name, described in models:
        model = load_model(described, find_device(device))
        of_model = []
        for source in corpus.sources:
            batches = with_bar(source.loader, f"{name}, {source.name}", len(source.loader))
            of_model.append(_read(corpus, model, batches, by_row))
        measured.append(of_model)
    losses = _losses(corpus, [_report(sums) for sums in measured[0]])
    if not by_row and not corpus.labels:
        return losses
    if len(losses) > 1:
        for of_model in measured:
            of_model.append(reduce(operator.add, of_model))
    pairs = zip(losses, zip(*measured, strict=True), strict=True)
    return [_judged(loss, by_model, corpus.labels, corpus.has_captions, resamples) for loss, by_model in pairs]


def _read(
    corpus: Corpus, model: LanguageModel, batches: Iterable[Batch], by_row: bool
) -> LossReport | RowSums | Answers:
    if corpus.labels:
        return read_answers(model, batches)
    loss = ModelLoss(model, build_loss(corpus.objective))
    if by_row:
        return sum_rows(loss, batches)
    # Rows matter for comparisons and captions only: otherwise batches are summed at once.
    report = evaluate_loss(loss, batches, lambda: False)
    assert report is not None, "no stop was requested"
    return report


def _losses(corpus: Corpus, reports: list[LossReport]) -> list[SourceLoss]:
    """Returns the loss on each source, and with several on all of them."""
    of_kind: dict[str, Any] = {
        "chooses": HEADS[OBJECTIVES[corpus.objective.kind].head].chooses,
        "scores_words": corpus.objective.scores_words,
        "shown": shown_of(corpus.objective),
    }
    losses = []
    for source, report in zip(corpus.sources, reports, strict=True):
        if not report.num_targets:
            raise DataError(f"source {source.name!r} has nothing to predict", fix="give more data")
        bits = report.bits_per_byte(source.tokens_per_byte) if source.tokens_per_byte else None
        losses.append(SourceLoss(source.name, report, bits, source.num_left_out, **of_kind))
    if len(losses) > 1:
        report, bits = pool(reports, [source.tokens_per_byte for source in corpus.sources])
        left_out = sum(loss.left_out for loss in losses)
        losses.append(SourceLoss(ALL, report, bits, left_out, **of_kind))
    return losses


def _report(measured: LossReport | RowSums | Answers) -> LossReport:
    return measured if isinstance(measured, LossReport) else _rows(measured).report


def _rows(measured: RowSums | Answers) -> RowSums:
    return sum_documents(measured) if isinstance(measured, Answers) else measured


def _judged(
    loss: SourceLoss, by_model: Sequence[RowSums | Answers], labels: Sequence[str], captions: bool, resamples: int
) -> SourceLoss:
    mine, *baselines = by_model
    if captions:
        loss = replace(loss, exact=float(_rows(mine).exact.mean()))
    if isinstance(mine, Answers):
        loss = replace(loss, labels=score_labels(mine, labels, resamples))
    if not baselines:
        return loss
    (theirs,) = baselines
    baseline = _rows(theirs)
    unit = "documents" if labels else "rows"
    differences = compare_rows(baseline, _rows(mine), resamples, unit)
    if isinstance(mine, Answers) and isinstance(theirs, Answers):
        scores = compare_labels(theirs, mine, len(labels), resamples)
        differences = {"loss": differences["loss"]} | scores
    if captions:
        differences["exact"] = compare_exact(baseline, _rows(mine), resamples)
    return replace(loss, baseline=baseline.report, differences=differences)
