"""Filling masks: what a masked language model puts where a text has a mask token."""

from dataclasses import dataclass

import torch

from pretrain.errors import ConfigError
from pretrain.generate.codec import Codec
from pretrain.generate.incremental_decoder import check_prompt
from pretrain.model import LanguageModel
from pretrain.model.heads import LanguageModelHead
from pretrain.types import Batch

MASK = "[MASK]"
"""May stand in a text for the mask token of whatever tokenizer."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token for a mask.

    Attributes:
        token: As the codec displays it.
        id: Its id.
        probability: Under the model, by itself: other masks are masks still.
    """

    token: str
    id: int
    probability: float


@dataclass(frozen=True, slots=True)
class Filled:
    """A text with its masks filled.

    Attributes:
        prompt: The text that was given.
        text: With the best candidate of each mask.
        masks: The candidates of each mask in order, the best first.
    """

    prompt: str
    text: str
    masks: list[list[Candidate]]


def fill_masks(model: LanguageModel, codec: Codec, text: str, top_k: int = 5, *, where: str = "") -> Filled:
    """Fills every mask of a text, each by itself, in one forward.

    Args:
        model: An encoder with a language model's head; run in eval mode, and left in the mode that it was in.
        codec: Its tokenizer.
        text: With one mask or more, as `[MASK]` or as the tokenizer's own mask token.
        top_k: Candidates of each mask.
        where: Which text it is, for errors.

    Raises:
        ConfigError: The model does not fill masks, the tokenizer has no mask token, the text has none or is too long.
    """
    if model.is_causal or not isinstance(model.head, LanguageModelHead):
        kind = "a model with a decoder" if model.is_causal else "a model without a language model's head"
        raise ConfigError(f"{kind} fills no masks", where=where, fix="use one of an encoder with such a head")
    if codec.mask_id is None:
        raise ConfigError("the tokenizer has no mask token", where=where, fix="use the model's own tokenizer")
    if top_k < 1:
        raise ConfigError(f"top_k={top_k} must be at least 1", where=where, fix="use 5 or so")
    (mask,) = codec.tokens([codec.mask_id])
    ids = codec.encode(text.replace(MASK, mask))
    places = [place for place, token in enumerate(ids) if token == codec.mask_id]
    if not places:
        raise ConfigError("the text has no mask", where=where, fix=f"put {MASK} where a word is to be filled in")
    check_prompt(model, ids, where=where)
    masks = [_candidates(codec, row) for row in _best(model, ids, places, min(top_k, model.vocab_size))]
    best = dict(zip(places, (candidates[0].id for candidates in masks), strict=True))
    return Filled(text, codec.decode([best.get(place, token) for place, token in enumerate(ids)]), masks)


def _candidates(codec: Codec, best: list[tuple[int, float]]) -> list[Candidate]:
    tokens = codec.tokens([number for number, _ in best])
    return [Candidate(token, number, value) for token, (number, value) in zip(tokens, best, strict=True)]


@torch.no_grad()
def _best(model: LanguageModel, ids: list[int], places: list[int], top_k: int) -> list[list[tuple[int, float]]]:
    """Returns (id, probability) of the best tokens at each place."""
    assert model.head is not None
    tokens_BT, was_training = torch.tensor([ids], device=model.embedding.weight.device), model.training
    model.eval()
    try:
        hidden_BTD = model(Batch(tokens_BT, tokens_BT), logits=False).hidden_BTD
        best = model.head(hidden_BTD[0, places]).float().softmax(dim=-1).topk(top_k)
    finally:
        model.train(was_training)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [list(zip(numbers, values, strict=True)) for numbers, values in pairs]
