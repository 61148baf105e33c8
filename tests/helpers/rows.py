"""Row makers and lengths for tests of what is around them."""

from functools import partial

from pretrain.config.data import BatchConfig
from pretrain.config.lengths import RowLengths
from pretrain.objective.causal import causal_rows

CAUSAL = partial(causal_rows, document_mask=True)
DENSE = partial(causal_rows, document_mask=False)


def lengths_of(batch: BatchConfig) -> RowLengths:
    """Returns the lengths of rows that no objective changes."""
    return RowLengths(batch.seq_len, batch.seq_len, batch.source_len or batch.seq_len)
