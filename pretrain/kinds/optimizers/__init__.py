"""Optimizers by `optim.kind`, and the section that chooses one. A new one: a file with its record, and a line here."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from pretrain.config.base import OFF, Conflicts, OnResume, Section, check_name
from pretrain.kinds.optimizer import Optimizer, TransferConfig
from pretrain.kinds.optimizers.adafactor import ADAFACTOR, AdafactorConfig
from pretrain.kinds.optimizers.adamw import ADAMW
from pretrain.kinds.optimizers.lion import LION
from pretrain.kinds.optimizers.muon import MUON, MuonConfig
from pretrain.kinds.optimizers.soap import SOAP, SoapConfig

OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": ADAMW,
    "adafactor": ADAFACTOR,
    "lion": LION,
    "muon": MUON,
    "soap": SOAP,
}
"""Record of each `optim.kind`. Modules under `extend` may add entries."""
_HIGH = 6
"""Times the usual rate: small models take five."""


def optimizers_where(test: Callable[[Optimizer], object]) -> str:
    """Returns the names of the optimizers that a test holds for, as `adamw or lion`."""
    return " or ".join(sorted(kind for kind, record in OPTIMIZERS.items() if test(record)))


class OptimizerConfig(Section):
    """An optimizer and its rates."""

    kind: Annotated[str, AfterValidator(partial(check_name, known=OPTIMIZERS)), OnResume.NEVER] = "adamw"
    """`adamw`, `adafactor`, `lion`, `muon`, `soap`, or one that a module of `extend` adds (docs/optimizers.md)."""
    lr: Annotated[float, OnResume.WARN] = Field(gt=0)
    """Peak learning rate."""
    beta1: Annotated[float, OnResume.WARN] = Field(default=0.9, ge=0, lt=1)
    """Decay rate of the first moment."""
    beta2: Annotated[float, OnResume.WARN] = Field(default=0.95, ge=0, lt=1)
    """Decay rate of the second moment."""
    eps: Annotated[float, OnResume.WARN] = Field(default=1e-8, gt=0)
    """Epsilon that is added to the root of the second moment; not read by `lion` and `adafactor`."""
    weight_decay: Annotated[float, OFF, OnResume.WARN] = Field(default=0.1, ge=0)
    """Decoupled weight decay of matrices; none on norms, biases and embeddings."""
    cautious_decay: Annotated[bool, OnResume.WARN] = False
    """Decay a weight only where its update has its sign (Chen et al. 2025); not for `adafactor`."""
    grad_clip: Annotated[float, OFF, OnResume.WARN] = Field(default=1.0, ge=0)
    """Largest global gradient norm. 0: no clipping."""
    layer_decay: Annotated[float | None, OnResume.WARN] = Field(default=None, gt=0, le=1)
    """Learning rate of a block divided by that of the block above it (Clark et al. 2020);
    embeddings are below the first block, the head above the last. None: one rate."""
    transfer: TransferConfig | None = None
    """Transfer from a smaller model (docs/optimizers.md). None: the rates are those of this model."""
    muon: MuonConfig = MuonConfig()
    soap: SoapConfig = SoapConfig()
    adafactor: AdafactorConfig = AdafactorConfig()

    @property
    def record(self) -> Optimizer:
        """The optimizer of `kind`."""
        return OPTIMIZERS[self.kind]

    @property
    def own(self) -> Any:
        """The section that this optimizer alone reads, of one that was added its defaults; None: it has none."""
        return getattr(self, self.kind, self.record.section()) if self.record.section else None

    def of_matrices(self, key: Literal["lr", "weight_decay", "split_heads"]) -> Any:
        """Returns a key of `own` that is of hidden matrices; None: they have the value of all others."""
        return getattr(self.own, key, None)

    @property
    def splits_heads(self) -> bool:
        """Whether a step takes the matrices of attention head by head."""
        return bool(self.of_matrices("split_heads"))

    def _conflicts(self) -> Conflicts:
        if self.cautious_decay and not self.record.is_cautious:
            kinds = optimizers_where(lambda record: record.is_cautious)
            yield f"cautious_decay needs kind={kinds}, not {self.kind}", "leave it out"
        if self.cautious_decay and not (self.weight_decay or self.of_matrices("weight_decay")):
            yield "cautious_decay=true has no decay to choose from: weight_decay=0", "leave it out"
        for kind in OptimizerConfig.model_fields:
            if kind in OPTIMIZERS and kind != self.kind and self.differs(kind):
                usual = self.record.usual_rate
                rate = f" optim.lr={usual}" if usual else ""
                yield (
                    f"the keys under {kind} are read under kind={kind} only, not {self.kind}",
                    f"remove them, or write optim.{kind}=null{rate}",
                )

    def high_rate(self) -> str | None:
        """Returns a sentence about a rate that is far above the usual one, such as from a recipe for Muon."""
        usual = self.record.usual_rate
        if self.transfer is not None or self.record.matrices or usual is None or self.lr <= _HIGH * usual:
            return None
        return f"optim.lr={self.lr:g} is high for optim.kind={self.kind}, whose usual rate is {usual:g}"
