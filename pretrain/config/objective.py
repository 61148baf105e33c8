"""`objective:` -- what is predicted from what, which model shape and which data that needs, and how it changes rows."""

from dataclasses import dataclass
from typing import Self

from pydantic import Field, field_validator, model_validator

from pretrain.config.base import Section, check_name


@dataclass(frozen=True, slots=True)
class Needs:
    """What an objective needs.

    Attributes:
        shapes: Stacks of the model: `encoder`, `decoder`, `encoder+decoder`.
        data: Kinds of documents: `text`, `pairs`, `records`, `classes`, `tags`.
        whole_rows: Rows must be full, which `data.packing=concat` makes.
        head: Kind of the model's head.
    """

    shapes: tuple[str, ...]
    data: tuple[str, ...]
    whole_rows: bool = False
    head: str = "lm"


NEEDS: dict[str, Needs] = {
    "causal": Needs(("decoder",), ("text", "records")),
    "masked": Needs(("encoder",), ("text",)),
    "span": Needs(("encoder+decoder",), ("text",), whole_rows=True),
    "prefix": Needs(("decoder",), ("text",)),
    "ul2": Needs(("encoder+decoder", "decoder"), ("text",), whole_rows=True),
    "fim": Needs(("decoder",), ("text",), whole_rows=True),
    "seq2seq": Needs(("encoder+decoder",), ("pairs",)),
    "supervised": Needs(("decoder",), ("records",)),
    "classify": Needs(("encoder",), ("classes",), head="labels"),
    "tag": Needs(("encoder",), ("tags",), head="labels"),
}
"""By `objective.kind`. Modules under `extend` may add."""


class MaskedConfig(Section):
    """Masked language modelling (Devlin et al. 2019, 3.1).

    Attributes:
        rate: Share of tokens that are predicted, on average; no special token ever is.
        random: Of these, the share that is replaced by another token.
        keep: Of these, the share that is left as it is. What remains becomes the mask token: 0.1 and 0.1 are BERT's
            80/10/10, 0 and 0 ModernBERT's.
        whole_words: Predict all tokens of a word, or none.
    """

    rate: float = Field(default=0.15, gt=0, lt=1)
    random: float = Field(default=0.1, ge=0, le=1)
    keep: float = Field(default=0.1, ge=0, le=1)
    whole_words: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.random + self.keep > 1:
            raise ValueError(f"random={self.random} and keep={self.keep} are more than all predicted tokens")
        return self


class SpanConfig(Section):
    """Span corruption (Raffel et al. 2020, 3.1.4).

    Attributes:
        density: Share of tokens that are taken out of the source, and predicted.
        mean_length: Mean tokens of a span that is taken out.
    """

    density: float = Field(default=0.15, gt=0, lt=1)
    mean_length: float = Field(default=3.0, ge=1)


class DenoiserConfig(SpanConfig):
    """One of UL2's denoisers.

    Attributes:
        mode: What the source begins with: a special token of the tokenizer. None: nothing.
        prefix: A prefix language model: one span, the last of the row; `density` is its share of the row.
        weight: How often, in proportion to the others.
    """

    mode: str | None = None
    prefix: bool = False
    weight: float = Field(default=1.0, gt=0)


def _ul2() -> list[DenoiserConfig]:
    regular = [DenoiserConfig(mode="[NLU]", density=0.15, mean_length=length) for length in (3.0, 8.0)]
    extreme = [
        DenoiserConfig(mode="[NLG]", density=density, mean_length=length)
        for density, length in ((0.5, 3.0), (0.5, 8.0), (0.15, 64.0), (0.5, 64.0))
    ]
    return [*regular, *extreme, DenoiserConfig(mode="[S2S]", density=0.25, prefix=True)]


class Ul2Config(Section):
    """Mixture of denoisers (Tay et al. 2023, 3.1).

    Attributes:
        denoisers: The seven of the paper's table 1, uniformly: two R, four X, one S.
    """

    denoisers: list[DenoiserConfig] = Field(default_factory=_ul2, min_length=1)


class FimConfig(Section):
    """Fill in the middle (Bavarian et al. 2022), on tokens.

    Attributes:
        rate: Share of documents that are rearranged.
        spm_rate: Of these, the share in the order suffix, prefix, middle; the others are prefix, suffix, middle.
        max_documents: Documents of a row that are rearranged at most; a row keeps room for the three special tokens of
            each, and what of it is not needed is padding.
        tokens: Special tokens that begin prefix, suffix and middle.
    """

    rate: float = Field(default=0.5, gt=0, le=1)
    spm_rate: float = Field(default=0.5, ge=0, le=1)
    max_documents: int = Field(default=4, ge=1)
    tokens: list[str] = Field(
        default=["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"], min_length=3, max_length=3
    )


SECTIONS = ("masked", "span", "ul2", "fim")
"""Of `TaskConfig`: each has a meaning with the kind of its name."""


class TaskConfig(Section):
    """One objective.

    Attributes:
        kind: Entry of `objective/`.
        masked: Of kind `masked`.
        span: Of kind `span`.
        ul2: Of kind `ul2`.
        fim: Of kind `fim`.
    """

    kind: str = "causal"
    masked: MaskedConfig = MaskedConfig()
    span: SpanConfig = SpanConfig()
    ul2: Ul2Config = Ul2Config()
    fim: FimConfig = FimConfig()

    @field_validator("kind")
    @classmethod
    def _is_known(cls, kind: str) -> str:
        return check_name(kind, NEEDS)

    @model_validator(mode="after")
    def _check_sections(self) -> Self:
        for name in SECTIONS:
            if name != self.kind and self.differs(name):
                raise ValueError(f"{name} has no meaning with kind={self.kind}; leave it out")
        return self

    def differs(self, name: str) -> bool:
        """Returns whether a section says something else than its defaults."""
        return bool(getattr(self, name) != TaskConfig.model_fields[name].default)


class MixedTaskConfig(TaskConfig):
    """One of several objectives of a run.

    Attributes:
        weight: Share of the rows, in proportion to the others'.
    """

    weight: float = Field(gt=0)


class ObjectiveConfig(TaskConfig):
    """The training objective, or several: each row is of one of them, drawn by (seed, sample id).

    Attributes:
        mixture: Instead of `kind` and its section.
        label_smoothing: Probability that is spread evenly over the vocabulary (Szegedy et al. 2016, 7); in training
            only: the loss that is shown is without it.
        z_loss: Coefficient of the squared log of the softmax's denominator (Chowdhery et al. 2022, 5); likewise.
    """

    mixture: list[MixedTaskConfig] = Field(default_factory=list)
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    z_loss: float = Field(default=0.0, ge=0)

    @property
    def tasks(self) -> list[TaskConfig]:
        """The objectives: those of the mixture, or the one."""
        return [*self.mixture] or [self]

    @property
    def weights(self) -> list[float]:
        """Of the objectives, any scale."""
        return [task.weight for task in self.mixture] or [1.0]

    @property
    def sees_prompts_whole(self) -> bool:
        """Whether a decoder learns to continue what it has read in both directions, whatever row it gets."""
        return all(task.kind in ("prefix", "ul2") for task in self.tasks)

    @property
    def head_share(self) -> float:
        """Expected share of the positions at which the head is computed: few where all objectives are masked.

        Where documents are classified it is one a document, which counts as none.
        """
        if any(task.kind not in ("masked", "classify") for task in self.tasks):
            return 1.0
        rates = [task.masked.rate if task.kind == "masked" else 0.0 for task in self.tasks]
        return sum(weight * rate for weight, rate in zip(self.weights, rates, strict=True)) / sum(self.weights)

    @model_validator(mode="after")
    def _check_mixture(self) -> Self:
        alone = [name for name in ("kind", *SECTIONS) if self.differs(name)]
        if self.mixture and alone:
            raise ValueError(f"needs {alone[0]} or mixture, and not both")
        return self
