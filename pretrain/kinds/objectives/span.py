"""Span corruption (Raffel et al. 2020, 3.1.4)."""

from pretrain.kinds.corruption import SpanConfig, corrupted_shape, longest_corrupted
from pretrain.kinds.objective import Objective

SPAN = Objective(
    shapes=("encoder+decoder",),
    data=("text",),
    section=SpanConfig,
    rows="pretrain.objective.span:build_span",
    whole_rows=True,
    longest_row=longest_corrupted,
    row_shapes=lambda section, row, limits: [corrupted_shape(section, row, limits)],
    next_command="pretrain generate {path} --prompt 'Once upon a <extra_id_0>'",
)
