"""Questions with answers to choose from."""

from pretrain.kinds.layout import BESIDE_COLUMNS, Layout

CHOICES = Layout(
    fields=("question_field", "choices_field", "label_field"),
    normalized=False,
    most_mark=7,
    many_choices=True,
    table_columns=BESIDE_COLUMNS,
    whole=True,
    too_long="questions are longer, with all of their answers, than batch.seq_len, and left out",
)
