"""Vectors of texts, close where the texts belong together (van den Oord et al. 2018, InfoNCE)."""

from typing import Annotated, Any

from pydantic import Field

from pretrain.config.base import Conflicts, OnResume, Section
from pretrain.kinds.objective import Objective

_Width = Annotated[int, Field(ge=1)]


class ContrastiveConfig(Section):
    """Contrastive loss over the whole global batch, for `kind: contrastive`."""

    temperature: Annotated[float, OnResume.WARN] = Field(default=0.05, gt=0)
    """Divisor of the cosines in the softmax; with `model.head.learned_temperature` that of the
    first step."""
    symmetric: Annotated[bool, OnResume.WARN] = True
    """Mean of the losses of both directions: the positive among the texts, and the query among the
    queries."""
    widths: Annotated[list[_Width], OnResume.WARN] = Field(default_factory=list)
    """Further widths at which the loss is computed, of the first dimensions of each vector, and
    averaged with that of the whole (Kusupati et al. 2022): vectors may then be cut to them."""


def _conflicts(config: Any) -> Conflicts:
    key = "objective.kind=contrastive"
    if max(config.objective.contrastive.widths, default=0) >= config.model.last_stack.width:
        width = config.model.last_stack.width
        yield (
            f"objective.contrastive.widths must be less than the width of the model, {width}",
            "leave larger ones out",
        )
    rows = min(tokens // config.batch.seq_len for _, tokens in config.batch.sizes)
    if config.data.packing == "padded" and rows < 2:
        yield (
            f"{key} compares the pairs of a batch, and one row has one pair",
            "raise batch.global_tokens",
        )
    for name in ("sequence", "tensor"):
        ranks = getattr(config.parallel, name)
        if ranks > 1:
            yield (
                f"parallel.{name}={ranks} cuts rows, and {key} compares whole texts",
                f"use parallel.{name}=1",
            )


CONTRASTIVE = Objective(
    shapes=("encoder", "decoder"),
    data=("triples",),
    head="vectors",
    section=ContrastiveConfig,
    rows="pretrain.objective.contrastive:build_contrastive",
    loss="pretrain.objective.contrastive:sum_contrastive_loss",
    loss_settings=("temperature", "symmetric", "widths"),
    whole_batch="pretrain.objective.contrastive:compare_batches",
    conflicts=_conflicts,
    shown=("similarity", "temperature"),  # cosine of a query and its positive
    mixes=False,
    target_share=lambda section: 0.0,  # one a document
    apart="compares documents, which",
    instead_of_tokens="compares texts",
    token_kinds="pretrain.objective.contrastive:compared_kinds",
    next_command="pretrain embed {path} texts.jsonl --output vectors.npy",
    no_targets="no pair is in the rows; see `pretrain data show`",
)
