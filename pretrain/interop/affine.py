"""The weights of a linear layer or norm, which theirs may hold in several parts."""

from pretrain.interop.family import Weight


def affine(ours: str, *theirs: tuple[str, int], bias: bool) -> list[Weight]:
    """Returns the entries of one module of ours.

    Args:
        ours: Name of our module.
        *theirs: Name and rows of each module of theirs, stacked in this order.
        bias: It has a bias beside its weight.
    """
    kinds = ("weight", "bias") if bias else ("weight",)
    return [Weight(f"{ours}.{kind}", tuple((f"{name}.{kind}", rows) for name, rows in theirs)) for kind in kinds]
