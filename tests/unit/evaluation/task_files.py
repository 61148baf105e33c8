"""Tasks of lm-eval-harness in files: one of each way in which it asks a model, over documents on the disk."""

import json
from pathlib import Path
from typing import Any

import yaml

from tests.unit.artifact.runs import TEXTS

SHARED = {"validation_split": "validation", "test_split": "validation", "metadata": {"version": 1.0}}
CHOICES = SHARED | {
    "task": "our_choices",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}} ",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "fewshot_split": "validation",
    "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")],
}
ROLLING = SHARED | {
    "task": "our_text",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{question}}",
    "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
}
REPEATS = {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2}
ANSWERS = SHARED | {
    "task": "our_answers",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{choices[0]}}",
    "generation_kwargs": {"until": ["e"], "max_gen_toks": 8, "do_sample": False, **REPEATS},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
NAMES = ("our_choices", "our_text", "our_answers")


def write_tasks(folder: Path) -> Path:
    """Writes the tasks, and their documents beside them."""
    folder.mkdir()
    documents = folder / "documents.jsonl"
    with documents.open("w") as file:
        for number in range(12):
            words = TEXTS[number % 4].split()
            row = {
                "question": " ".join(words[: 3 + number % 5]),
                "choices": [words[3 + number % 5], "playhouse", "a man on a ladder", words[0]],
                "answer": number % 4,
            }
            file.write(json.dumps(row) + "\n")
    where = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"validation": str(documents)}}}
    for task in (CHOICES, ROLLING, ANSWERS):
        values: dict[str, Any] = where | task
        (folder / f"{values['task']}.yaml").write_text(yaml.safe_dump(values))
    return folder
