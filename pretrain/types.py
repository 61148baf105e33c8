"""The contract between the parts: Batch, AttentionMask, ModelOutput, Fragment, and the shape legend.

Shape legend, used as suffixes everywhere (`q_BTNH`) and defined only here:

    B  batch rows            N  query heads           F  feed-forward width
    T  target length         K  key-value heads       V  vocabulary, padded
    S  source length         H  head width            D  model width

A decoder-only or encoder-only model reads `tokens_BT`; an encoder-decoder also reads `source`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""Target id of a position that has no loss."""


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """Who may attend to whom, declared, never materialised here. A backend turns it into what its kernel takes.

    Attributes:
        causal: Position t sees only positions up to t.
        documents_BT: int32; queries and keys see each other only within one document number. None: one document a row.
        key_documents_BS: The same for keys, where they are another sequence than the queries (cross attention, cache).
            None: keys are the queries' own sequence.
        query_offset: Position of the first query among the keys; non-zero when decoding with a cache.
    """

    causal: bool
    documents_BT: Tensor | None = None
    key_documents_BS: Tensor | None = None
    query_offset: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch of one rank.

    Attributes:
        tokens_BT: int64 input ids.
        targets_BT: int64 ids to predict at each position; IGNORE_INDEX where there is no loss.
        positions_BT: int64 position of each token in its document. None: 0..T-1 in every row.
        documents_BT: int32 number of each token's document in its row, from 0. None: each row is one document.
        sample_ids: Identity of each row's sample, B integers, on the host. Empty for text that is not from shards.
    """

    tokens_BT: Tensor
    targets_BT: Tensor
    positions_BT: Tensor | None = None
    documents_BT: Tensor | None = None
    sample_ids: tuple[int, ...] = ()

    def num_targets(self) -> int:
        """Returns the number of positions that have a loss. Host only: reads the tensor."""
        return int((self.targets_BT != IGNORE_INDEX).sum())

    def to(self, device: torch.device) -> "Batch":
        """Returns the batch with its tensors on `device`, copied asynchronously from pinned memory."""
        moved: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                moved[field.name] = value.to(device, non_blocking=True)
        return replace(self, **moved)


class ModelOutput(NamedTuple):
    """What a model returns. A tuple, because the hooks of ZeRO stage 3 find tensors in tuples.

    Attributes:
        hidden_BTD: Last hidden states, after the final norm; the input of the head.
        logits_BTV: Scores; None when the caller asked for hidden states only.
    """

    hidden_BTD: Tensor
    logits_BTV: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Fragment:
    """A contiguous piece of one parameter's training state, as it lies on this rank.

    Attributes:
        name: Parameter name, as in the unwrapped model.
        offset: First element of the piece in the flattened parameter.
        shape: Shape of the whole parameter.
        tensors: fp32 1-D live views of equal length: `weight` (the master weight) and the optimizer's moments.
    """

    name: str
    offset: int
    shape: tuple[int, ...]
    tensors: dict[str, Tensor]

    @property
    def length(self) -> int:
        """Number of elements of the piece."""
        return self.tensors["weight"].numel()


class FragmentStore(Protocol):
    """The training state of a model on this rank, as fragments: what an engine keeps and a checkpoint saves."""

    def owned_fragments(self) -> Iterator[Fragment]:
        """Yields what this rank must save; over the ranks, every element of every parameter exactly once."""
        ...

    def held_fragments(self) -> Iterator[Fragment]:
        """Yields everything that this rank keeps, to be filled when loading."""
        ...

    def finish_load(self, optimizer_step: int) -> None:
        """Makes the working weights follow the filled fragments and sets the optimizer's own step count. Collective."""
        ...
