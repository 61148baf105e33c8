"""A model's loss and scores on prepared data, source by source, and beside another model's.

What -> Setting -> Corpus -> every batch once, a share of them on each rank -> a report for each source, and for all
"""

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import NamedTuple

from pretrain.artifact.open import open_artifact
from pretrain.artifact.what import What
from pretrain.config.objective import NEEDS, ObjectiveConfig
from pretrain.errors import ConfigError, DataError
from pretrain.evaluate.bootstrap import RESAMPLES
from pretrain.evaluate.corpus import Choice, Corpus, HeldOut, settle
from pretrain.evaluate.evaluation_log import find_subject
from pretrain.evaluate.held_out_report import HeldOutReport, SourceLoss
from pretrain.evaluate.label_scores import Answers, compare_labels, score_labels
from pretrain.evaluate.labels import read_answers, sum_documents
from pretrain.evaluate.loss import LossReport, evaluate_loss, pool
from pretrain.evaluate.ranks import current, open_together
from pretrain.evaluate.row_loss import ModelLoss, RowSums, compare_rows, sum_rows
from pretrain.objective import build_loss
from pretrain.types import Batch
from pretrain.utils.log import stderr_console

ALL = "all"


def evaluate_held_out(
    what: Path, choice: Choice, *, other: Path | None = None, resamples: int = RESAMPLES, device: str = "cpu"
) -> HeldOutReport:
    """Measures a model on every token of a split, once. Collective: all ranks return the same.

    Args:
        what: A run, a checkpoint, a model folder or a Hugging Face folder.
        choice: Which data.
        other: The baseline to compare with: it reads the same rows, which the first model's config makes.
        resamples: Of the bootstrap.
        device: As of `open_artifact`.

    Raises:
        ConfigError: The objective does not fit the model or the data.
        DataError: Data are missing or damaged, or of another tokenizer or other labels.
    """
    described = open_together(what)
    subject = find_subject(described)
    setting = settle(described, choice)
    rank, world_size = current()
    corpus = Corpus(setting, choice, described.config, rank=rank, world_size=world_size)
    corpus.check_model(described)
    models = [_Named(what.name, described.path)]
    if other is not None:
        theirs = open_together(other)
        models.append(_Named(other.name, theirs.path))
        _check_fits(theirs, corpus.objective, max(setting.lengths.target, setting.lengths.source or 0))
        corpus.check_model(theirs)
    if corpus.labels:
        losses = _evaluate_labels(corpus, models, resamples, device)
    elif other is None:
        model = ModelLoss(open_artifact(described.path, device).model, build_loss(corpus.objective))
        losses = [_measure(model, held, what.name) for held in corpus.sources]
        losses += [_of_all(losses, corpus.sources)] if len(losses) > 1 else []
    else:
        losses = _compare(corpus, models, resamples, device)
    kinds = "+".join(task.kind for task in corpus.objective.tasks)
    names = str(what), None if other is None else str(other)
    return HeldOutReport(*names, kinds, choice.split, losses, corpus.data, subject)


class _Named(NamedTuple):
    """A model: what a bar calls it, and where its weights are."""

    name: str
    path: Path


def _check_fits(what: What, objective: ObjectiveConfig, longest: int) -> None:
    """Refuses a baseline that cannot read the same rows. Raises: ConfigError."""
    for task in objective.tasks:
        if what.config.shape not in NEEDS[task.kind].shapes:
            raise ConfigError(
                f"objective.kind={task.kind} needs a model with {' or '.join(NEEDS[task.kind].shapes)}, this one has "
                f"{what.config.shape}",
                where=str(what.path),
                fix="compare models of one shape",
            )
    if longest > what.config.max_seq_len:
        raise ConfigError(
            f"rows of {longest} tokens, model.max_seq_len is {what.config.max_seq_len}",
            where=str(what.path),
            fix=f"use --seq-len {what.config.max_seq_len}",
        )


def _measure(model: ModelLoss, held: HeldOut, label: str) -> SourceLoss:
    report = evaluate_loss(model, _shown(held, label), lambda: False)
    assert report is not None, "nobody stops it"
    return _of_source(held, report)


def _of_source(held: HeldOut, report: LossReport) -> SourceLoss:
    if not report.num_targets:
        raise DataError(f"source {held.name!r} has nothing to predict", fix="give more data")
    bits = report.bits_per_byte(held.tokens_per_byte) if held.tokens_per_byte else None
    return SourceLoss(held.name, report, bits, held.num_left_out)


def _compare(corpus: Corpus, models: Sequence[_Named], resamples: int, device: str) -> list[SourceLoss]:
    """Returns the losses of the first model beside those of the second, the baseline."""
    sums: list[list[RowSums]] = []
    for name, path in models:
        model = ModelLoss(open_artifact(path, device).model, build_loss(corpus.objective))
        sums.append([sum_rows(model, _shown(held, name)) for held in corpus.sources])
    losses = []
    for held, mine, its in zip(corpus.sources, *sums, strict=True):
        found = _of_source(held, mine.report)
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
        answers.append([read_answers(model, _shown(held, name)) for held in corpus.sources])
    losses = []
    for number, held in enumerate(corpus.sources):
        loss = _of_source(held, sum_documents(answers[0][number]).report)
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


def _of_all(losses: Sequence[SourceLoss], sources: Sequence[HeldOut]) -> SourceLoss:
    """Returns the mean over the targets of all sources, and over their bytes where all of these are known."""
    whole, bits = pool([found.report for found in losses], [held.tokens_per_byte for held in sources])
    return SourceLoss(ALL, whole, bits, sum(found.left_out for found in losses))


def _shown(held: HeldOut, label: str) -> Iterator[Batch]:
    """Passes a source's batches on, and draws a bar on the terminal of rank 0."""
    from rich.progress import track

    console = stderr_console()
    batches: Iterable[Batch] = held.loader
    yield from track(
        batches,
        f"{label}, {held.name}",
        total=len(held.loader),
        console=console,
        transient=True,
        disable=not console.is_terminal or current()[0] != 0,
    )
