"""The matrices that a fused weight is made of. An optimizer that reads a matrix as one must see these, not the fusion.

A layer that runs queries, keys and values as one product, or a gate and what it gates, still has several matrices, each
with its own spectrum, rows and columns. Muon's author found it better to take queries, keys and values apart (Jordan et
al. 2024), and Adafactor's factors (Shazeer and Stern 2018) were those of separate matrices in T5.
"""

from torch import nn

_HALVES = frozenset({"key_value", "gate_up"})
"""Layers whose rows are two matrices of equal height."""
_GATES = {nn.LSTM: 4, nn.LSTMCell: 4, nn.GRU: 3, nn.GRUCell: 3}
"""Matrices in each weight of torch's recurrent modules."""


def block_rows(model: nn.Module, name: str) -> tuple[int, ...]:
    """Returns the rows of each matrix of a parameter, from the top; one number where it is not fused.

    Args:
        model: The model, its parameters in their true shapes.
        name: Of a parameter.
    """
    parameter = model.get_parameter(name)
    rows = parameter.shape[0] if parameter.ndim else 1
    owner_name, _, _ = name.rpartition(".")
    parent_name, _, layer = owner_name.rpartition(".")
    owner, parent = model.get_submodule(owner_name), model.get_submodule(parent_name)
    if parameter.ndim != 2:
        return (rows,)
    if layer == "qkv" and hasattr(parent, "kv_heads"):
        heads = (parent.heads, parent.kv_heads, parent.kv_heads)
        blocks = tuple(int(number) * int(parent.head_width) for number in heads)
    else:
        parts = 2 if layer in _HALVES else _GATES.get(type(owner), 1)
        blocks = (rows // parts,) * parts
    assert sum(blocks) == rows, f"{name}: {blocks} are not {rows} rows"
    return blocks
