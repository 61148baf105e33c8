"""Questions with answers to choose from."""

from pretrain.kinds.layout import BESIDE_COLUMNS, Layout

CHOICE_BEGINS, CHOICE_IS_RIGHT, CHOICE_IS_FIRST = 1, 2, 4
"""Bits of the mark of the first token of each choice, a document of the question and an answer: the
first one is that of all, whether it is the right one, whether it is the first of its question."""

CHOICES = Layout(
    document="pretrain.preparation.readers.records:build_choices",
    pieces="pretrain.preparation.text_pieces:choice_pieces",
    fields=("question_field", "choices_field", "label_field"),
    normalized=False,
    most_mark=CHOICE_BEGINS | CHOICE_IS_RIGHT | CHOICE_IS_FIRST,
    many_choices=True,
    table_columns=BESIDE_COLUMNS,
    whole=True,
    too_long="questions are longer, with all of their answers, than batch.seq_len, and left out",
)
