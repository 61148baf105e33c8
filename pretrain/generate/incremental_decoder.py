"""A model that reads prompts, then one token a row at a time: what every way of decoding stands on.

    decoder-only      prompts, padded on the left -> cache -> scores of the next token -> one token a row -> ...
    encoder-decoder   sources, padded on the right -> encoder -> cache; the decoder's prompt is its start token

Padding is a document of its own, -1, which no token sees; positions count from a row's first real token. So a row
gets the scores that it gets alone, up to rounding.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pretrain.errors import CheckpointError, ConfigError
from pretrain.model import LanguageModel
from pretrain.types import Batch, SourceBatch

Prompts = Sequence[Sequence[int]]
"""Token ids, one prompt a row: what a decoder continues, or the source of an encoder-decoder."""

PADDING = -1
"""Document number of padding."""


class IncrementalDecoder:
    """The rows of one batch, and the cache of what they have read.

    Args:
        model: A model with a decoder and a head; it is run in eval mode, and left in the mode that it was in.
        prompts: At least one, checked (`check_prompts`).
        max_new_tokens: Tokens that will be added at most.
        sees_prompt_whole: That of `Constraints`.

    Raises:
        CheckpointError: The model gives scores that are not numbers.
    """

    def __init__(
        self, model: LanguageModel, prompts: Prompts, max_new_tokens: int, *, sees_prompt_whole: bool = False
    ) -> None:
        self._model, self._device = model, model.embedding.weight.device
        self._source: SourceBatch | None = None
        self._documents_B1: Tensor | None = None
        self._positions_B1: Tensor | None = None
        if model.encoder is not None:
            self._source, self._first = self._pad_sources(prompts), self._start_tokens(len(prompts))
        else:
            self._first = self._pad_prompts(prompts)
            if sees_prompt_whole:  # padding is another document
                whole_BT = torch.ones_like(self._first.tokens_BT, dtype=torch.bool)
                self._first = replace(self._first, prefix_BT=whole_BT)
        # The last token is not read any more.
        capacity = self._first.tokens_BT.shape[1] + max(0, max_new_tokens - 1)
        self._cache = model.new_cache(capacity)

    def start(self) -> Tensor:
        """Reads the prompts; returns the scores of what follows each, fp32 [B, V]."""
        return self._read(self._first)

    def step(self, tokens_B: Tensor) -> Tensor:
        """Reads one more token of each row; returns the scores of what follows, fp32 [B, V]."""
        if self._positions_B1 is not None:
            self._positions_B1 = self._positions_B1 + 1
        tokens_B1 = tokens_B[:, None]
        return self._read(Batch(tokens_B1, tokens_B1, positions_BT=self._positions_B1, documents_BT=self._documents_B1))

    def select(self, rows: Sequence[int]) -> None:
        """Keeps the given rows, in their order; a row may come several times. Copies the cache."""
        rows_B = torch.tensor(rows, device=self._device)
        self._cache.select(rows_B)
        if self._positions_B1 is not None and self._documents_B1 is not None:
            self._positions_B1, self._documents_B1 = self._positions_B1[rows_B], self._documents_B1[rows_B]
        if self._source is not None:
            lengths_B = self._source.lengths_B
            self._source = replace(
                self._source,
                tokens_BS=self._source.tokens_BS[rows_B],
                lengths_B=None if lengths_B is None else lengths_B[rows_B],
            )

    # no_grad, not inference_mode: what the model caches for later (rotary tables) must stay usable in training.
    @torch.no_grad()
    def _read(self, batch: Batch) -> Tensor:
        model, was_training = self._model, self._model.training
        model.eval()
        try:
            batch = replace(batch, source=self._source)
            last_B1D = model(batch, cache=self._cache, logits=False).hidden_BTD[:, -1:]
            assert model.head is not None
            logits_BV = model.head(last_B1D)[:, 0].float()
        finally:
            model.train(was_training)
        if bool(logits_BV.isnan().any()):
            raise CheckpointError(
                "the model's scores are not numbers", fix="use a checkpoint from before its loss diverged"
            )
        return logits_BV

    def _start_tokens(self, rows: int) -> Batch:
        start = self._model.special_tokens.start
        assert start is not None
        tokens_B1 = torch.full((rows, 1), start, device=self._device)
        return Batch(tokens_B1, tokens_B1)

    def _pad_sources(self, prompts: Prompts) -> SourceBatch:
        longest = max(len(prompt) for prompt in prompts)
        tokens_BS = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts])
        if all(len(prompt) == longest for prompt in prompts):
            return SourceBatch(tokens_BS.to(self._device))
        lengths_B = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32)
        return SourceBatch(tokens_BS.to(self._device), lengths_B=lengths_B.to(self._device))

    def _pad_prompts(self, prompts: Prompts) -> Batch:
        longest = max(len(prompt) for prompt in prompts)
        tokens_BT = torch.tensor([[*[0] * (longest - len(prompt)), *prompt] for prompt in prompts]).to(self._device)
        if all(len(prompt) == longest for prompt in prompts):
            return Batch(tokens_BT, tokens_BT)
        offsets_B1 = torch.tensor([[longest - len(prompt)] for prompt in prompts], device=self._device)
        places_T = torch.arange(longest, device=self._device)
        documents_BT = torch.where(places_T < offsets_B1, PADDING, 0).int()
        positions_BT = (places_T - offsets_B1).clamp(min=0)
        self._documents_B1, self._positions_B1 = documents_BT[:, -1:], positions_BT[:, -1:]
        return Batch(tokens_BT, tokens_BT, positions_BT=positions_BT, documents_BT=documents_BT)


def new_token_limits(model: LanguageModel, prompts: Prompts, max_new_tokens: int) -> list[int]:
    """Returns how many tokens each row may add: the last is drawn from `max_seq_len` positions, and is not read."""
    read = [1 if model.encoder is not None else len(prompt) for prompt in prompts]
    return [min(max_new_tokens, model.max_seq_len - length + 1) for length in read]


def group_rows(model: LanguageModel, prompts: Prompts, limits: Sequence[int]) -> list[list[int]]:
    """Splits rows into batches, as few as can be without one row shortening what another may add.

    Padding takes room in the cache: where the longest prompt and the greatest limit together exceed `max_seq_len`,
    prompts of different lengths do not share a batch.
    """
    if not prompts:
        return []
    fits = max(len(prompt) for prompt in prompts) + max(limits) - 1 <= model.max_seq_len
    if fits or model.encoder is not None:
        return [list(range(len(prompts)))]
    groups: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(len(prompt), []).append(row)
    return list(groups.values())


def check_prompts(model: LanguageModel, prompts: Prompts) -> None:
    """Refuses a model that cannot generate, and prompts that it cannot read.

    Raises:
        ConfigError: The model has no decoder, no head or no start token, or a prompt is empty, too long, or not of its
            vocabulary.
    """
    if not model.is_causal:
        raise ConfigError("an encoder cannot generate: it reads both sides", fix="use a model with a decoder")
    if model.head is None:
        raise ConfigError("the model has no language model's head, so it cannot generate", fix="use one that has")
    if model.encoder is not None and model.special_tokens.start is None:
        raise ConfigError("the decoder's first token is not known", fix="set model.special_tokens.start")
    for number, prompt in enumerate(prompts, start=1):
        check_prompt(model, prompt, where=f"prompt {number}" if len(prompts) > 1 else "")


def check_prompt(model: LanguageModel, prompt: Sequence[int], *, where: str = "") -> None:
    """Refuses a prompt that a model cannot read. Raises: ConfigError."""
    if not prompt:
        raise ConfigError("the prompt has no tokens", where=where, fix="give at least one")
    if len(prompt) > model.max_seq_len:
        raise ConfigError(
            f"the prompt has {len(prompt)} tokens, model.max_seq_len is {model.max_seq_len}",
            where=where,
            fix="shorten the prompt",
        )
    for token in (max(prompt), min(prompt)):
        if not 0 <= token < model.vocab_size:
            raise ConfigError(
                f"the prompt has token id {token}, the model's vocabulary has {model.vocab_size}",
                where=where,
                fix="encode it with the model's own tokenizer",
            )
