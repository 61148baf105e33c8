"""Checkpoints of adapters: what was trained beside a model that stays where it is, and the two merged.

    X.lora_A.default.weight [r, in], X.lora_B.default.weight [out, r]   X.weight + alpha / r * B A (Hu et al. 2022, 4.1)
    any other parameter of the checkpoint                               in place of the model's own

Names are peft's, but for `base_layer`, which says only that a layer has an adapter.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from pretrain.artifact.adapt import Adapted
from pretrain.checkpoint.layout import load_manifest
from pretrain.checkpoint.weights import WeightReader
from pretrain.config.run import RunConfig
from pretrain.errors import CheckpointError
from pretrain.interop.shapes import parameter_shapes

if TYPE_CHECKING:
    from pretrain.artifact.what import What

A_SUFFIX, B_SUFFIX = ".lora_A.default.weight", ".lora_B.default.weight"


def is_adapter(name: str) -> bool:
    """Whether a parameter is one of an adapter's two matrices."""
    return name.endswith((A_SUFFIX, B_SUFFIX))


def name_without_adapter(name: str) -> str:
    """Returns the name that a parameter has in a model without adapters."""
    return name.replace(".base_layer.", ".")


class Merged:
    """A model with adapters merged into it.

    Args:
        base: The model that they were trained beside.
        trained: The checkpoint.
        scale: What the product of an adapter's matrices is multiplied by.

    Attributes:
        base: The model.
        shapes: Of every parameter.
        layers: Names of the layers that have an adapter.
        replaced: Names of the parameters that were trained in full.
    """

    def __init__(self, base: Adapted, trained: WeightReader, scale: float) -> None:
        self.base, self.shapes, self.scale = base, base.shapes, scale
        self._trained = trained
        self.layers = [name.removesuffix(A_SUFFIX) for name in trained.shapes if name.endswith(A_SUFFIX)]
        self._full = {name_without_adapter(name): name for name in trained.shapes if not is_adapter(name)}
        self.replaced = sorted(self._full)

    def matrices(self, layer: str) -> tuple[Tensor, Tensor]:
        """Returns A [r, in] and B [out, r] of a layer."""
        return self._trained.read(layer + A_SUFFIX), self._trained.read(layer + B_SUFFIX)

    def read(self, name: str) -> Tensor:
        """Returns one parameter, fp32, whole. Raises: CheckpointError."""
        if name in self._full:
            return self._trained.read(self._full[name])
        weight, layer = self.base.read(name), name.removesuffix(".weight")
        if layer not in self.layers:
            return weight
        a, b = self.matrices(layer)
        return weight + self.scale * (b @ a)


def merge_adapters(checkpoint: Path, config: RunConfig, open_other: "Callable[[Path], What]") -> Merged:
    """Opens a checkpoint of adapters with the model under them; reads that once, to see that it is the same.

    Args:
        checkpoint: The folder.
        config: Of its run.
        open_other: `open_what`.

    Raises:
        CheckpointError: The model is gone, or has changed.
    """
    assert config.init.from_ is not None
    start = Path(config.init.from_)
    if not start.exists():
        raise CheckpointError(
            f"holds adapters of {start}, and there is nothing there",
            where=str(checkpoint),
            fix="put that model back, or call this from the folder that the run was started in",
        )
    base = Adapted(open_other(start), config.model, parameter_shapes(config.model))
    check_base(str(load_manifest(checkpoint).state.get("base_hash", "")), base, str(checkpoint))
    return Merged(base, WeightReader(checkpoint), config.finetune.scale)


def check_base(saved: str, base: Adapted, where: str) -> None:
    """Compares the weights under adapters with those that they were trained beside. Raises: CheckpointError."""
    found = base.fingerprint()
    if saved != found:
        raise CheckpointError(
            f"its adapters were trained beside other weights than those of {base.what.path} (sha256 {saved[:12]} -> "
            f"{found[:12]})",
            where=where,
            fix="put back the model that init.from named when the run began",
        )
