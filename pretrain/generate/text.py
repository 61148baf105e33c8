"""From prompt text to continued text."""

import torch
from tokenizers import Tokenizer

from pretrain.errors import ConfigError
from pretrain.generate.decode import generate
from pretrain.generate.sampling import Sampling
from pretrain.model import Transformer

EOS = "<|endoftext|>"


def generate_text(
    model: Transformer, tokenizer: Tokenizer, prompt: str, max_new_tokens: int, sampling: Sampling, *, seed: int = 0
) -> str:
    """Returns the prompt with its continuation.

    Args:
        model: A causal model.
        tokenizer: Its tokenizer.
        prompt: Text to continue; empty: the beginning of a document.
        max_new_tokens: Most tokens to add; fewer come where the document ends or the model can read no further.
        sampling: How to draw.
        seed: Of the draws.

    Raises:
        ConfigError: The prompt does not fit the model, or is empty where the tokenizer has no end-of-text token.
    """
    eos_id = tokenizer.token_to_id(EOS)
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    if not ids:
        if eos_id is None:
            raise ConfigError("the prompt is empty, and the tokenizer has no end-of-text token", fix="give --prompt")
        ids = [eos_id]
    device = next(model.parameters()).device
    (new_ids,) = generate(model, torch.tensor([ids], device=device), max_new_tokens, sampling, eos_id=eos_id, seed=seed)
    return prompt + str(tokenizer.decode(new_ids))
