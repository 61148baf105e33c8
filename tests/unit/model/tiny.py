"""Small models for tests: every axis of a stack can be set by keyword."""

from typing import Any

import torch

from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.model import ModelConfig
from pretrain.config.presets import expand_preset
from pretrain.model import Transformer, build_model, init_weights
from pretrain.types import IGNORE_INDEX, Batch, StackRows

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


def two_stacks_config(*, model: dict[str, Any] | None = None, **stack: Any) -> ModelConfig:
    """An encoder-decoder of two equal tiny stacks, with keys of both stacks and of the model section laid over it."""
    one = tiny_config(**stack).last_stack
    return ModelConfig(encoder=one, decoder=one, vocab_size=61, max_seq_len=128, **(model or {}))


def build(
    config: ModelConfig,
    *,
    attention: str = "sdpa",
    checkpointing: str = "none",
    every: int = 1,
    offload: str = "none",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    scale: float = 5.0,
) -> Transformer:
    """Builds and initialises; matrices are scaled up, so that attention is far from uniform and errors show."""
    engine = {
        "attention": attention,
        "activation_checkpointing": checkpointing,
        "activation_checkpointing_every": every,
        "offload_activations": offload,
    }
    model = build_model(config, PLAIN_ENGINE.model_copy(update=engine), CPU)
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
    return Batch(plain.tokens_BT, plain.targets_BT, positions_BT=positions, documents_BT=documents.int())


def single_documents(batch: Batch, row: int, lengths: list[int]) -> list[Batch]:
    """The documents of a packed row, each as a batch of one row."""
    tokens, targets = batch.tokens_BT[row].split(lengths), batch.targets_BT[row].split(lengths)
    return [Batch(t[None], g[None]) for t, g in zip(tokens, targets, strict=True)]


def random_pairs(
    source_lengths: list[int], target_lengths: list[int], *, vocab_size: int = 61, seed: int = 0
) -> tuple[Batch, list[Batch]]:
    """Random pairs in one batch, padded at the end on both sides, and the same pairs as a batch of one row each."""
    generator = torch.Generator().manual_seed(seed)
    alone = []
    for source, target in zip(source_lengths, target_lengths, strict=True):
        ids = torch.randint(vocab_size, (1, target + 1), generator=generator)
        read = StackRows(torch.randint(vocab_size, (1, source), generator=generator))
        alone.append(Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), source=read))
    sources = [batch.source.tokens_BT[0] for batch in alone if batch.source is not None]
    padded = Batch(
        _padded([batch.tokens_BT[0] for batch in alone], 0),
        _padded([batch.targets_BT[0] for batch in alone], IGNORE_INDEX),
        lengths_B=torch.tensor(target_lengths, dtype=torch.int32),
        source=StackRows(_padded(sources, 0), lengths_B=torch.tensor(source_lengths, dtype=torch.int32)),
    )
    return padded, alone


def packed_pairs(alone: list[Batch]) -> Batch:
    """Pairs of one row each laid end to end in one row, on both sides."""

    def numbers(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([torch.full_like(row, i) for i, row in enumerate(rows)], dim=1).int()

    def counts(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([torch.arange(row.shape[1])[None] for row in rows], dim=1)

    targets = [batch.tokens_BT for batch in alone]
    sources = [batch.source.tokens_BT for batch in alone if batch.source is not None]
    return Batch(
        torch.cat(targets, dim=1),
        torch.cat([batch.targets_BT for batch in alone], dim=1),
        positions_BT=counts(targets),
        documents_BT=numbers(targets),
        source=StackRows(torch.cat(sources, dim=1), positions_BT=counts(sources), documents_BT=numbers(sources)),
    )


def _padded(rows: list[torch.Tensor], value: int) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)
