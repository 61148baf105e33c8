"""A decoder for lm-eval-harness, with the behaviour of its Hugging Face model (`HFLM`).

    context + continuation -> ids, cut from the left -> sum of log p(continuation), is it likeliest
    a text                 -> windows of max_seq_len, each token predicted once -> the same, summed
    context, until         -> greedy continuation, up to the first stop string

Batches are dealt out to the ranks, and every rank returns all answers, as if it were alone. Import
this module only where the harness is installed.
"""

import contextlib
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pretrain.artifact.open import Artifact
from pretrain.errors import ConfigError
from pretrain.evaluation.distributed import collect, deal, failing_together
from pretrain.evaluation.translation import plan_batches
from pretrain.generation.constraints import Constraints
from pretrain.generation.sampling import generate
from pretrain.generation.stop_strings import StopStrings
from pretrain.types import Batch

_TemplateLM: Any = importlib.import_module("lm_eval.api.model").TemplateLM
_windows: Any = importlib.import_module("lm_eval.utils")
_generation: Any = importlib.import_module("lm_eval.models.utils")

MAX_GENERATED = 256
"""Tokens of an answer, the default of the harness."""


class HarnessModel(_TemplateLM):
    """A decoder-only model with its tokenizer; batches have `batch_tokens`, at least one request.

    With `chat` the contexts are conversations, in the text of the model's chat template. With
    `together` each rank answers all requests, as forward passes that are collective need it.
    `go_on` is called after each batch.

    Raises:
        ConfigError: No token ends a text, or the model is not decoder-only.
    """

    def __init__(
        self,
        artifact: Artifact,
        batch_tokens: int,
        *,
        chat: bool = False,
        together: bool = False,
        go_on: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._together = together
        self._go_on = go_on
        self._model = artifact.model
        self._codec = artifact.codec
        self._batch_tokens = batch_tokens
        self._chat = chat
        where = str(artifact.path)
        shape = artifact.model_config.shape
        if shape != "decoder" or artifact.model.head is None or not artifact.model.head.scores_ids:
            kinds = f"{shape}, head.kind={artifact.model_config.head.kind}"
            raise ConfigError(
                f"--tasks is for models with a decoder alone and its head, this one has {kinds}",
                where=where,
                fix="give --data",
            )
        if not self._codec.eos_ids:
            raise ConfigError(
                "its tokenizer has no end-of-text token",
                where=where,
                fix="give --data",
            )
        self._device = next(artifact.model.parameters()).device
        bos = artifact.model_config.special_tokens.bos
        self._prefix = self.eot_token_id if bos is None else bos
        self._added = self._codec.encode("")
        (self._prefix_text,) = self._codec.tokens([self._prefix])

    @property
    def eot_token_id(self) -> int:
        """Id that ends a text."""
        return self._codec.eos_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """Id before a text without a context: the one that begins texts, or else ends them."""
        return self._prefix

    @property
    def max_length(self) -> int:
        """Most tokens of a row."""
        return self._model.max_seq_len

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Returns ids; None: with special tokens of the tokenizer, unless the text spells them."""
        if self._chat:
            return self._codec.encode_rendered(string)
        ids = self._codec.encode(string)
        count = len(self._added)
        begins = add_special_tokens is None and string.startswith(self._prefix_text)
        if (begins or add_special_tokens is False) and ids[:count] == self._added:
            return ids[count:]
        return ids

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer for the harness's cache, which is not used."""
        return "pretrain"

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Returns the template for the harness's record, which is not kept: the model applies its own."""
        return "the model's own" if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Returns the text of a conversation; without a generation prompt its last turn is left open."""
        turns = [(turn["role"], turn["content"]) for turn in chat_history]
        if add_generation_prompt:
            return self._codec.render_chat(turns)
        *before, (_, begun) = turns
        return self._codec.render_chat(before) + begun

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Returns log p of each continuation, and whether it is the likeliest."""
        answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Returns log p of each text."""
        pieces: list[Any] = []
        of: list[int] = []  # the text of each piece
        limits = {"prefix_token": self._prefix, "max_seq_len": self.max_length, "context_len": 1}
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            windows = _windows.get_rolling_token_windows(ids, **limits)
            pieces += [(None, *_windows.make_disjoint_window(window)) for window in windows]
            of += [number] * (len(pieces) - len(of))
        sums = [0.0] * len(requests)
        for number, (log_prob, _) in zip(of, self._loglikelihood_tokens(pieces), strict=True):
            sums[number] += log_prob
        return sums

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """Returns the same of (anything, context ids, continuation ids)."""
        most = self.max_length + 1  # the last token is predicted, not read
        rows = [(context + continuation)[-most:] for _, context, continuation in requests]
        lengths = [len(continuation) for _, _, continuation in requests]
        batches = list(plan_batches([row[:-1] for row in rows], self._batch_tokens))

        def score(numbers: list[int]) -> list[tuple[float, bool]]:
            return self._score([(rows[number], lengths[number]) for number in numbers])

        return [(log_prob, is_greedy) for log_prob, is_greedy in self._answer_all(batches, score)]

    def _answer_all(self, batches: list[list[int]], answer: Callable[[list[int]], list[Any]]) -> list[Any]:
        by_number: dict[int, Any] = {}
        count = sum(map(len, batches))
        # In passes that are collective the others wait for a rank that leaves by an exception.
        with contextlib.nullcontext() if self._together else failing_together():
            for place in range(len(batches)) if self._together else deal(len(batches)):
                by_number |= zip(batches[place], answer(batches[place]), strict=True)
                self._go_on()
        return [by_number[number] for number in range(count)] if self._together else collect(by_number, count)

    @torch.no_grad()
    def _score(self, batch: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """Returns, of each row and number, log p of the last tokens, and if they are likeliest."""
        longest = max(len(row) for row, _ in batch)
        # Padding comes after the tokens, and a decoder does not see it.
        padded = [[*row, *[0] * (longest - len(row))][:-1] for row, _ in batch]
        tokens_BT = torch.tensor(padded, device=self._device)
        hidden_BTD = self._model(Batch(tokens_BT, tokens_BT), logits=False).hidden_BTD
        scores = []
        for place, (row, length) in enumerate(batch):
            end = len(row) - 1
            hidden_1TD = hidden_BTD[place : place + 1, end - length : end]
            targets_T = torch.tensor(row[-length:], device=self._device)
            assert self._model.head is not None
            log_probs_TV = self._model.head(hidden_1TD)[0].float().log_softmax(dim=-1)
            of_targets = log_probs_TV.gather(1, targets_T[:, None])
            is_greedy = bool((log_probs_TV.argmax(dim=-1) == targets_T).all())
            scores.append((float(of_targets.double().sum()), is_greedy))
        return scores

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Returns the greedy continuation of each context, up to a stop string."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            # Requests of one batch have the same settings.
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(number)
        asked: dict[int, tuple[list[int], dict[str, Any]]] = {}
        batches: list[list[int]] = []
        for numbers in groups.values():
            settings = _generation.normalize_gen_kwargs(requests[numbers[0]].args[1], MAX_GENERATED)
            if settings.get("do_sample") or settings.get("num_beams", 1) != 1:
                raise ConfigError(
                    "a task draws its answers, or searches with beams",
                    fix="set do_sample: false in the task",
                )
            most = settings["max_gen_toks"]
            room = self.max_length - int(most)
            if room < 1:
                limit = f"model.max_seq_len is {self.max_length}"
                raise ConfigError(
                    f"answers of a task have {most} tokens, {limit}",
                    fix="set generation_kwargs.max_gen_toks in the task",
                )
            contexts = [self.tok_encode(requests[number].args[0])[-room:] for number in numbers]
            asked |= {number: (ids, settings) for number, ids in zip(numbers, contexts, strict=True)}
            rows = plan_batches(contexts, self._batch_tokens)
            batches += [[numbers[row] for row in batch] for batch in rows]

        def go_on_with(numbers: list[int]) -> list[str]:
            return self._continue([asked[number][0] for number in numbers], asked[numbers[0]][1])

        return [str(text) for text in self._answer_all(batches, go_on_with)]

    def _continue(self, contexts: list[list[int]], settings: dict[str, Any]) -> list[str]:
        (end,) = self._codec.tokens([self.eot_token_id])
        ends = [text for text in (*settings["until"], end) if text]
        stops = StopStrings(self._codec.decode, ends)
        limits = Constraints(
            int(settings["max_gen_toks"]),
            eos_ids=(self.eot_token_id,),
            repetition_penalty=float(settings.get("repetition_penalty", 1.0)),
            no_repeat_ngram_size=int(settings.get("no_repeat_ngram_size", 0)),
        )
        rows = generate(self._model, contexts, limits, is_complete=stops.are_in)
        return [stops.cut(self._codec.decode(row.tokens)) for row in rows]
