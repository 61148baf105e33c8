"""Writes small text corpora for tests, and compares what `prepare` makes of them."""

import gzip
import hashlib
import json
import random
from collections.abc import Iterable
from pathlib import Path

from pretrain.tokenizer.special_tokens import EOS

WORDS = ["the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on"]


def write_corpus(folder: Path, num_documents: int = 60, words: int = 80) -> list[str]:
    """Writes .txt, .jsonl and .jsonl.gz documents; returns their texts in input order."""
    rng = random.Random(0)
    texts = [" ".join(rng.choices(WORDS, k=words)) + f"\n{number} \u00e9{EOS}\r\n" for number in range(num_documents)]
    folder.mkdir()
    third = num_documents // 3
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (folder / "a.jsonl").write_text("".join(lines[:third]) + '{"text": ""}\n')
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[third : 2 * third]).encode(), mtime=0))
    for number, text in enumerate(texts[2 * third :]):
        (folder / f"c{number:03d}.txt").write_bytes(text.encode())
    return texts


def write_rows(path: Path, rows: Iterable[object]) -> Path:
    """Writes a .jsonl file of rows; returns its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def digests(folder: Path) -> dict[str, str]:
    """sha256 of every file but the locks."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith("."))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
