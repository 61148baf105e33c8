"""Texts with a label, which is at the first token."""

from pretrain.kinds.layout import BESIDE_COLUMNS, Layout

CLASSES = Layout(
    document="pretrain.preparation.readers.records:build_class",
    fields=("text_field", "label_field"),
    labelled=True,
    names_labels=True,
    table_columns=BESIDE_COLUMNS,
    beginning=True,
    too_long="texts are longer than batch.seq_len, and cut: the rest is in no row",
)
