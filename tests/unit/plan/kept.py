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
    if engine.precision == "bf16" and not engine.autocasts:
        model = model.to(torch.bfloat16)
    saved = SavedStorages(model)
    batch, objective = probe_batch(config, rows, length, source_length)
    source = batch.source
    autocasts = engine.autocasts
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


def probe_batch(
    config: AnyModelConfig, rows: int, length: int, source_length: int | None
) -> tuple[Batch, ObjectiveConfig]:
    """Makes a micro-batch that a model reads, and its objective."""
    vocab = config.vocab_size or 1
    tokens = torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(0))
    places, kind, draws = None, "causal", None
    if config.head.kind == "labels":  # of the first position alone
        places, kind = torch.arange(0, rows * length, length), "images"
    elif config.head.kind == "pixels":  # of what is not read
        hidden = torch.arange(length).expand(rows, -1) >= (source_length or 0)
        places, kind = hidden.flatten().nonzero()[:, 0], "masked_patches"
    elif getattr(config, "generator_heads", 0):  # a quarter of the tokens is masked
        places, kind = torch.arange(0, rows * length, 4), "replaced"
        draws = torch.rand(len(places), dtype=torch.float64)
    source = None
    if source_length is not None:
        seen = torch.arange(source_length).expand(rows, -1).contiguous()
        positions = seen if kind == "masked_patches" else None
        source = StackRows(torch.zeros(rows, source_length, dtype=torch.int64), positions_BT=positions)
    pixels = None
    if config.input is not None:
        pixels = torch.rand(rows, *config.input.image_size[:1], config.input.image, config.input.image)
    batch = Batch(tokens, tokens.clone(), target_positions_P=places, draws_P=draws, source=source, pixels_BCYX=pixels)
    return batch, ObjectiveConfig(kind=kind)


def live_tensors() -> dict[int, Tensor]:
    """Returns every tensor that Python holds, by identity."""
    gc.collect()
    return {id(thing): thing for thing in gc.get_objects() if type(thing) is Tensor}
