"""`objective:` -- training objectives, and the model shapes and data that each needs."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from pretrain.config.base import OnResume, Section, check_name
from pretrain.config.data import DataConfig
from pretrain.config.model import AnyModelConfig


@dataclass(frozen=True, slots=True)
class Needs:
    """Requirements of an objective."""

    shapes: tuple[str, ...]  # permitted stacks of the model: `encoder`, `decoder`, `encoder+decoder`
    data: tuple[str, ...]  # permitted kinds of documents: `text`, `pairs`, `records` ...
    whole_rows: bool = False  # true: rows must be full, as with `data.packing=concat`
    head: str = "lm"  # required kind of the head
    reads: str = "tokens"  # required input of the model: `tokens` or `patches`


NEEDS: dict[str, Needs] = {
    "causal": Needs(("decoder",), ("text", "records")),
    "masked": Needs(("encoder",), ("text",)),
    "replaced": Needs(("encoder",), ("text",), head="replaced"),
    "span": Needs(("encoder+decoder",), ("text",), whole_rows=True),
    "prefix": Needs(("decoder",), ("text",)),
    "ul2": Needs(("encoder+decoder", "decoder"), ("text",), whole_rows=True),
    "fim": Needs(("decoder",), ("text",), whole_rows=True),
    "seq2seq": Needs(("encoder+decoder",), ("pairs",)),
    "supervised": Needs(("decoder",), ("records",)),
    "dpo": Needs(("decoder",), ("preferences",)),
    "classify": Needs(("encoder", "decoder"), ("classes",), head="labels"),
    "tag": Needs(("encoder",), ("tags",), head="labels"),
    "answers": Needs(("encoder", "decoder"), ("answers",), head="spans"),
    "choices": Needs(("encoder",), ("choices",), head="choices"),
    "images": Needs(("encoder",), ("images",), head="labels", reads="patches"),
    "masked_patches": Needs(("encoder+decoder",), ("images",), head="pixels", reads="patches"),
    "captions": Needs(("encoder+decoder",), ("captions",), reads="patches"),
}
"""Requirements by `objective.kind`. Modules under `extend` may add entries."""

UNITS = {"labels": "labels", "spans": "answers", "choices": "answers", "pixels": "pixels"}
"""Noun of the targets by the kind of the head; `tokens` of others."""
TARGET_COUNTS = ("tokens", "labels", "answers", "pairs")
"""Metrics that count targets; a run logs one of them. Pixels are counted by patches, as `tokens`."""

ALONE = ("seq2seq", "masked_patches", "captions", "dpo", "replaced", "answers", "choices")
"""Objectives that no mixture has."""


class MaskedConfig(Section):
    """Masked language modelling (Devlin et al. 2019, 3.1); for `kind: masked`."""

    rate: Annotated[float, OnResume.ALLOW] = Field(default=0.15, gt=0, lt=1)
    """Average share of tokens that are predicted; special tokens never are."""
    random: Annotated[float, OnResume.ALLOW] = Field(default=0.1, ge=0, le=1)
    """Share of the predicted tokens that are replaced by a random token."""
    keep: Annotated[float, OnResume.ALLOW] = Field(default=0.1, ge=0, le=1)
    """Share of the predicted tokens that stay unchanged; the rest becomes the mask token. `random`
    and `keep` of 0.1 are the 80/10/10 of BERT, both 0 is ModernBERT."""
    whole_words: Annotated[bool, OnResume.ALLOW] = False
    """Predict all tokens of a word or none."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.random + self.keep > 1:
            raise ValueError(f"random={self.random} and keep={self.keep} must sum to at most 1")
        return self


class ReplacedConfig(MaskedConfig):
    """Replaced-token detection (Clark et al. 2020, 3.1); for `kind: replaced`."""

    random: Annotated[float, OnResume.ALLOW] = Field(default=0.0, ge=0, le=1)
    """Share of the tokens that the generator predicts which it reads as a random token."""
    keep: Annotated[float, OnResume.ALLOW] = Field(default=0.0, ge=0, le=1)
    """Share of these that it reads unchanged; the rest is the mask token."""
    weight: Annotated[float, OnResume.ALLOW] = Field(default=50.0, gt=0)
    """Factor of the loss of the model in the minimised sum, beside that of its generator."""


class SpanConfig(Section):
    """Span corruption (Raffel et al. 2020, 3.1.4); for `kind: span`."""

    density: Annotated[float, OnResume.ALLOW] = Field(default=0.15, gt=0, lt=1)
    """Share of tokens that are removed from the source and predicted."""
    mean_length: Annotated[float, OnResume.ALLOW] = Field(default=3.0, ge=1)
    """Mean length of a removed span in tokens."""


class DenoiserConfig(SpanConfig):
    """Denoiser of UL2."""

    mode: Annotated[str | None, OnResume.ALLOW] = None
    """Special token that the source begins with. None: no such token."""
    prefix: Annotated[bool, OnResume.ALLOW] = False
    """Prefix language model: the only span is the end of the row, a share `density` of it."""
    weight: Annotated[float, OnResume.ALLOW] = Field(default=1.0, gt=0)
    """Share of the rows relative to the other denoisers."""


def _ul2() -> list[DenoiserConfig]:
    regular = [DenoiserConfig(mode="[NLU]", density=0.15, mean_length=length) for length in (3.0, 8.0)]
    extreme = [
        DenoiserConfig(mode="[NLG]", density=density, mean_length=length)
        for density, length in ((0.5, 3.0), (0.5, 8.0), (0.15, 64.0), (0.5, 64.0))
    ]
    return [*regular, *extreme, DenoiserConfig(mode="[S2S]", density=0.25, prefix=True)]


class Ul2Config(Section):
    """Mixture of denoisers (Tay et al. 2023, 3.1); for `kind: ul2`."""

    denoisers: list[DenoiserConfig] = Field(default_factory=_ul2, min_length=1)
    """Default: the seven of table 1 of the paper with equal weights (two R, four X, one S)."""


class FimConfig(Section):
    """Fill in the middle (Bavarian et al. 2022), on tokens; for `kind: fim`."""

    rate: Annotated[float, OnResume.ALLOW] = Field(default=0.5, gt=0, le=1)
    """Share of documents that are rearranged."""
    spm_rate: Annotated[float, OnResume.ALLOW] = Field(default=0.5, ge=0, le=1)
    """Share of those in the order suffix, prefix, middle, and not prefix, suffix, middle."""
    max_documents: Annotated[int, OnResume.ALLOW] = Field(default=4, ge=1)
    """Limit of rearranged documents in a row, which reserves three special tokens for each."""
    tokens: Annotated[list[str], OnResume.ALLOW] = Field(
        default=["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"], min_length=3, max_length=3
    )
    """Special tokens before the prefix, the suffix and the middle."""


class MaskedPatchesConfig(Section):
    """Masked autoencoder of images (He et al. 2022, 3); for `kind: masked_patches`."""

    rate: Annotated[float, OnResume.ALLOW] = Field(default=0.75, gt=0, lt=1)
    """Share of the patches of an image that are hidden from the encoder and predicted."""
    normalize: Annotated[bool, OnResume.ALLOW] = True
    """Predict pixels minus the mean of their patch, divided by its standard deviation (He et al.
    2022, 3). False: pixels as normalized by `model.input`."""


class DpoConfig(Section):
    """Direct preference optimization (Rafailov et al. 2023, 4), for `kind: dpo`.

    The reference is the model that training begins with, `init.from`.
    """

    beta: Annotated[float, OnResume.WARN] = Field(default=0.1, gt=0)
    """Factor of the difference to the reference: a larger one keeps the model closer to it."""
    label_smoothing: Annotated[float, OnResume.WARN] = Field(default=0.0, ge=0, lt=0.5)
    """Share of the preferences that are assumed to be the wrong way round, in training."""


SECTIONS = ("masked", "replaced", "span", "ul2", "fim", "masked_patches", "dpo")
"""Sections of `TaskConfig`, each of which is read by the kind of its name."""


class TaskConfig(Section):
    """One objective."""

    kind: Annotated[str, AfterValidator(partial(check_name, known=NEEDS)), OnResume.ALLOW] = "causal"
    """Objective: `causal`, `masked`, `replaced`, `span`, `prefix`, `ul2`, `fim`, `seq2seq`, `supervised`,
    `dpo`, `classify`, `tag`, `answers`, `choices`, `images`, `masked_patches`, `captions`, or one
    that a module under `extend` adds (docs/objectives.md)."""
    masked: MaskedConfig = MaskedConfig()
    replaced: ReplacedConfig = ReplacedConfig()
    span: SpanConfig = SpanConfig()
    ul2: Ul2Config = Ul2Config()
    fim: FimConfig = FimConfig()
    masked_patches: MaskedPatchesConfig = MaskedPatchesConfig()
    dpo: DpoConfig = DpoConfig()

    @property
    def target_share(self) -> float:
        """Expected share of the positions at which the head is computed."""
        masked = {"masked": self.masked.rate, "masked_patches": self.masked_patches.rate}
        few = masked | {"classify": 0.0, "choices": 0.0, "images": 0.0}
        return few.get(self.kind, 1.0)

    @model_validator(mode="after")
    def _check_sections(self) -> Self:
        for name in SECTIONS:
            if name != self.kind and self.differs(name):
                raise ValueError(f"{name} does not go with kind={self.kind}; leave it out")
        return self


class MixedTaskConfig(TaskConfig):
    """One of several objectives of a run."""

    weight: Annotated[float, OnResume.ALLOW] = Field(gt=0)
    """Share of the rows relative to the other objectives."""


class ObjectiveConfig(TaskConfig):
    """Training objective, or several, one of which is drawn for each row by (seed, sample id)."""

    mixture: list[MixedTaskConfig] = Field(default_factory=list)
    """Several weighted objectives, instead of `kind` and its section."""
    label_smoothing: Annotated[float, OnResume.ALLOW] = Field(default=0.0, ge=0, lt=1)
    """Probability spread evenly over the vocabulary (Szegedy et al. 2016, 7), in training only."""
    z_loss: Annotated[float, OnResume.ALLOW] = Field(default=0.0, ge=0)
    """Coefficient of the squared log of the denominator (Chowdhery et al. 2022, 5), in training."""

    multi_token_weight: Annotated[float, OnResume.ALLOW] = Field(default=0.3, gt=0)
    """Weight of the mean loss of the modules of `model.multi_token` (DeepSeek-V3, 2.2 and 4.2: 0.3, and
    0.1 in the last third of the tokens), in training."""

    @property
    def tasks(self) -> list[TaskConfig]:
        """Objectives of the mixture, or the only one."""
        return [*self.mixture] or [self]

    @property
    def weights(self) -> list[float]:
        """Weights of the objectives, at any scale."""
        return [task.weight for task in self.mixture] or [1.0]

    @property
    def sees_prompts_whole(self) -> bool:
        """True if a decoder always reads prompts with bidirectional attention."""
        return all(task.kind in ("prefix", "ul2") for task in self.tasks)

    @property
    def scores_words(self) -> bool:
        """True if the loss is one of words of a vocabulary: exp(loss), their perplexity, is a number of words."""
        return all(NEEDS[task.kind].head == "lm" and task.kind != "dpo" for task in self.tasks)

    @property
    def head_share(self) -> float:
        """Expected share of the positions at which the head is computed: the masked, or 0 of labels."""
        shares = [task.target_share for task in self.tasks]
        if 1.0 in shares:
            return 1.0
        weighted = [weight * share for weight, share in zip(self.weights, shares, strict=True)]
        return sum(weighted) / sum(self.weights)

    @model_validator(mode="after")
    def _check_mixture(self) -> Self:
        alone = [name for name in ("kind", *SECTIONS) if self.differs(name)]
        if self.mixture and alone:
            raise ValueError(f"needs {alone[0]} or mixture, and not both")
        others = {"dpo": "compares answers", "replaced": "finds replaced ones"}
        others |= {"answers": "finds answers in texts", "choices": "chooses an answer"}
        for name in ("label_smoothing", "z_loss"):
            if self.kind in others and self.differs(name):
                smooths_pairs = self.kind == "dpo" and name == "label_smoothing"
                fix = "use dpo.label_smoothing" if smooths_pairs else "leave it out"
                what = f"{name} is of predicted tokens, and kind={self.kind} {others[self.kind]}"
                raise ValueError(f"{what}; {fix}")
        return self


def check_kind(kind: str, model: AnyModelConfig, data: DataConfig, start: str | None) -> None:
    """Checks that a model and the layout of its data fit an objective."""
    needs = NEEDS[kind]
    head = model.head
    if model.shape not in needs.shapes:
        preset = f"model.preset={model.preset}" if model.preset else "this one"
        this = preset if start is None else f"that of init.from={start}"
        what = f"objective.kind={kind} needs a model with {' or '.join(needs.shapes)}, {this} has {model.shape}"
        other = "another init.from" if start else "another model.preset"
        # The first is the usual one of such a model, on data of this kind.
        for name, fitting in NEEDS.items():
            if model.shape in fitting.shapes and fitting.head == head.kind and set(fitting.data) & set(needs.data):
                raise ValueError(f"{what}; use objective.kind={name}, or {other}")
        raise ValueError(f"{what}; use {other}")
    if model.kind == "recurrent" and model.encoder is None and kind in ("prefix", "ul2"):
        raise ValueError(
            f"objective.kind={kind} needs bidirectional attention to the prefix, which a "
            f"recurrent decoder lacks; use objective.kind=causal"
        )
    if head.kind != needs.head:
        tied = ", and model.tied_embeddings=false" if needs.head in ("labels", "spans", "choices") else ""
        need = f"objective.kind={kind} needs model.head.kind={needs.head}"
        raise ValueError(f"{need}, this model has {head.kind}; set it{tied}")
    reads = getattr(model, "reads", "tokens")
    if reads != needs.reads:
        need = f"objective.kind={kind} needs a model that reads {needs.reads}, this one reads {reads}"
        fix = "choose a preset with model.input"
        if reads == "patches":
            kinds = {"pixels": "masked_patches", "lm": "captions"}
            fix = f"use objective.kind={kinds.get(head.kind, 'images')}"
        raise ValueError(f"{need}; {fix}")
    if reads == "patches" and data.packing != "concat":
        what = f"data.packing={data.packing} is of text"
        raise ValueError(f"{what}; images are one a row, leave it out")
    if kind == "tag" and (head.mean or getattr(model, "pooler", False)):
        raise ValueError(
            "objective.kind=tag labels words, but model.head.mean and model.pooler summarize "
            "documents; set both to false"
        )
    if kind in ("classify", "answers", "choices") and not data.document_mask:
        verb = {"classify": "labels", "answers": "searches", "choices": "compares"}[kind]
        what = f"objective.kind={kind} {verb} documents, which must not attend to each other"
        raise ValueError(f"{what}; use data.document_mask=true")
    if needs.whole_rows and data.packing != "concat":
        need = f"objective.kind={kind} needs full rows, but data.packing={data.packing}"
        raise ValueError(f"{need}; use data.packing=concat")
    if kind == "ul2" and data.document_mask:
        what = "objective.kind=ul2 has one mode token a row, not one a document"
        raise ValueError(f"{what}; use data.document_mask=false")


def check_multi_token(model: AnyModelConfig, objective: ObjectiveConfig) -> None:
    """Checks that an objective predicts further tokens, from left to right. Raises: ValueError."""
    depth = getattr(model, "multi_token", 0)
    if not depth:
        if objective.differs("multi_token_weight"):
            key = f"objective.multi_token_weight={objective.multi_token_weight}"
            raise ValueError(f"{key} needs model.multi_token=1 or more; leave it out")
        return
    key = f"model.multi_token={depth}"
    for kind in (task.kind for task in objective.tasks):
        if kind in ("prefix", "ul2"):
            # The module of a prefix's last tokens would read the very token that it predicts.
            what = "reads the token after each one"
            what = f"{what}, which a prefix that is seen whole would show to those before it"
            raise ValueError(f"{key} {what}: objective.kind={kind}; use model.multi_token=0")
