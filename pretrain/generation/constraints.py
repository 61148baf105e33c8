"""The interface of a tokenizer, and limits on the next token, common to every way of decoding."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pretrain.errors import ConfigError


class Codec(Protocol):
    """A tokenizer, with the special tokens that a model expects around a text."""

    eos_ids: tuple[int, ...]  # ids that end a text; several, or none
    mask_id: int | None  # id of a token to fill in; None: there is none

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, with the special tokens of the model's inputs."""
        ...

    def encode_placed(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the ids of a text that is labelled, begun and ended, and their character spans, ascending."""
        ...

    def encode_chat(self, turns: list[tuple[str, str]]) -> list[int]:
        """Returns the ids of a conversation of (role, text), up to where the assistant's next turn begins."""
        ...

    def render_chat(self, turns: list[tuple[str, str]], *, generation_prompt: bool = True) -> str:
        """Returns the text of a conversation; by default up to where the assistant's next turn begins."""
        ...

    def encode_rendered(self, text: str) -> list[int]:
        """Returns the ids of such a text, or one that begins so: its special tokens are meant, none is added."""
        ...

    def encode_target(self, text: str) -> list[int]:
        """Returns the ids of a target of two stacks; a translator's, in the target's language."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Returns the text of ids, without special tokens."""
        ...

    def tokens(self, ids: list[int]) -> list[str]:
        """Returns the text of each id, for display."""
        ...


@dataclass(frozen=True, slots=True)
class Constraints:
    """Limits on the next token and on the length. Raises: ConfigError, for negative numbers."""

    # Most tokens to add, the end of a row included; fewer where `max_seq_len` is reached.
    max_new_tokens: int
    min_new_tokens: int = 0  # no token of `eos_ids` comes before this many others
    eos_ids: tuple[int, ...] = ()  # tokens that end a row; empty: only its length does
    suppressed_ids: tuple[int, ...] = ()  # tokens that never come
    # Last token of a row that has not ended before, suppressed or not, without effect on its score.
    forced_eos_id: int | None = None
    # Probabilities sum to 1 again without the excluded tokens. This changes the scores of beams;
    # sampling always does so.
    renormalize: bool = False
    # Divides the scores of tokens that the decoder has read, multiplies negative ones (Keskar et al.
    # 2019, 4.1); 1: changes nothing.
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0  # no run of this many tokens comes twice in a row; 0: any may
    # A decoder reads its prompt in both directions (Raffel et al. 2020, 3.2.1), as under the
    # objective of a prefix language model.
    sees_prompt_whole: bool = False
    # Texts that end a row, and are no part of it: of `generate_text` and `stream_text`.
    stop_strings: tuple[str, ...] = ()
    # Most tokens of a row, with its prompt; of an encoder-decoder, with its first. None: any.
    max_length: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "min_new_tokens", "no_repeat_ngram_size"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"{name}={getattr(self, name)} must not be negative",
                    fix="use 0 or more",
                )
        if not 0 < self.repetition_penalty < float("inf"):
            raise ConfigError(
                f"repetition_penalty={self.repetition_penalty} must be above 0",
                fix="use 1 for none, 1.2 or so to repeat less",
            )

    def check(self, vocab_size: int) -> None:
        """Refuses ids beyond a vocabulary. Raises: ConfigError."""
        forced = () if self.forced_eos_id is None else (self.forced_eos_id,)
        for token in (*self.eos_ids, *self.suppressed_ids, *forced):
            if not 0 <= token < vocab_size:
                raise ConfigError(
                    f"token id {token} of the generation settings is not among the {vocab_size} of the vocabulary",
                    fix="use the model's own tokenizer and settings",
                )

    def log_probs(
        self, logits_BV: Tensor, read_BT: Tensor, num_new: int, is_last: list[bool], *, searches: bool = False
    ) -> Tensor:
        """Returns the log-probabilities of the next token, fp32 [B, V]; -inf for excluded tokens.

        Each row has added `num_new` tokens; for some the next token is the last that they may add.
        `read_BT` are the tokens that the decoder has read, `IncrementalDecoder.read_BT`. A beam
        search penalizes repetitions in log-probabilities, as in transformers, not in scores.
        """
        scores_BV = logits_BV.float()
        if searches:
            log_probs_BV = self._penalize(scores_BV.log_softmax(dim=-1), read_BT)
        else:
            log_probs_BV = self._penalize(scores_BV, read_BT).log_softmax(dim=-1)
        early = self.eos_ids if num_new < self.min_new_tokens else ()
        excluded = [*self.suppressed_ids, *early]
        # In place: the tensor is this call's own.
        self._exclude_repeats(log_probs_BV, read_BT)
        if excluded:
            log_probs_BV[:, excluded] = -torch.inf
        if self.renormalize and (excluded or self.no_repeat_ngram_size or self.repetition_penalty != 1.0):
            log_probs_BV = log_probs_BV.log_softmax(dim=-1)
        if self.forced_eos_id is not None and any(is_last):
            rows = torch.tensor(is_last, device=log_probs_BV.device)
            log_probs_BV[rows] = -torch.inf
            log_probs_BV[rows, self.forced_eos_id] = 0.0
        return log_probs_BV

    def _penalize(self, scores_BV: Tensor, read_BT: Tensor) -> Tensor:
        penalty = self.repetition_penalty
        if penalty == 1.0:
            return scores_BV
        # Padding stands for the newest token, whose score is changed anyway.
        ids_BT = torch.where(read_BT < 0, read_BT[:, -1:], read_BT)
        found_BT = scores_BV.gather(1, ids_BT)
        return scores_BV.scatter(1, ids_BT, torch.where(found_BT < 0, found_BT * penalty, found_BT / penalty))

    def _exclude_repeats(self, log_probs_BV: Tensor, read_BT: Tensor) -> None:
        """Sets tokens to -inf that would complete an n-gram (N tokens) for the second time."""
        size = self.no_repeat_ngram_size
        if not 0 < size <= read_BT.shape[1]:
            return
        ngrams_BWN = read_BT.unfold(1, size, 1)
        newest_B1N = read_BT[:, None, read_BT.shape[1] - size + 1 :]
        # Padding comes first: an n-gram with any begins with it.
        repeats_BW = (ngrams_BWN[..., :-1] == newest_B1N).all(dim=-1) & (ngrams_BWN[..., 0] >= 0)
        rows, places = repeats_BW.nonzero(as_tuple=True)
        log_probs_BV[rows, ngrams_BWN[rows, places, -1]] = -torch.inf
