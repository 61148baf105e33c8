"""Small models for tests: every axis of a stack can be set by keyword."""

from typing import Any

import torch

from pretrain.config.model import ModelConfig
from pretrain.config.presets import expand_preset
from pretrain.model import Transformer, build_model, init_weights
from pretrain.types import Batch

CPU = torch.device("cpu")


def tiny_config(preset: str = "llama-tiny", *, vocab_size: int = 61, model: dict[str, Any] | None = None, **stack: Any):
    """A tiny preset with keys of the model section (`model`) and of its decoder (the rest) laid over it."""
    values = {"preset": preset, "vocab_size": vocab_size, "decoder": stack, **(model or {})}
    return ModelConfig.model_validate(expand_preset(values))


def encoder_config(**stack: Any) -> ModelConfig:
    """The same as an encoder."""
    decoder = tiny_config(**stack).decoder
    assert decoder is not None
    return ModelConfig(encoder=decoder, vocab_size=61, max_seq_len=128)


def build(
    config: ModelConfig,
    *,
    attention: str = "sdpa",
    checkpointing: str = "none",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    scale: float = 5.0,
) -> Transformer:
    """Builds and initialises; matrices are scaled up, so that attention is far from uniform and errors show."""
    model = build_model(config, attention=attention, activation_checkpointing=checkpointing, compile=False, device=CPU)
    init_weights(model, config, seed)
    model.to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    return model


def random_batch(rows: int, length: int, *, vocab_size: int = 61, seed: int = 0) -> Batch:
    """Random tokens, each row's targets the tokens that follow."""
    ids = torch.randint(vocab_size, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def packed_batch(row_lengths: list[list[int]], *, vocab_size: int = 61, seed: int = 0) -> Batch:
    """Random rows of documents of the given lengths; all rows must have the same sum."""
    plain = random_batch(len(row_lengths), sum(row_lengths[0]), vocab_size=vocab_size, seed=seed)
    documents = torch.stack([torch.repeat_interleave(torch.arange(len(n)), torch.tensor(n)) for n in row_lengths])
    positions = torch.stack([torch.cat([torch.arange(m) for m in n]) for n in row_lengths])
    return Batch(plain.tokens_BT, plain.targets_BT, positions, documents.int())


def single_documents(batch: Batch, row: int, lengths: list[int]) -> list[Batch]:
    """The documents of a packed row, each as a batch of one row."""
    tokens, targets = batch.tokens_BT[row].split(lengths), batch.targets_BT[row].split(lengths)
    return [Batch(t[None], g[None]) for t, g in zip(tokens, targets, strict=True)]
