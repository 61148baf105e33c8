"""Sequence to sequence (Sutskever et al. 2014)."""

from pretrain.kinds.objective import Objective, RowShape

SEQ2SEQ = Objective(
    shapes=("encoder+decoder",),
    data=("pairs",),
    rows="pretrain.objective.seq2seq:build_seq2seq",
    mixes=False,
    source_rows=True,
    row_shapes=lambda section, row, limits: [RowShape(limits.seq_len, limits.source_len)],
    next_command="pretrain generate {path} --prompt 'A text like those of the data'",
)
