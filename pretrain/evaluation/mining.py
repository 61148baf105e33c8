"""Hard negatives: of each query the nearest texts of other records, by the vectors of a model.

A text as near as its own positive is more likely to answer the query than to be a negative: the limit
is a share of the cosine with the positive (de Souza P. Moreira et al. 2024, NV-Retriever, 3.2).
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.errors import ConfigError, DataError
from pretrain.evaluation.translation import read_objects

LIMIT = 0.95
"""Largest cosine of a negative, as a share of that with the positive."""
_CHUNK_SCORES = 2**24


def read_records(path: Path) -> list[dict[str, Any]]:
    """Returns records of triples. Raises: ConfigError, DataError: One has no texts, with its line."""
    records = []
    for where, record in read_objects(path):
        for name in ("query", "positive"):
            if not isinstance(record.get(name), str) or not record[name].strip():
                fix = "give records of a query and its positive"
                raise DataError(f"field {name!r} is no text", where=where, fix=fix)
        records.append(record)
    if len(records) < 2:
        raise ConfigError("one record has no other texts", where=str(path), fix="give more records")
    return records


def mine_negatives(
    records: Sequence[dict[str, Any]],
    embed: Callable[[Sequence[str]], np.ndarray],
    count: int,
) -> Iterator[dict[str, Any]]:
    """Yields the records with `count` hard negatives at most, the nearest first.

    Not among them are the query itself, positives of an equal query, and texts of its group.
    """
    texts = list(dict.fromkeys(record["positive"] for record in records))
    texts_ND = embed(texts)
    queries_QD = embed([record["query"] for record in records])
    place = {text: number for number, text in enumerate(texts)}
    apart: dict[tuple[str, Any], set[str]] = {}
    for record in records:
        for key in _keys(record):
            apart.setdefault(key, {record["query"]}).add(record["positive"])
    size = max(1, _CHUNK_SCORES // len(texts))
    for start in range(0, len(records), size):
        scores_QN = queries_QD[start : start + size] @ texts_ND.T
        for record, scores_N in zip(records[start : start + size], scores_QN, strict=True):
            limit = LIMIT * scores_N[place[record["positive"]]]
            excluded = set().union(*(apart[key] for key in _keys(record)))
            negatives: list[str] = []
            for number in np.argsort(-scores_N, kind="stable"):
                if len(negatives) == count:
                    break
                if scores_N[number] <= limit and texts[number] not in excluded:
                    negatives.append(texts[number])
            yield record | {"negatives": negatives}


def _keys(record: dict[str, Any]) -> list[tuple[str, Any]]:
    """Returns the identities by which records are no negatives of each other."""
    keys = [("query", record["query"])]
    if record.get("group") is not None:
        keys.append(("group", str(record["group"])))
    return keys
