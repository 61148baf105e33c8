"""Which parameters decay: matrices do; norms, biases and embeddings do not.

Decay pulls a matrix towards zero against a loss that hardly sees its scale. It has no such use for a gain or a shift,
and it would shrink the embedding of a rare token between the few steps that train it. An output head that shares the
embedding's weight is one parameter with it, and does not decay either. A table of learned positions is an embedding.
"""

from dataclasses import dataclass

from torch import nn

EMBEDDING_PARTS = frozenset({"embedding", "position"})
"""Parts of parameter names that mark a look-up table whose module is not nn.Embedding."""


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters that share a weight decay.

    Attributes:
        name: `decay` or `no_decay`.
        decays: Whether `optim.weight_decay` applies.
        names: Name of each parameter, in the order in which the model registers them.
        parameters: The parameters, in the same order.
    """

    name: str
    decays: bool
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]


def group_parameters(model: nn.Module) -> list[ParameterGroup]:
    """Splits the trainable parameters of a model into at most two groups, each parameter in exactly one.

    A parameter decays if it has two or more dimensions and is no embedding: no nn.Embedding owns it, and no part of its
    dotted name is in EMBEDDING_PARTS. The order is that of registration:
    the same for every process that builds the same model. Frozen parameters are in no group. Call it while parameters
    have their true shapes, before an engine partitions them.

    Args:
        model: Any module; shared parameters count once, under their first name.

    Returns:
        The groups that are not empty, the decaying one first.
    """
    embeddings = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for parameter in module.parameters(recurse=False)
    }
    members: dict[bool, list[tuple[str, nn.Parameter]]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_embedding = id(parameter) in embeddings or not EMBEDDING_PARTS.isdisjoint(name.split("."))
            members[parameter.ndim >= 2 and not is_embedding].append((name, parameter))
    return [
        ParameterGroup(
            name="decay" if decays else "no_decay",
            decays=decays,
            names=tuple(name for name, _ in pairs),
            parameters=tuple(parameter for _, parameter in pairs),
        )
        for decays, pairs in members.items()
        if pairs
    ]
