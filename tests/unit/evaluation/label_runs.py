"""Run folders of tiny classifiers with random weights, over labelled texts that are all in both splits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pretrain.config.prepare import PrepareConfig
from pretrain.preparation.prepare import prepare
from tests.helpers.corpus import write_rows
from tests.unit.artifact.runs import write_run_of

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "near", "some", "river", "bank"]
CLASSES = [
    {"text": " ".join(WORDS[first : first + 1 + number % 9]), "label": ("neg", "pos", "mixed")[number % 3]}
    for number, first in enumerate([0, 3, 1, 4, 2, 7, 5, 9, 6, 8, 10, 3, 0, 2, 5, 1])
]
TAGS = [
    {"tokens": words, "tags": ["ANIMAL" if word in ("fox", "dog") else "O" for word in words]}
    for words in (row["text"].split() for row in CLASSES)
]
LABELS = {"classes": ["mixed", "neg", "pos"], "tags": ["ANIMAL", "O"]}

CONFIG = """
seed: 7
run: {{dir: {runs}, name: {name}}}
data: {{path: {data}, packing: bins}}
model:
  preset: bert-tiny
  max_seq_len: 48
  init_std: 0.5
  encoder: {{dropout: 0.0}}
  tied_embeddings: false
  pooler: {pooler}
  head: {{kind: labels, transform: false, labels: {labels}}}
objective: {{kind: {kind}}}
batch: {{global_tokens: 48, seq_len: 48, micro: 1}}
optim: {{lr: 1e-3, schedule: {{warmup_steps: 1}}}}
train: {{steps: 100}}
engine: {{kind: single, zero_stage: 0, precision: fp32, device: cpu}}
tracking: {{wandb: off}}
"""


BERT = {"kind": "wordpiece", "vocab_size": 120, "roles": "bert"}


def write_labelled(
    folder: Path, kind: str, rows: Sequence[dict[str, Any]], tokenizer: dict[str, Any] | None = None
) -> Path:
    """Prepares labelled texts."""
    one = {"path": str(write_rows(folder.with_suffix(".jsonl"), rows))}
    values = {
        "output": str(folder),
        "kind": kind,
        "inputs": [one, one | {"split": "validation"}],
        "tokenizer": tokenizer or BERT,
        "split": "hash:0",
    }
    prepare(PrepareConfig.model_validate(values), processes=1)
    return folder


def write_label_run(folder: Path, data: Path, kind: str, *, step: int = 1) -> Path:
    """Writes a run that learns `classes` or `tags`, with one checkpoint of random weights."""
    content = CONFIG.format(
        runs=folder.parent,
        name=folder.name,
        data=data,
        labels=f"[{', '.join(LABELS[kind])}]",
        kind={"classes": "classify", "tags": "tag"}[kind],
        pooler=str(kind == "classes").lower(),
    )
    return write_run_of(folder, data, content, [step])
