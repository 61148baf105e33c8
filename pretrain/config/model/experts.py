"""`model.encoder.experts`, `model.decoder.experts` -- a mixture of experts in place of feed-forward layers."""

from typing import Annotated, Literal

from pydantic import Field

from pretrain.config.base import MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH, Conflicts, OnResume, Section


class ExpertsConfig(Section):
    """Mixture of experts in place of every feed-forward layer of a stack (Shazeer et al. 2017)."""

    count: Annotated[int, OnResume.NEVER] = Field(ge=2, le=MAX_EXPERTS)
    """Number E of experts of a layer, each a feed-forward layer of its own."""
    top_k: Annotated[int, OnResume.ALLOW] = Field(ge=1, le=MAX_EXPERTS)
    """Experts that a token chooses. None is ever full: no token is dropped."""
    width: Annotated[int | None, OnResume.NEVER] = Field(default=None, ge=1, le=MAX_WIDTH)
    """Hidden width F of one expert. None: `ff_width`."""
    shared: Annotated[int, OnResume.NEVER] = Field(default=0, ge=0, le=MAX_EXPERTS)
    """Experts that every token passes besides (Dai et al. 2024, DeepSeekMoE), as one layer of their
    summed width."""
    shared_width: Annotated[int | None, OnResume.NEVER] = Field(default=None, ge=1, le=MAX_WIDTH)
    """Summed width of the shared experts. None: `shared` times that of one expert."""
    shared_gate: Annotated[bool, OnResume.NEVER] = False
    """Multiply the result of the shared experts by the sigmoid of a learned score (Qwen3-Next)."""
    first: Annotated[int, OnResume.NEVER] = Field(default=0, ge=0, le=MAX_LAYERS)
    """Number of the first layer with experts, counted from 0; those before it are dense, of `ff_width`
    (DeepSeek-V3: 3)."""
    groups: Annotated[int, OnResume.ALLOW] = Field(default=1, ge=1, le=MAX_EXPERTS)
    """Equal groups of experts of which a token first chooses `top_groups`, by the sum of their two
    best scores (DeepSeek-V3, 2.1.2; see `group_scores`). 1: it chooses among all."""
    top_groups: Annotated[int, OnResume.ALLOW] = Field(default=1, ge=1, le=MAX_EXPERTS)
    """Groups that a token chooses experts of."""
    group_scores: Annotated[int, OnResume.ALLOW] = Field(default=2, ge=1, le=2)
    """Best scores of a group whose sum is its own (DeepSeek-V2, 2.2.2: 1)."""
    scores: Annotated[Literal["softmax", "sigmoid"], OnResume.ALLOW] = "softmax"
    """Scores of the experts for a token: `softmax` over all, `sigmoid` of each (DeepSeek-V3)."""
    normalize: Annotated[bool, OnResume.ALLOW] = True
    """Divide the weights of the chosen experts by their sum; with `softmax` the same as a softmax
    over the chosen ones (Mixtral). False: the scores themselves (Switch, OLMoE)."""
    scale: Annotated[float, OnResume.ALLOW] = Field(default=1.0, gt=0)
    """Factor of these weights (DeepSeek-V3)."""
    balance: Annotated[Literal["loss", "bias", "none"], OnResume.NEVER] = "loss"
    """Even use of experts. `loss`: an auxiliary loss of the global batch (Fedus et al. 2022, 2.2).
    `bias`: a bias of the choice alone, moved after each step (Wang et al. 2024, 3)."""
    balance_weight: Annotated[float, OnResume.WARN] = Field(default=0.01, gt=0)
    """Coefficient of that loss; `loss` only."""
    balance_rate: Annotated[float, OnResume.WARN] = Field(default=0.001, gt=0)
    """Change of the bias of an expert in a step; `bias` only."""
    z_loss: Annotated[float, OnResume.WARN] = Field(default=0.0, ge=0)
    """Coefficient of the squared log of the softmax's denominator (Zoph et al. 2022, 3.2);
    `softmax` only."""

    def _conflicts(self) -> Conflicts:
        if self.top_k > self.count:
            most = self.count
            yield f"top_k={self.top_k} exceeds count={most}", f"use {most} or fewer"
        size = self.count // self.groups
        if self.groups > 1 and (self.count % self.groups or size < 2):
            yield f"groups={self.groups} must divide count={self.count} into groups of 2 or more"
        if self.top_groups > self.groups or self.top_k > self.top_groups * size:
            yield (
                f"top_groups={self.top_groups} of groups={self.groups} must be groups that have "
                f"top_k={self.top_k} experts"
            )
        for key, needs, value in (
            ("balance_weight", "balance=loss", self.balance == "loss"),
            ("balance_rate", "balance=bias", self.balance == "bias"),
            ("z_loss", "scores=softmax", self.scores == "softmax"),
            ("shared_gate", "shared=1 or more", self.shared > 0),
            ("shared_width", "shared=1 or more", self.shared > 0),
        ):
            if self.differs(key) and not value:
                yield f"{key}={str(getattr(self, key)).lower()} needs {needs}", "leave it out"
