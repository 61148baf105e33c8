"""What an evaluation on prepared data has found, as lines and as facts."""

from dataclasses import asdict, dataclass, field
from typing import Any

from pretrain.evaluate.bootstrap import Difference
from pretrain.evaluate.evaluation_log import Data, Subject
from pretrain.evaluate.label_scores import LabelScores
from pretrain.evaluate.loss import LossReport


@dataclass(frozen=True, slots=True)
class SourceLoss:
    """What a model is worth on a source.

    Attributes:
        source: Its name; `all`: that of all.
        report: Of the model.
        bits_per_byte: None: not every token is predicted, or the text's size is not known.
        left_out: Pairs that are longer than a row.
        labels: Scores of a classifier; None: tokens are predicted.
        baseline: Of the model that it is compared with.
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
        model: As it was given.
        baseline: The same of the model that it is compared with.
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
