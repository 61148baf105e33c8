"""Questions with a text that has the answer."""

from pretrain.kinds.layout import BESIDE_COLUMNS, Layout

ANSWER_BEGINS, ANSWER_ENDS = 1, 2
"""Bits of the mark of a token where an answer begins and where it ends: at the first token of the
document if there is none. Tokens of the text have a mark, of the question IGNORE_INDEX."""

ANSWERS = Layout(
    document="pretrain.preparation.readers.records:build_answer",
    pieces="pretrain.preparation.text_pieces:answer_pieces",
    fields=("question_field", "context_field", "answers_field"),
    normalized=False,
    most_mark=ANSWER_BEGINS | ANSWER_ENDS,
    table_columns=BESIDE_COLUMNS,
    whole=True,
    too_long="questions are longer, with their texts, than batch.seq_len, and left out",
)
