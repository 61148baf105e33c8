"""Prompts and responses, or conversations: only the responses are learned."""

from pretrain.kinds.layout import BESIDE_COLUMNS, Layout

RECORDS = Layout(
    document="pretrain.preparation.readers.conversations:build_record",
    pieces="pretrain.preparation.text_pieces:record_pieces",
    fields=("messages_field",),
    filtered=True,
    begun=True,
    loss_mask=True,
    table_columns=BESIDE_COLUMNS,
    too_long="records are longer than batch.seq_len, and cut: the rest is trained on without its prompt, and a "
    "row that a prompt fills has no targets",
    no_targets="prompts fill the rows, without an answer; raise batch.seq_len, or shorten the prompts",
)
