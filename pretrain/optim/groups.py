"""Which parameters decay: matrices do; norms, biases and embeddings do not.

Decay pulls a matrix towards zero against a loss that hardly sees its scale. It has no such use for a gain or a shift,
and it would shrink the embedding of a rare token between the few steps that train it. An output head that shares the
embedding's weight is one parameter with it, and does not decay either. A table of learned positions is an embedding.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from pretrain.optim.blocks import block_rows

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
        blocks: Of each, the shapes of the matrices that it fuses along its rows; its own shape where it is one.
    """

    name: str
    decays: bool
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    blocks: tuple[tuple[tuple[int, ...], ...], ...]

    def select(self, name: str, wanted: Callable[[str, tuple[tuple[int, ...], ...]], bool]) -> "ParameterGroup":
        """Returns the group of those parameters whose name and blocks are `wanted`, in order."""
        kept = [number for number, key in enumerate(self.names) if wanted(key, self.blocks[number])]
        return ParameterGroup(
            name=name,
            decays=self.decays,
            names=tuple(self.names[number] for number in kept),
            parameters=tuple(self.parameters[number] for number in kept),
            blocks=tuple(self.blocks[number] for number in kept),
        )


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
            blocks=tuple(
                tuple((rows, *parameter.shape[1:]) for rows in block_rows(model, key)) for key, parameter in pairs
            ),
        )
        for decays, pairs in members.items()
        if pairs
    ]
