"""Initial weights of a run from another model: `init.from`.

finetune.kind=full   a new run takes them once, as fp32 masters, by the ranges that a rank keeps
finetune.kind=lora   every attempt takes them: they are frozen, and in no checkpoint; adapters come from checkpoints
"""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from pretrain import dist
from pretrain.artifact.lora import add_adapters, check_tokens, freeze, initial_adapter, train_beside
from pretrain.artifact.model_path import open_source
from pretrain.artifact.source import AdaptedModel, check_base, is_adapter, name_without_adapter
from pretrain.checkpoint.state import TrainState
from pretrain.config.run import RunConfig
from pretrain.errors import CheckpointError, PretrainError
from pretrain.interop.family import parameter_shapes
from pretrain.model.build import initial_weight
from pretrain.types import FragmentStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InitialWeights:
    """What the weights of a run are before its first step.

    Attributes:
        config: Config of the run, fitted to its data.
        tokenizer: The tokenizer.json of its data.
        base: The model that adapters are put beside; None where all is trained.
    """

    config: RunConfig
    tokenizer: Path
    base: AdaptedModel | None

    def arrange(self, model: nn.Module) -> int:
        """Adds adapters and freezes what is not trained, in place, and says so; returns how many values are saved.

        Raises:
            ConfigError: Patterns name nothing, or leave nothing to train.
            LaunchError: A package is missing.
        """
        finetune = self.config.finetune
        if self.base is None:
            if self.config.init.freeze:
                num = freeze(model, self.config.init.freeze)
                log.info("%s values are frozen, %s are trained", f"{num:,}", f"{num_trained(model):,}")
            return sum(parameter.numel() for parameter in model.parameters())
        layers = add_adapters(model, finetune)
        beside = train_beside(model, self.base.anew, finetune.also)
        log.info(
            "adapters of rank %d beside %d layers: %s values are trained%s",
            finetune.rank,
            len(layers),
            f"{num_trained(model):,}",
            f", {', '.join(beside)} in full among them" if beside else "",
        )
        return num_trained(model)

    def draw(self, name: str, shape: torch.Size) -> Tensor:
        """Returns what a parameter is before anything is loaded, fp32, whole."""
        if is_adapter(name):
            return initial_adapter(name, shape, self.config.seed)
        name = name_without_adapter(name)
        if self.base is not None and name in self.base:
            return self.base.read(name)
        return initial_weight(name, shape, self.config.model, self.config.seed)

    def fill(self, store: FragmentStore, fresh: TrainState) -> TrainState:
        """Takes the weights of `init.from`, if there is one, for a run that has saved nothing yet. Collective.

        Raises:
            CheckpointError: There is no intact checkpoint, or it is not of this model.
            DataError: It has another tokenizer than the data.
        """
        if self.config.init.from_ is None:
            return fresh
        source = self.base or open_base(self.config, self.tokenizer)
        take_weights(source, store)
        for line in source.describe():
            log.info("%s", line)
        return self.mark(fresh)

    def mark(self, state: TrainState) -> TrainState:
        """Returns a state that knows the weights under its adapters."""
        return state if self.base is None else replace(state, base_hash=self.base.fingerprint())

    def check(self, saved: TrainState) -> None:
        """Checks that adapters come back to the weights that they were trained beside. Raises: CheckpointError."""
        if self.base is not None:
            check_base(saved.base_hash, self.base, self.config.run.name)


def open_start(config: RunConfig, tokenizer: Path) -> InitialWeights:
    """Opens the model under adapters, where there are any. Raises: CheckpointError, ConfigError, DataError."""
    return InitialWeights(config, tokenizer, open_base(config, tokenizer) if config.finetune.kind == "lora" else None)


def open_base(config: RunConfig, tokenizer: Path) -> AdaptedModel:
    """Opens `init.from` and compares model and tokenizer. Raises: CheckpointError, ConfigError, DataError."""
    assert config.init.from_ is not None
    what = open_source(Path(config.init.from_))
    if config.init.check_tokenizer:
        check_tokens(what, tokenizer)
    return AdaptedModel(what, config.model, parameter_shapes(config.model))


def take_weights(source: AdaptedModel, store: FragmentStore) -> None:
    """Fills the weights of a state from another model; what that does not give stays as it is. Collective.

    Raises:
        CheckpointError: A rank could not read; the same on every rank.
    """
    problem = None
    try:
        for fragment in store.held_fragments():
            name = name_without_adapter(fragment.name)
            if name in source and "weight" in fragment.tensors:
                source.read_part(name, fragment.offset, fragment.tensors["weight"])
    except PretrainError as error:
        problem = str(error)
    first = next((text for text in dist.gather_objects(problem) if text), None)
    if first is not None:
        raise CheckpointError(first)
    store.finish_load(0, {})


def num_trained(model: nn.Module) -> int:
    """Returns how many values of a model are trained."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
