"""Questions with a text that has the answer."""

from pretrain.kinds.layout import BESIDE_COLUMNS, Layout

ANSWERS = Layout(
    fields=("question_field", "context_field", "answers_field"),
    normalized=False,
    most_mark=3,
    table_columns=BESIDE_COLUMNS,
    whole=True,
    too_long="questions are longer, with their texts, than batch.seq_len, and left out",
)
