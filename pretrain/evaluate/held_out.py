"""Evaluates a model on prepared data: loss and scores by source, alone or against a baseline."""

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from pretrain.artifact.open import open_artifact
from pretrain.artifact.source import ModelSource
from pretrain.config.objective import NEEDS, ObjectiveConfig
from pretrain.errors import ConfigError, DataError
from pretrain.evaluate.bootstrap import RESAMPLES, Difference
from pretrain.evaluate.corpus import Corpus, CorpusOptions, EvaluationSource, settle
from pretrain.evaluate.distributed import current, open_together
from pretrain.evaluate.evaluation_log import Data, Subject, find_subject
from pretrain.evaluate.label_scores import (
    Answers,
    LabelScores,
    compare_labels,
    read_answers,
    score_labels,
    sum_documents,
)
from pretrain.evaluate.row_loss import LossReport, ModelLoss, RowSums, compare_rows, evaluate_loss, pool, sum_rows
from pretrain.objective import build_loss
from pretrain.types import Batch
from pretrain.utils.log import stderr_console


@dataclass(frozen=True, slots=True)
class SourceLoss:
    """What a model is worth on a source.

    Attributes:
        source: Name of the source; `all`: all sources together.
        report: Loss of the model.
        bits_per_byte: None: not every token is predicted, or the text's size is not known.
        left_out: Pairs that are longer than a row.
        labels: Scores of a classifier; None: tokens are predicted.
        baseline: Loss of the baseline.
        differences: The model's scores less the baseline's, by name.
    """

    source: str
    report: LossReport
    bits_per_byte: float | None
    left_out: int
    labels: LabelScores | None = None
    baseline: LossReport | None = None
    differences: dict[str, Difference] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """Returns plain values."""
        facts = {**_facts(self.report), "bits_per_byte": self.bits_per_byte, "left_out": self.left_out}
        if self.labels is not None:
            facts["labels"] = self.labels.facts()
        if self.baseline is not None:
            facts["baseline"] = _facts(self.baseline)
            facts["differences"] = {name: asdict(found) for name, found in self.differences.items()}
        return facts

    def lines(self, baseline: str | None) -> list[str]:
        """Returns what is printed. `baseline`: its name."""
        report, indent = self.report, " " * 15
        bits = "" if self.bits_per_byte is None else f"  bits per byte {self.bits_per_byte:.4f}"
        left_out = f"  ({self.left_out:,} pairs longer than a row)" if self.left_out else ""
        lines = [
            f"  {self.source:<12} loss {report.loss:.4f}  perplexity {report.perplexity:.3f}{bits}  "
            f"accuracy {report.accuracy:.4f}  {report.num_targets:,} targets{left_out}"
        ]
        if self.labels is not None:
            lines += [indent + line for line in self.labels.lines()]
        if self.baseline is not None:
            lines.append(f"{indent}against {baseline}")
        return lines + [f"{indent}  {name:<9} {found.line()}" for name, found in self.differences.items()]


@dataclass(frozen=True, slots=True)
class HeldOutReport:
    """Losses by source, the last of all.

    Attributes:
        model: Path as given on the command line.
        baseline: Path of the baseline; None: no comparison.
        objective: Kinds of what is predicted.
        split: What was read.
        losses: By source.
        data: The sources.
        subject: The checkpoint; None: the model is no run's.
    """

    model: str
    baseline: str | None
    objective: str
    split: str
    losses: list[SourceLoss]
    data: list[Data]
    subject: Subject | None

    def facts(self) -> dict[str, Any]:
        """Returns plain values."""
        named = {"kind": "loss", "model": self.model, "objective": self.objective, "split": self.split}
        if self.baseline is not None:
            named["baseline"] = self.baseline
        return {**named, "sources": {loss.source: loss.facts() for loss in self.losses}}

    def lines(self) -> list[str]:
        """Returns what is printed."""
        lines = [f"{self.model}: {self.objective}, {self.split}"]
        return lines + [line for found in self.losses for line in found.lines(self.baseline)]


def _facts(report: LossReport) -> dict[str, Any]:
    return {
        "loss": report.loss,
        "perplexity": report.perplexity,
        "accuracy": report.accuracy,
        "targets": report.num_targets,
        "correct": report.num_correct,
    }


# A model's loss and scores on prepared data, source by source, and beside another model's.
#
# What -> Setting -> Corpus -> every batch once, a share of them on each rank -> a report for each
# source, and for all


ALL = "all"


def evaluate_held_out(
    path: Path, choice: CorpusOptions, *, other: Path | None = None, resamples: int = RESAMPLES, device: str = "cpu"
) -> HeldOutReport:
    """Measures a model on every token of a split, once. Collective: all ranks return the same.

    Args:
        path: A run, a checkpoint, a model folder or a Hugging Face folder.
        choice: Which data.
        other: The baseline to compare with: it reads the same rows, which the first model's config makes.
        resamples: Bootstrap resamples.
        device: Device as in `open_artifact`.

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
    models = [_Named(path.name, described.path)]
    if other is not None:
        theirs = open_together(other)
        models.append(_Named(other.name, theirs.path))
        _check_fits(theirs, corpus.objective, max(setting.lengths.target, setting.lengths.source or 0))
        corpus.check_model(theirs)
    if corpus.labels:
        losses = _evaluate_labels(corpus, models, resamples, device)
    elif other is None:
        model = ModelLoss(open_artifact(described.path, device).model, build_loss(corpus.objective))
        losses = [_measure(model, source, path.name) for source in corpus.sources]
        losses += [_of_all(losses, corpus.sources)] if len(losses) > 1 else []
    else:
        losses = _compare(corpus, models, resamples, device)
    kinds = "+".join(task.kind for task in corpus.objective.tasks)
    names = str(path), None if other is None else str(other)
    return HeldOutReport(*names, kinds, choice.split, losses, corpus.data, subject)


class _Named(NamedTuple):
    """A model: what a bar calls it, and where its weights are."""

    name: str
    path: Path


def _check_fits(source: ModelSource, objective: ObjectiveConfig, longest: int) -> None:
    """Refuses a baseline that cannot read the same rows. Raises: ConfigError."""
    for task in objective.tasks:
        if source.config.shape not in NEEDS[task.kind].shapes:
            raise ConfigError(
                f"objective.kind={task.kind} needs a model with {' or '.join(NEEDS[task.kind].shapes)}, this one has "
                f"{source.config.shape}",
                where=str(source.path),
                fix="compare models of one shape",
            )
    if longest > source.config.max_seq_len:
        raise ConfigError(
            f"rows of {longest} tokens, model.max_seq_len is {source.config.max_seq_len}",
            where=str(source.path),
            fix=f"use --seq-len {source.config.max_seq_len}",
        )


def _measure(model: ModelLoss, source: EvaluationSource, label: str) -> SourceLoss:
    report = evaluate_loss(model, _shown(source, label), lambda: False)
    assert report is not None, "no stop was requested"
    return _of_source(source, report)


def _of_source(source: EvaluationSource, report: LossReport) -> SourceLoss:
    if not report.num_targets:
        raise DataError(f"source {source.name!r} has nothing to predict", fix="give more data")
    bits = report.bits_per_byte(source.tokens_per_byte) if source.tokens_per_byte else None
    return SourceLoss(source.name, report, bits, source.num_left_out)


def _compare(corpus: Corpus, models: Sequence[_Named], resamples: int, device: str) -> list[SourceLoss]:
    """Returns the losses of the first model beside those of the second, the baseline."""
    sums: list[list[RowSums]] = []
    for name, path in models:
        model = ModelLoss(open_artifact(path, device).model, build_loss(corpus.objective))
        sums.append([sum_rows(model, _shown(source, name)) for source in corpus.sources])
    losses = []
    for source, mine, its in zip(corpus.sources, *sums, strict=True):
        found = _of_source(source, mine.report)
        losses.append(replace(found, baseline=its.report, differences=compare_rows(its, mine, resamples)))
    if len(losses) > 1:
        mine, its = (reduce(operator.add, of_model) for of_model in sums)
        whole = _of_all(losses, corpus.sources)
        losses.append(replace(whole, baseline=its.report, differences=compare_rows(its, mine, resamples)))
    return losses


def _evaluate_labels(corpus: Corpus, models: Sequence[_Named], resamples: int, device: str) -> list[SourceLoss]:
    """Returns the scores of a classifier, beside those of a second, the baseline, where there is one."""
    answers: list[list[Answers]] = []
    for name, path in models:
        model = open_artifact(path, device).model
        answers.append([read_answers(model, _shown(source, name)) for source in corpus.sources])
    losses = []
    for number, source in enumerate(corpus.sources):
        loss = _of_source(source, sum_documents(answers[0][number]).report)
        losses.append(_with_labels(loss, [of_model[number] for of_model in answers], corpus.labels, resamples))
    if len(losses) > 1:
        whole = [reduce(operator.add, of_model) for of_model in answers]
        losses.append(_with_labels(_of_all(losses, corpus.sources), whole, corpus.labels, resamples))
    return losses


def _with_labels(found: SourceLoss, answers: Sequence[Answers], names: Sequence[str], resamples: int) -> SourceLoss:
    """Adds scores of labels; the answers are the model's, and the baseline's if there is one."""
    mine, *others = answers
    found = replace(found, labels=score_labels(mine, names, resamples))
    if not others:
        return found
    its, sums = sum_documents(others[0]), sum_documents(mine)
    loss = compare_rows(its, sums, resamples, "documents")["loss"]
    scores = compare_labels(others[0], mine, len(names), resamples)
    return replace(found, baseline=its.report, differences={"loss": loss, **scores})


def _of_all(losses: Sequence[SourceLoss], sources: Sequence[EvaluationSource]) -> SourceLoss:
    """Returns the mean over the targets of all sources, and over their bytes where all of these are known."""
    whole, bits = pool([found.report for found in losses], [source.tokens_per_byte for source in sources])
    return SourceLoss(ALL, whole, bits, sum(found.left_out for found in losses))


def _shown(source: EvaluationSource, label: str) -> Iterator[Batch]:
    """Passes a source's batches on, and draws a bar on the terminal of rank 0."""
    from rich.progress import track

    console = stderr_console()
    batches: Iterable[Batch] = source.loader
    yield from track(
        batches,
        f"{label}, {source.name}",
        total=len(source.loader),
        console=console,
        transient=True,
        disable=not console.is_terminal or current()[0] != 0,
    )
