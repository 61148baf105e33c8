"""Texts with a label a word."""

from pretrain.kinds.layout import BESIDE_COLUMNS, Layout

TAGS = Layout(
    document="pretrain.preparation.readers.records:build_tags",
    fields=("words_field", "tags_field"),
    labelled=True,
    labels_words=True,
    names_labels=True,
    table_columns=BESIDE_COLUMNS,
    too_long="texts are longer than batch.seq_len, and cut",
)
