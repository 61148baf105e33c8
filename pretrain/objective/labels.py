"""Labels of documents (Devlin et al. 2019, 4.1) or of words (5.3), predicted by an encoder that reads all of a text.

    tokens [B, T+1]  ->  inputs, the last column dropped
    labels [B, T+1]  ->  targets: a document's is at its first token, a word's at the first token of the word

Documents do not see each other, and each begins at position 0, so that packing changes nothing. The head is computed at
the places that have a label only.
"""

from functools import partial

import numpy as np

from pretrain.config.objective import TaskConfig
from pretrain.objective.contract import RowContext, RowMaker
from pretrain.objective.documents import count_padding, place_documents
from pretrain.rows import IGNORE_INDEX, ModelRows, PairRows, TokenRows


def build_labels(config: TaskConfig, context: RowContext) -> RowMaker:
    """Labels of whole documents, or of words: the data say where they are."""
    return partial(label_rows, document_mask=context.document_mask)


def label_rows(rows: TokenRows | PairRows, document_mask: bool) -> ModelRows:
    """Makes inputs and targets of labelled rows.

    Args:
        rows: From the stream.
        document_mask: Documents do not see each other.
    """
    assert isinstance(rows, TokenRows) and rows.labels is not None, "the data are labelled"
    seq_len = rows.tokens.shape[1] - 1
    targets = rows.labels[:, :-1].astype(np.int64)
    places = np.flatnonzero(targets != IGNORE_INDEX)
    positions, documents = place_documents(rows, document_mask)
    return ModelRows(
        inputs=rows.tokens[:, :-1].astype(np.int64),
        targets=targets,
        num_targets=len(places),
        sample_ids=rows.sample_ids,
        positions=positions,
        documents=documents,
        places=places,
        num_padding=count_padding(rows, seq_len),
    )
