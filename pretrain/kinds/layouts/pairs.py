"""Pairs of a source and a target."""

from pretrain.kinds.layout import SOURCE_COLUMNS, Layout

PAIRS = Layout(
    document="pretrain.preparation.readers.records:build_pair",
    pieces="pretrain.preparation.text_pieces:pair_pieces",
    fields=("source_field", "target_field"),
    has_source=True,
    table_columns=SOURCE_COLUMNS,
    length_columns=2,  # of the target and of the source
    too_long="pairs are longer than batch.source_len or batch.seq_len, and left out",
)
