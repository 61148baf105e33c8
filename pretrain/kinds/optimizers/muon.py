"""Muon (Jordan et al. 2024) and NorMuon (Li et al. 2025) on hidden matrices, AdamW on the rest."""

from typing import Annotated, Literal

from pydantic import Field

from pretrain.config.base import OnResume, Section
from pretrain.kinds.optimizer import MatrixState, Optimizer


class MuonConfig(Section):
    """Muon (Jordan et al. 2024) on hidden matrices, AdamW on the rest; for `kind: muon`."""

    lr: Annotated[float, OnResume.WARN] = Field(default=0.02, gt=0)
    """Peak learning rate of hidden matrices. It follows the same schedule as `optim.lr`."""
    momentum: Annotated[float, OnResume.WARN] = Field(default=0.95, ge=0, lt=1)
    """Decay rate of the momentum."""
    nesterov: Annotated[bool, OnResume.WARN] = True
    """Use Nesterov momentum."""
    ns_steps: Annotated[int, OnResume.WARN] = Field(default=5, ge=1, lt=100)
    """Newton-Schulz iterations."""
    weight_decay: Annotated[float | None, OnResume.WARN] = Field(default=None, ge=0)
    """Weight decay of hidden matrices. None: `optim.weight_decay`."""
    adjust_lr_fn: Annotated[Literal["original", "match_rms_adamw"], OnResume.WARN] = "original"
    """Learning rate of a matrix by its shape. `original`: sqrt(height / width) times for a tall
    one. `match_rms_adamw`: scaled for a rate and a decay tuned for AdamW (Liu et al. 2025)."""

    row_beta2: Annotated[float | None, OnResume.NEVER] = Field(default=None, ge=0, lt=1)
    """NorMuon (Li et al. 2025): decay rate of the mean squares by which rows of the update are normalized, 0.95 in
    the paper. None: plain Muon."""
    split_heads: Annotated[bool, OnResume.NEVER] = False
    """Orthogonalize the queries, keys and values of each head on their own."""


def _state(own: MuonConfig) -> MatrixState:
    return MatrixState(values=1, rows=int(own.row_beta2 is not None))


def _transfer(own: MuonConfig, width: float) -> float:
    """Returns the factor of a rate: the spectral norm of an update grows with `match_rms_adamw` alone."""
    return 1.0 if own.adjust_lr_fn == "original" else width**-0.5


MUON = Optimizer(
    build="pretrain.optim.muon:build_muon",
    section=MuonConfig,
    matrices=_state,
    usual_rate=1e-3,
    is_cautious=True,
    transfer=_transfer,
    is_in_bf16=True,
)
