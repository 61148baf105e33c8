"""The contract between the parts: batches, masks, outputs, fragments, and the shape legend.

Shape legend, used as suffixes everywhere (`q_BTNH`) and defined only here:

    B  batch rows            N  query heads           F  feed-forward width
    T  target length         K  key-value heads       V  vocabulary, padded
    S  source length         H  head width            D  model width

    P  chosen positions of a batch, flattened      A  pairs of answers, or of texts
    C  channels of an image  Y  rows of its pixels    X  columns of its pixels
    E  experts of a layer            J  experts that a token chooses
    L  layers with experts           R  rows of experts, one a token and choice
    G  largest scores of a teacher

A decoder-only or encoder-only model reads `tokens_BT`; an encoder-decoder also reads `source`; a
model of image patches reads `pixels_BCYX`.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from pretrain.parts import Stripes
from pretrain.rows import IGNORE_INDEX, Array, ArrayFields, Rows, TokenRows


class Columns(NamedTuple):
    """The columns of each row that a rank has, the `rank`-th of `ranks` equal parts."""

    rank: int
    ranks: int

    def width(self, length: int) -> int:
        """Returns the columns of a part; those beyond the end of the last one are padding."""
        return -(-length // self.ranks)

    def fill(self, whole_BT: Tensor, padding: int) -> Tensor:
        """Returns rows lengthened by padding to equal parts."""
        length = whole_BT.shape[1]
        return pad(whole_BT, (0, self.width(length) * self.ranks - length), value=padding)

    def take(self, whole_BT: Tensor, padding: int = 0) -> Tensor:
        """Returns this rank's part, in memory of its own."""
        return self.fill(whole_BT, padding).chunk(self.ranks, dim=1)[self.rank].contiguous()


def continuing(documents_BT: Tensor | None, lengths_B: Tensor | None, length: int) -> Tensor | None:
    """Returns where the next token is of the same document, bool [B, T - 1]; None: everywhere.

    Args:
        documents_BT: Numbers of documents as in `Batch`.
        lengths_B: Lengths as in `Batch`, read where there are no documents.
        length: T.
    """
    if documents_BT is not None:
        return (documents_BT[:, 1:] == documents_BT[:, :-1]) & (documents_BT[:, 1:] >= 0)
    if lengths_B is not None:
        return torch.arange(1, length, device=lengths_B.device) < lengths_B[:, None]
    return None


def take_next(x: Tensor, continuing_BT: Tensor | None, fill: float) -> Tensor:
    """Returns the values of the next token, [B, T] or [B, T, D]; `fill` where a document ends."""
    following = x[:, 1:]
    if continuing_BT is not None:
        is_there = continuing_BT if x.ndim == 2 else continuing_BT[..., None]
        following = torch.where(is_there, following, fill)
    return pad(following, (0, 1) if x.ndim == 2 else (0, 0, 0, 1), value=fill)


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """Declared visibility of keys, never materialised here; backends build the mask of a kernel.

    Query t may see key s where all of these hold. A backend may return anything finite for a query
    that sees no key, and for one that is padding of its own sequence (`key_lengths_B` under
    `causal` or a window).

    Attributes:
        causal: Position t sees only positions up to t.
        documents_BT: int32; tokens see their own document only. None: one document a row.
        key_documents_BS: The same for keys of another sequence (cross attention, cache). None: keys
            are the queries' own sequence.
        key_lengths_B: int32, at least 1; keys from a row's length on are padding. None: no padding.
        window: Only keys fewer than this many positions away are seen, t - s with `query_offset`
            counted. None: all.
        prefix_BS: bool; keys that every query of their document sees (prefix language models).
            Lifts `causal` only: window, documents and lengths still hold.
        query_offset: Position of the first query among the keys; non-zero when decoding with a
            cache.
        position_1: int64 [1]; position of the one query, in place of `query_offset`, where the host
            does not know it: in a step of fixed shapes, by `eager` and `sdpa` alone. None: it does.
        on_host: Documents and lengths on the host, to be read without a wait for the device. None:
            they are read where they are.
        columns: Part of the queries and keys that this rank passes to `attend`; the mask is of
            whole rows, and so are the sizes for `prepare`. None: it has whole rows.
    """

    causal: bool
    documents_BT: Tensor | None = None
    key_documents_BS: Tensor | None = None
    key_lengths_B: Tensor | None = None
    window: int | None = None
    prefix_BS: Tensor | None = None
    query_offset: int = 0
    position_1: Tensor | None = None
    on_host: "AttentionMask | None" = None
    columns: Columns | None = None


def _columns_of(rows: Rows[np.ndarray]) -> np.ndarray:
    return np.arange(rows.tokens_BT.shape[1])


def _zero(dtype: type) -> Callable[[Rows[np.ndarray]], np.ndarray]:
    return lambda rows: np.zeros((), dtype)


@dataclass(frozen=True, slots=True)
class StackRows(Rows[Array]):
    """Rows of tokens that a stack reads: the source of two stacks, or a batch. Packed or padded.

    Attributes:
        tokens_BT: int64 input ids; of images zeros, one for each vector of a row.
        positions_BT: int64 position of each token in its document, or place of a vector that is read
            in the row of an image. None: 0..T-1 in every row.
        documents_BT: int32 number of each token's document in its row, from 0, of a source that of
            its target; tokens of a negative number are padding that no other token sees. None: each
            row is one document.
        lengths_B: int32, at least 1: tokens of each row before padding at its end. None: no
            padding.
        prefix_BT: bool; tokens that all of their document sees, in a causal model too. None: none.
        token_types_BT: int64 segment of each token (BERT). None: 0.
        columns: Part of the rows that this is, the source's too: tokens, targets, positions and
            types are these columns, and what masks are made of (documents, lengths, prefix) is of
            whole rows. None: whole rows.
        window: Keys that a query sees on each visible side, its own included, at most; a layer's own
            window may be shorter. None: no limit.
        on_host: The rows that were copied to a device. None: these were not.
    """

    _: KW_ONLY
    positions_BT: Array | None = field(default=None, metadata={"absent": _columns_of})
    documents_BT: Array | None = field(default=None, metadata={"absent": _zero(np.int32), "whole": True, "padding": -1})
    lengths_B: Array | None = None
    prefix_BT: Array | None = field(default=None, metadata={"absent": _zero(bool), "whole": True})
    token_types_BT: Array | None = field(default=None, metadata={"absent": _zero(np.int64)})
    columns: Columns | None = None
    window: int | None = None
    on_host: "StackRows[Any] | None" = None

    @property
    def ranks(self) -> int:
        """Number of ranks over which the columns of the rows are cut."""
        return 1 if self.columns is None else self.columns.ranks

    def to(self, device: torch.device, *, non_blocking: bool = True) -> Self:
        """Returns the rows on `device`, copied asynchronously from pinned memory."""
        tokens_BT: Any = self.tokens_BT
        on_host = self.on_host if tokens_BT.device == device else self
        rows = replace(self, on_host=None)
        moved = rows.changed(lambda part: part.to(device, non_blocking=non_blocking))
        return replace(moved, on_host=on_host)


StackRowsT = TypeVar("StackRowsT", bound=StackRows[Any])


@dataclass(frozen=True, slots=True)
class PairBatch(ArrayFields[Array]):
    """Two answers to each of A prompts, and P tokens of them all, at `Batch.target_positions_P`.

    The second answer of records that are judged is that of another prompt.
    """

    targets_P: Array  # int64 ids of these tokens
    sides_P: Array  # int64: 2 n for the chosen answer of pair n, 2 n + 1 for the rejected one
    keys_A: Array  # int64 hash of the tokens of a pair
    # float64 log-probabilities of the answers by the model that training began with. None: unknown
    reference_A2: Array | None = None
    wanted_A: Array | None = None  # bool: the record is wanted; None: pairs
    rows_A: Array | None = None  # int64 row of each record; None: pairs


@dataclass(frozen=True, slots=True)
class TextBatch(ArrayFields[Array]):
    """Texts whose vectors are compared, each with its first token at `Batch.target_positions_P`.

    The texts of a record follow one another: its query, its positive, its hard negatives.
    """

    roles_P: Array  # int64: 0 a query, 1 a positive, 2 a hard negative
    keys_P: Array  # int64 hash of the tokens
    groups_P: Array  # int64 number of the group of its record; 0: none
    # Of the loss over the global batch, once it is known: its gradient with respect to the vectors, float64, and
    # for each record `info_nce.RESULTS`. None: unknown
    slopes_PD: Array | None = None
    results_AR: Array | None = None


@dataclass(frozen=True, slots=True)
class TaughtTokens(ArrayFields[Array]):
    """Largest scores of a teacher at each position, as `shards/teacher_scores.py` stores them."""

    ids_BTG: Array  # int64
    scores_BTG: Array  # float32: less the largest
    rest_BT2: Array  # float32: the largest, and the log of the mass of the others


@dataclass(frozen=True, slots=True)
class Batch(StackRows[Array]):
    """One micro-batch of one rank: in numpy as an objective makes it, then in torch for the model.

    Attributes:
        targets_BT: int64 ids to predict at each position, or numbers whose meaning the row maker of
            the objective defines; IGNORE_INDEX where there is no loss.
        target_positions_P: int64, ascending: indices into the flattened `targets_BT` that have a
            loss, where they are few: the head is computed there only. None: all.
        mixed_P2: fp32; a second target of each of these positions, an id, and its share of the loss.
            None: one target each.
        draws_P: float64 of [0, 1); samples a token for each of these positions, which `targets_BT` then
            are not limited to. None: none is sampled.
        source: Input of the encoder of a model with two stacks.
        pairs: Answers to compare; `targets_BT` then has 0 at the first token of each chosen one.
        texts: Texts to compare; `targets_BT` then has 0 at the first token of each query.
        taught: Stored scores of a teacher. None: there are none.
        num_padding: Tokens of padding, in the source too.
    """

    targets_BT: Array = field(metadata={"padding": IGNORE_INDEX})
    _: KW_ONLY
    target_positions_P: Array | None = field(default=None, metadata={"place": True})
    mixed_P2: Array | None = None
    draws_P: Array | None = None
    source: StackRows[Array] | None = None
    pairs: PairBatch[Array] | None = None
    texts: TextBatch[Array] | None = None
    taught: TaughtTokens[Array] | None = None
    num_padding: int = 0

    def num_targets(self) -> int:
        """Returns the number of positions that have a loss. Host only: reads the tensor."""
        # Six times as fast as a sum.
        return int(np.count_nonzero(np.asarray(self.targets_BT) != IGNORE_INDEX))

    def sample_ids(self) -> list[int]:
        """Returns the identity of each row's sample; empty without shards. Host only."""
        ids_B: Any = self.sample_ids_B
        return [] if ids_B is None else ids_B.tolist()

    def num_tokens(self) -> int:
        """Returns the tokens that the model reads: source and target, and no padding."""
        stacks: list[StackRows[Any]] = [self] if self.source is None else [self, self.source]
        return sum(math.prod(rows.tokens_BT.shape) for rows in stacks) - self.num_padding


ModelRows = Batch[np.ndarray]
"""A batch in numpy, whole rows."""

RowMaker = Callable[[TokenRows], ModelRows]
"""Makes of rows what a model reads and predicts: in the loader's threads, a pure function."""


class ModelOutput(NamedTuple):
    """Output of a model. A tuple, because the hooks of ZeRO stage 3 find tensors in tuples.

    Attributes:
        hidden_BTD: Last hidden states, after the final norm; the input of the head. Under a head of
            labels that pools: the pooled documents.
        logits_BTV: Scores; None without a head, or when the caller asked for hidden states only.
        routing_LW: Sums over the tokens of each layer with experts (`RoutingSums`); None without.
        ahead: In training, hidden states [B, T, D] of each module of `multi_token`, for the head.
    """

    hidden_BTD: Tensor
    logits_BTV: Tensor | None = None
    routing_LW: Tensor | None = None
    ahead: tuple[Tensor, ...] = ()


EMA = "ema"
"""Kind of a fragment's tensor that is the moving average of the weight; and what a path to that average ends with."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """A piece of one parameter's training state, as it lies on this rank.

    State of another size than the parameter, such as the row factors of a variance, is a kind of
    its own, in a fragment of its own: offset and length then count the elements of that kind.
    """

    name: str  # parameter name, as in the unwrapped model
    offset: int  # first element of the piece in the flattened parameter
    shape: tuple[int, ...]  # shape of the whole parameter
    # fp32 1-D live views of equal length, at least one: `weight` (the master weight) with or without
    # its average, or the optimizer's moments, or both.
    tensors: dict[str, Tensor]
    stripes: Stripes | None = None  # where elements after the first lie; None: one after another

    @property
    def length(self) -> int:
        """Number of elements of the piece."""
        return next(iter(self.tensors.values())).numel()


class FragmentStore(Protocol):
    """The training state of a model on this rank, as fragments."""

    def owned_fragments(self) -> Iterator[Fragment]:
        """Yields the part of this rank in a save: every element of every parameter on one rank."""
        ...

    def held_fragments(self) -> Iterator[Fragment]:
        """Yields everything that this rank keeps, to be filled when loading."""
        ...

    def scalars(self) -> dict[str, float]:
        """Returns the state that is no tensor, such as a loss scale; the same on every rank."""
        ...

    def finish_load(self, optimizer_step: int, scalars: dict[str, float]) -> None:
        """Makes the working weights follow filled fragments, and sets the step count. Collective.

        The saved `scalars` may be those of another engine; unknown ones are ignored.
        """
        ...


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Settings of decoding that a model is released with, as transformers defines them.

    Attributes:
        num_beams: Beams; 1 is greedy.
        length_penalty: Exponent of the length that a finished beam's score is divided by.
        early_stopping: End of a beam search with `num_beams` finished beams. True: at once; False:
            when no open beam is likely to do better; "never": when none can.
        max_length: Most tokens of a row, its first ones included. None: not given.
        max_new_tokens: Most tokens without the prompt; precedes `max_length`.
        suppressed: Ids that are never generated.
        forced_eos: Id of the last token of a row that reaches its greatest length. None: not
            forced.
        eos: Ids that end a row; empty: those of the tokenizer.
        renormalize: Probabilities sum to 1 again without `suppressed`, which changes beam scores.
        repetition_penalty: Divides the scores of tokens that a row has; 1: none.
        no_repeat_ngram_size: No run of this many tokens comes twice in a row; 0: any may.
        stop_strings: Texts that end a row.
        sees_prompt_whole: A decoder reads its prompt in both directions; theirs has no such
            setting.
        stated: Every setting of the release by its key, unsupported ones and those whose value is
            the default too; an export has them.
        not_honoured: Settings that change the result and are not supported, as `key=value`.
    """

    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    max_length: int | None = None
    max_new_tokens: int | None = None
    suppressed: tuple[int, ...] = ()
    forced_eos: int | None = None
    eos: tuple[int, ...] = ()
    renormalize: bool = False
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    stop_strings: tuple[str, ...] = ()
    sees_prompt_whole: bool = False
    stated: dict[str, Any] = field(default_factory=dict)
    not_honoured: tuple[str, ...] = ()
