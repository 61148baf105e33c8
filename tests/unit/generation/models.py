"""Models and references for tests of decoding."""

import torch

from pretrain.config.model import ModelConfig
from pretrain.config.presets import expand_preset
from pretrain.types import Batch, StackRows
from tests.unit.model.tiny import build

PRESETS = ["llama-tiny", "gpt2-tiny", "mistral-tiny", "t5-tiny", "marian-tiny"]
START = 2
LENGTHS = [5, 1, 9, 5]


def tiny_model(preset="llama-tiny", *, vocab_size=61, attention="sdpa", scale=5.0, **model):
    """A tiny model of a preset, without dropout, whose decoder begins with START where there is an encoder."""
    values = expand_preset({"preset": preset, "vocab_size": vocab_size, **model})
    for stack in ("encoder", "decoder"):
        if stack in values:
            values[stack] = values[stack] | {"dropout": 0.0}
    config = ModelConfig.model_validate(values | {"special_tokens": {"start": START}})
    return build(config, attention=attention, scale=scale).eval()


def random_prompts(lengths=LENGTHS, *, vocab_size=61, seed=0):
    """Prompts of the given lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def read_again(model, prompt, new_tokens, *, sees_prompt_whole=False):
    """Log-probabilities of what follows, [new tokens + 1, V], from one forward without cache or padding."""
    prefix_BT = torch.arange(len(prompt) + len(new_tokens))[None] < len(prompt) if sees_prompt_whole else None
    if model.encoder is None:
        tokens, source = [*prompt, *new_tokens], None
    else:
        tokens, source = [START, *new_tokens], StackRows(torch.tensor([prompt]))
    tokens_BT = torch.tensor([tokens])
    with torch.no_grad():
        logits_BTV = model(Batch(tokens_BT, tokens_BT, source=source, prefix_BT=prefix_BT)).logits_BTV
    return logits_BTV[0, -len(new_tokens) - 1 :].float().log_softmax(dim=-1)


def read_greedily(model, prompt, count, *, sees_prompt_whole=False):
    """The best continuation, everything read again for each token."""
    new_tokens = []
    for _ in range(count):
        scores = read_again(model, prompt, new_tokens, sees_prompt_whole=sees_prompt_whole)[-1]
        new_tokens.append(int(scores.argmax()))
    return new_tokens


def log_prob_of(model, prompt, new_tokens):
    """Sum of the log-probabilities of tokens that follow a prompt."""
    log_probs = read_again(model, prompt, new_tokens[:-1])
    return float(log_probs[range(len(new_tokens)), new_tokens].sum())
