"""Prompts with an answer that is wanted, or is not (unpaired preferences)."""

from pretrain.kinds.layout import BESIDE_COLUMNS, Layout

FEEDBACK = Layout(
    document="pretrain.preparation.readers.conversations:build_feedback",
    pieces="pretrain.preparation.text_pieces:feedback_pieces",
    fields=("messages_field", "label_field"),
    normalized=False,
    begun=True,
    loss_mask=True,
    judged=True,
    table_columns=BESIDE_COLUMNS,
    whole=True,
    too_long="records are longer than half of batch.seq_len, and left out",
)
