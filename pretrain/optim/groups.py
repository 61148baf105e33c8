"""Parameter groups: weight decay for matrices, learning rates by depth, parts of fused weights.

Weight decay applies to matrices, but not to norms, biases, short convolutions and embeddings: it is
of no use for a gain or a shift, and would shrink the embedding of a rare token between the few steps that update
it. A tied output head is the embedding's parameter and does not decay either; a table of learned
positions counts as an embedding.

Fused weights (queries, keys and values; gate and up) consist of several matrices, each with its own
spectrum, rows and columns. An optimizer over whole matrices steps them separately: Muon's author
found it better (Jordan et al. 2024), and T5's Adafactor factors (Shazeer and Stern 2018) were those
of separate matrices. So are those of experts, [E, outputs, inputs], expert by expert.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import NamedTuple

from torch import nn

from pretrain.parts import part_of

_HALVES = frozenset({"key_value", "gate_up"})
"""Layers whose weight consists of two matrices of equal height."""

_GATES = {nn.LSTM: 4, nn.LSTMCell: 4, nn.GRU: 3, nn.GRUCell: 3}
"""Matrices in each weight of torch's recurrent modules."""


_HEADS = frozenset({"qkv", "query", "key_value"})
"""Layers whose rows are those of heads, one after another."""


def block_rows(model: nn.Module, name: str, *, split_heads: bool = False) -> tuple[int, ...]:
    """Returns the number of rows of each matrix of a parameter, or with `split_heads` of each head.

    One number if it is not fused; of experts over ranks the rows of all. So of biases.

    To be called before an engine partitions the parameters.
    """
    parameter = model.get_parameter(name)
    owner_name, _, _ = name.rpartition(".")
    parent_name, _, layer = owner_name.rpartition(".")
    owner = model.get_submodule(owner_name)
    copies = math.prod(part_of(parameter).whole(parameter.shape)[:-2])
    if parameter.ndim < 2:
        matrix = getattr(owner, "weight", None)
        # Biases of experts are one after another, as their matrices are; here those of this rank.
        experts = matrix.shape[0] if isinstance(matrix, nn.Parameter) and matrix.ndim == 3 else 1
        copies = experts * part_of(parameter).ranks
    rows = parameter.shape[-2] if parameter.ndim > 1 else parameter.numel() // experts
    parent = model.get_submodule(parent_name)
    if split_heads and parameter.ndim > 1 and layer in _HEADS and hasattr(parent, "head_width"):
        blocks = (int(parent.head_width),) * (rows // int(parent.head_width))
    elif layer in getattr(parent, "fused", ()):
        blocks = parent.fused[layer]
    elif layer == "qkv" and hasattr(parent, "kv_heads"):
        blocks = parent.rows()
    else:
        parts = 2 if layer in _HALVES else _GATES.get(type(owner), 1)
        blocks = (rows // parts,) * parts
    assert sum(blocks) == rows, f"{name}: {blocks} are not {rows} rows"
    return blocks * copies


_FILTERS = frozenset({"convolution"})
"""Parts of the parameter names of convolutions of each channel, which are no matrices."""

EMBEDDING_PARTS = frozenset({"embedding", "patches", "position"})
"""Parts of the parameter names of inputs whose module is not nn.Embedding: tables, and patches."""

_ABOVE = frozenset({"head", "pooler", "multi_token", "generator"})
"""First part of the parameter names of modules above the last block."""


class Scale(NamedTuple):
    """Factors of a parameter's initial values, learning rate and epsilon; its decay is divided by the rate's."""

    init: float = 1.0
    lr: float = 1.0
    eps: float = 1.0


PLAIN_SCALE = Scale()


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters that share a weight decay and a learning rate.

    Attributes:
        name: `decay` or `no_decay`; under `layer_decay`, with the depth: `decay.3`; of several
            scales, with the number of its own: `decay.s1`; of what ranks share `decay.parts`.
        decays: `optim.weight_decay` applies.
        names: Parameter names, in the order of registration in the model.
        parameters: The parameters, in the same order.
        blocks: Shapes of the matrices of each parameter, along its rows.
        lr_ratio: Factor of the learning rate, from `layer_decay` and `scale`.
        scale: Factors of `optim.transfer`.
    """

    name: str
    decays: bool
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    blocks: tuple[tuple[tuple[int, ...], ...], ...]
    lr_ratio: float = 1.0
    scale: Scale = PLAIN_SCALE


def depths(names: Iterable[str]) -> tuple[dict[str, int], int]:
    """Returns the depth of each parameter, and of the head.

    Blocks count from 1; embeddings, positions and the input norm have depth 0. Blocks of a decoder
    come after those of its encoder. An output norm has the depth of the module above it.
    """
    names = list(names)
    depth_of = dict.fromkeys(names, 0)
    top = 0
    for stack in ("encoder", "decoder"):
        prefix = f"{stack}.blocks."
        inside = [name for name in names if name.startswith(prefix)]
        numbers = {name: int(name[len(prefix) :].partition(".")[0]) for name in inside}
        depth_of |= {name: top + 1 + number for name, number in numbers.items()}
        top += 1 + max(numbers.values(), default=-1)
        depth_of |= {name: top + 1 for name in names if name.startswith(f"{stack}.norm.")}
    depth_of |= {name: top + 1 for name in names if name.split(".")[0] in _ABOVE}
    return depth_of, top + 1


def group_parameters(
    model: nn.Module,
    layer_decay: float | None = None,
    scale_of: Callable[[str], Scale] = lambda name: PLAIN_SCALE,
    *,
    split_heads: bool = False,
) -> list[ParameterGroup]:
    """Splits the trainable parameters of a model into groups, each parameter in exactly one.

    A parameter decays if it has two or more dimensions and is no embedding: no nn.Embedding owns
    it, and no part of its dotted name is in EMBEDDING_PARTS or _FILTERS. The order is that of registration,
    the same in every process. Frozen parameters are in no group. To be called before an engine
    partitions the parameters.

    Args:
        model: Any module; shared parameters count once, under their first name.
        layer_decay: Learning rate of a block relative to the block above it. None: one rate.
        scale_of: Scale of a parameter by its name, of `optim.transfer`.
        split_heads: The matrices of projections to heads are those of each head.

    Returns:
        At most two groups, the decaying one first; for each depth with `layer_decay`, for each
        scale, and for experts and matrices over ranks.
    """
    tables = _tables(model)
    depth_of, head_depth = depths(name for name, _ in model.named_parameters())
    members: dict[tuple[int, bool, Scale, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = parameter.ndim >= 2 and id(parameter) not in tables
            depth = head_depth if layer_decay is None else depth_of[name]
            # Reduced over other ranks than the rest, so that an engine needs them apart.
            is_part = part_of(parameter).ranks > 1
            key = (depth, decays, scale_of(name), is_part)
            members.setdefault(key, []).append((name, parameter))
    scales = list(dict.fromkeys(scale for _, _, scale, _ in members))
    groups = []
    for key in sorted(members, key=lambda key: (key[0], not key[1], scales.index(key[2]), key[3])):
        depth, decays, scale, is_part = key
        names, parameters = zip(*members[key], strict=True)
        blocks = []
        for name, parameter in members[key]:
            rows_of = block_rows(model, name, split_heads=split_heads)
            blocks.append(tuple((rows, *parameter.shape[1:][-1:]) for rows in rows_of))
        group = "decay" if decays else "no_decay"
        if layer_decay is not None:
            group += f".{depth}"
        if len(scales) > 1:
            group += f".s{scales.index(scale)}"
        if is_part:
            group += ".parts"
        ratio = scale.lr * (layer_decay or 1.0) ** (head_depth - depth)
        groups.append(ParameterGroup(group, decays, names, parameters, tuple(blocks), ratio, scale))
    return groups


def _tables(model: nn.Module) -> set[int]:
    """Returns the identities of the parameters of embeddings, and of short convolutions."""
    parts = EMBEDDING_PARTS | _FILTERS
    every = model.named_parameters()
    named = {id(one) for name, one in every if not parts.isdisjoint(name.split("."))}
    kinds = nn.Embedding | nn.EmbeddingBag
    owners = [module for module in model.modules() if isinstance(module, kinds)]
    return named | {id(one) for owner in owners for one in owner.parameters(recurse=False)}


HEAD_PARTS = frozenset({"head", "router", "shared_gate"})
"""Parts of the parameter names of heads: rows of scores."""


def split_hidden(group: ParameterGroup) -> tuple[ParameterGroup, ParameterGroup]:
    """Returns the hidden matrices of a group, and the rest of it."""
    is_hidden = [
        group.decays and len(blocks[0]) == 2 and HEAD_PARTS.isdisjoint(name.split("."))
        for name, blocks in zip(group.names, group.blocks, strict=True)
    ]

    def select(name: str, chosen: Sequence[bool]) -> ParameterGroup:
        names = tuple(compress(group.names, chosen))
        parameters = tuple(compress(group.parameters, chosen))
        blocks = tuple(compress(group.blocks, chosen))
        return replace(group, name=name, names=names, parameters=parameters, blocks=blocks)

    rest = select(group.name, [not hidden for hidden in is_hidden])
    return select(group.name.replace("decay", "matrix"), is_hidden), rest
