"""Measures what autograd keeps of one forward pass of the real model and its loss: each storage once, in bytes."""

import gc

import torch
from torch import Tensor, nn

from pretrain.config.engine import EngineConfig
from pretrain.config.model import AnyModelConfig
from pretrain.config.objective import ObjectiveConfig
from pretrain.model import build_model, init_weights
from pretrain.objective import build_loss
from pretrain.types import Batch, StackRows


class SavedStorages:
    """Bytes of each storage that is packed, once; those of a model's parameters are left out."""

    def __init__(self, model: nn.Module) -> None:
        self._own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._sizes: dict[int, int] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        """Counts the storage of a tensor; a hook of autograd."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._own:
            self._sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    def num_bytes(self) -> int:
        """Returns the bytes of all."""
        return sum(self._sizes.values())


def kept_bytes(config: AnyModelConfig, engine: EngineConfig, rows: int, length: int, source_length: int | None) -> int:
    """Runs one micro-batch forward, in training mode, in the precision of the engine; parameters are not counted."""
    gc.collect()
    gc.freeze()  # a look at live tensors then passes over what was there before
    model = build_model(config, engine, torch.device("cpu"))
    init_weights(model, config, seed=0)
    if engine.kind == "deepspeed" and engine.precision == "bf16":
        model = model.to(torch.bfloat16)
    saved = SavedStorages(model)
    tokens = torch.randint(0, config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))
    source = None if source_length is None else StackRows(torch.zeros(rows, source_length, dtype=torch.int64))
    batch = Batch(tokens, tokens.clone(), source=source)
    objective = ObjectiveConfig()
    if getattr(config, "generator_heads", 0):  # a quarter of the tokens is masked
        objective, places = ObjectiveConfig(kind="replaced"), torch.arange(0, rows * length, 4)
        draws = torch.rand(len(places), dtype=torch.float64)
        batch = Batch(tokens, tokens.clone(), target_positions_P=places, draws_P=draws)
    autocasts = engine.kind != "deepspeed" and engine.precision == "bf16"
    loss, before = build_loss(objective), live_tensors()
    with (
        torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocasts),
    ):
        found = loss(model, batch)
    assert found.loss_sum.requires_grad
    # What is checkpointed lies in Python, where no hook of autograd sees it.
    for number, tensor in live_tensors().items():
        if number not in before:
            saved.pack(tensor)
    for tensor in (batch.tokens_BT, batch.targets_BT, *([] if source is None else [source.tokens_BT])):
        saved.pack(tensor)
    return saved.num_bytes()


def live_tensors() -> dict[int, Tensor]:
    """Returns every tensor that Python holds, by identity."""
    gc.collect()
    return {id(thing): thing for thing in gc.get_objects() if type(thing) is Tensor}
