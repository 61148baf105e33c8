"""FLOPs of training, by the formula that MFU is reported with (Chowdhery et al. 2022, appendix B).

    y = x W    forward 2 FLOPs a weight and token, gradient of x 2, gradient of W 2

All trained, that is 6 N + 12 L D T a token: N are the weights that a token is multiplied with
(projections and head, tied or not; no look-ups, norms and biases), D is the width of all query
heads, and scores and mixing count all T keys, masked ones too. A layer with a window counts the
keys that the window leaves. Neither recomputation nor a pooler is counted.

A frozen W lacks its gradient: 4 N. An x that no trained parameter has gone into lacks the other:
2 N, as in the blocks below the first trained one. An adapter's A and B are two products more, both
trained (Hu et al. 2022, 4.1). All weights of a recurrent model count as trained.

With two stacks a source token meets the encoder and the decoder's keys and values of it, a target
token the rest of the decoder and the head; cross attention has T x S scores. A masked autoencoder
has none: of an image's T vectors the encoder reads S, the decoder all. Modules of `multi_token` count
as a block, a projection and a head each; a generator of replaced tokens is a model of its own.
"""

from collections import Counter
from dataclasses import dataclass

from pretrain.config.model import AnyModelConfig
from pretrain.config.model.parts import counts_of
from pretrain.config.model.parts.counts import FlopCounter
from pretrain.plan.params import parameter_shapes
from pretrain.plan.trained import TrainableSubset


@dataclass(frozen=True, slots=True)
class RowFlops:
    """FLOPs on a row."""

    projections: int  # products with weights, without the head
    attention: int  # scores and mixing
    head: int  # output projection, and the layer before it

    @property
    def total(self) -> int:
        """All of it."""
        return self.projections + self.attention + self.head

    def __add__(self, other: "RowFlops") -> "RowFlops":
        projections, attention = self.projections + other.projections, self.attention + other.attention
        return RowFlops(projections, attention, self.head + other.head)

    def part(self, ranks: int) -> "RowFlops":
        """Returns the FLOPs of one of the ranks that share the row."""
        return RowFlops(self.projections // ranks, self.attention // ranks, self.head // ranks)


@dataclass(frozen=True, slots=True)
class TrainingFlops:
    """FLOPs of training on a row."""

    whole: RowFlops  # forward and backward pass
    forward: RowFlops  # forward pass
    frozen_blocks: dict[str, int]  # first blocks of each stack that no gradient reaches


def count_flops(
    model: AnyModelConfig,
    seq_len: int,
    *,
    source_len: int | None = None,
    head_share: float = 1.0,
    trained: TrainableSubset | None = None,
    window: int | None = None,
) -> TrainingFlops:
    """Counts the FLOPs of training on a row of T = `seq_len` tokens; with two stacks, of the target.

    A source has S = `source_len` tokens, by default as many; the head is computed at a share of the
    positions. `trained=None`: the whole model. `window`: that of a step, beside those of layers.
    """
    shapes = parameter_shapes(model)
    count = FlopCounter(shapes, shapes.keys(), window=window)
    if trained is not None:
        count = FlopCounter(shapes, trained.names, trained.layers, trained.finetune.rank, window)
    frozen = counts_of(model).flops(count, seq_len, source_len or seq_len)

    def row(counts: Counter[str]) -> RowFlops:
        head = round(counts["head"] * head_share)
        return RowFlops(counts["projections"], counts["attention"], head)

    return TrainingFlops(row(count.whole), row(count.forward), frozen)
