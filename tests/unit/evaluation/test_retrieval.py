"""Retrieval and similarity by vectors: scores of a ranking, their files, and what contradicts."""

import json
import math

import numpy as np
import pytest

from pretrain.errors import ConfigError, DataError
from pretrain.evaluation.retrieval import (
    rank_documents,
    read_collection,
    read_pairs,
    read_relevance,
    score_ranking,
    spearman,
)
from tests.helpers.corpus import write_rows

RANKED = [f"d{number}" for number in range(200)]


@pytest.mark.parametrize(
    ("relevant", "expected"),
    [
        ({"d0": 1}, {"MRR@10": 1, "nDCG@10": 1, "recall@1": 1, "recall@10": 1, "recall@100": 1}),
        ({"d3": 2}, {"MRR@10": 1 / 4, "nDCG@10": 1 / math.log2(5), "recall@1": 0, "recall@10": 1}),
        (
            {"d1": 1, "d2": 3, "d150": 2, "elsewhere": 1},
            {
                "MRR@10": 1 / 2,
                "nDCG@10": (1 / math.log2(3) + 3 / 2) / (3 + 2 / math.log2(3) + 1 / 2 + 1 / math.log2(5)),
                "recall@1": 0,
                "recall@10": 1 / 2,
                "recall@100": 1 / 2,
            },
        ),
        ({"d10": 1}, {"MRR@10": 0, "nDCG@10": 0, "recall@10": 0, "recall@100": 1}),
    ],
)
def test_scores_of_a_query_are_those_of_their_definitions(relevant, expected):
    scores = score_ranking(RANKED[:100], relevant)
    assert {name: scores[name] for name in expected} == pytest.approx(expected, rel=1e-12)


def test_documents_are_ranked_by_their_product_and_the_first_of_equal_ones_counts(monkeypatch):
    monkeypatch.setattr("pretrain.evaluation.retrieval._CHUNK_SCORES", 8)
    corpus = np.array([[1, 0], [0, 1], [0, 1], [0.6, 0.8]], np.float32)
    queries = np.array([[1, 0], [0, 1], [0.6, 0.8]], np.float32)
    assert rank_documents(queries, corpus, 3).tolist() == [[0, 3, 1], [1, 2, 3], [3, 1, 2]]
    assert rank_documents(queries, corpus, 9).shape == (3, 4)


def test_spearman_is_the_correlation_of_mean_ranks():
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 6, 50).astype(float), rng.normal(size=50)

    def ranks(values):
        return np.array([(values < one).sum() + ((values == one).sum() + 1) / 2 for one in values])

    wanted = np.corrcoef(ranks(first), ranks(second))[0, 1]
    assert spearman(first, second) == pytest.approx(wanted, rel=1e-12)
    assert spearman(second, np.exp(second)) == pytest.approx(1.0)
    assert spearman(first, np.zeros(50)) == 0.0


TEXTS = {
    "q": [{"_id": "q1", "text": "who"}, {"_id": 2, "text": "what"}],
    "d": [{"_id": "d1", "text": "a", "title": "b"}],
}


def write(folder, qrels, **changed):
    paths = [write_rows(folder / f"{name}.jsonl", rows) for name, rows in (TEXTS | changed).items()]
    (folder / "qrels.tsv").write_text(qrels)
    return *paths, folder / "qrels.tsv"


@pytest.mark.parametrize("qrels", ["query-id\tcorpus-id\tscore\nq1\td1\t2\n2\td1\t0\n", "q1 0 d1 2\n"])
def test_files_of_beir_and_judgments_of_trec_are_read(tmp_path, qrels):
    queries, corpus, judged = write(tmp_path, qrels)
    texts = read_collection(queries), read_collection(corpus)
    assert texts == ({"q1": "who", "2": "what"}, {"d1": "b a"})
    assert read_relevance(judged, *texts) == {"q1": {"d1": 2.0}}


@pytest.mark.parametrize(
    ("qrels", "message"),
    [
        ("q1\td9\t1\n", "qrels.tsv:1: document 'd9' is unknown; give the files that belong together"),
        ("q1\td1\t1\nq7\td1\t1\n", "qrels.tsv:2: query 'q7' is unknown"),
        ("q1\td1\tnan\n", "qrels.tsv:1: no judgment: 'q1"),
        ("q1\td1\n", "qrels.tsv:1: no judgment"),
        ("q1\td1\t0\n", "qrels.tsv: no query has a relevant document; give judgments above 0"),
    ],
)
def test_judgments_that_contradict_the_texts_are_refused_with_their_line(tmp_path, qrels, message):
    queries, corpus, judged = write(tmp_path, qrels)
    with pytest.raises(DataError) as error:
        read_relevance(judged, read_collection(queries), read_collection(corpus))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "a"}], r"a\.jsonl:1: there is no _id; write records such as"),
        ([{"_id": "1", "text": "a"}, {"_id": 1, "text": "b"}], r"a\.jsonl:2: _id '1' comes twice"),
        ([{"_id": "1", "text": " "}], r"a\.jsonl:1: field 'text' is no text"),
    ],
)
def test_a_text_without_an_id_of_its_own_is_refused(tmp_path, rows, message):
    with pytest.raises(DataError, match=message):
        read_collection(write_rows(tmp_path / "a.jsonl", rows))
    with pytest.raises(ConfigError, match="cannot read it"):
        read_collection(tmp_path / "none.jsonl")


@pytest.mark.parametrize("score", [math.nan, "3", None, True])
def test_a_pair_without_a_finite_score_is_refused(tmp_path, score):
    pair = {"sentence1": "a", "sentence2": "b"}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(pair | {"score": one}) + "\n" for one in (1.5, score)))
    with pytest.raises(DataError, match=r"a\.jsonl:2: (field 'score' is no finite number|not JSON)"):
        read_pairs(tmp_path / "a.jsonl")
