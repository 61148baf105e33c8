"""Initial weights of a run from another model: `init.from`.

finetune.kind=full   a new run takes them once, as fp32 masters, by the ranges that a rank keeps
finetune.kind=lora   every attempt takes them: they are frozen; checkpoints have the adapters alone
"""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from pretrain import dist
from pretrain.artifact.lora import add_adapters, check_tokens, freeze, initial_adapter, train_beside
from pretrain.artifact.model_path import open_source
from pretrain.artifact.quantized import QuantizedLinear
from pretrain.artifact.source import (
    MAGNITUDE_SUFFIX,
    AdaptedModel,
    check_base,
    is_adapter,
    name_without_adapter,
    row_norms,
)
from pretrain.checkpoint.agree import agree
from pretrain.checkpoint.load import PIECE
from pretrain.checkpoint.state import TrainState
from pretrain.config.model import ModelConfig
from pretrain.config.run import RunConfig
from pretrain.dist import World
from pretrain.errors import CheckpointError, ConfigError, PretrainError
from pretrain.interop.choose import choose_family
from pretrain.interop.tensors import parameter_shapes
from pretrain.interop.write import as_released
from pretrain.model import LanguageModel
from pretrain.model.build import initial_weight
from pretrain.optim.groups import Scale
from pretrain.optim.parametrization import scale_of
from pretrain.parts import part_of
from pretrain.run.folder import RunDir
from pretrain.types import EMA, Fragment, FragmentStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InitialWeights:
    """Weights of a run before its first step.

    `base`: the model under adapters, if any. `resumes`: a checkpoint is loaded over all of them.
    """

    config: RunConfig
    base: AdaptedModel | None
    resumes: bool = False

    @property
    def quantizes(self) -> bool:
        """True if the matrices under adapters are in 4 bits; then the model is built without storage."""
        return self.config.finetune.quantize != "none"

    def arrange(self, model: LanguageModel, device: torch.device) -> int:
        """Adds adapters and freezes the rest, in place; returns the number of saved values.

        Matrices in 4 bits are filled, and what is left of the model then gets storage on `device`. Raises:
        ConfigError (patterns match no parameter, or leave none to train), LaunchError, CheckpointError.
        """
        finetune = self.config.finetune
        if self.base is None:
            if self.config.init.freeze:
                num = freeze(model, self.config.init.freeze)
                log.info("%s values are frozen, %s are trained", f"{num:,}", f"{_num_trained(model):,}")
            return sum(part_of(one).ranks * one.numel() for one in model.parameters())
        layers = add_adapters(model, finetune)
        if self.quantizes:
            model.to_empty(device=device)
            model.tie()
            self._fill_quantized(model, device)
        beside = train_beside(model, self.base.anew, finetune.also)
        frozen = [name for name in self.base.tables if name not in beside]
        if self.base.num_added and frozen:
            text = "rows of %d new tokens in %s are not trained; to train these tables: %s"
            fix = "finetune.new_tokens=trained"
            log.warning(text, self.base.num_added, ", ".join(frozen), fix)
        in_full = f", {', '.join(beside)} in full among them" if beside else ""
        num = _num_trained(model)
        text = "adapters of rank %d in %d layers: %s values are trained%s"
        log.info(text, finetune.rank, len(layers), f"{num:,}", in_full)
        return num

    def draw(self, name: str, shape: torch.Size) -> Tensor:
        """Returns a whole parameter, fp32, on the CPU. Raises: CheckpointError."""
        if self.base is not None and name.endswith(MAGNITUDE_SUFFIX):
            return row_norms(self.base.read(name.removesuffix(MAGNITUDE_SUFFIX) + ".weight"))
        if is_adapter(name):
            return initial_adapter(name, shape, self.config.seed)
        name = name_without_adapter(name)
        if self.base is not None and name in self.base:
            return self.base.read(name)
        weight = initial_weight(name, shape, self.config.model, self.config.seed)
        return weight.mul_(self.scale_of(name).init)

    def _fill_quantized(self, model: nn.Module, device: torch.device) -> None:
        """Fills the matrices in 4 bits, one whole one on the device at a time. Raises: CheckpointError."""
        for name, part in model.named_modules():
            if isinstance(part, QuantizedLinear):
                weight = self.draw(f"{name}.weight", torch.Size((part.out_features, part.in_features)))
                part.take(weight.to(device))

    def scale_of(self, name: str) -> Scale:
        """Returns the factors of a parameter under `optim.transfer`. Raises: ConfigError: It has no rule."""
        return scale_of(name, self.config.optim, self.config.model)

    def fill(self, store: FragmentStore, fresh: TrainState) -> TrainState:
        """Takes the weights of `init.from`, if any, for a run that has saved nothing. Collective.

        Raises:
            CheckpointError: There is no intact checkpoint, or it is not of this model.
        """
        assert not self.resumes, "a run with checkpoints loads one, or ends"
        if self.config.init.from_ is None:
            return fresh
        source = self.base or _open_base(self.config)
        take_weights(source, store)
        for line in source.describe():
            log.info("%s", line)
        if source.source.run is None and isinstance(self.config.model, ModelConfig):
            try:
                choose_family(as_released(self.config.model), None)
            except ConfigError as error:
                log.warning("this model can be trained, but `pretrain export` refuses it: %s", error.what)
        return fresh if self.base is None else replace(fresh, base_hash=self.base.fingerprint())

    def check(self, saved: TrainState) -> None:
        """Checks that adapters meet the weights of their training. Raises: CheckpointError."""
        if self.base is not None:
            check_base(saved.base_hash, self.base, RunDir(self.config.folder), open_source)


def open_start(config: RunConfig, tokenizer: Path, world: World) -> InitialWeights:
    """Compares the tokenizers of data and start, on one rank; opens the model under adapters, if any.

    Collective. Raises: CheckpointError, ConfigError; DataError: They differ; the same on every rank.
    """
    init, has_adapters = config.init, config.finetune.kind == "lora"
    has_saved = RunDir(config.folder).has_saved()

    def check() -> None:
        is_read = has_adapters or not has_saved
        if world.is_main and is_read and tokenizer.is_file():  # images have none
            check_tokens(open_source(Path(str(init.from_))), tokenizer)

    if init.from_ is not None and init.check_tokenizer:
        agree(check)
    if has_adapters:  # their checkpoints are without the weights below
        return InitialWeights(config, _open_base(config))
    return InitialWeights(config, None, resumes=has_saved)


def _open_base(config: RunConfig) -> AdaptedModel:
    assert config.init.from_ is not None
    source = open_source(Path(config.init.from_))
    return AdaptedModel(source, config.model, parameter_shapes(config.model))


def _read(source: AdaptedModel, name: str, fragment: Fragment) -> None:
    """Fills the weight of a fragment; of columns of a matrix, whole rows at a time are read."""
    weight = fragment.tensors["weight"]
    if fragment.stripes is None:
        source.read_part(name, fragment.offset, weight)
        return
    run, stride = fragment.stripes
    first = fragment.offset // stride * stride
    for part_RC in weight.view(-1, run).split(max(1, PIECE // stride)):
        rows_RC = torch.empty(len(part_RC), stride)
        source.read_part(name, first, rows_RC.view(-1))
        part_RC.copy_(rows_RC[:, fragment.offset % stride :][:, :run])
        first += rows_RC.numel()


def take_weights(source: AdaptedModel, store: FragmentStore) -> None:
    """Fills the weights of a state from another model, as far as it has them. Collective.

    Raises: CheckpointError, where a rank could not read; the same on every rank.
    """
    problem = None
    try:
        for fragment in store.held_fragments():
            name = name_without_adapter(fragment.name)
            if name in source and "weight" in fragment.tensors:
                _read(source, name, fragment)
                if EMA in fragment.tensors:
                    fragment.tensors[EMA].copy_(fragment.tensors["weight"])
    except PretrainError as error:
        problem = str(error)
    first = next((text for text in dist.gather_objects(problem) if text), None)
    if first is not None:
        raise CheckpointError(first)
    store.finish_load(0, {})


def _num_trained(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
