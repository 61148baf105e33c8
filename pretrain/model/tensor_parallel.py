"""Tensor parallelism: N ranks share the matrices of a model, and the columns of its rows.

Attention and feed-forward layers are cut by heads and by hidden values (Shoeybi et al. 2019,
Megatron-LM), what is between them by columns (Korthikanti et al. 2022, 4.2):

    norms, residual sums, dropout, biases of results       T / N columns, all D values
        | gather: columns of all ranks
        v
    qkv, key_value, query; gate_up, up                     T columns, 1 / N of the rows of a weight
    attention of N-th part of heads; activation
    output; down                                           1 / N of the columns of a weight
        | sum over ranks, of which each gets its columns
        v
    norms, residual sums, dropout, biases of results       T / N columns

    embedding    token ids of all columns -> vectors of a part of the vocabulary -> sum
    head         hidden states of all columns -> scores of a part of the vocabulary -> loss
                 (`objective/chunk_loss.py`)

The gradient of a gather is a sum and that of a sum a gather. So a rank has the gradient of its part
of a matrix for all columns of its group, and that of everything else for its own columns or heads:
summed over all ranks that have the parameter, both are those of whole rows. That is what an engine
does with experts over ranks, and needs nothing else (`engine/shared_parameters.py`).

Whole rows (generation in a run) pass the same layers: nothing is gathered, and sums are whole.
"""

from typing import Any

import torch
import torch.distributed as td
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn

from pretrain.dist import World
from pretrain.model.parts.attention import CrossAttention, SelfAttention
from pretrain.model.parts.feedforward import FeedForward
from pretrain.model.parts.mixer_layer import MixerLayer
from pretrain.model.parts.position import RotaryPosition
from pretrain.model.stack import Stack
from pretrain.model.transformer import Transformer
from pretrain.parts import Part
from pretrain.types import IGNORE_INDEX

_ops = torch.ops._c10d_functional


# Operations of our own, which torch.compile keeps in its graph, where torch has both with gradients:
# its all-gather is a coalesced one under gloo, whose two threads write the name of the last finished
# collective without a lock (torch 2.13, ProcessGroupGloo::runLoop). Only the name
# "ALLGATHER_COALESCED" is too long to be kept in place: now and then its memory is freed twice.
@torch.library.custom_op("pretrain::all_gather_rows", mutates_args=())
def _gather_rows(x: Tensor, ranks: int, group: str) -> Tensor:
    """Returns the rows, of dimension 0, of all ranks. Collective."""
    rows = x.new_empty(ranks * x.shape[0], *x.shape[1:])
    return _ops.wait_tensor(_ops.all_gather_into_tensor_out(x, ranks, group, out=rows))


@torch.library.custom_op("pretrain::reduce_scatter_rows", mutates_args=())
def _sum_rows(x: Tensor, ranks: int, group: str) -> Tensor:
    """Returns this rank's rows, of dimension 0, of the sum over ranks. Collective."""
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(x, "sum", ranks, group))


def _keep_group(ctx: Any, inputs: tuple[Tensor, int, str], output: Tensor) -> None:
    ctx.group = inputs[1:]


_gather_rows.register_fake(lambda x, ranks, group: x.new_empty(ranks * x.shape[0], *x.shape[1:]))
_sum_rows.register_fake(lambda x, ranks, group: x.new_empty(x.shape[0] // ranks, *x.shape[1:]))
_gather_rows.register_autograd(
    lambda ctx, grad: (_sum_rows(grad.contiguous(), *ctx.group), None, None), setup_context=_keep_group
)
_sum_rows.register_autograd(
    lambda ctx, grad: (_gather_rows(grad.contiguous(), *ctx.group), None, None), setup_context=_keep_group
)


class TensorRanks:
    """The ranks that share the matrices of a model.

    Attributes:
        rank: Number of this one.
        size: Their number.
        has_columns: Each has some columns of the rows of the present batch, not whole rows.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank, self.size = group.rank(), group.size()
        self.has_columns = False

    def own(self, length: int) -> slice:
        """Returns the place of this rank's among so many gathered tokens."""
        each = length // self.size
        return slice(self.rank * each, (self.rank + 1) * each) if self.has_columns else slice(None)

    def gather(self, x_Bt: Tensor, dim: int = 1) -> Tensor:
        """Returns the columns of all ranks; what has no gradient may be of integers. Collective."""
        return self.collect(x_Bt, dim) if self.has_columns else x_Bt

    def sum(self, x_BTD: Tensor, dim: int = 1) -> Tensor:
        """Returns the sum over ranks, of this rank's columns. Collective."""
        if not self.has_columns:
            return collectives.wait_tensor(collectives.all_reduce(x_BTD, "sum", self._group))
        by_rank = x_BTD.contiguous() if dim == 0 else torch.cat(x_BTD.chunk(self.size, dim))
        return _sum_rows(by_rank, self.size, self._group.group_name)

    def collect(self, x: Tensor, dim: int) -> Tensor:
        """Returns the tensors of all ranks, one after another along a dimension. Collective."""
        by_rank = _gather_rows(x.contiguous(), self.size, self._group.group_name)
        return by_rank if dim == 0 else torch.cat(by_rank.chunk(self.size), dim)

    def join(self, logits_BTV: Tensor) -> Tensor:
        """Returns the scores of the whole vocabulary, of whole rows. Collective."""
        assert not self.has_columns, "scores of columns are made by the loss"
        return self.collect(logits_BTV, logits_BTV.dim() - 1)

    def fill(self, hidden_PD: Tensor, targets_P: Tensor) -> tuple[Tensor, Tensor]:
        """Lengthens chosen positions to as many as any rank has, without a target. Collective."""
        if not self.has_columns:
            return hidden_PD, targets_P
        most = torch.tensor(len(targets_P), device=targets_P.device)
        td.all_reduce(most, td.ReduceOp.MAX, group=self._group)
        more = int(most) - len(targets_P)
        pad = nn.functional.pad
        return pad(hidden_PD, (0, 0, 0, more)), pad(targets_P, (0, more), value=IGNORE_INDEX)


class RowsLinear(nn.Linear):
    """A part of the rows of a weight: columns of a rank to a part of the results of all columns.

    `ranks` None: its input has all columns already.
    """

    def __init__(self, whole: nn.Linear, size: int, ranks: TensorRanks | None) -> None:
        super().__init__(whole.in_features, whole.out_features // size, whole.bias is not None)
        self._ranks = ranks

    def forward(self, x_BtD: Tensor) -> Tensor:
        return super().forward(x_BtD if self._ranks is None else self._ranks.gather(x_BtD))


class ColumnsLinear(nn.Linear):
    """A part of the columns of a weight: a part of the inputs of all columns to a rank's results.

    The bias is added once, to the sum over ranks, and each rank has all of it.
    """

    def __init__(self, whole: nn.Linear, ranks: TensorRanks) -> None:
        inputs = whole.in_features // ranks.size
        super().__init__(inputs, whole.out_features, whole.bias is not None)
        self._ranks = ranks

    def forward(self, x_BTF: Tensor) -> Tensor:
        sum_BtD = self._ranks.sum(nn.functional.linear(x_BTF, self.weight))
        return sum_BtD if self.bias is None else sum_BtD + self.bias


class RowsEmbedding(nn.Embedding):
    """A part of the vocabulary; the vectors of a rank's columns are the sums over all parts."""

    def __init__(self, whole: nn.Embedding, ranks: TensorRanks) -> None:
        super().__init__(whole.num_embeddings // ranks.size, whole.embedding_dim)
        self._ranks = ranks

    def forward(self, tokens_Bt: Tensor) -> Tensor:
        place_BT = self._ranks.gather(tokens_Bt) - self._ranks.rank * self.num_embeddings
        is_here_BT = (place_BT >= 0) & (place_BT < self.num_embeddings)
        found_BTD = super().forward(torch.where(is_here_BT, place_BT, 0))
        return self._ranks.sum(found_BTD.masked_fill(~is_here_BT[..., None], 0.0))


class ColumnsEmbedding(nn.Embedding):
    """A part of the columns of a table: values of a rank's heads, of all columns of the rows."""

    def __init__(self, whole: nn.Embedding, ranks: TensorRanks) -> None:
        super().__init__(whole.num_embeddings, whole.embedding_dim // ranks.size)
        self._ranks = ranks

    def forward(self, tokens_Bt: Tensor) -> Tensor:
        return super().forward(self._ranks.gather(tokens_Bt))


def share_tensors(model: Transformer, world: World, timeout_s: int) -> dict[str, Part]:
    """Leaves this rank its part of the matrices of a model without storage. Collective.

    Returns the part of each parameter that is cut, by name, for `mark_parts`. `timeout_s` is that
    of their process group.
    """
    if world.tensor == 1:
        return {}
    ranks = TensorRanks(world.parts_group(timeout_s))
    parts: dict[str, Part] = {}

    def cut(name: str, layer: nn.Module, key: str, sections: tuple[int, ...] | None) -> None:
        whole: nn.Linear = getattr(layer, key)
        if sections is None:
            layer.add_module(key, ColumnsLinear(whole, ranks))
            parts[f"{name}.{key}.weight"] = Part(ranks.rank, ranks.size, 1)
            return
        # A mixer gathers once for all of its matrices.
        gathering = None if isinstance(layer, MixerLayer) else ranks
        layer.add_module(key, RowsLinear(whole, ranks.size, gathering))
        part = Part(ranks.rank, ranks.size, 0, sections)
        parts.update({f"{name}.{key}.{kind}": part for kind, _ in whole.named_parameters()})

    for name, layer in list(model.named_modules()):
        if isinstance(layer, SelfAttention | CrossAttention | FeedForward | MixerLayer):
            for key, sections in layer.cuts().items():
                cut(name, layer, key, sections)
        if isinstance(layer, SelfAttention):
            layer.heads //= ranks.size
            layer.kv_heads //= ranks.size
        elif isinstance(layer, MixerLayer):
            layer.share(ranks)
        elif isinstance(layer, RotaryPosition):
            layer.shared = ranks
        elif isinstance(layer, Stack):
            for number, table in enumerate(list(layer.value_embedding)):
                layer.value_embedding[number] = ColumnsEmbedding(table, ranks)
                parts[f"{name}.value_embedding.{number}.weight"] = Part(ranks.rank, ranks.size, 1)
    _share_vocabulary(model, ranks, parts)
    return parts


def _share_vocabulary(model: Transformer, ranks: TensorRanks, parts: dict[str, Part]) -> None:
    assert isinstance(model.embedding, nn.Embedding), "checked by the config"
    model.shared = ranks
    part = Part(ranks.rank, ranks.size)
    model.embedding = RowsEmbedding(model.embedding, ranks)
    parts["embedding.weight"] = part
    if model.head is None or not model.head.scores_ids:
        return
    model.head.shared = ranks
    for kind, whole in list(model.head.named_parameters(recurse=False)):
        setattr(model.head, kind, nn.Parameter(part.take(whole).clone()))
        parts[f"head.{kind}"] = part
    model.tie()


def mark_parts(model: nn.Module, parts: dict[str, Part]) -> None:
    """Tells of the parameters of a built model which parts they are (`part_of`)."""
    for name, part in parts.items():
        parameter: Any = model.get_parameter(name)
        parameter.part = part
