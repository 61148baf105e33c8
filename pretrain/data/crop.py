"""Rows without the columns that are padding in all of them."""

import numpy as np

from pretrain.rows import PairRows, TokenRows


def crop(rows: TokenRows | PairRows, multiple: int = 8) -> TokenRows | PairRows:
    """Takes away the columns that are padding in every row, down to a multiple of `multiple` and at least that."""
    if isinstance(rows, PairRows):
        return PairRows(_crop_side(rows.source, multiple), _crop_side(rows.target, multiple))
    return _crop_side(rows, multiple)


def _crop_side(rows: TokenRows, multiple: int) -> TokenRows:
    assert rows.num_tokens is not None, "rows of known length"
    width = rows.tokens.shape[1]
    longest = int(rows.num_tokens.max(initial=1))
    kept = min(width, -(-min(longest, width - 1) // multiple) * multiple + 1)
    row, column = np.divmod(rows.starts, width)
    inside = column < kept
    return TokenRows(
        tokens=rows.tokens[:, :kept],
        starts=row[inside] * kept + column[inside],
        num_tokens=rows.num_tokens,
        sample_ids=rows.sample_ids,
        learned=None if rows.learned is None else rows.learned[:, :kept],
        labels=None if rows.labels is None else rows.labels[:, :kept],
    )
