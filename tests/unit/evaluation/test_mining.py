"""Hard negatives: the nearest texts of other records, but for those that may be right."""

import json

import numpy as np
import pytest

from pretrain.errors import ConfigError, DataError
from pretrain.evaluation.mining import mine_negatives, read_records
from tests.helpers.corpus import write_rows

# Angles of texts, in degrees: a cosine is that of the difference.
ANGLES = {"q": 0, "own": 20, "nearer": 10, "near": 30, "far": 40, "same": 35, "other": 90, "q2": 0, "last": 60}


def embed(texts):
    angles = np.radians([ANGLES[text] for text in texts])
    return np.stack((np.cos(angles), np.sin(angles)), axis=1)


def test_the_nearest_texts_below_the_limit_are_negatives_but_for_those_of_the_query_and_its_group():
    records = [{"query": "q", "positive": "own", "group": 1, "kept": True}, {"query": "other", "positive": "nearer"}]
    records += [{"query": "other", "positive": "near"}, {"query": "q", "positive": "far"}]
    records += [{"query": "other", "positive": "same", "group": "1"}, {"query": "q2", "positive": "last"}]
    first, *_, last = mine_negatives(records, embed, 2)
    # 0.95 cos 20 is cos 26.8: `nearer` may be right.
    assert first == records[0] | {"negatives": ["near", "last"]}
    assert last["negatives"] == []


def test_a_record_without_its_texts_is_named(tmp_path):
    with pytest.raises(DataError, match=r"a\.jsonl:2: field 'positive' is no text; give records of a query"):
        read_records(write_rows(tmp_path / "a.jsonl", [{"query": "a", "positive": "b"}, {"query": "c"}]))
    with pytest.raises(ConfigError, match="one record has no other texts"):
        read_records(write_rows(tmp_path / "a.jsonl", [{"query": "a", "positive": "b"}]))
    assert json.loads((tmp_path / "a.jsonl").read_text()) == {"query": "a", "positive": "b"}
