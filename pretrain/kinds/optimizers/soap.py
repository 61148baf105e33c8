"""SOAP (Vyas et al. 2024) on hidden matrices, AdamW on the rest."""

from typing import Annotated

from pydantic import Field

from pretrain.config.base import OnResume, Section
from pretrain.kinds.optimizer import MatrixState, Optimizer


class SoapConfig(Section):
    """SOAP (Vyas et al. 2024) on hidden matrices, AdamW on the rest; for `kind: soap`."""

    every: Annotated[int, OnResume.WARN] = Field(default=10, ge=1)
    """Steps between updates of the bases, each a QR decomposition of both sides of every matrix."""
    shampoo_beta: Annotated[float, OnResume.WARN] = Field(default=0.95, ge=0, lt=1)
    """Decay rate of the factors whose eigenvectors the bases are."""


SOAP = Optimizer(
    build="pretrain.optim.soap:build_soap",
    section=SoapConfig,
    matrices=lambda own: MatrixState(values=2, squares=2),
    usual_rate=3e-3,
    is_cautious=True,
)
