"""Queries, each with the text that answers it, and hard negatives."""

from typing import Any

from pretrain.kinds.layout import BESIDE_COLUMNS, Layout

TEXT_BEGINS, IS_QUERY, IS_POSITIVE = 1, 2, 4
"""Bits of the mark of the first token of a text; neither of the last two: a hard negative."""

_LOW_BITS, _HIGH_BITS = 12, 14
NUM_GROUPS = 1 << (_LOW_BITS + _HIGH_BITS)


def group_marks(group: int) -> tuple[int, int]:
    """Returns the marks of the first two tokens of a query, of a group; 0: none."""
    return TEXT_BEGINS | IS_QUERY | (group % (1 << _LOW_BITS)) << 3, group >> _LOW_BITS << 1


def group_of(first: Any, second: Any) -> Any:
    """Returns the number of a group from these marks, or from arrays of them."""
    return first >> 3 | second >> 1 << _LOW_BITS


TRIPLES = Layout(
    document="pretrain.preparation.readers.records:build_triple",
    pieces="pretrain.preparation.text_pieces:triple_pieces",
    fields=("query_field", "positive_field"),
    optional=("negatives_field", "group_field"),
    library_format="docstrings",
    cuts_texts=True,
    normalized=False,
    most_mark=0x7FFF,
    many_choices=True,
    table_columns=BESIDE_COLUMNS,
    whole=True,
    too_long="records are longer, with all of their texts, than batch.seq_len, and left out",
)
