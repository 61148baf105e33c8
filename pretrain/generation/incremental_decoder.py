"""A model that reads prompts, then one token a row at a time: the base of every way of decoding.

Prompts of a decoder are padded on the left, sources of an encoder-decoder on the right. Padding is
a document of its own, -1, which no token sees; positions count from a row's first real token. So a
row gets the same scores as alone, up to rounding.

    start             reads the prompts
    step, on a CPU    reads the cached positions so far
    step, on a GPU    reads them up to a power of two, those to come hidden; the first of these shapes
                      runs as it is, the second is captured as a CUDA graph, which the others replay
    select            on a GPU, keeps rows that have ended until half of them have: other shapes are
                      another capture
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from pretrain.errors import CheckpointError, ConfigError
from pretrain.generation.constraints import Constraints
from pretrain.model import KVCache, LanguageModel, Transformer
from pretrain.model.backends.auto import AutoAttention
from pretrain.model.backends.sdpa import SdpaAttention
from pretrain.model.kv_cache import select_rows
from pretrain.model.parts.experts import MixtureOfExperts
from pretrain.types import Batch, StackRows

Prompt: TypeAlias = Sequence[int] | Tensor
"""Token ids: a text to continue, or the source of an encoder-decoder; or an image that is
captioned, uint8 or normalised [C, Y, X]."""

Prompts = Sequence[Prompt]
"""One prompt a row."""

PADDING = -1
"""Document number of padding, and its token in `read_BT`."""


class IncrementalDecoder:
    """The rows of one batch, and the cache of their keys and values.

    The model, with a decoder and a head, is run in eval mode, its mode restored. At least one
    prompt, checked by `check_prompts`; at most `max_new_tokens` are added. `sees_prompt_whole` is
    that of `Constraints`. Scores may be NaN: `read_with_check`, where the host reads what it has
    chosen.

    `read_BT` has the tokens that the decoder has read in each row, PADDING before the first.
    `fixes_steps`: steps have fixed shapes; None: where they can be captured.
    """

    def __init__(
        self,
        model: LanguageModel,
        prompts: Prompts,
        max_new_tokens: int,
        *,
        sees_prompt_whole: bool = False,
        fixes_steps: bool | None = None,
    ) -> None:
        self._model = model
        self._device = model.embedding.weight.device
        self._source: StackRows | None = None
        images = [prompt for prompt in prompts if isinstance(prompt, Tensor)]
        self._documents_B1: Tensor | None = None
        self._positions_B1: Tensor | None = None
        if model.encoder is not None:
            start = model.special_tokens.start
            assert start is not None
            tokens_B1 = torch.full((len(prompts), 1), start, device=self._device)
            pixels_BCYX = None
            if images:
                pixels_BCYX = torch.stack(images).to(self._device)
            else:
                self._source = self._pad_sources(prompts)
            self._first = Batch(tokens_B1, tokens_B1, pixels_BCYX=pixels_BCYX)
        else:
            self._first = self._pad_prompts(prompts)
            if sees_prompt_whole:  # padding is another document
                whole_BT = torch.ones_like(self._first.tokens_BT, dtype=torch.bool)
                self._first = replace(self._first, prefix_BT=whole_BT)
        # The last new token is never read.
        rows, length = self._first.tokens_BT.shape
        capacity = length + max(0, max_new_tokens - 1)
        self._cache = model.new_cache(capacity)
        self._tokens_BC = self._first.tokens_BT.new_empty(rows, capacity)
        self.read_BT = self._tokens_BC[:, :length]
        self.read_BT.copy_(self._first.tokens_BT)
        if self._first.documents_BT is not None:
            self.read_BT.masked_fill_(self._first.documents_BT == PADDING, PADDING)
        self._fixes_steps = _captures_steps(model) if fixes_steps is None else fixes_steps
        # Inputs and scores of a step of fixed shapes, at addresses that a graph knows. Rows that have
        # ended may remain, after the others.
        self._tokens_B1 = self._first.tokens_BT[:, -1:].clone()
        self._logits_BV: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._shape = (0, 0)

    def start(self) -> Tensor:
        """Reads the prompts; returns the scores of the next token of each, fp32 [B, V]."""
        return self._read(self._first)

    def step(self, tokens_B: Tensor) -> Tensor:
        """Reads one more token of each row; returns the scores of the next one, fp32 [B, V], until the next step."""
        if self._positions_B1 is None and self._fixes_steps:  # known to the device
            self._positions_B1 = torch.full_like(self._tokens_B1, self._cache.length - 1)
        if self._positions_B1 is not None:
            self._positions_B1.add_(1)
        length = self.read_BT.shape[1]
        self._tokens_BC[:, length] = tokens_B
        self.read_BT = self._tokens_BC[:, : length + 1]
        self._tokens_B1[: len(tokens_B), 0] = tokens_B
        batch = Batch(
            self._tokens_B1,
            self._tokens_B1,
            positions_BT=self._positions_B1,
            documents_BT=self._documents_B1,
        )
        logits_BV = self._read_fixed(batch) if self._fixes_steps else self._read(batch)
        return logits_BV[: len(tokens_B)]

    def select(self, rows: Sequence[int]) -> None:
        """Keeps the given rows, in their order; a row may come several times. Copies the cache."""
        rows_B = torch.tensor(rows, device=self._device)
        self._tokens_BC = self._tokens_BC[rows_B]
        self.read_BT = self._tokens_BC[:, : self.read_BT.shape[1]]
        held = len(self._tokens_B1)
        if self._fixes_steps and held // 2 < len(rows) < held:
            rows_B = torch.cat((rows_B, rows_B[:1].expand(held - len(rows))))
        if len(rows_B) != held:  # the memory that a graph reads is replaced
            self._shape = (0, 0)
        self._cache.select(rows_B)
        self._tokens_B1 = select_rows(self._tokens_B1, rows_B)
        if self._positions_B1 is not None:
            self._positions_B1 = select_rows(self._positions_B1, rows_B)
        if self._documents_B1 is not None:
            self._documents_B1 = select_rows(self._documents_B1, rows_B)
        if self._source is not None:
            lengths_B = self._source.lengths_B
            self._source = StackRows(
                select_rows(self._source.tokens_BT, rows_B),
                lengths_B=None if lengths_B is None else select_rows(lengths_B, rows_B),
            )

    def _read(self, batch: Batch) -> Tensor:
        model = self._model
        # Both calls walk all modules: a tenth of a step of a small model.
        if not model.training:
            return self._scores(batch)
        model.eval()
        try:
            return self._scores(batch)
        finally:
            model.train()

    def _read_fixed(self, batch: Batch) -> Tensor:
        """Reads a batch of one token a row in a step of fixed shapes."""
        assert isinstance(self._cache, KVCache)
        shape = (len(batch.tokens_BT), self._cache.fix(self._device))
        if shape != self._shape or self._logits_BV is None or self._device.type != "cuda":
            self._shape, self._graph = shape, None
            self._logits_BV = self._read(batch)
        else:
            if self._graph is None:
                self._graph = torch.cuda.CUDAGraph()
                # Torch's own is on the first device that captured.
                stream = torch.cuda.Stream(self._device)
                # Other threads may use the device meanwhile.
                with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
                    self._logits_BV = self._scores(batch)
            self._graph.replay()
        self._cache.advance()
        return self._logits_BV

    # Not inference_mode: tensors that the model caches (rotary tables) are used in training too.
    @torch.no_grad()
    def _scores(self, batch: Batch) -> Tensor:
        batch = replace(batch, source=self._source)
        last_B1D = self._model(batch, cache=self._cache, logits=False).hidden_BTD[:, -1:]
        assert self._model.head is not None
        return self._model.head(last_B1D)[:, 0].float()

    def _pad_sources(self, prompts: Prompts) -> StackRows:
        lengths = [len(prompt) for prompt in prompts]
        longest = max(lengths)
        rows = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
        tokens_BS = torch.tensor(rows, device=self._device)
        if min(lengths) == longest:  # needs no mask
            return StackRows(tokens_BS)
        lengths_B = torch.tensor(lengths, dtype=torch.int32, device=self._device)
        return StackRows(tokens_BS, lengths_B=lengths_B)

    def _pad_prompts(self, prompts: Prompts) -> Batch:
        longest = max(len(prompt) for prompt in prompts)
        offsets = [longest - len(prompt) for prompt in prompts]
        rows = [[*[0] * offset, *prompt] for offset, prompt in zip(offsets, prompts, strict=True)]
        tokens_BT = torch.tensor(rows, device=self._device)
        if not any(offsets):  # needs no mask
            return Batch(tokens_BT, tokens_BT)
        offsets_B1 = torch.tensor(offsets, device=self._device)[:, None]
        places_T = torch.arange(longest, device=self._device)
        documents_BT = torch.where(places_T < offsets_B1, PADDING, 0).int()
        positions_BT = (places_T - offsets_B1).clamp(min=0)
        self._documents_B1 = documents_BT[:, -1:].clone()
        self._positions_B1 = positions_BT[:, -1:].clone()
        return Batch(tokens_BT, tokens_BT, positions_BT=positions_BT, documents_BT=documents_BT)


def read_with_check(logits_BV: Tensor, *chosen: Tensor) -> list[list[float]]:
    """Reads what was chosen by scores, each tensor flattened, in one copy to the host.

    Integers below 2**53 and fp32 are exact in the fp64 that is copied.

    Raises:
        CheckpointError: A score is NaN.
    """
    # The greatest of numbers is NaN if any of them is.
    parts = [tensor.flatten().double() for tensor in (logits_BV.max().isnan(), *chosen)]
    (is_nan,), *values = (part.tolist() for part in torch.cat(parts).cpu().split([len(part) for part in parts]))
    if is_nan:
        raise CheckpointError(
            "the model's scores are not numbers",
            fix="use a checkpoint from before its loss diverged",
        )
    return values


def _captures_steps(model: LanguageModel) -> bool:
    """Returns whether steps can be captured.

    Not of a model in training, whose engine may move its weights, nor of one whose pass gathers
    weights on another stream (ZeRO 3), or has the host wait for numbers of rows (experts).
    """
    weight = model.embedding.weight
    if weight.device.type != "cuda" or model.training or torch.is_autocast_enabled("cuda"):
        return False
    if hasattr(weight, "ds_tensor") or any(isinstance(part, MixtureOfExperts) for part in model.modules()):
        return False
    stack = model.decoder if isinstance(model, Transformer) else None
    return stack is not None and isinstance(stack.backend, AutoAttention | SdpaAttention)


def new_token_limits(model: LanguageModel, prompts: Prompts, constraints: Constraints) -> list[int]:
    """Returns how many tokens each row may add: the last needs no position, as it is never read.

    Raises: ConfigError: A prompt leaves no room for one.
    """
    read = [1 if model.encoder is not None else len(prompt) for prompt in prompts]
    most = model.max_seq_len + 1
    if constraints.max_length is not None:
        most = min(most, constraints.max_length)
        if max(read) >= most:
            settings = f"max_length={most} of the model's generation settings"
            raise ConfigError(
                f"a prompt of {max(read)} tokens fills {settings}",
                fix="give --max-tokens, which precedes it, or a shorter prompt",
            )
    return [min(constraints.max_new_tokens, most - length) for length in read]


def group_rows(model: LanguageModel, prompts: Prompts, limits: Sequence[int]) -> list[list[int]]:
    """Splits rows into the fewest batches in which no row shortens another.

    Padding takes positions: where the longest prompt and the greatest limit together exceed
    `max_seq_len`, prompts of different lengths do not share a batch.
    """
    if not prompts:
        return []
    needed = max(len(prompt) for prompt in prompts) + max(limits) - 1
    # Sources are in the encoder, and every decoder begins with one token.
    if needed <= model.max_seq_len or model.encoder is not None:
        return [list(range(len(prompts)))]
    groups: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(len(prompt), []).append(row)
    return list(groups.values())


def check_prompts(model: LanguageModel, prompts: Prompts) -> None:
    """Refuses a model that cannot generate, and prompts that it cannot read. Raises: ConfigError."""
    if not model.is_causal:
        raise ConfigError(
            "an encoder cannot generate: it reads both sides",
            fix="use a model with a decoder",
        )
    if model.head is None or not model.head.scores_ids:
        raise ConfigError(
            "the model has no language model's head, so it cannot generate",
            fix="use one that has",
        )
    if model.encoder is not None and model.special_tokens.start is None:
        raise ConfigError(
            "the decoder's first token is not known",
            fix="set model.special_tokens.start",
        )
    for number, prompt in enumerate(prompts, start=1):
        check_prompt(model, prompt, where=f"prompt {number}" if len(prompts) > 1 else "")


def check_prompt(model: LanguageModel, prompt: Prompt, *, where: str = "", name: str = "prompt") -> None:
    """Refuses a prompt, or another text of that name, that a model cannot read. Raises: ConfigError."""
    patches = model.patches if isinstance(model, Transformer) else None
    if patches is not None:
        size = patches.image_size
        if not isinstance(prompt, Tensor):
            pixels = f"{size.side} x {size.side} pixels"
            raise ConfigError(
                f"the {name} is a text, and the model reads images of {pixels}",
                where=where,
                fix="caption an image by `pretrain generate RUN --image FILE`",
            )
        assert prompt.shape == (size.channels, size.side, size.side), "of `ImageCodec`"
        return
    if isinstance(prompt, Tensor):
        raise ConfigError(
            "the model reads text, and no images",
            where=where,
            fix="use one whose objective is captions",
        )
    if not prompt:
        raise ConfigError(f"the {name} has no tokens", where=where, fix="give at least one")
    if len(prompt) > model.max_seq_len:
        raise ConfigError(
            f"the {name} has {len(prompt)} tokens, model.max_seq_len is {model.max_seq_len}",
            where=where,
            fix=f"shorten the {name}",
        )
    for token in (max(prompt), min(prompt)):
        if not 0 <= token < model.vocab_size:
            raise ConfigError(
                f"the {name} has token id {token}, the model's vocabulary has {model.vocab_size}",
                where=where,
                fix="use the tokenizer that belongs to the model: this one is larger",
            )
