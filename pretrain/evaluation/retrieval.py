"""Retrieval: ranks of the documents of a query by vectors of texts; similarity of sentences.

    corpus.jsonl, queries.jsonl   {"_id": "...", "text": "...", "title": "..."}, as BEIR has them
    qrels.tsv                     query id, document id, relevance, below a header; or as of TREC
    -> vectors of all documents and queries -> by cosine, the first documents of each query ->
    scores

    MRR@10      1 / rank of the first relevant document, 0 beyond the tenth
    nDCG@10     sum of relevance / log2(1 + rank), over the best one (Jarvelin, Kekalainen 2002)
    recall@k    share of the relevant documents among the first k

Scores are means over queries with a relevant document; others are counted. Among equal cosines the
first document counts.

    pairs.jsonl                   {"sentence1": "...", "sentence2": "...", "score": 3.8}
    -> Spearman's correlation of the cosines with the scores
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.artifact.open import load_artifact
from pretrain.artifact.source import ModelSource
from pretrain.errors import DataError
from pretrain.evaluation.bootstrap import (
    RESAMPLES,
    Difference,
    Interval,
    bootstrap_interval,
    compare_means,
    draw,
)
from pretrain.evaluation.distributed import open_together
from pretrain.evaluation.evaluation_log import Data, Subject, find_subject, hash_lines
from pretrain.evaluation.translation import read_objects, read_texts
from pretrain.generation.text_vectors import embed_texts

FIRST = 10
"""Rank up to which MRR and nDCG look."""
RECALLS = (1, 10, 100)
SPEARMAN = "Spearman"
_CHUNK_SCORES = 2**24


@dataclass(frozen=True, slots=True)
class RetrievalChoice:
    """Options of the command line for vectors."""

    task: tuple[Path, Path, Path] | None = None  # corpus, queries, qrels
    pairs: Path | None = None
    query_prefix: str = ""
    document_prefix: str = ""
    width: int | None = None


@dataclass(frozen=True, slots=True)
class RetrievalReport:
    """Scores of vectors with their intervals, compared with a baseline if there is one."""

    model: str
    baseline: str | None
    scores: dict[str, Interval]
    differences: dict[str, Difference]
    units: str
    num_units: int
    num_left_out: int
    data: list[Data]
    subject: Subject | None

    def facts(self) -> dict[str, Any]:
        """Returns plain values."""
        facts: dict[str, Any] = {
            "kind": "retrieval",
            "model": self.model,
            "scores": {name: asdict(score) for name, score in self.scores.items()},
            "units": self.units,
            "num_units": self.num_units,
            "num_left_out": self.num_left_out,
        }
        if self.baseline is not None:
            differences = {name: asdict(one) for name, one in self.differences.items()}
            facts |= {"baseline": self.baseline, "differences": differences}
        return facts

    def lines(self) -> list[str]:
        """Returns the lines of the report."""
        lines = [f"{self.model}: {self.num_units:,} {self.units}"]
        if self.num_left_out:
            lines[0] += f", and {self.num_left_out:,} without a relevant document left out"
        for name, score in self.scores.items():
            interval = f"95% {score.low:.4f} to {score.high:.4f} ({score.method})"
            lines.append(f"  {name:<12} {score.value:.4f}  {interval}")
            if name in self.differences:
                lines.append(f"    against {self.baseline}: {self.differences[name].line()}")
        return lines


def _text_of(record: Mapping[str, Any], name: str, where: str) -> str:
    text = record.get(name)
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"field {name!r} is no text", where=where, fix="give each record its text")
    return text


def read_collection(path: Path) -> dict[str, str]:
    """Returns texts by their ids. Raises: ConfigError, DataError, with the line."""
    texts: dict[str, str] = {}
    for where, record in read_objects(path):
        name = record.get("_id", record.get("id"))
        if isinstance(name, bool) or not isinstance(name, str | int):
            raise DataError(
                "there is no _id",
                where=where,
                fix='write records such as {"_id": "1", "text": "..."}',
            )
        if str(name) in texts:
            raise DataError(
                f"_id {str(name)[:40]!r} comes twice",
                where=where,
                fix="give each text an id of its own",
            )
        title = record.get("title")
        text = _text_of(record, "text", where)
        texts[str(name)] = f"{title} {text}" if isinstance(title, str) and title else text
    return texts


Texts = Mapping[str, str]
"""Texts by their ids."""


def read_relevance(path: Path, queries: Texts, corpus: Texts) -> dict[str, dict[str, float]]:
    """Returns the relevant documents of each query with their relevance, above 0.

    Raises: ConfigError, DataError: A line is no judgment, or names an unknown query or document.
    """
    relevance: dict[str, dict[str, float]] = {}
    for number, line in enumerate(read_texts(path), start=1):
        parts = line.split("\t") if "\t" in line else line.split()
        if not line.strip() or (number == 1 and parts[-1].strip() in ("score", "relevance")):
            continue
        where = f"{path}:{number}"
        try:
            query, document, value = (parts[0], *parts[2:]) if len(parts) == 4 else parts
            grade = float(value)
        except ValueError:
            grade = math.nan
        if not math.isfinite(grade):
            fix = "write the id of a query, that of a document and a number, with tabs between"
            raise DataError(f"no judgment: {line[:60]!r}", where=where, fix=fix)
        for name, kind, texts in ((query, "query", queries), (document, "document", corpus)):
            if name not in texts:
                fix = "give the files that belong together, or leave the line out"
                raise DataError(f"{kind} {name[:40]!r} is unknown", where=where, fix=fix)
        if grade > 0:
            relevance.setdefault(query, {})[document] = grade
    if not relevance:
        text = "no query has a relevant document"
        raise DataError(text, where=str(path), fix="give judgments above 0")
    return relevance


def rank_documents(queries_QD: np.ndarray, corpus_ND: np.ndarray, most: int) -> np.ndarray:
    """Returns the first documents of each query by their product, int64 [Q, most]."""
    most = min(most, len(corpus_ND))
    ranked = np.empty((len(queries_QD), most), dtype=np.int64)
    size = max(1, _CHUNK_SCORES // len(corpus_ND))
    for start in range(0, len(queries_QD), size):
        scores = queries_QD[start : start + size] @ corpus_ND.T
        ranked[start : start + size] = np.argsort(-scores, axis=1, kind="stable")[:, :most]
    return ranked


def score_ranking(ranked: Sequence[str], relevant: Mapping[str, float]) -> dict[str, float]:
    """Returns the scores of one query, by name; `ranked` are the ids of its first documents."""
    grades = [relevant.get(name, 0.0) for name in ranked]
    first = next((rank for rank, grade in enumerate(grades[:FIRST], start=1) if grade > 0), None)
    gains = [grades[:FIRST], sorted(relevant.values(), reverse=True)[:FIRST]]
    reached, best = map(_discount, gains)
    scores = {f"MRR@{FIRST}": 0.0 if first is None else 1 / first, f"nDCG@{FIRST}": reached / best}
    for most in RECALLS:
        scores[f"recall@{most}"] = sum(grade > 0 for grade in grades[:most]) / len(relevant)
    return scores


def _discount(gains: Sequence[float]) -> float:
    return sum(gain / math.log2(1 + rank) for rank, gain in enumerate(gains, start=1))


def spearman(first: np.ndarray, second: np.ndarray) -> float:
    """Returns the correlation of mean ranks of two arrays; 0 where one is constant."""
    ranks = []
    for values in (first, second):
        _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[places])
    centered = [each - each.mean() for each in ranks]
    norms = math.prod(float(np.linalg.norm(each)) for each in centered)
    return float(centered[0] @ centered[1] / norms) if norms else 0.0


def read_pairs(path: Path) -> tuple[list[str], list[str], np.ndarray]:
    """Returns the sides of pairs, and their scores. Raises: ConfigError, DataError, with the line."""
    sentences: tuple[list[str], list[str]] = ([], [])
    scores = []
    for where, record in read_objects(path):
        for side, name in zip(sentences, ("sentence1", "sentence2"), strict=True):
            side.append(_text_of(record, name, where))
        score: Any = record.get("score")
        is_number = isinstance(score, int | float) and not isinstance(score, bool)
        if not is_number or not math.isfinite(score):
            text = "field 'score' is no finite number"
            raise DataError(text, where=where, fix="give each pair a number")
        scores.append(float(score))
    return *sentences, np.array(scores)


Embed = Callable[[Sequence[str], str], np.ndarray]
"""`embed(texts, prefix)`: vectors of length 1."""


def _embedder(source: ModelSource, choice: RetrievalChoice, device: str) -> Embed:
    artifact = load_artifact(source, device)

    def embed(texts: Sequence[str], prefix: str) -> np.ndarray:
        read = list(artifact.normalized([prefix + text for text in texts]))
        return embed_texts(artifact.model, artifact.codec, read, width=choice.width)

    return embed


def measure_retrieval(
    path: Path,
    choice: RetrievalChoice,
    other: Path | None = None,
    resamples: int = RESAMPLES,
    device: str = "cpu",
) -> RetrievalReport:
    """Measures vectors of a model, and of a baseline, on a retrieval task or on scored pairs.

    Raises:
        ConfigError: A model makes no vectors, or a file cannot be read.
        DataError: The files contradict each other, or have too few queries.
    """
    is_pairs = choice.pairs is not None
    read = _Pairs.read if is_pairs else _Task.read
    task = read(choice)
    sources = [open_together(one) for one in (path, *([] if other is None else [other]))]
    tables = [task.score(_embedder(source, choice, device)) for source in sources]
    scores = task.intervals(tables[0], resamples)
    differences = {}
    if len(tables) > 1 and not is_pairs:
        counts = np.ones(task.num_units)
        differences = {
            name: compare_means(tables[1][name], mine, counts, resamples, task.units)
            for name, mine in tables[0].items()
        }
    return RetrievalReport(
        str(path), None if other is None else str(other), scores, differences,
        task.units, task.num_units, task.num_left_out, task.data, find_subject(sources[0]),
    )  # fmt: skip


Scores = dict[str, np.ndarray]
"""Values of each unit, by the name of a score."""


@dataclass(frozen=True, slots=True)
class _Task:
    """A corpus, queries, and the relevant documents of each."""

    corpus: dict[str, str]
    queries: dict[str, str]
    relevance: dict[str, dict[str, float]]
    choice: RetrievalChoice
    data: list[Data]
    units: str = "queries"

    @staticmethod
    def read(choice: RetrievalChoice) -> "_Task":
        assert choice.task is not None
        corpus, queries = map(read_collection, choice.task[:2])
        files = dict(zip(("corpus", "queries", "qrels"), choice.task, strict=True))
        data = [Data(name, str(path), hash_lines(read_texts(path))) for name, path in files.items()]
        relevance = read_relevance(choice.task[2], queries, corpus)
        return _Task(corpus, queries, relevance, choice, data)

    @property
    def num_units(self) -> int:
        return len(self.relevance)

    @property
    def num_left_out(self) -> int:
        return len(self.queries) - len(self.relevance)

    def score(self, embed: Embed) -> Scores:
        names = list(self.corpus)
        corpus_ND = embed(list(self.corpus.values()), self.choice.document_prefix)
        asked = [self.queries[name] for name in self.relevance]
        queries_QD = embed(asked, self.choice.query_prefix)
        ranked = rank_documents(queries_QD, corpus_ND, max(FIRST, *RECALLS))
        rows = [
            score_ranking([names[place] for place in places], relevant)
            for places, relevant in zip(ranked.tolist(), self.relevance.values(), strict=True)
        ]
        return {name: np.array([row[name] for row in rows]) for name in rows[0]}

    def intervals(self, scores: Scores, resamples: int) -> dict[str, Interval]:
        drawn = np.concatenate([*draw(self.num_units, resamples)])
        return {
            name: bootstrap_interval(float(values.mean()), drawn @ values / self.num_units)
            for name, values in scores.items()
        }


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Pairs of sentences with the score that people gave them."""

    sentences: tuple[list[str], list[str]]
    scores: np.ndarray
    choice: RetrievalChoice
    data: list[Data]
    units: str = "pairs"
    num_left_out: int = 0

    @staticmethod
    def read(choice: RetrievalChoice) -> "_Pairs":
        assert choice.pairs is not None
        first, second, scores = read_pairs(choice.pairs)
        data = [Data("pairs", str(choice.pairs), hash_lines(read_texts(choice.pairs)))]
        return _Pairs((first, second), scores, choice, data)

    @property
    def num_units(self) -> int:
        return len(self.scores)

    def score(self, embed: Embed) -> Scores:
        first, second = (embed(side, self.choice.query_prefix) for side in self.sentences)
        return {SPEARMAN: (first * second).sum(axis=1)}

    def intervals(self, scores: Scores, resamples: int) -> dict[str, Interval]:
        cosines = scores[SPEARMAN]
        drawn = []
        for counts in draw(self.num_units, resamples):
            for each in counts:
                places = np.repeat(np.arange(self.num_units), each)
                drawn.append(spearman(cosines[places], self.scores[places]))
        return {SPEARMAN: bootstrap_interval(spearman(cosines, self.scores), np.array(drawn))}
