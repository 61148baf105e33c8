"""Prompts with a chosen and a rejected answer."""

from pretrain.kinds.layout import BESIDE_COLUMNS, Layout

PREFERENCES = Layout(
    document="pretrain.preparation.readers.conversations:build_preference",
    pieces="pretrain.preparation.text_pieces:preference_pieces",
    fields=("chosen_field", "rejected_field"),
    normalized=False,
    begun=True,
    loss_mask=True,
    two_sides=True,
    table_columns=BESIDE_COLUMNS,
    whole=True,
    too_long="preferences are longer, with both answers, than batch.seq_len, and left out",
)
