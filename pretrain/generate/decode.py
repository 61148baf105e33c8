"""Decoding: continue prompts token by token, with a key-value cache.

    read the prompt, filling the cache -> sample -> feed the sampled token -> sample -> ...

Each step costs one forward of one token a row. Not here: beam search, prompts of different lengths in one batch.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from pretrain.errors import ConfigError
from pretrain.generate.sampling import Sampling, sample
from pretrain.model import KVCache, Transformer
from pretrain.types import Batch


def generate(
    model: Transformer,
    prompt_BT: Tensor,
    max_new_tokens: int,
    sampling: Sampling,
    *,
    eos_id: int | None = None,
    seed: int = 0,
) -> list[list[int]]:
    """Continues each prompt; a pure function of its arguments.

    Args:
        model: A causal model; run in eval mode, and left in the mode that it was in.
        prompt_BT: int64 ids, one prompt a row, on the model's device.
        max_new_tokens: Most tokens to add. Fewer come where `max_seq_len` or `eos_id` ends a row.
        sampling: How to draw.
        eos_id: Token that ends a row; None: nothing does.
        seed: Of the draws.

    Returns:
        The new tokens of each row, without the prompt and without `eos_id`.

    Raises:
        ConfigError: The model is not causal, or a prompt is empty, too long, or not of its vocabulary.
    """
    new_tokens: list[list[int]] = [[] for _ in range(prompt_BT.shape[0])]
    open_rows = set(range(len(new_tokens)))
    for ids_B in stream(model, prompt_BT, max_new_tokens, sampling, seed=seed):
        for row, token in enumerate(ids_B.tolist()):
            if row in open_rows and token == eos_id:
                open_rows.remove(row)
            elif row in open_rows:
                new_tokens[row].append(token)
        if not open_rows:
            break
    return new_tokens


def stream(
    model: Transformer, prompt_BT: Tensor, max_new_tokens: int, sampling: Sampling, *, seed: int = 0
) -> Iterator[Tensor]:
    """Yields the next token of every row, int64 [B], as it is drawn; arguments and errors are those of `generate`.

    Never stops at a token: that is the reader's to decide. Stops when the model can read no further.
    """
    _check_prompt(model, prompt_BT)
    generator = torch.Generator().manual_seed(seed)
    num_new = min(max_new_tokens, model.max_seq_len - prompt_BT.shape[1] + 1)
    cache = KVCache(model.num_layers, capacity=min(model.max_seq_len, prompt_BT.shape[1] + num_new))
    fed_BT = prompt_BT
    for _ in range(num_new):
        ids_B = sample(_next_logits(model, fed_BT, cache), sampling, generator)
        yield ids_B
        fed_BT = ids_B[:, None]


# no_grad, not inference_mode: what the model caches for later (rotary tables) must stay usable in training.
@torch.no_grad()
def _next_logits(model: Transformer, tokens_BT: Tensor, cache: KVCache) -> Tensor:
    """Feeds tokens and returns the scores of what follows the last, [B, V]."""
    was_training = model.training
    model.eval()
    try:
        batch = Batch(tokens_BT, targets_BT=tokens_BT)
        last_B1D = model(batch, cache=cache, logits=False).hidden_BTD[:, -1:]
        return model.head(last_B1D)[:, 0]
    finally:
        model.train(was_training)


def _check_prompt(model: Transformer, prompt_BT: Tensor) -> None:
    length = prompt_BT.shape[1]
    if not model.is_causal:
        raise ConfigError("an encoder cannot generate: it reads both sides", fix="use a model with a decoder")
    if length == 0:
        raise ConfigError("the prompt has no tokens", fix="give at least one")
    if length > model.max_seq_len:
        raise ConfigError(
            f"the prompt has {length} tokens, model.max_seq_len is {model.max_seq_len}", fix="shorten the prompt"
        )
    largest = int(prompt_BT.max())
    if largest >= model.vocab_size:
        raise ConfigError(
            f"the prompt has token id {largest}, the model's vocabulary has {model.vocab_size}",
            fix="encode it with the model's own tokenizer",
        )
