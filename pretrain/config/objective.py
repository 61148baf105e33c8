"""`objective:` -- training objectives, and the model shapes and data that each needs."""

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, create_model

from pretrain.config.base import Conflicts, OnResume, SameKeys, Section, UserPath, check_name
from pretrain.config.data import DataConfig
from pretrain.config.model import AnyModelConfig
from pretrain.kinds.heads import HEADS
from pretrain.kinds.objectives import OBJECTIVES, objective_of_model

SECTIONS = {name: one.section for name, one in OBJECTIVES.items() if one.section is not None}
"""Sections of `objective:`, each of which is read by the kind of its name."""


class TaskConfig(Section):
    """One objective."""

    kind: Annotated[str, AfterValidator(partial(check_name, known=OBJECTIVES)), OnResume.ALLOW] = "causal"
    """Objective: {names}, or one that a module under `extend` adds (docs/objectives.md)."""

    @property
    def section(self) -> Any:
        """Settings of the objective, in the section of its name; None: it has none."""
        return getattr(self, self.kind) if self.kind in SECTIONS else None

    @property
    def target_share(self) -> float:
        """Expected share of the positions at which the head is computed."""
        return OBJECTIVES[self.kind].target_share(self.section)

    @property
    def generator_share(self) -> float:
        """Expected share of the positions at which a generator has its head; 0 without one."""
        share = OBJECTIVES[self.kind].generator_share
        return 0.0 if share is None else share(self.section)

    def _conflicts(self) -> Conflicts:
        for name in SECTIONS:
            if name != self.kind and self.differs(name):
                yield f"{name} does not go with kind={self.kind}", "leave it out"


if TYPE_CHECKING:
    _Sectioned = TaskConfig
else:
    fields = {name: (section, section()) for name, section in SECTIONS.items()}
    _Sectioned = create_model("_Sectioned", __base__=TaskConfig, **fields)


class MixedTaskConfig(_Sectioned):
    """One of several objectives of a run."""

    weight: Annotated[float, OnResume.ALLOW] = Field(gt=0)
    """Share of the rows relative to the other objectives."""


class DistillConfig(Section):
    """Distillation (Hinton et al. 2015): scores of a frozen teacher are learned beside the targets.

    Added to the loss of a target is `weight` times the divergence of the two distributions.
    """

    teacher: Annotated[UserPath, OnResume.ALLOW]
    """Teacher of the same vocabulary and stacks: a run, a checkpoint, a model folder or a Hugging
    Face folder."""
    stored: Annotated[bool, OnResume.ALLOW] = False
    """Read its largest scores beside the shards, which `pretrain distill` writes, and do not run it."""
    weight: Annotated[float, OnResume.WARN] = Field(default=1.0, gt=0)
    """Factor of the divergence, beside 1 of the loss of the targets."""
    temperature: Annotated[float, OnResume.WARN] = Field(default=1.0, gt=0)
    """Number that divides the scores of both; the divergence is multiplied by its square."""
    kind: Annotated[Literal["forward_kl", "reverse_kl", "mse"], OnResume.ALLOW] = "forward_kl"
    """Divergence of a token: `forward_kl`, KL(teacher, student); `reverse_kl`, KL(student, teacher)
    (Gu et al. 2024); or `mse`, the mean squared difference of the scores (Kim et al. 2021)."""

    def _conflicts(self) -> Conflicts:
        if self.kind == "mse" and self.differs("temperature"):
            yield "temperature is of distributions, and kind=mse compares scores", "leave it out"


class ObjectiveConfig(_Sectioned):
    """Training objective, or several, one of which is drawn for each row by (seed, sample id)."""

    mixture: Annotated[list[MixedTaskConfig], SameKeys("objective", own=("weight",))] = Field(default_factory=list)
    """Several weighted objectives, instead of `kind` and its section."""
    label_smoothing: Annotated[float, OnResume.ALLOW] = Field(default=0.0, ge=0, lt=1)
    """Probability spread evenly over the vocabulary (Szegedy et al. 2016, 7), in training only."""
    z_loss: Annotated[float, OnResume.ALLOW] = Field(default=0.0, ge=0)
    """Coefficient of the squared log of the denominator (Chowdhery et al. 2022, 5), in training."""

    multi_token_weight: Annotated[float, OnResume.ALLOW] = Field(default=0.3, gt=0)
    """Weight of the mean loss of the modules of `model.multi_token` (DeepSeek-V3, 2.2 and 4.2: 0.3, and
    0.1 in the last third of the tokens), in training."""

    distill: DistillConfig | None = None
    """Teacher whose scores are learned beside targets that are words. None: no teacher."""

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
        return all(OBJECTIVES[task.kind].whole_prompts for task in self.tasks)

    @property
    def scores_words(self) -> bool:
        """True if the loss is one of words of a vocabulary: exp(loss), their perplexity, is a number of words."""
        needs = [OBJECTIVES[task.kind] for task in self.tasks]
        return all(HEADS[one.head].scores_words and not one.instead_of_tokens for one in needs)

    @property
    def predicts_text(self) -> bool:
        """True if each token of a text is predicted from those before it, which is a code for the text."""
        return all(OBJECTIVES[task.kind].running_text for task in self.tasks)

    @property
    def has_reference(self) -> bool:
        """True if the model is compared with the one that training begins with."""
        return OBJECTIVES[self.kind].reference(self.section)

    @property
    def head_share(self) -> float:
        """Expected share of the positions at which the head is computed: the masked, or 0 of labels."""
        shares = [task.target_share for task in self.tasks]
        if 1.0 in shares:
            return 1.0
        weighted = [weight * share for weight, share in zip(self.weights, shares, strict=True)]
        return sum(weighted) / sum(self.weights)

    def _conflicts(self) -> Conflicts:
        yield from super()._conflicts()
        alone = [name for name in ("kind", *SECTIONS) if self.differs(name)]
        if self.mixture and alone:
            yield f"needs {alone[0]} or mixture, and not both"
        yield from self._distill_conflicts()
        instead = OBJECTIVES[self.kind].instead_of_tokens
        for name in ("label_smoothing", "z_loss"):
            if instead and self.differs(name):
                fix = f"use {self.kind}.{name}" if hasattr(self.section, name) else "leave it out"
                yield f"{name} is of predicted tokens, and kind={self.kind} {instead}", fix

    def _distill_conflicts(self) -> Conflicts:
        if self.distill is None:
            return
        kinds = [task.kind for task in self.tasks]
        if not self.scores_words:
            why = f"which kind={'+'.join(kinds)} does not predict"
            yield f"distill compares scores of words, {why}", "leave it out"
        drawn = [kind for kind in kinds if not OBJECTIVES[kind].stored_scores]
        if self.distill.stored and drawn:
            why = f"which kind={drawn[0]} changes"
            yield f"distill.stored has scores of texts as they are, {why}", "use distill.stored=false"


def kind_conflicts(kind: str, model: AnyModelConfig, data: DataConfig, start: str | None) -> Conflicts:
    """Yields what of a model and of the layout of its data does not fit an objective."""
    needs = OBJECTIVES[kind]
    key = f"objective.kind={kind}"
    if model.shape not in needs.shapes:
        yield _shape_conflict(kind, model, start)
    if model.kind == "recurrent" and model.encoder is None and needs.whole_prompts:
        yield (
            f"{key} needs bidirectional attention to the prefix, which a recurrent decoder lacks",
            "use objective.kind=causal",
        )
    mixers = "" if model.kind == "recurrent" else model.last_stack.lacking("both_sides")
    if needs.whole_prompts and mixers:
        yield (
            f"{key} reads a prefix from both sides, and layers of {mixers} from left to right",
            "use objective.kind=causal",
        )
    head = model.head
    if head.kind != needs.head:
        tied = ", and model.tied_embeddings=false" if HEADS[needs.head].fine_tuned else ""
        yield f"{key} needs model.head.kind={needs.head}, this model has {head.kind}", f"set it{tied}"
    reads = getattr(model, "reads", "tokens")
    if reads != needs.reads:
        fix = "choose a preset with model.input"
        if reads == "patches":
            fix = f"use objective.kind={objective_of_model(model.shape, head.kind, reads)}"
        yield f"{key} needs a model that reads {needs.reads}, this one reads {reads}", fix
    yield from _layout_conflicts(kind, model, data)


def _layout_conflicts(kind: str, model: AnyModelConfig, data: DataConfig) -> Conflicts:
    needs = OBJECTIVES[kind]
    key = f"objective.kind={kind}"
    if model.input is not None and data.packing != "concat":
        yield f"data.packing={data.packing} is of text", "images are one a row, leave it out"
    if needs.labels_words and (model.head.mean or getattr(model, "pooler", False)):
        yield (
            f"{key} labels words, but model.head.mean and model.pooler summarize documents",
            "set both to false",
        )
    if needs.apart and not data.document_mask:
        yield f"{key} {needs.apart} must not attend to each other", "use data.document_mask=true"
    if needs.whole_rows and data.packing != "concat":
        yield f"{key} needs full rows, but data.packing={data.packing}", "use data.packing=concat"
    if needs.one_text_a_row and data.document_mask:
        yield f"{key} has one mode token a row, not one a document", "use data.document_mask=false"


def _shape_conflict(kind: str, model: AnyModelConfig, start: str | None) -> tuple[str, str]:
    needs = OBJECTIVES[kind]
    preset = f"model.preset={model.preset}" if model.preset else "this one"
    this = preset if start is None else f"that of init.from={start}"
    stacks = " or ".join(needs.shapes)
    fix = "another init.from" if start else "another model.preset"
    # The first is the usual one of such a model, on data of this kind.
    for name, other in OBJECTIVES.items():
        if model.shape in other.shapes and other.head == model.head.kind and set(other.data) & set(needs.data):
            fix = f"objective.kind={name}, or {fix}"
            break
    return f"objective.kind={kind} needs a model with {stacks}, {this} has {model.shape}", f"use {fix}"


def multi_token_conflicts(model: AnyModelConfig, objective: ObjectiveConfig) -> Conflicts:
    """Yields what does not go with the prediction of further tokens, from left to right."""
    depth = getattr(model, "multi_token", 0)
    if not depth and objective.differs("multi_token_weight"):
        key = f"objective.multi_token_weight={objective.multi_token_weight}"
        yield f"{key} needs model.multi_token=1 or more", "leave it out"
    for kind in (task.kind for task in objective.tasks):
        # The module of a prefix's last tokens would read the very token that it predicts.
        if depth and OBJECTIVES[kind].whole_prompts:
            seen = "which a prefix that is seen whole would show to those before it"
            yield (
                f"model.multi_token={depth} reads the token after each one, {seen}: objective.kind={kind}",
                "use model.multi_token=0",
            )
