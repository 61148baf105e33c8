"""A model's loss on prepared data, source by source, and beside another model's.

What -> Setting -> Corpus -> every batch once -> LossReport a source, and of all
"""

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

from pretrain.artifact.open import open_artifact
from pretrain.artifact.what import What, open_what
from pretrain.config.objective import NEEDS, ObjectiveConfig
from pretrain.errors import ConfigError, DataError
from pretrain.evaluate.corpus import Choice, Corpus, HeldOut, settle
from pretrain.evaluate.loss import LossReport, evaluate_loss
from pretrain.evaluate.row_loss import Difference, ModelLoss, RowSums, compare_rows, sum_rows
from pretrain.log import stderr_console
from pretrain.objective import build_loss
from pretrain.types import Batch

ALL = "all"


@dataclass(frozen=True, slots=True)
class SourceLoss:
    """Loss on a source.

    Attributes:
        source: Its name; `all`: that of all.
        report: Of the model.
        bits_per_byte: None: not every token is predicted, or the text's size is not known.
        left_out: Pairs that are longer than a row.
        baseline: Of the model that it is compared with.
        difference: The model's less the baseline's.
    """

    source: str
    report: LossReport
    bits_per_byte: float | None
    left_out: int
    baseline: LossReport | None = None
    difference: Difference | None = None

    def facts(self) -> dict[str, Any]:
        """Returns plain values."""
        facts = {**_facts(self.report), "bits_per_byte": self.bits_per_byte, "left_out": self.left_out}
        if self.baseline is not None and self.difference is not None:
            facts |= {"baseline": _facts(self.baseline), "difference": asdict(self.difference)}
        return facts


@dataclass(frozen=True, slots=True)
class HeldOutReport:
    """Losses by source, the last of all.

    Attributes:
        model: As it was given.
        baseline: The same of the model that it is compared with.
        objective: Kinds of what is predicted.
        split: What was read.
    """

    model: str
    baseline: str | None
    objective: str
    split: str
    losses: list[SourceLoss]

    def facts(self) -> dict[str, Any]:
        """Returns plain values."""
        named = {"kind": "loss", "model": self.model, "objective": self.objective, "split": self.split}
        if self.baseline is not None:
            named["baseline"] = self.baseline
        return {**named, "sources": {loss.source: loss.facts() for loss in self.losses}}

    def lines(self) -> list[str]:
        """Returns what is printed."""
        lines = [f"{self.model}: {self.objective}, {self.split}"]
        for found in self.losses:
            report = found.report
            bits = "" if found.bits_per_byte is None else f"  bits per byte {found.bits_per_byte:.4f}"
            left_out = f"  ({found.left_out:,} pairs longer than a row)" if found.left_out else ""
            lines.append(
                f"  {found.source:<12} loss {report.loss:.4f}  perplexity {report.perplexity:.3f}{bits}  "
                f"accuracy {report.accuracy:.4f}  {report.num_targets:,} targets{left_out}"
            )
            if found.difference is not None:
                d = found.difference
                lines.append(
                    f"  {'':<12} against {self.baseline}: {d.loss:+.4f}, 95% {d.low:+.4f} to {d.high:+.4f}, "
                    f"p {d.p_value:.4f}, {d.num_rows:,} rows"
                )
        return lines


def _facts(report: LossReport) -> dict[str, Any]:
    return {
        "loss": report.loss,
        "perplexity": report.perplexity,
        "accuracy": report.accuracy,
        "targets": report.num_targets,
        "correct": report.num_correct,
    }


def evaluate_held_out(
    what: Path, choice: Choice, *, other: Path | None = None, resamples: int = 1000, device: str = "cpu"
) -> HeldOutReport:
    """Measures a model on every token of a split, once.

    Args:
        what: A run, a checkpoint, a model folder or a Hugging Face folder.
        choice: Which data.
        other: The baseline to compare with: it reads the same rows, which the first model's config makes.
        resamples: Of the paired bootstrap.
        device: As of `open_artifact`.

    Raises:
        ConfigError: The objective does not fit the model or the data.
        DataError: Data are missing or damaged, or of another tokenizer.
    """
    described = open_what(what)
    setting = settle(described, choice)
    corpus = Corpus(setting, choice, described.config)
    corpus.check_tokenizer(described)
    if other is not None:
        theirs = open_what(other)
        _check_fits(theirs, setting.objective, max(setting.lengths.target, setting.lengths.source or 0))
        corpus.check_tokenizer(theirs)
    loss = build_loss(setting.objective)
    model = ModelLoss(open_artifact(what, device).model, loss)
    if other is None:
        losses = [_measure(model, held, what.name) for held in corpus.sources]
        if len(losses) > 1:
            losses.append(_of_all(losses))
    else:
        mine = [sum_rows(model, _shown(held, what.name)) for held in corpus.sources]
        model = ModelLoss(open_artifact(other, device).model, loss)
        its = [sum_rows(model, _shown(held, other.name)) for held in corpus.sources]
        pairs = list(zip(corpus.sources, mine, its, strict=True))
        losses = [_paired(held, one, two, resamples) for held, one, two in pairs]
        if len(losses) > 1:
            difference = compare_rows(_joined(its), _joined(mine), resamples)
            losses.append(replace(_of_all(losses), baseline=_joined(its).report, difference=difference))
    kinds = "+".join(task.kind for task in setting.objective.tasks)
    return HeldOutReport(str(what), None if other is None else str(other), kinds, choice.split, losses)


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


def _paired(held: HeldOut, mine: RowSums, its: RowSums, resamples: int) -> SourceLoss:
    found = _of_source(held, mine.report)
    return replace(found, baseline=its.report, difference=compare_rows(its, mine, resamples))


def _joined(sums: Sequence[RowSums]) -> RowSums:
    return reduce(operator.add, sums)


def _of_all(losses: Sequence[SourceLoss]) -> SourceLoss:
    """Returns the mean over the targets of all sources."""
    reports = [found.report for found in losses]
    count = sum(report.num_targets for report in reports)
    loss = sum(report.loss * report.num_targets for report in reports) / count
    bits = [found.bits_per_byte * found.report.num_targets for found in losses if found.bits_per_byte is not None]
    return SourceLoss(
        ALL,
        LossReport(loss, count, sum(report.num_correct for report in reports)),
        sum(bits) / count if len(bits) == len(losses) else None,
        sum(found.left_out for found in losses),
    )


def _shown(held: HeldOut, label: str) -> Iterator[Batch]:
    """Passes a source's batches on, and draws a bar on a terminal."""
    from rich.progress import track

    console = stderr_console()
    batches: Iterable[Batch] = held.loader
    yield from track(
        batches,
        f"{label}, {held.name}",
        total=len(held.loader),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
