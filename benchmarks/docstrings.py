"""Retrieval of functions of Python's library by their docstrings, files held out: vectors beside BM25.

python -m benchmarks.docstrings runs/embed MODEL ...     models of vectors; data as of configs/prepare/triples.yaml

Writes corpus.jsonl, queries.jsonl and qrels.tsv of the validation split of those data into --folder, ranks the code of
all its functions for each docstring by BM25 (Robertson and Zaragoza 2009; k1 1.2, b 0.75, words by letters and digits,
names divided at underscores and capitals), and by the cosines of each model.
"""

import argparse
import json
import math
import re
from collections import Counter
from pathlib import Path

import numpy as np

from benchmarks.common import print_row
from pretrain.config.prepare import PrepareConfig
from pretrain.evaluation.retrieval import (
    RetrievalChoice,
    measure_retrieval,
    read_collection,
    read_relevance,
    score_ranking,
)
from pretrain.preparation.input_parts import Slice
from pretrain.preparation.inputs.listing import list_inputs
from pretrain.preparation.readers.dispatch import read_slices
from pretrain.preparation.split import parse_split
from pretrain.preparation.text_pieces import triple_pieces

SPLIT = ("hash:0.1", 0)
K1, B = 1.2, 0.75
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")


def write_task(folder: Path) -> tuple[Path, Path, Path]:
    """Writes the held-out functions as a task of BEIR; equal codes are one document, equal docstrings one query."""
    config = PrepareConfig(output="", kind="triples")
    rule = parse_split(*SPLIT)
    codes: dict[str, str] = {}
    queries: dict[str, str] = {}
    judged = set()
    slices = [Slice(file, 0, file.size) for file in list_inputs([], "triples")]
    for document in read_slices(config, slices):
        if not document.text or document.source is None or triple_pieces(document, rule)[0].split != "validation":
            continue
        code = codes.setdefault(document.text, f"d{len(codes)}")
        query = queries.setdefault(document.source, f"q{len(queries)}")
        judged.add((query, code))
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "corpus.jsonl", folder / "queries.jsonl", folder / "qrels.tsv"
    for path, texts in zip(paths, (codes, queries), strict=False):
        path.write_text("".join(json.dumps({"_id": name, "text": text}) + "\n" for text, name in texts.items()))
    paths[2].write_text("".join(f"{query}\t{code}\t1\n" for query, code in sorted(judged)))
    return paths


def words(text: str) -> list[str]:
    """Returns the words of a text or of names in code, in lower case."""
    return [word.lower() for word in _WORDS.findall(text)]


def bm25(queries: list[str], corpus: list[str]) -> np.ndarray:
    """Returns the scores of all documents, [queries, documents]."""
    counts = [Counter(words(text)) for text in corpus]
    lengths = np.array([sum(one.values()) for one in counts], dtype=float)
    frequency = Counter(word for one in counts for word in one)
    scores = np.zeros((len(queries), len(corpus)))
    for row, query in enumerate(queries):
        for word in words(query):
            if not (number := frequency[word]):
                continue
            inverse = math.log(1 + (len(corpus) - number + 0.5) / (number + 0.5))
            times = np.array([one[word] for one in counts], dtype=float)
            scores[row] += inverse * times * (K1 + 1) / (times + K1 * (1 - B + B * lengths / lengths.mean()))
    return scores


def main() -> None:
    """Prints a row for BM25 and one for each model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("data/docstrings"))
    arguments = parser.parse_args()
    task = write_task(arguments.folder)
    corpus, queries = read_collection(task[0]), read_collection(task[1])
    relevance = read_relevance(task[2], queries, corpus)
    names = list(corpus)
    ranked = np.argsort(-bm25([queries[name] for name in relevance], list(corpus.values())), axis=1, kind="stable")
    rows = [
        score_ranking([names[place] for place in places[:100]], relevant)
        for places, relevant in zip(ranked.tolist(), relevance.values(), strict=True)
    ]
    means = {name: round(float(np.mean([row[name] for row in rows])), 4) for name in rows[0]}
    print_row("docstrings", {"model": "BM25", "queries": len(relevance), "documents": len(corpus), **means}, ("numpy",))
    for model in arguments.models:
        report = measure_retrieval(model, RetrievalChoice(task))
        scores = {
            name: [round(value, 4) for value in (one.value, one.low, one.high)] for name, one in report.scores.items()
        }
        print_row("docstrings", {"model": str(model), **scores}, ("torch",))


if __name__ == "__main__":
    main()
